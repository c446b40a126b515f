"""Regression on sequences, or on each of their steps."""

import keras

from trellis_keras.layers import base
from trellis_keras.models import checks
from trellis_keras.models.losses import SquaredError
from trellis_keras.models.sequence_model import SequenceModel


@keras.saving.register_keras_serializable("trellis_keras")
class SequenceRegressor(SequenceModel):
    """Real-valued outputs of a sequence, or of each of its steps, from any causal backbone.

    With the last step's output it is the adding-problem model of the TCN paper (Bai et al. 2018):

        y = D_out(backbone(D_in(x))) W + b,

    D being element-wise dropout. `compile` takes the mean squared error unless it is told
    otherwise.

    Args:
        backbone: Layer from (batch, time, channels) to (batch, hidden), the last step
            (`return_sequences=False`), or with `per_step` to (batch, time, hidden).
        units: Number of outputs.
        per_step: Whether there are outputs for each step.
        input_dropout: Rate of dropped inputs, each by itself.
        output_dropout: Rate of dropped outputs of the backbone, each by itself.
        kernel_initializer, bias_initializer: Of W and b. Default: Glorot uniform and zeros.
        seed: Integer seed of the dropouts and the default initialiser.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        training: Whether dropout is active.
        mask: Boolean (batch, time), see `SequenceClassifier`.

    Returns:
        Tensor (batch, units), or with `per_step` (batch, time, units), at least float32.

    Raises:
        ValueError: Arguments out of range, a backbone with other outputs, inputs or targets of
            wrong shape, or a row whose sample weights are all 0.

    Example:

    >>> model = SequenceRegressor(keras.layers.GRU(8))
    >>> model.compile("adam")
    >>> x = np.random.rand(8, 12, 2)
    >>> list(model.fit(x, x.sum(axis=(1, 2)), verbose=0).history)
    ['loss']
    >>> model.predict(x, verbose=0).shape
    (8, 1)
    """

    def __init__(
        self,
        backbone,
        units=1,
        *,
        per_step=False,
        input_dropout=0.0,
        output_dropout=0.0,
        kernel_initializer=None,
        bias_initializer="zeros",
        seed=None,
        **kwargs,
    ):
        base.check_positive(units=units)
        super().__init__(
            backbone,
            units,
            per_step=per_step,
            input_dropout=input_dropout,
            output_dropout=output_dropout,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            seed=seed,
            **kwargs,
        )
        self.units = units

    def _default_loss(self):
        return SquaredError(dtype=self.head.compute_dtype)

    def _check_targets(self, y):
        if self.units == 1 and y.ndim == 1 + self.per_step:
            return
        checks.check_rank("y", y, "(batch, time, units)" if self.per_step else "(batch, units)")
        if y.shape[-1] != self.units:
            raise ValueError(f"`y` must have {self.units} units. Received: shape {y.shape}")

    def get_config(self):
        return {**super().get_config(), "units": self.units, "per_step": self.per_step}
