"""Losses of sequence models: means over the steps that count.

Each returns one value per step (or per sequence), and their mean is taken with the sample weights:
sum(weight * value) / sum(weight), so that padding of weight 0 leaves no trace.
"""

import keras
from keras import ops


def frame_nll(y_true, y_pred):
    """Negative log-likelihood of the frames of a piano roll, in nats.

    The sum over the keys of -log p(key): the keys are independent given the past.

    Args:
        y_true: Tensor (..., keys) of 0 and 1.
        y_pred: Logits (..., keys).

    Returns:
        Tensor (...).
    """
    # -log sigmoid(z) = softplus(-z) for a key that sounds, softplus(z) for one that does not.
    return ops.sum(ops.softplus((1 - 2 * ops.cast(y_true, y_pred.dtype)) * y_pred), axis=-1)


class _MeanOverSteps(keras.losses.Loss):
    def __init__(self, name=None, reduction="mean_with_sample_weight", dtype=None):
        super().__init__(name=name, reduction=reduction, dtype=dtype)

    def get_config(self):
        return {**super().get_config(), "dtype": self.dtype}


@keras.saving.register_keras_serializable("trellis_keras")
class FrameLoss(_MeanOverSteps):
    """Negative log-likelihood of a piano roll's frames (Bai et al. 2018, section 4; in nats).

    Summed over keys, averaged over frames.

    Args:
        name, reduction, dtype: As in `keras.losses.Loss`.

    Call arguments:
        y_true: Tensor (batch, time, keys) of 0 and 1.
        y_pred: Logits (batch, time, keys).
        sample_weight: Tensor (batch, time), 0 where a frame is padding.

    Example: two keys that a model knows nothing about.

    >>> loss = FrameLoss()(np.array([[[0.0, 1.0]]]), np.zeros((1, 1, 2)))
    >>> round(float(loss), 4)
    1.3863
    """

    def call(self, y_true, y_pred):
        return frame_nll(y_true, y_pred)


@keras.saving.register_keras_serializable("trellis_keras")
class SquaredError(_MeanOverSteps):
    """Mean squared error; unlike Keras' it stays in float64 on JAX.

    Args:
        name, reduction, dtype: As in `keras.losses.Loss`.

    Call arguments:
        y_true: Tensor (..., units), or (...) if there is one unit.
        y_pred: Tensor (..., units).
        sample_weight: Tensor (...).

    Example:

    >>> float(SquaredError()(np.array([1.0, 2.0]), np.array([[1.0], [4.0]])))
    2.0
    """

    def call(self, y_true, y_pred):
        if len(y_true.shape) < len(y_pred.shape):
            if y_pred.shape[-1] != 1:
                raise ValueError(
                    "Targets without an axis of units need a model with one unit. Received: "
                    f"targets of shape {tuple(y_true.shape)}, outputs {tuple(y_pred.shape)}"
                )
            y_true = ops.expand_dims(y_true, -1)
        return ops.sum(ops.square(y_pred - y_true), axis=-1) / y_pred.shape[-1]
