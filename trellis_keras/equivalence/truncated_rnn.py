"""The TrellisLayer that is a truncated RNN."""

import keras
from keras import ops

from trellis_keras.layers import TrellisLayer


@keras.saving.register_keras_serializable("trellis_keras")
class TruncatedRNN(TrellisLayer):
    """A `TrellisLayer` that computes an M-truncated RNN (Bai et al. 2019, Theorem 1).

    `equivalence.to_trellis` makes it. At level j and step t it holds

        z_t^{(j)} = [h^{(1)}_{t,t-j+1}, h^{(2)}_{t,t-j+2}, ..., h^{(L)}_{t,t-j+L}]    (Eq. 6),

    h^{(i)}_{t,t'} being the state at t of layer i of the RNN that was begun at t', and zero for
    t' > t. So the last group of level M + L - 1 is the output of the RNN over the last M steps.

    With the RNN's own states as a history (`stateful=True` or `initial_state`) the outputs, and the
    last states, are those of the RNN that is not truncated, as long as a segment has at most M
    steps (appendix B.1): the windows of all its steps then reach back to the history. That of step
    M + 1 does not, so longer segments are refused. Streaming from an `initial_state` cannot know
    how many steps are to come: the first M are those of the untruncated RNN, the later ones those
    of the M-truncated one.

    A mask is right for padding before and after a sequence. An RNN skips masked steps in between,
    a TrellisNet sees the zero state there.

    Args:
        *args, **kwargs: As `TrellisLayer`, with `kernel_structure="mixed_group"` and the arguments
            that `check_structure` wants.

    Call arguments: As of `TrellisLayer`. `initial_state` holds the RNN's states side by side,
        [h] or for LSTMs [h, c], each (batch, units) with the bottom layer's channels first.

    Returns:
        As `TrellisLayer`; states are laid out as in `initial_state`.

    Raises:
        ValueError: As `TrellisLayer`; another structure; with a history, a segment of more than
            `horizon` steps. (TensorFlow has its own error where it has compiled for any length.)

    Example: an LSTM over two segments, which its carried state makes one.

    >>> lstm = keras.layers.LSTM(4, return_sequences=True, return_state=True)
    >>> x = np.random.normal(size=(2, 10, 3)).astype("float32")
    >>> y, _, _ = lstm(x)
    >>> layer = trellis_keras.equivalence.to_trellis(lstm, horizon=5)
    >>> _, h, c = layer(x[:, :5])
    >>> y2, _, _ = layer(x[:, 5:], initial_state=[h, c])
    >>> np.allclose(y2, y[:, 5:], atol=1e-6)
    True
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.kernel_structure != "mixed_group":
            raise ValueError(
                'A truncated RNN has the kernels of Eq. (5): kernel_structure="mixed_group". '
                f"Received: kernel_structure={self.kernel_structure!r}"
            )
        check_structure(self)

    @property
    def horizon(self):
        """M: the number of inputs that an output depends on, the current one included."""
        return self.depth - len(self.groups) + 1

    def call(self, inputs, initial_state=None, training=False, mask=None, output_length=None):
        self._check_segment(inputs.shape[1], initial_state)
        if inputs.shape[1] is None and (self.stateful or initial_state is not None):
            inputs = self._checked_later(inputs)
        return super().call(inputs, initial_state, training, mask, output_length)

    def compute_output_spec(
        self, inputs, initial_state=None, training=False, mask=None, output_length=None
    ):
        self._check_segment(inputs.shape[1], initial_state)
        return super().compute_output_spec(inputs, initial_state, training, mask, output_length)

    def _check_segment(self, time, initial_state):
        carries = self.stateful or initial_state is not None
        if carries and time is not None and time > self.horizon:
            raise ValueError(
                "With a history this layer computes an RNN over segments of at most "
                f"horizon={self.horizon} steps (TrellisNet, appendix B.1): later steps do not see "
                "the history. Cut the sequence into shorter segments or convert with a larger "
                f"horizon. Received: {time} steps"
            )

    def _checked_later(self, inputs):
        """Returns the inputs; where they are too long the graph, made for any length, fails."""
        with keras.name_scope("segment_longer_than_the_horizon"):
            ones = ops.ones((1, self.horizon, 1), inputs.dtype)
            return inputs * ops.slice(ones, (0, 0, 0), (1, ops.shape(inputs)[1], 1))

    @classmethod
    def from_config(cls, config):
        # With its mask lifted (`to_dense`) it is a TrellisNet like any other.
        if config["kernel_structure"] == "dense":
            return TrellisLayer.from_config(config)
        return super().from_config(config)


def check_structure(layer):
    """Refuses a `TrellisLayer` that is no truncated RNN, whatever its weights.

    Raises:
        ValueError: An argument that Theorem 1 does not have; the message names it.
    """
    groups = layer.groups or [layer.units]
    # A single group starts at level 1 without being told.
    starts = layer.group_starts or [1] * len(groups)
    refuse_others(
        layer,
        kernel_size=(layer.kernel_size, 2),
        dilation_rate=(set(layer.dilations), {1}),
        injection_every=(layer.injection_every, 1),
        group_starts=(starts, list(range(1, len(groups) + 1))),
        output_units=(layer.output_units, groups[-1]),
    )


def refuse_others(layer, **arguments):
    """Refuses arguments (found, right) that are not what is right.

    Raises:
        ValueError: One is not.
    """
    for name, (found, right) in arguments.items():
        if found != right:
            raise ValueError(
                f"A TrellisLayer with groups={layer.groups} is an RNN only with {name}={right} "
                f"(Theorem 1). Received: {name}={found} in {layer.name}"
            )
