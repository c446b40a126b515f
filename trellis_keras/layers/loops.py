"""Loops that compile once and hold what one turn needs, on every backend."""

import keras
from keras import ops


def scan(step, carry, inputs, reverse=False):
    """Returns the last carry and what each step returned, stacked, as `keras.ops.scan` does.

    Args:
        step: Function of the carry and a list of tensors, the slices of `inputs`; returns the next
            carry and a list of tensors.
        carry: Tensor, or a structure of tensors.
        inputs: List of tensors with the axis to loop over first. All have at least one step.
        reverse: Whether to begin at the last step.
    """
    if keras.backend.backend() == "tensorflow":
        from trellis_keras.layers import loops_tf

        return loops_tf.scan(step, carry, inputs, reverse)
    return ops.scan(step, carry, inputs, reverse=reverse)


def while_loop(condition, body, carry):
    """As `keras.ops.while_loop`, one turn after the other."""
    if keras.backend.backend() == "tensorflow":
        from trellis_keras.layers import loops_tf

        return loops_tf.while_loop(condition, body, carry)
    return ops.while_loop(condition, body, carry)
