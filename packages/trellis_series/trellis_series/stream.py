"""The forecast of one series as a stream: constant work for each new value."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams import StreamingMixin
from trellis_keras.types import Cache, Tensor
from trellis_series import smoothing
from trellis_series.ensemble import Ensemble, State, widths


class ForecastStream(StreamingMixin):
    """Forecasts a series after each new value.

    The stream continues after the last value that the forecasts have read. Its numbers are those of
    `Forecasts.update` and `predict`.

    Args:
        model: `Ensemble` without covariates.
        levels: Percentages of the bands.
        network: `Network` that the model uses, or `None`.
        dtype: String, the dtype of the computation. Defaults to `"float64"`; on JAX this needs
            `jax_enable_x64`.

    Example:

    >>> series = pd.Series(np.sin(np.arange(100) / 4))
    >>> stream = Forecasts(horizon=6).fit(series).stream()
    >>> cache = stream.initial_cache(1)
    >>> y, cache = stream.step(np.array([[np.sin(25.0)]]), cache)
    >>> y.shape  # forecast, and the ends of the band
    (1, 6, 3)
    """

    built = True  # as `keras_streams` asks of a layer

    def __init__(
        self, model: Ensemble, levels: Sequence[float], network: Any = None, dtype: str = "float64"
    ) -> None:
        self.compute_dtype = keras.backend.standardize_dtype(dtype)
        self.model = _cast(model, self.compute_dtype)
        self.network = network
        self.factors = model.factors(levels).astype(self.compute_dtype)
        self.least = model.least_widths(levels).astype(self.compute_dtype)
        self.variables = [] if network is None else network.model.variables

    def initial_cache(self, batch_size: int) -> Cache:
        """Returns the state after the last value that was read, for each row of a batch."""
        state = self.model.state
        rows = {"values": state.values, "local": state.local}
        rows |= {f"filters_{i}": tuple(part) for i, part in enumerate(state.filters)}

        def repeat(array):
            array = np.broadcast_to(array, (batch_size, *np.shape(array)))
            return ops.convert_to_tensor(array, self.compute_dtype)

        return keras.tree.map_structure(repeat, rows)

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Reads one value of each row.

        Args:
            x: Tensor (batch, 1) in the units of the data, NaN for a missing value.
            cache: Result of `initial_cache` or `step`.

        Returns:
            Tensor (batch, horizon, 1 + 2 levels): the forecast, and the lower and upper end of each
            band; and the new cache.
        """
        model, count = self.model, len(self.model.banks)
        filters = tuple(smoothing.State(*cache[f"filters_{i}"]) for i in range(count))
        state = State(cache["values"], cache["local"], filters)
        state = model.observe(state, ops.cast(x, self.compute_dtype), xp=ops)
        net = self.network and self.network(state.values[:, -self.network.window :])
        mean = model.outlook(state, net=net, xp=ops)
        half = widths(self.factors, self.least, state.local, ops)
        ends = [mean]
        for i in range(half.shape[1]):
            ends += [ops.maximum(mean - half[:, i], model.low), mean + half[:, i]]
        cache = {"values": state.values, "local": state.local}
        cache |= {f"filters_{i}": tuple(part) for i, part in enumerate(state.filters)}
        return ops.stack(ends, axis=-1) * model.scale, cache


def _cast(model, dtype):
    """Returns a model whose arrays have a dtype."""

    def cast(array):
        return np.asarray(array, dtype)

    return dataclasses.replace(
        model,
        banks=[each._replace(bank=smoothing.Bank(*map(cast, each.bank))) for each in model.banks],
        kernels=list(map(cast, model.kernels)),
        weights=model.weights.tolist(),
        limits=model.limits.tolist(),
    )
