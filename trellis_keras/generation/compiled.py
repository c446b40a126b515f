"""Functions compiled once per shape of their arguments, and kept with a model."""

import keras

# Shapes, samplers' settings, stop tokens: a compiled function takes megabytes.
_KEPT = 16


def kept(model, key, make):
    """Returns what `make()` returned for this key and model, unless it was too long ago."""
    if "_generation_functions" not in vars(model):
        # A plain attribute: Keras' tracking would try to save it.
        object.__setattr__(model, "_generation_functions", {})
    functions = model._generation_functions
    functions[key] = functions.pop(key) if key in functions else make()
    if len(functions) > _KEPT:
        del functions[next(iter(functions))]
    return functions[key]


def compile_xla(function, variables, updated=()):
    """Compiles a function of tensors that reads `variables` and updates `updated`."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True, autograph=False)
    if keras.backend.backend() == "jax":
        return _compile_jax(function, [*variables, *updated], updated)
    return function


def _compile_jax(function, variables, updated):
    import jax

    @jax.jit
    def pure(values, *arguments):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            result = function(*arguments)
        return result, [scope.get_current_value(variable) for variable in updated]

    def call(*arguments):
        result, values = pure([variable.value for variable in variables], *arguments)
        for variable, value in zip(updated, values, strict=True):
            variable.assign(value)
        return result

    return call
