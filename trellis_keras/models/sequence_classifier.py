"""Classification of sequences, or of each of their steps."""

import keras

from trellis_keras.layers import base
from trellis_keras.models import checks
from trellis_keras.models.sequence_model import SequenceModel


@keras.saving.register_keras_serializable("trellis_keras")
class SequenceClassifier(SequenceModel):
    """Class logits of a sequence, or of each of its steps, from any causal backbone.

    With the last step's output it classifies images read pixel by pixel (TrellisNet, section 5.2;
    TCN, section 4), with `per_step=True` it is the copy-memory model of the TCN paper:

        logits = D_out(backbone(D_in(x))) W + b,

    D being element-wise dropout. The authors' pixel program of TrellisNet has its output dropout
    on the logits instead, and neither of its dropouts is switched off in evaluation; the paper has
    an output dropout, and so do we.

    `compile` takes the cross-entropy and the accuracy unless it is told otherwise.

    Args:
        backbone: Layer from (batch, time, channels) to (batch, hidden), the last step
            (`return_sequences=False`), or with `per_step` to (batch, time, hidden): a
            `TrellisLayer`, a `TCN`, a Keras RNN layer, a `keras.Sequential` of such.
        num_classes: Number of classes.
        per_step: Whether each step is classified.
        input_dropout: Rate of dropped inputs, each by itself.
        output_dropout: Rate of dropped outputs of the backbone, each by itself.
        kernel_initializer, bias_initializer: Of W and b. Default: Glorot uniform and zeros.
        seed: Integer seed of the dropouts and the default initialiser.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        training: Whether dropout is active.
        mask: Boolean (batch, time): the steps that are no padding. The backbone must take it.
            Where it is to come with the data, put a `keras.layers.Masking` first in a
            `keras.Sequential` backbone.

    Returns:
        Logits (batch, num_classes), or with `per_step` (batch, time, num_classes), at least
        float32.

    Raises:
        ValueError: Arguments out of range, a backbone with other outputs, inputs of wrong shape,
            labels outside [0, num_classes), or a row whose sample weights are all 0.

    Example:

    >>> backbone = TrellisLayer(units=8, depth=4, return_sequences=False)
    >>> model = SequenceClassifier(backbone, num_classes=3)
    >>> model.compile("adam")
    >>> x, y = np.random.rand(8, 12, 1), np.random.randint(0, 3, 8)
    >>> sorted(model.fit(x, y, verbose=0).history)
    ['accuracy', 'loss']
    >>> model.predict(x, verbose=0).shape
    (8, 3)
    """

    def __init__(
        self,
        backbone,
        num_classes,
        *,
        per_step=False,
        input_dropout=0.0,
        output_dropout=0.0,
        kernel_initializer=None,
        bias_initializer="zeros",
        seed=None,
        **kwargs,
    ):
        base.check_positive(num_classes=num_classes)
        super().__init__(
            backbone,
            num_classes,
            per_step=per_step,
            input_dropout=input_dropout,
            output_dropout=output_dropout,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            seed=seed,
            **kwargs,
        )
        self.num_classes = num_classes

    def _default_loss(self):
        return keras.losses.SparseCategoricalCrossentropy(
            from_logits=True,
            reduction="mean_with_sample_weight",
            dtype=self.head.compute_dtype,
        )

    def _default_metrics(self):
        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]

    def _check_targets(self, y):
        if y.ndim == 2 + self.per_step and y.shape[-1] == 1:  # Keras takes such labels too
            y = y[..., 0]
        checks.check_rank("y", y, "(batch, time)" if self.per_step else "(batch)")
        checks.check_labels(y, self.num_classes)

    def get_config(self):
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "per_step": self.per_step,
        }
