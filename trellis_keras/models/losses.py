"""Losses: weighted means over the steps of a batch.

The losses of models are sum(weight * value) / sum(weight) over steps or sequences, so padding with
weight 0 does not count.
"""

import keras
from keras import ops

from keras_streams.protocol import shapes_match
from trellis_keras.types import Tensor

if keras.backend.backend() == "tensorflow":
    from trellis_keras import _tensorflow


def frame_nll(y_true: Tensor, y_pred: Tensor) -> Tensor:
    """Returns the negative log-likelihood of the frames of a piano roll, in nats.

    The keys are independent given the past, so it is the sum over keys of the binary cross-entropy.

    Args:
        y_true: Tensor (..., keys) of 0 and 1.
        y_pred: Logits (..., keys).

    Returns:
        Tensor (...).
    """
    on = ops.cast(y_true, y_pred.dtype)
    _check_targets(on, y_pred)
    # -log sigmoid(z) = softplus(-z) for a key that is on, softplus(z) for one that is off.
    return ops.sum(ops.softplus((1 - 2 * on) * y_pred), axis=-1)


class WeightedMeanLoss(keras.losses.Loss):
    """A loss whose mean is sum(weight * value) / sum(weight), and which saves its dtype.

    Args:
        reduction, name, dtype: As in `keras.losses.Loss`.
    """

    def __init__(
        self,
        reduction: str = "mean_with_sample_weight",
        name: str | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)

    def get_config(self) -> dict:
        return {**super().get_config(), "dtype": self.dtype}


@keras.saving.register_keras_serializable("trellis_keras")
class FrameLoss(WeightedMeanLoss):
    """Computes the negative log-likelihood of a piano roll's frames, in nats.

    Summed over keys and averaged over frames (Bai et al. 2018, section 4).

    Args:
        reduction, name, dtype: As in `WeightedMeanLoss`.

    Call arguments:
        y_true: Tensor (batch, time, keys) of 0 and 1.
        y_pred: Logits (batch, time, keys).
        sample_weight: Tensor (batch, time), 0 where a frame is padding.

    Example: two keys of probability 1/2.

    >>> loss = FrameLoss()(np.array([[[0.0, 1.0]]]), np.zeros((1, 1, 2)))
    >>> round(float(loss), 4)
    1.3863
    """

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        return frame_nll(y_true, y_pred)


@keras.saving.register_keras_serializable("trellis_keras")
class SquaredError(WeightedMeanLoss):
    """Computes the mean squared error. Unlike Keras', it keeps float64 on JAX.

    Args:
        reduction, name, dtype: As in `WeightedMeanLoss`.

    Call arguments:
        y_true: Tensor (..., units), or (...) if there is one unit.
        y_pred: Tensor (..., units).
        sample_weight: Tensor (...).

    Example:

    >>> float(SquaredError()(np.array([1.0, 2.0]), np.array([[1.0], [4.0]])))
    2.0
    """

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        if y_pred.shape[-1] == 1:
            # With or without an axis of units; the rank may be unknown on TensorFlow.
            y_true = ops.reshape(y_true, ops.shape(y_pred))
        else:
            _check_targets(y_true, y_pred)
        return _mean_square(y_pred - y_true)


def _check_targets(y_true, y_pred):
    """Raises ValueError for targets that would be broadcast to the outputs."""
    if not shapes_match(y_true.shape, y_pred.shape):
        raise ValueError(
            "Targets must have the shape of the outputs. Received: "
            f"targets of shape {tuple(y_true.shape)}, outputs {tuple(y_pred.shape)}"
        )


def expand_to_rank(weight: Tensor, rank: int) -> Tensor:
    """Returns a weight over leading axes, with trailing axes of size 1 appended."""
    if getattr(weight.shape, "rank", 0) is not None:
        return ops.reshape(weight, (*ops.shape(weight), *[1] * (rank - len(weight.shape))))
    # The rank is unknown to TensorFlow if it has been both (batch,) and (batch, n).
    return _tensorflow.add_axes(weight, rank)


def counted_targets(y_true: Tensor, weight: Tensor) -> Tensor:
    """Returns targets with 0 where the weight, over leading axes, is 0: they may be NaN there."""
    is_counted = ops.not_equal(expand_to_rank(weight, len(y_true.shape)), 0)
    return ops.where(is_counted, y_true, ops.zeros_like(y_true))


# The terms of a language model's loss. `weight` is (batch, n), 0 where a token does not count.


def token_weights(sample_weight: Tensor | None, nll: Tensor) -> Tensor:
    """Returns weights of the shape of `nll` (batch, n), from a weight per row or token, or None."""
    if sample_weight is None:
        return ops.ones_like(nll)
    # By reshape: the rank is unknown to TensorFlow if it has been both (batch,) and (batch, n).
    weight = ops.reshape(ops.cast(sample_weight, nll.dtype), (ops.shape(nll)[0], -1))
    return ops.broadcast_to(weight, ops.shape(nll))


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Returns the weighted mean of values (batch, n), 0 where all weights are 0.

    Values of weight 0 may be NaN.
    """
    values = ops.where(weight == 0, ops.zeros_like(values), values)
    return ops.divide_no_nan(ops.sum(values * weight), ops.sum(weight))


def activation_reg(output: Tensor, weight: Tensor) -> Tensor:
    """AR of Merity et al. (2018): the mean square of the output (batch, n, channels)."""
    return weighted_mean(_mean_square(ops.cast(output, weight.dtype)), weight)


def temporal_activation_reg(hidden: Tensor, weight: Tensor) -> Tensor:
    """TAR of Merity et al. (2018): the mean squared change between successive counted steps."""
    hidden = ops.cast(hidden, weight.dtype)
    change = hidden[:, 1:] - hidden[:, :-1]
    return weighted_mean(_mean_square(change), weight[:, 1:] * weight[:, :-1])


def _mean_square(x):
    """Mean over the last axis. (On JAX, `ops.mean` does not keep float64.)"""
    return ops.sum(ops.square(x), axis=-1) / x.shape[-1]
