"""Functions of tensors compiled by XLA, which read the variables of a model as they are then."""

import keras


def compile_xla(function, variables, updated=()):
    """Compiles a function of tensors that reads `variables` and updates `updated`.

    On JAX a plain `jax.jit` would go on with the values that it was compiled with.
    """
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
