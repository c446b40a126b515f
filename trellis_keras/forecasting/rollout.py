"""Forecasts beyond the end of a series, block by block, and the streaming step that reads it.

Series have channels in this order: the targets, other covariates, and covariates known in the
future. A model reads the latter `horizon` steps ahead, so at each step it has seen them up to the
end of its forecast.
"""

import statistics
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.protocol import check_built
from keras_streams.xla import compile_xla
from trellis_keras.layers.base import check_positive
from trellis_keras.models.generation import cached_function
from trellis_keras.types import Cache, Tensor

_STEPS_AT_ONCE = 1024


def forecast(
    model: Any,
    history: np.ndarray,
    steps: int | None,
    future_covariates: np.ndarray | None,
    samples: int,
    seed: int | None,
) -> np.ndarray:
    """See `Forecaster.forecast`."""
    check_ready(model)
    horizon = model.horizon
    history = np.asarray(history, "float32")
    is_single = history.ndim == 2
    history = history[None] if is_single else history
    check_history(model, history)
    steps = horizon if steps is None else steps
    check_positive(steps=steps, samples=samples)
    blocks = -(-steps // horizon)
    known = known_covariates(model, history, future_covariates, blocks * horizon)
    missing = np.argwhere(np.isnan(known[:, history.shape[1] :]))
    if len(missing):
        _, step, channel = missing[0]
        raise ValueError(
            "`future_covariates` must have no missing values in the steps of the forecast. "
            f"Received: NaN in step {step}, channel {channel}"
        )
    x = with_lead(model, history, known)
    if blocks == 1:
        y = _direct(model, x)
        y = y[:, -1] if model.per_step else y
    else:
        y = np.concatenate(list(_blocks(model, x, known, blocks, samples, seed)), axis=1)
    y = y[:, :steps]
    return y[0] if is_single else y


def _direct(model, x):
    """Returns `model.predict(x)`, but is thread-safe, unlike Keras' method on JAX."""

    def make():
        return compile_xla(lambda x: model(x), model.variables, any_shape=True)

    return ops.convert_to_numpy(cached_function(model, "direct", make)(ops.convert_to_tensor(x)))


def _blocks(model, x, known, blocks, samples, seed) -> Iterator[np.ndarray]:
    """Yields forecasts (batch, horizon, targets[, quantiles]); each is read back as history.

    With quantiles, `samples` paths for each row are drawn from them and read back.
    """
    horizon, targets = model.horizon, model.targets
    if model.future_channels + targets != x.shape[-1]:
        raise ValueError(
            f"Beyond the model's horizon of {horizon} steps, all inputs must be targets or known "
            "in the future. Received: a model with "
            f"{x.shape[-1] - targets - model.future_channels} other channels, "
            f"steps={blocks * horizon}. Make them `future_channels`, or forecast {horizon} steps."
        )
    samples = samples if model.has_band else 1
    rng = np.random.default_rng(seed)
    (batch, time), cache = x.shape[:2], None
    for i in range(blocks):
        y, cache = read(model, x, cache, last=True)
        values = y = ops.convert_to_numpy(y)
        if i == 0:
            known = np.repeat(known, samples, axis=0)
            cache = keras.tree.map_structure(lambda c: ops.repeat(c, samples, axis=0), cache)
            values = np.repeat(y, samples, axis=0)
        if not model.has_band:
            values = y if model.middle is None else y[..., model.middle]
        else:
            values = _draw(values.reshape(batch, samples, *y.shape[1:]), model.quantiles, rng)
            if i > 0:
                y = np.moveaxis(np.quantile(values, model.quantiles, axis=1), 0, -1)
            values = values.reshape(-1, horizon, targets).astype("float32")
        yield y.astype("float32")
        if i + 1 < blocks:
            first = time + (i + 1) * horizon
            x = np.concatenate([values, known[:, first : first + horizon]], axis=-1)


def _draw(outputs, quantiles, rng):
    """Draws values from quantiles.

    Within a block, a path uses the same normal score for all steps and targets. Values are
    interpolated between the model's quantiles, and extrapolated beyond them, linearly in the normal
    score.

    Args:
        outputs: Array (batch, samples, horizon, targets, quantiles).
        quantiles: Increasing floats between 0 and 1.
        rng: `numpy.random.Generator`.

    Returns:
        Array (batch, samples, horizon, targets).
    """
    batch, samples = outputs.shape[:2]
    normal = statistics.NormalDist()
    # One value for each of equal shares of the distribution, in random order.
    shares = np.array([normal.inv_cdf((n + 0.5) / samples) for n in range(samples)])
    z = rng.permuted(np.tile(shares, (batch, 1)), axis=1)
    knots = np.array([normal.inv_cdf(q) for q in quantiles])
    place = np.clip(np.searchsorted(knots, z), 1, len(knots) - 1)
    part = (z - knots[place - 1]) / (knots[place] - knots[place - 1])
    index = place[:, :, None, None, None]
    low, high = (np.take_along_axis(outputs, i, axis=-1)[..., 0] for i in (index - 1, index))
    return low + part[:, :, None, None] * (high - low)


def read(
    model: Any, x: np.ndarray, cache: Cache | None, last: bool = False
) -> tuple[Tensor, Cache]:
    """Returns the outputs at each step of a segment, and the cache after it.

    With `last` it returns the outputs after the last step only.
    """
    cache = model.initial_cache(len(x)) if cache is None else cache

    def step(x, cache):
        if x.shape[1] > 1:
            return (model.last_outputs if last else model.outputs_at_each_step)(x, cache)
        y, cache = model.step(x[:, 0], cache)
        return y if last else y[:, None], cache

    key = "forecast", last, *x.shape
    function = cached_function(model, key, lambda: compile_xla(step, model.variables))
    return function(ops.convert_to_tensor(x), cache)


def read_blocks(model: Any, x: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the forecasts after each step of a segment, which is read as one stream.

    Args:
        model: `Forecaster`.
        x: Array (1, time, channels), see `with_lead`.

    Yields:
        The first step of a block, and its forecasts (steps, horizon, targets[, quantiles]).
    """
    cache = None
    for first in range(0, x.shape[1], _STEPS_AT_ONCE):
        y, cache = read(model, x[:, first : first + _STEPS_AT_ONCE], cache)
        yield first, ops.convert_to_numpy(y)[0]


def check_ready(model: Any) -> None:
    """Raises ValueError if a model is not built or not adapted."""
    check_built(model)
    model.check_adapted()


def check_history(model, history):
    channels = model.input_spec.axes[-1]
    if history.ndim != 3 or history.shape[-1] != channels or history.shape[1] < 1:
        raise ValueError(
            f"`history` must have shape (time, {channels}) or (batch, time, {channels}), with the "
            "targets first and the covariates that are known in the future last. "
            f"Received: shape {history.shape}"
        )


def known_covariates(model, history, future_covariates, length):
    """Returns the known covariates of the history and of `length` steps after it."""
    count = model.future_channels
    if not count:
        if future_covariates is not None:
            raise ValueError(
                "The model has no future covariates (future_channels=0). Received: "
                f"future_covariates of shape {np.shape(future_covariates)}"
            )
        return np.zeros((len(history), history.shape[1] + length, 0), "float32")
    shape = np.shape(future_covariates)
    wanted = (len(history), length, count)
    if future_covariates is not None and len(shape) == 2 and len(history) == 1:
        shape = (1, *shape)
    if len(shape) != 3 or shape[0] != wanted[0] or shape[2] != count or shape[1] < length:
        raise ValueError(
            f"`future_covariates` must have shape {wanted}, with at least {length} steps after the "
            "history: whole blocks of the model's horizon. "
            f"Received: {None if future_covariates is None else f'shape {shape}'}"
        )
    future = np.asarray(future_covariates, "float32").reshape(shape)[:, :length]
    return np.concatenate([history[..., -count:], future], axis=1)


def with_lead(model: Any, history: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Returns the inputs of a model, which reads known covariates `horizon` steps ahead.

    Args:
        model: `Forecaster`.
        history: Array (batch, time, channels).
        known: Array (batch, time + horizon or more, future_channels), from the history's start.
    """
    if not model.future_channels:
        return history
    horizon, time = model.horizon, history.shape[1]
    others = history[..., : -model.future_channels]
    return np.concatenate([others, known[:, horizon : horizon + time]], axis=-1)
