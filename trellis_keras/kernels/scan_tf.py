"""The loops of `scan` on TensorFlow, in graphs and under XLA."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def scan(
    step: Callable, carry: Any, inputs: Sequence[tf.Tensor], reverse: bool
) -> tuple[Any, list[tf.Tensor]]:
    """See `scan.scan`. `keras.ops.scan` has no gradient under XLA here."""
    time = inputs[0].shape[0]
    time = tf.shape(inputs[0])[0] if time is None else time
    arrays = [array_of(x, time, x.shape[1:]).unstack(x) for x in inputs]
    # Only for the shapes and dtypes that a step returns.
    _, like = step(carry, [x[0] for x in inputs])
    outputs = [array_of(y, time, y.shape) for y in like]

    def body(i, carry, outputs):
        t = time - 1 - i if reverse else i
        carry, ys = step(carry, [array.read(t) for array in arrays])
        return i + 1, carry, [array.write(t, y) for array, y in zip(outputs, ys, strict=True)]

    # Without a bound, XLA cannot allocate the gradient's inputs.
    _, carry, outputs = while_loop(lambda i, *_: i < time, body, (0, carry, outputs), time)
    return carry, [array.stack() for array in outputs]


def while_loop(
    condition: Callable,
    body: Callable,
    carry: Sequence[Any],
    maximum_iterations: int | tf.Tensor | None = None,
) -> Sequence[Any]:
    """See `scan.while_loop`. By default, TensorFlow keeps the arrays of up to ten iterations."""
    return tf.while_loop(
        condition, body, carry, maximum_iterations=maximum_iterations, parallel_iterations=1
    )


def array_of(like: tf.Tensor, size: int | tf.Tensor, shape: tf.TensorShape) -> tf.TensorArray:
    """Returns an array of `size` tensors of this shape, with the dtype of `like`."""
    return tf.TensorArray(like.dtype, size, element_shape=shape, clear_after_read=False)
