"""Means over counted tokens.

`weight` is (batch, n): 1 where a token counts, 0 where it is padding.
"""

from keras import ops


def token_weight(sample_weight, nll):
    """Returns weights of the shape of `nll` (batch, n), from such ones, one per row, or None."""
    if sample_weight is None:
        return ops.ones_like(nll)
    # By reshape: where both kinds were seen, TensorFlow does not know the rank any more.
    weight = ops.reshape(ops.cast(sample_weight, nll.dtype), (ops.shape(nll)[0], -1))
    return ops.broadcast_to(weight, ops.shape(nll))


def mean(values, weight):
    """Weighted mean of values (batch, n); 0 where all weights are 0."""
    return ops.divide_no_nan(ops.sum(values * weight), ops.sum(weight))


def activation(output, weight):
    """AR of Merity et al. 2018: the mean square of the output (batch, n, channels)."""
    return mean(_mean_square(ops.cast(output, weight.dtype)), weight)


def change(raw, weight):
    """TAR of Merity et al. 2018: the mean squared change from one counted step to the next."""
    raw = ops.cast(raw, weight.dtype)
    return mean(_mean_square(raw[:, 1:] - raw[:, :-1]), weight[:, 1:] * weight[:, :-1])


def _mean_square(x):
    """Mean over channels. (`ops.mean` leaves float64 on JAX.)"""
    return ops.sum(ops.square(x), axis=-1) / x.shape[-1]
