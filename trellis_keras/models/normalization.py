"""Standardization of a series, with its statistics stored as weights."""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.protocol import at_least_float32
from trellis_keras.types import Shape, Tensor

_ROWS_AT_ONCE = 1 << 18
LARGEST = 10.0  # standard deviations
_LEAST = 1e-5  # deviation of values in units of their mean, of which float32 keeps two digits


class Standardization(keras.layers.Layer):
    """Subtracts the mean of each channel and divides by its standard deviation.

    `keras.layers.Normalization` keeps constants derived from its weights, so restoring a checkpoint
    does not change its outputs, and a missing value makes all its statistics NaN. This layer reads
    its weights in each call, ignores missing values (NaN) in `adapt`, replaces them with the mean
    in a call, and gives constant channels a scale of 1. A call clips standardized values to +-10:
    a channel that hardly varied in the training data may later be thousands of standard deviations
    away.

    Until `adapt` is called or weights are loaded, the scale and so the outputs are NaN.

    Call arguments:
        inputs: Tensor (..., channels), in the units of the data.

    Returns:
        Tensor (..., channels), at least float32.
    """

    def build(self, input_shape: Shape) -> None:
        options: dict[str, Any] = {"trainable": False, "autocast": False}
        self.mean = self.add_weight((input_shape[-1],), "zeros", name="mean", **options)
        unknown = keras.initializers.Constant(np.nan)
        self.scale = self.add_weight((input_shape[-1],), unknown, name="scale", **options)

    def call(self, inputs: Tensor) -> Tensor:
        x = ops.cast(inputs, at_least_float32(self.compute_dtype))
        standardized = ops.clip(self.standardize(x), -LARGEST, LARGEST)
        # `isnan` of the inputs, because a scale of NaN also gives NaN.
        return ops.where(ops.isnan(x), ops.zeros_like(x), standardized)

    def standardize(self, values: Tensor, axis: int = -1) -> Tensor:
        """Returns standardized values of a tensor with the channels at a negative `axis`."""
        return (values - _at(axis, self.mean)) / _at(axis, self.scale)

    def invert(self, outputs: Tensor, axis: int = -1) -> Tensor:
        """Returns standardized values in the units of the data."""
        return outputs * _at(axis, self.scale) + _at(axis, self.mean)

    @property
    def is_adapted(self) -> bool:
        """Whether the layer has statistics."""
        return self.built and bool(np.all(ops.convert_to_numpy(self.scale) > 0))

    def adapt(self, data: np.ndarray | Sequence[np.ndarray]) -> None:
        """Computes the statistics of data, see `SequenceModel.adapt`."""
        data = arrays_of(data)  # which are read twice
        count = total = np.zeros(())
        for block in _blocks(data):
            count = count + np.sum(~np.isnan(block), axis=0)
            total = total + np.nansum(block, axis=0)
        if not np.all(count) or not np.all(np.isfinite(total)):
            wrong = np.flatnonzero((np.atleast_1d(count) == 0) | ~np.isfinite(total)).tolist()
            raise ValueError(
                "Each channel needs at least one value, and no infinite values. "
                f"Received: invalid channels {wrong} of {len(np.atleast_1d(count))}"
            )
        mean = total / count
        squares = sum(np.nansum(np.square(block - mean), axis=0) for block in _blocks(data))
        deviation = np.sqrt(squares / count)
        if not self.built:
            self.build((None, len(mean)))
        if self.mean.shape != mean.shape:
            raise ValueError(
                f"Training data must have {self.mean.shape[0]} channels, as before. Received: "
                f"{len(mean)}"
            )
        self.mean.assign(mean)
        # Rounding may give a constant channel a nonzero deviation.
        is_constant = deviation <= 1e-7 * np.abs(mean)
        self.scale.assign(np.where(is_constant | (deviation == 0), 1.0, deviation))
        is_lost = (1e-12 * np.abs(mean) < deviation) & (deviation < _LEAST * np.abs(mean))
        if np.any(is_lost) and self.compute_dtype != "float64":
            channel = int(np.argmax(is_lost))
            warnings.warn(
                f"Channel {channel} varies by {deviation[channel]:.2g} around "
                f"{mean[channel]:.10g}, of which float32 keeps fewer than two digits. Subtract "
                "a constant from it before `adapt`, `fit` and `predict`.",
                stacklevel=3,
            )


def arrays_of(data: Any) -> list[np.ndarray]:
    """Returns one array, or a sequence of arrays, as a list."""
    arrays = [data] if hasattr(data, "shape") else list(data)
    if not all(hasattr(array, "shape") for array in arrays):
        raise ValueError(
            f"Training data must be an array, or a list of arrays. Received: {data!r:.100}"
        )
    return arrays


def _at(axis, statistic):
    """Returns a statistic (channels,) reshaped to broadcast along an axis."""
    return ops.reshape(statistic, (-1, *[1] * (-1 - axis)))


def _blocks(arrays) -> Iterator[np.ndarray]:
    """Yields float64 arrays (rows, channels)."""
    for array in arrays:
        rows = np.reshape(array, (-1, array.shape[-1]))
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            yield np.asarray(rows[first : first + _ROWS_AT_ONCE], "float64")
