"""The arguments `return_sequences` and `output_length` of a layer."""

import keras
from keras import ops

from trellis_keras.layers.checks import check_positive


class OutputLengthMixin:
    """The arguments `return_sequences` and `output_length` of a layer.

    Attributes:
        return_sequences: Whether to return all steps, or only the last one.
        go_backwards: Whether to read the input from its last step to its first.
        output_length: Number of last steps to return, None for all. The call argument of the
            same name overrides it.
    """

    def _init_output_length(self, return_sequences, output_length, go_backwards):
        self.return_sequences = return_sequences
        self.go_backwards = go_backwards
        self._check_output_length(output_length)
        self.output_length = output_length

    def _check_output_length(self, output_length):
        if output_length is None:
            return
        check_positive(output_length=output_length)
        if self.go_backwards:
            raise ValueError(
                "`go_backwards=True` returns the outputs from the last step to the first, so "
                f"`output_length` must be None. Received: output_length={output_length}"
            )
        if not self.return_sequences and output_length != 1:
            raise ValueError(
                "`return_sequences=False` returns one step. "
                f"Received: output_length={output_length}"
            )

    def _check_time(self, time, output_length):
        """Checks a call's `output_length`, and that the input is long enough for it."""
        self._check_output_length(output_length)
        output_length = self._output_steps(output_length)
        if None not in (time, output_length) and output_length > time:
            raise ValueError(
                f"`output_length` must be at most the length of the input. "
                f"Received: output_length={output_length}, input length {time}"
            )

    def _last_steps(self, x, steps):
        """Returns the last `steps` steps of x (batch, time, channels), all of them for None."""
        if steps is None or x.shape[1] is not None:
            return x if steps is None else x[:, -steps:]
        # A graph for any length: unlike `x[:, -steps:]`, a slice fails if there are fewer steps.
        with keras.name_scope("output_length_exceeds_the_length_of_the_input"):
            batch, time, channels = ops.shape(x)
            return ops.slice(x, (0, time - steps, 0), (batch, steps, channels))

    def _output_steps(self, output_length=None):
        """Returns the number of last steps that a call returns, None for all."""
        if not self.return_sequences:
            return 1
        return self.output_length if output_length is None else output_length

    def _time_axis(self, time, output_length=None):
        """Returns the time axis of the output shape as a tuple, empty if there is none."""
        steps = self._output_steps(output_length)
        return (time if steps is None else steps,) if self.return_sequences else ()

    def _output_mask(self, mask):
        """Returns the mask of the returned steps, or None."""
        if mask is None or not self.return_sequences:
            return None
        if self.go_backwards:
            return ops.flip(mask, axis=1)
        return mask if self.output_length is None else mask[:, -self.output_length :]
