"""Polyphonic music: the next frame of a piano roll."""

import keras

from trellis_keras.layers import base
from trellis_keras.models import checks
from trellis_keras.models.losses import FrameLoss
from trellis_keras.models.metrics import FrameNLL
from trellis_keras.models.sequence_model import SequenceModel


@keras.saving.register_keras_serializable("trellis_keras")
class PolyphonicModel(SequenceModel):
    """Which keys sound in the next frame of a piano roll (Bai et al. 2018, section 4).

    Given the past, the keys are independent, each with the probability sigmoid(logit),

        logits = D_out(backbone(D_in(x))) W + b,

    D being element-wise dropout. The loss of a frame is its negative log-likelihood in nats, the
    sum over the keys of the binary cross-entropy; `compile` takes its mean over the frames, and
    the metric `models.FrameNLL` (which has no part of a regulariser), unless it is told
    otherwise. (The authors' program trains on the sum over a piece's frames, so a bound on the
    gradient's norm means more there.)

    Pieces of music differ in length. Pad them at the end, with any 0/1 frames, and give
    `sample_weight` (batch, time), 1 for a real frame and 0 for padding: the backbone is causal, so
    the figures are those of the pieces one by one. (A frame of zeros is a rest: it cannot mark
    padding.)

    Args:
        backbone: Causal layer from (batch, time, keys) to (batch, time, hidden), with
            `return_sequences=True`.
        keys: Number of keys; a piano has 88.
        input_dropout: Rate of dropped inputs, each by itself.
        output_dropout: Rate of dropped outputs of the backbone, each by itself.
        kernel_initializer, bias_initializer: Of W and b. Default: Glorot uniform and zeros.
        seed: Integer seed of the dropouts and the default initialiser.

    Call arguments:
        inputs: Tensor (batch, time, keys) of 0 and 1.
        training: Whether dropout is active.
        mask: Boolean (batch, time), see `SequenceClassifier`.

    Returns:
        Logits (batch, time, keys) of the next frames, at least float32. `keras.ops.sigmoid` makes
        probabilities of them.

    Raises:
        ValueError: Arguments out of range, a backbone with other outputs, a piano roll with
            another number of keys or with values other than 0 and 1, or a row whose sample
            weights are all 0.

    Example:

    >>> model = PolyphonicModel(TrellisLayer(units=12, depth=4), keys=88)
    >>> model.compile("adam")
    >>> rolls = np.random.randint(0, 2, (8, 13, 88))
    >>> sorted(model.fit(rolls[:, :-1], rolls[:, 1:], verbose=0).history)
    ['frame_nll', 'loss']
    >>> probabilities = keras.ops.sigmoid(model.predict(rolls, verbose=0))
    >>> tuple(probabilities.shape)
    (8, 13, 88)
    """

    def __init__(
        self,
        backbone,
        keys=88,
        *,
        input_dropout=0.0,
        output_dropout=0.0,
        kernel_initializer=None,
        bias_initializer="zeros",
        seed=None,
        **kwargs,
    ):
        base.check_positive(keys=keys)
        super().__init__(
            backbone,
            keys,
            per_step=True,
            input_dropout=input_dropout,
            output_dropout=output_dropout,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            seed=seed,
            **kwargs,
        )
        self.keys = keys

    def build(self, input_shape):
        if input_shape[-1] != self.keys:
            raise ValueError(
                f"The inputs must be piano rolls (batch, time, {self.keys}): set `keys` to their "
                f"number of keys. Received: keys={self.keys}, inputs of shape {tuple(input_shape)}"
            )
        super().build(input_shape)

    def _default_loss(self):
        return FrameLoss(dtype=self.head.compute_dtype)

    def _default_metrics(self):
        return [FrameNLL()]

    def _check_inputs(self, x):
        checks.check_piano_roll("x", x, self.keys)

    def _check_targets(self, y):
        checks.check_piano_roll("y", y, self.keys)

    def get_config(self):
        return {**super().get_config(), "keys": self.keys}
