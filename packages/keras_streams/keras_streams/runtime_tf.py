"""Functions of tensors as TensorFlow's graphs."""

from collections.abc import Callable

import tensorflow as tf


def compiled(function: Callable, xla: bool = True, any_shape: bool = False) -> Callable:
    """Returns a function of tensors as a graph.

    Args:
        function: Function of tensors.
        xla: Boolean, whether XLA compiles it.
        any_shape: Boolean, whether one graph serves all shapes.
    """
    return tf.function(function, jit_compile=xla, reduce_retracing=any_shape, autograph=False)


def compiled_flat(function: Callable) -> Callable:
    """Compiles a function of tensors that returns a list of tensors, with low call overhead.

    It skips the most expensive parts of calling a `tf.function`: structures, and its gradient.
    """
    graphs = compiled(function)
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
