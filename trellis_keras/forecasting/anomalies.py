"""One-step forecasts within a series, and how far its values are from them."""

from collections.abc import Sequence

import numpy as np

from trellis_keras.forecasting import rollout
from trellis_keras.forecasting.forecaster import Forecaster


def one_step_forecasts(
    model: Forecaster, series: np.ndarray, future_covariates: np.ndarray | None = None
) -> np.ndarray:
    """Returns the first step of the forecast after each step of a series.

    Args:
        model: `Forecaster` with a backbone that streams.
        series: Array (time, channels).
        future_covariates: Array (horizon, future_channels), the steps after the series. Defaults to
            `None`, which leaves out the last forecasts, as they would need them.

    Returns:
        Array (time, targets) or (time, targets, quantiles): row t is the forecast of step t + 1.
    """
    rollout.check_ready(model)
    horizon = model.horizon
    series = np.asarray(series, "float32")[None]
    rollout.check_history(model, series)
    if model.future_channels and future_covariates is None:
        future_covariates = series[:, -horizon:, -model.future_channels :]
        series = series[:, :-horizon]
    known = rollout.known_covariates(model, series, future_covariates, horizon)
    x = rollout.with_lead(model, series, known)
    return np.concatenate([y[:, 0] for _, y in rollout.read_blocks(model, x)])


def anomaly_scores(
    model: Forecaster,
    series: np.ndarray,
    scale: float | Sequence[float] | None = None,
    future_covariates: np.ndarray | None = None,
) -> np.ndarray:
    """Returns how far each value of a series is from its one-step forecast.

    Without quantiles, the score is the error in standard deviations (a z-score). With quantiles it
    is 0 within the band from the lowest to the highest one; outside, it is the distance from the
    band in units of the band's width. The work is one pass over the series by the streaming cache,
    so the model sees the whole series before each step.

    Args:
        model: `Forecaster` with a backbone that streams.
        series: Array (time, channels), in the units and order of the model's inputs, with each
            channel at its own time.
        scale: Positive float, or one for each target: the standard deviation of the one-step errors
            of normal data. Not for quantiles. Defaults to `None`: 1.4826 times the median absolute
            error in `series`, which few anomalies hardly change.
        future_covariates: Array (horizon, future_channels), the steps after the series, as in
            `Forecaster.forecast`. Defaults to `None`: without them the last `horizon - 1`
            values of a model with `future_channels` have no score.

    Returns:
        Array (time, targets). NaN where a value is missing or, like the first, has no forecast.

    Raises:
        ValueError: If the model is not a forecaster or cannot stream, or arguments do not match it.

    Example:

    >>> from trellis_keras import forecasting
    >>> backbone = trellis_keras.layers.TCN(4, kernel_size=2, depth=2, return_sequences=False)
    >>> model = forecasting.Forecaster(backbone, horizon=1, normalize=True)
    >>> model.adapt(np.random.rand(50, 1))
    >>> forecasting.anomaly_scores(model, np.random.rand(20, 1)).shape
    (20, 1)
    """
    forecasts = one_step_forecasts(model, series, future_covariates)
    values = np.asarray(series, "float32")[1 : len(forecasts) + 1, : forecasts.shape[1]]
    forecasts = forecasts[: len(values)]
    if model.quantiles is not None:
        if scale is not None or len(model.quantiles) < 2:
            raise ValueError(
                "A model with quantiles scores values by its band: it needs at least two quantiles "
                "and no `scale`. "
                f"Received: quantiles={model.quantiles}, scale={scale}"
            )
        lowest, highest = forecasts[..., 0], forecasts[..., -1]
        distance = np.maximum(lowest - values, values - highest)
        width = np.maximum(highest - lowest, np.finfo("float32").tiny)
        found = np.maximum(distance, 0) / width
    else:
        errors = np.abs(values - forecasts)
        if scale is None:
            scale = 1.4826 * np.nanmedian(errors, axis=0)
        if not np.all(np.asarray(scale) > 0):
            raise ValueError(f"`scale` must be positive. Received: scale={scale}")
        found = errors / np.asarray(scale, "float32")
    scores = np.full((len(series), values.shape[1]), np.nan, "float32")
    scores[1 : len(found) + 1] = found
    return scores
