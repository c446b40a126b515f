"""Functions of tensors, compiled."""

from collections.abc import Callable, Sequence

import keras


def compile_xla(
    function: Callable,
    variables: Sequence[keras.Variable],
    updated: Sequence[keras.Variable] = (),
    *,
    jit_compile: bool = True,
    any_shape: bool = False,
) -> Callable:
    """Compiles a function of tensors with XLA; it always uses the current values of variables.

    It is thread-safe if it updates no variables.

    Args:
        function: Function of tensors.
        variables: Variables that it reads.
        updated: Variables that it reads and assigns.
        jit_compile: Boolean, whether TensorFlow compiles it with XLA. Defaults to `True`.
        any_shape: Whether to build one graph for all shapes on TensorFlow, without XLA, which
            recompiles for each shape.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        is_xla = jit_compile and not any_shape
        return tf.function(
            function, autograph=False, jit_compile=is_xla, reduce_retracing=any_shape
        )
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


def compile_flat(function: Callable, jit_compile: bool = True) -> Callable:
    """Compiles a function of TensorFlow's tensors that returns a list, with low call overhead.

    It skips the most expensive parts of calling a `tf.function`: structures, and its gradient.
    """
    import tensorflow as tf

    graphs = compile_xla(function, [], jit_compile=jit_compile)
    traced: dict[tuple, tuple] = {}

    def call(*arguments):
        arguments = [tf.convert_to_tensor(argument) for argument in arguments]
        key = tuple((argument.dtype, argument.shape) for argument in arguments)
        if key not in traced:
            concrete = graphs.get_concrete_function(*arguments)
            traced[key] = concrete.inference_fn, concrete.captured_inputs
        inference, captured = traced[key]
        return inference.call_flat(*arguments, *captured)

    return call
