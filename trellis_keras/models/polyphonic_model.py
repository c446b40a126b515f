"""Polyphonic music: the keys of a piano roll's next frame."""

from typing import Any

import keras
import numpy as np
from keras import ops

from trellis_keras.layers.checks import check_integer
from trellis_keras.models.base import check_rank
from trellis_keras.models.losses import FrameLoss
from trellis_keras.models.metrics import FrameNLL
from trellis_keras.models.sequence_model import SequenceModel


@keras.saving.register_keras_serializable("trellis_keras")
class PolyphonicModel(SequenceModel):
    """Predicts the keys that are on in the next frame of a piano roll (Bai et al. 2018, section 4).

    The keys are independent given the past, each with probability sigmoid(logit). The loss of a
    frame is its negative log-likelihood in nats, the sum over keys of the binary cross-entropy.
    `compile` defaults to its mean over frames (the authors' code trains on the sum over a piece's
    frames, for which the same gradient clipping is stricter), and to the metric `models.FrameNLL`,
    which excludes regularizers.

    Pieces of music differ in length. Pad them at the end with any 0/1 frames, and pass
    `sample_weight` (batch, time), 1 for a real frame and 0 for padding: the backbone is causal, so
    the results equal those of the individual pieces. (A frame of zeros is a rest, so it cannot mark
    padding.)

    Args:
        backbone: Causal layer from (batch, time, keys) to (batch, time, hidden), with
            `return_sequences=True`.
        keys: Positive integer, number of keys. Defaults to `88`, as on a piano.
        **kwargs: `input_dropout`, `output_dropout`, `kernel_initializer`, `bias_initializer` and
            `seed`, as in `SequenceModel`.

    Call arguments:
        inputs: Tensor (batch, time, keys) of 0 and 1.

    Returns:
        Logits (batch, time, keys) of the next frames, at least float32. `keras.ops.sigmoid`
        converts them to probabilities.

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

    _outputs_are_logits = True

    def __init__(self, backbone: keras.Layer, keys: int = 88, **kwargs: Any) -> None:
        keys = check_integer("keys", keys, 1)
        unsuited = {name: kwargs.get(name) for name in ("activation", "embedding")}
        if any(value is not None for value in unsuited.values()):
            raise ValueError(
                "The outputs are logits and the inputs piano rolls, so `activation` and "
                f"`embedding` must be None. Received: {unsuited}"
            )
        super().__init__(backbone, keys, per_step=True, **kwargs)
        self.keys = keys

    def _prefers_xla(self):
        return False  # It would compile the step for each length of a piece.

    def _read_out(self, outputs):
        return ops.sigmoid(outputs)

    def _random_inputs(self, rng, steps):
        shape = steps, self.input_spec.axes[-1]
        return rng.integers(0, 2, shape).astype(self.compute_dtype)

    def _export_notes(self):
        return ["Outputs: the probability of each key in the next frame"]

    def _default_loss(self):
        return FrameLoss(dtype=self.head.compute_dtype)

    def _default_metrics(self):
        return [FrameNLL(dtype=self.head.compute_dtype)]

    def _checked_loss(self, loss):
        return super()._checked_loss(_of_keys(loss))

    def _checked_metrics(self, metrics):
        return super()._checked_metrics(keras.tree.map_structure(_metric_of_keys, metrics))

    def _check_inputs(self, x):
        self._check_roll("x", x)

    def _check_targets(self, y):
        self._check_roll("y", y)

    def _check_roll(self, name, roll):
        check_rank(name, roll, "(batch, time, keys)")
        if roll.shape[-1] != self.keys:
            raise ValueError(f"`{name}` must have {self.keys} keys. Received: shape {roll.shape}")
        wrong = ~np.isin(roll, (0, 1))
        if wrong.any():
            row, time, key = np.argwhere(wrong)[0]
            raise ValueError(
                f"`{name}` must contain only 0 (off) and 1 (on). "
                f"Received: {roll[row, time, key]} in row {row}, frame {time}, key {key}"
            )

    def get_config(self) -> dict:
        return {**super().get_config(), "keys": self.keys}


def _of_keys(loss_or_metric):
    """Returns the binary loss or metric for short names that Keras resolves by shapes."""
    if not isinstance(loss_or_metric, str):
        return loss_or_metric
    kinds = dict.fromkeys(("ce", "crossentropy"), "binary_crossentropy")
    return kinds.get(loss_or_metric.lower(), loss_or_metric)


def _metric_of_keys(metric):
    """Returns what `_of_keys` does, and for an accuracy that of logits."""
    if isinstance(metric, str) and metric.lower() in ("acc", "accuracy", "binary_accuracy"):
        return keras.metrics.BinaryAccuracy(name=metric, threshold=0.0)
    return _of_keys(metric)
