"""Loops that are compiled once, on every backend.

They are `keras.ops.scan` and `keras.ops.while_loop`, except on TensorFlow: see `scan_tf`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from trellis_keras.types import Tensor

if keras.backend.backend() == "tensorflow":
    from trellis_keras.kernels import scan_tf


def scan(
    step: Callable, carry: Tensor, inputs: Sequence[Tensor], reverse: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Loops over the first axis of `inputs`.

    Args:
        step: Function of the carry and the list of the inputs' slices. Returns the next carry and
            a list of tensors.
        carry: Tensor, or a structure of tensors.
        inputs: List of tensors of equal length, at least 1.
        reverse: Boolean, whether to start at the end. Defaults to `False`.

    Returns:
        The last carry, and a list of the steps' results, stacked along the first axis.
    """
    if keras.backend.backend() == "tensorflow":
        return scan_tf.scan(step, carry, inputs, reverse)
    return ops.scan(step, carry, inputs, reverse=reverse)


def while_loop(condition: Callable, body: Callable, carry: Sequence[Any]) -> Sequence[Any]:
    """Runs `keras.ops.while_loop` with the temporary arrays of only one iteration in memory."""
    if keras.backend.backend() == "tensorflow":
        return scan_tf.while_loop(condition, body, carry)
    return ops.while_loop(condition, body, carry)
