"""Conformal calibration of quantiles, by validation data or the recent past of a series."""

import math
from collections.abc import Sequence

import numpy as np
from keras import ops

from trellis_keras.forecasting.losses import middle_quantile


def conformal_scale(
    outputs: np.ndarray, targets: np.ndarray, quantiles: Sequence[float]
) -> np.ndarray:
    """Returns the factors of the gaps between quantiles that calibrate them on the targets.

    Conformalized quantile regression (Romano et al. 2019, separately for each side), with scores in
    units of the gap to the next quantile towards the middle.

    Args:
        outputs: Array (..., targets, quantiles) of increasing quantiles.
        targets: Array (..., targets). Missing values (NaN) are ignored.
        quantiles: Increasing floats between 0 and 1.

    Returns:
        Array (targets, quantiles) of numbers of 0 or more, 1 for the middle quantile.
    """
    outputs = outputs.reshape(-1, *outputs.shape[-2:]).astype("float64")
    targets = targets.reshape(-1, targets.shape[-1])
    pairs = [(outputs[:, i], targets[:, i]) for i in range(targets.shape[-1])]
    return np.stack([_scale(*pair, quantiles) for pair in pairs])


def _scale(outputs, targets, quantiles):
    known = ~np.isnan(targets)
    outputs, targets = outputs[known], targets[known]
    scale = np.ones(len(quantiles))
    if not len(targets):
        return scale
    middle = middle_quantile(quantiles)
    for sign in (1, -1):
        calibrated = outputs[:, middle]
        for i in range(middle + sign, len(quantiles) if sign > 0 else -1, sign):
            gap = sign * (outputs[:, i] - outputs[:, i - sign])
            scores = sign * (targets - calibrated) / np.maximum(gap, np.finfo("float32").tiny)
            share = quantiles[i] if sign > 0 else 1 - quantiles[i]
            # This share of n + 1 scores, including the next one, should be below the bound.
            # (Rounded, because 20 * 0.55 is slightly more than 11.)
            rank = math.ceil(round((len(scores) + 1) * share, 9))
            scale[i] = max(np.sort(scores)[min(rank, len(scores)) - 1], 0.0)
            calibrated = calibrated + sign * scale[i] * gap
    return scale


def rescale(outputs: np.ndarray, scale: np.ndarray, quantiles: Sequence[float]) -> np.ndarray:
    """Returns outputs whose gaps between quantiles are multiplied by factors.

    Args:
        outputs: Array (..., quantiles) of increasing quantiles.
        scale: Array (..., quantiles), see `conformal_scale`.
        quantiles: Increasing floats between 0 and 1.
    """
    middle = middle_quantile(quantiles)
    center, gaps = outputs[..., middle : middle + 1], np.diff(outputs, axis=-1)
    above = gaps[..., middle:] * scale[..., middle + 1 :]
    below = gaps[..., :middle] * scale[..., :middle]
    above = center + np.cumsum(above, axis=-1)
    below = center - np.cumsum(below[..., ::-1], axis=-1)[..., ::-1]
    return np.concatenate([below, center, above], axis=-1)


# Calibration on the recent past


def calibrate_on_known(model, outputs, known, known_y, windows):
    """Returns outputs with their quantiles calibrated on the last known windows.

    Targets without known values keep the model's calibration. `outputs` and `known` are those of
    `predict_windows`.
    """
    if not model.has_band:
        return outputs
    count = recent_count(windows)
    known, known_y = known[-count:], known_y[-count:]
    scale = ops.convert_to_numpy(model.gap_scale)
    has_value = ~np.isnan(known_y).all(axis=(0, 1))
    if has_value.any():
        found = conformal_scale(known, known_y, model.quantiles)
        scale = np.where(has_value[:, None], found, scale)
    return rescale(outputs, scale, model.quantiles)


def predict_windows(model, windows, index, batch_size=64):
    """Returns the outputs, without the model's calibration, and targets of these windows."""
    x, y = windows.read(np.asarray(index, int))
    if not len(x):
        return np.zeros(model.compute_output_shape(x.shape)), y
    if not model.has_band:
        return model.predict(x, batch_size=batch_size, verbose=0), y
    scale = ops.convert_to_numpy(model.gap_scale).copy()
    model.gap_scale.assign(np.ones_like(scale))  # a gap of 0 could not be calibrated again
    try:
        return model.predict(x, batch_size=batch_size, verbose=0), y
    finally:
        model.gap_scale.assign(scale)


def recent_count(windows):
    """Returns the number of calibration windows: those that start within two windows of rows."""
    return -(-2 * windows.window // windows.stride)


def recent_windows(windows, i):
    """Returns the indices of the last windows of series `i`, for calibrating what comes next."""
    own = np.array(windows.of_series(i), int)
    return own[max(len(own) - recent_count(windows), 0) :]


def windows_ahead(windows):
    """Returns the distance, in windows, from a window to the first one after its targets."""
    return -(-windows.horizon // windows.stride)
