"""Which steps of a sequence a layer returns."""

from keras import ops

from trellis_keras.layers import arguments
from trellis_keras.layers.convolution import pad_past


class OutputSteps:
    """What the arguments `return_sequences` and `output_length` mean.

    For a layer with a `depth` and a list of `dilations`, those of its levels or of a longer cycle.

    Attributes:
        return_sequences: Whether several steps are returned, or the last one only.
        output_length: How many of the last steps are returned. None: all. The call's argument of
            this name takes its place.
    """

    def _init_output_steps(self, return_sequences, output_length):
        self.return_sequences = return_sequences
        self._check_output_length(output_length)
        self.output_length = output_length

    def _check_output_length(self, output_length):
        if output_length is None:
            return
        arguments.check_positive(output_length=output_length)
        if not self.return_sequences and output_length != 1:
            raise ValueError(
                "`return_sequences=False` returns one step. "
                f"Received: output_length={output_length}"
            )

    def _check_length(self, time, output_length):
        """Refuses a call's `output_length`, and inputs that are too short for it or for a level."""
        self._check_output_length(output_length)
        longest = max(self.dilations[: self.depth])
        arguments.check_length(time, longest, self._kept(output_length))

    def _kept(self, output_length=None):
        """How many of the last steps are needed. None: all."""
        if not self.return_sequences:
            return 1
        return self.output_length if output_length is None else output_length

    def _step_axis(self, time, output_length=None):
        """The axis of steps in the shape of the output, which there may not be: () or (steps,)."""
        kept = self._kept(output_length)
        return (time if kept is None else kept,) if self.return_sequences else ()

    def _output_mask(self, mask):
        """The mask of the returned steps, or None."""
        if mask is None or not self.return_sequences:
            return None
        return mask if self.output_length is None else mask[:, -self.output_length :]


def last_step(states, history, mask):
    """States at the last step of each row; with a mask, at the last valid one.

    Args:
        states: List of tensors (batch, time, units); without a mask, any that end with the last
            step.
        history: List of tensors (batch, units) for rows without a valid step, or None for zeros.
        mask: Boolean (batch, time), or None.
    """
    if mask is None:
        return [state[:, -1] for state in states]
    steps = ops.cumsum(ops.ones_like(mask, dtype="int32"), axis=1)
    last = ops.max(ops.where(ops.cast(mask, "bool"), steps, 0), axis=1)[:, None, None]
    history = history or [None] * len(states)
    with_past = [pad_past(s, 1, p) for s, p in zip(states, history, strict=True)]
    return [ops.take_along_axis(s, last, axis=1)[:, 0] for s in with_past]
