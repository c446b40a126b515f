"""The forecast of one series as a stream: constant work for each new value."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams import StreamingMixin
from keras_streams.c_export import write_c
from keras_streams.exported_stream import ExportedStream
from keras_streams.protocol import check_shape
from trellis_keras.files import atomic_folder
from trellis_keras.types import Cache, Tensor
from trellis_series import smoothing
from trellis_series.ensemble import Ensemble, State
from trellis_series.network_expert import forecast
from trellis_series.saving import check_folder

_FILES = {"saved_model.pb", "fingerprint.pb", "variables", "assets"}


class ForecastStream(StreamingMixin, keras.layers.Layer):
    """Forecasts a series after each new value.

    The stream continues after the last value that the forecasts have read. Its numbers are those of
    `Forecasts.update` and `predict`.

    Args:
        model: `Ensemble` without covariates.
        levels: Percentages of the bands.
        network: `Forecaster` that the model uses, or `None`.
        dtype: String, the dtype of the computation. Defaults to `"float64"`; on JAX this needs
            `JAX_ENABLE_X64=1` in the environment.

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
        zero = ops.zeros((), self.compute_dtype)
        if keras.backend.standardize_dtype(zero.dtype) != self.compute_dtype:
            raise ValueError(
                f"On JAX, {self.compute_dtype} needs JAX_ENABLE_X64=1 in the environment. Set it "
                f"before Python starts, or pass dtype='float32'. Received: dtype={dtype!r}"
            )

        def cast(part):
            return part.astype(self.compute_dtype) if isinstance(part, np.ndarray) else part

        filters, kernels, band = keras.tree.map_structure(
            cast, (model.filters, model.kernels, model.band(levels))
        )
        self.model = model._replace(
            filters=filters, kernels=kernels, weights=model.weights.tolist()
        )
        self.network = network
        self.levels = tuple(levels)
        self.band = band
        self.built = True

    def initial_cache(self, batch_size: int) -> Cache:
        """Returns the state after the last value that was read, for each row of a batch."""

        def repeat(array):
            row = ops.convert_to_tensor(array, self.compute_dtype)
            return ops.broadcast_to(row[None], (batch_size, *np.shape(array)))

        return keras.tree.map_structure(repeat, _cache(self.model.state))

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Reads one value of each row.

        Args:
            x: Tensor (batch, 1) in the units of the data, NaN for a missing value.
            cache: Result of `initial_cache` or `step`.

        Returns:
            Tensor (batch, horizon, 1 + 2 levels): the forecast, and the lower and upper end of each
            band; and the new cache.
        """
        x = ops.cast(x, self.compute_dtype)
        check_shape("x", x, (cache["values"].shape[0], 1))
        model, net = self.model, None
        filters = tuple(smoothing.FilterState(*each) for each in cache["filters"])
        state = State(cache["values"], cache["local"], filters)
        state = model.observe(state, x, xp=ops)
        if self.network is not None:
            net = forecast(self.network, state.values[:, -self.network.linear_window :])
        mean = model.outlook(state, net=net, xp=ops)
        lower, upper = model.ends(mean, self.band, state, ops)
        ends = [mean]
        for i in range(len(self.levels)):
            ends += [lower[:, i], upper[:, i]]
        return ops.stack(ends, axis=-1) * model.scale, _cache(state)

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
    folder = check_folder(path, overwrite, _FILES)
    archive = keras.export.ExportArchive()
    archive.track(stream)
    archive.add_endpoint(
        "serving_default",
        lambda values: {"forecast": stream.prefill(values)[0][:, -1]},
        [keras.InputSpec(stream.compute_dtype, (None, None, 1), name="values")],
    )
    with atomic_folder(folder) as temporary:
        archive.write_out(str(temporary), verbose=False)


def _cache(state):
    """Returns what changes with each value, as exporters name it."""
    filters = [tuple(each) for each in state.filters]
    return {"values": state.values, "local": state.local, "filters": filters}
