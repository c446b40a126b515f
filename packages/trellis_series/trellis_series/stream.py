"""The forecast of one series as a stream: constant work for each new value."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams import StreamingMixin
from keras_streams.c import write_c
from keras_streams.exported import ExportedStream
from trellis_keras.files import atomic_folder
from trellis_keras.types import Cache, Tensor
from trellis_series import smoothing
from trellis_series.bands import Band
from trellis_series.ensemble import Ensemble, State


class ForecastStream(StreamingMixin, keras.layers.Layer):
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
    >>> tuple(y.shape)  # forecast, and the ends of the band
    (1, 6, 3)
    """

    def __init__(
        self, model: Ensemble, levels: Sequence[float], network: Any = None, dtype: str = "float64"
    ) -> None:
        super().__init__(name="forecast", dtype=dtype)
        self.model = _cast(model, self.compute_dtype)
        self.network = network
        self.net = None if network is None else network.model  # whose variables are the layer's
        self.levels = tuple(levels)
        self.band = Band(*(part.astype(self.compute_dtype) for part in model.band(levels)))
        self.built = True

    def initial_cache(self, batch_size: int) -> Cache:
        """Returns the state after the last value that was read, for each row of a batch."""
        state = self.model.state
        rows = {"values": state.values, "local": state.local}
        rows |= {f"filters_{i}": tuple(part) for i, part in enumerate(state.filters)}

        def repeat(array):
            row = ops.convert_to_tensor(array, self.compute_dtype)
            return ops.broadcast_to(row[None], (batch_size, *np.shape(array)))

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
        model, count = self.model, len(self.model.filters)
        filters = tuple(smoothing.FilterState(*cache[f"filters_{i}"]) for i in range(count))
        state = State(cache["values"], cache["local"], filters)
        state = model.observe(state, ops.cast(x, self.compute_dtype), xp=ops)
        net = self.network and self.network(state.values[:, -self.network.window :])
        mean = model.outlook(state, net=net, xp=ops)
        lower, upper = model.ends(mean, self.band, state, ops)
        ends = [mean]
        for i in range(len(self.levels)):
            ends += [lower[:, i], upper[:, i]]
        cache = {"values": state.values, "local": state.local}
        cache |= {f"filters_{i}": tuple(part) for i, part in enumerate(state.filters)}
        return ops.stack(ends, axis=-1) * model.scale, cache

    def export_stream(self) -> ExportedStream:
        """Returns the stream as exporters to C write it: it starts after the last value read."""
        kinds = ["the forecast"]
        for level in self.levels:
            kinds += [f"the lower end of the {level} % band", "its upper end"]
        shape = [self.model.horizon, len(kinds)]
        return ExportedStream(
            self,
            self.initial_cache,
            self.step,
            lambda x: self.prefill(x)[0],
            inputs=1,
            example=self._example,
            notes=[f"Outputs: y[step][of], shape {shape}, where `of` is {', '.join(kinds)}."],
        )

    def _example(self, rng, steps):
        """Returns values like the last ones, (steps, 1)."""
        y = rng.choice(self.model.state.values, (steps, 1)) + 0.1 * rng.normal(size=(steps, 1))
        return (np.maximum(y, self.model.low) * self.model.scale).astype(self.compute_dtype)


def export(stream: ForecastStream, path: str | os.PathLike, overwrite: bool = False) -> None:
    """Writes a stream as C or as a SavedModel, see `Forecasts.export`."""
    path = pathlib.Path(path).expanduser()
    if path.suffix == ".c":
        write_c(stream, path, overwrite=overwrite)
        return
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "A SavedModel needs the TensorFlow backend. Received: "
            f"KERAS_BACKEND={keras.backend.backend()}"
        )
    if path.exists() and not (overwrite and (path / "saved_model.pb").is_file()):
        raise ValueError(f"{path} already exists. Choose another name, or pass overwrite=True.")
    import tensorflow as tf

    values = tf.TensorSpec((None, None, 1), stream.compute_dtype, name="values")
    module = tf.Module()
    module.weights = [variable.value for variable in stream.variables]
    module.serve = tf.function(lambda values: {"forecast": stream.prefill(values)[0][:, -1]})
    with atomic_folder(path) as folder:
        signatures = {"serving_default": module.serve.get_concrete_function(values)}
        tf.saved_model.save(module, str(folder), signatures)


def _cast(model, dtype):
    """Returns a model whose arrays have a dtype."""

    def cast(array):
        return np.asarray(array, dtype)

    return dataclasses.replace(
        model,
        filters=[
            each._replace(bank=smoothing.Bank(*map(cast, each.bank))) for each in model.filters
        ],
        kernels=list(map(cast, model.kernels)),
        weights=model.weights.tolist(),
    )
