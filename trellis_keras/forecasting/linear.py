"""A linear map from the last steps of series to the next ones, fitted in closed form.

The map is a ridge regression that shrinks towards the best exponential smoothing: short series get
the smoothing, long ones follow their data. Unless it is significantly better than a naive forecast
and the drift, it is averaged with that forecast. Forecasts follow the level of the series, since a
target's own weights sum to 1 and those of the other targets to 0. Errors of a window are measured
in units of its mean change from step to step.
"""

import itertools
from collections.abc import Iterator

import keras
import numpy as np
from keras import ops

from keras_streams import StreamingMixin
from trellis_keras.types import Cache, Shape, Tensor

PENALTIES = (*10.0 ** np.arange(-3, 3), np.inf)
_MOST_WINDOWS = 2_000  # evenly spaced, used to find the season
_MOST_FEATURES = 1_000  # above which fewer steps of other channels are read
_FOLDS = 5
_FEW = 0.05  # share of rows with a missing output that are left out
_GROUPS = 8  # of outputs
_QUIET = 0.05  # quantile of the windows' scales that serves as the smallest scale
NEAR = 1.15  # ratio to the smallest naive error that counts as near
# Smoothing rates: of the level; of the trend and its damping; of the season.
_LEVELS = (0.05, 0.2, 0.5, 0.8, 0.97)
_TRENDS = ((0.0, 1.0), (0.05, 0.97), (0.2, 0.97), (0.2, 0.85))
_SEASONS = (0.05, 0.3)


@keras.saving.register_keras_serializable("trellis_keras")
class LinearMap(StreamingMixin, keras.layers.Layer):
    """Applies a linear map to the last `window` steps, and measures how much they change.

        base_t = sum_j z_{t-j} K[window - 1 - j]
        scale_t = max(mean_j |z_{t-j} - z_{t-j-1}|, s)

    for j = 0..window - 1, with the scale of each target from its own channel. A missing value (NaN)
    is replaced by the last known one; at the start of a window, by the first known one. There are
    zeros before the first step. `fit_map` finds the weights K and s.

    Args:
        window: Positive integer, at least 2, number of steps to read.
        horizon: Positive integer, number of steps to forecast.
        targets: Positive integer, number of targets, the first channels.
        return_sequences: Boolean, whether to return outputs for each step or only for the last.

    Call arguments:
        inputs: Tensor (batch, time, channels).

    Returns:
        Tuple of `base` (batch, horizon, targets) and `scale` (batch, 1, targets), with
        `return_sequences` (batch, time, ...).
    """

    def __init__(self, window, horizon, targets, return_sequences=False, **kwargs):
        super().__init__(**kwargs)
        self.window = window
        self.horizon = horizon
        self.targets = targets
        self.return_sequences = return_sequences

    def build(self, input_shape: Shape) -> None:
        options = {"initializer": "zeros", "trainable": False, "autocast": False}
        shape = (self.window, input_shape[-1], self.horizon * self.targets)
        self.kernel = self.add_weight(name="kernel", shape=shape, **options)
        self.least_scale = self.add_weight(name="least_scale", shape=(self.targets,), **options)

    def call(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        if self.return_sequences:
            return self.prefill(inputs)[0]
        return self.outputs(self.last_steps(inputs))

    def last_steps(self, inputs: Tensor) -> Tensor:
        """Returns the last steps (batch, window, channels), with missing values filled.

        A missing value is replaced by the last known one, or before that by the first known one.
        """
        before = self.initial_cache(ops.shape(inputs)[0])
        first = ops.flip(_last_known(ops.flip(inputs, axis=1)), axis=1)
        known = _last_known(inputs)
        known = _zero_missing(ops.where(ops.isnan(known), first, known))
        return ops.concatenate([before, known], axis=1)[:, -self.window :]

    def windows(self, x: Tensor, cache: Cache) -> Tensor:
        """Returns the last steps at each step of a segment, (batch, time, window, channels)."""
        steps = self.continued(x, cache)[:, 1:]
        first = ops.arange(ops.shape(x)[1])[:, None]
        return ops.take(steps, first + ops.arange(self.window), axis=1)

    def compute_output_shape(self, input_shape: Shape) -> tuple[Shape, Shape]:
        leading = tuple(input_shape[: 1 + self.return_sequences])
        return (*leading, self.horizon, self.targets), (*leading, 1, self.targets)

    # Streaming: the cache contains the last steps, with missing values filled.

    def initial_cache(self, batch_size: int) -> Cache:
        return ops.zeros((batch_size, self.window, self.kernel.shape[1]), self.compute_dtype)

    def step(self, x: Tensor, cache: Cache) -> tuple[tuple[Tensor, Tensor], Cache]:
        x = ops.where(ops.isnan(x), cache[:, -1], x)
        rows = ops.concatenate([cache[:, 1:], x[:, None]], axis=1)
        return self.outputs(rows), rows

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[tuple[Tensor, Tensor], Cache]:
        cache = self.initial_cache(ops.shape(x)[0]) if cache is None else cache
        rows = self.continued(x, cache)
        base = ops.conv(rows[:, 1:], self.kernel, padding="valid")
        changes = ops.absolute(rows[:, 1:, : self.targets] - rows[:, :-1, : self.targets])
        scale = ops.average_pool(changes[:, 1:], self.window - 1, 1, "valid")
        return self._shaped(base, scale), rows[:, -self.window :]

    def continued(self, x: Tensor, cache: Cache) -> Tensor:
        """Returns the steps of the cache and a segment, (batch, window + time, channels)."""
        # A missing first value is replaced by the cache's last row.
        known = _zero_missing(_last_known(ops.concatenate([cache[:, -1:], x], axis=1)))
        return ops.concatenate([cache[:, :-1], known], axis=1)

    def outputs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs after `window` rows."""
        base = ops.tensordot(rows, self.kernel, [[1, 2], [0, 1]])
        changes = ops.absolute(rows[:, 1:, : self.targets] - rows[:, :-1, : self.targets])
        return self._shaped(base, ops.mean(changes, axis=1))

    def _shaped(self, base, scale):
        base = ops.reshape(base, (*ops.shape(base)[:-1], self.horizon, self.targets))
        return base, ops.maximum(scale, self.least_scale)[..., None, :]

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "window": self.window,
            "horizon": self.horizon,
            "targets": self.targets,
            "return_sequences": self.return_sequences,
        }


def _last_known(x):
    """Returns steps (batch, time, channels) with missing values replaced by the last known one."""
    steps = ops.arange(ops.shape(x)[1])
    doublings = 20 if x.shape[1] is None else (x.shape[1] - 1).bit_length()
    for n in range(doublings):  # looks back 1, 3, 7, ... steps
        earlier = ops.take(x, ops.maximum(steps - 2**n, 0), axis=1)
        x = ops.where(ops.isnan(x), earlier, x)
    return x


def _zero_missing(x):
    return ops.where(ops.isnan(x), ops.zeros_like(x), x)


# The fit


def fit_map(
    x: np.ndarray, y: np.ndarray, x_valid: np.ndarray, y_valid: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the best linear map.

    Candidates are compared by the mean of two errors: blocked cross-validation on the training
    windows and, if there are any, the validation windows.

    Args:
        x, x_valid: Arrays (windows, W, channels) in chronological order, the targets first.
            Covariates are standardized. Missing values are NaN.
        y, y_valid: Arrays (windows, H, targets).

    Returns:
        A tuple `(kernel, least_scale, residuals)`: the weights of a `LinearMap`, of which `kernel`
        has the shape (W, channels, H, targets), and what is left of targets that a map was not
        fitted to, in units of the scale of their windows, (windows, H, targets).
    """
    x, x_valid = (fill(values) for values in (x, x_valid))
    found = [_fit_target(x, y, x_valid, y_valid, j) for j in range(y.shape[-1])]
    kernels, scales, residuals = zip(*found, strict=True)
    return np.stack(kernels, axis=-1), np.array(scales), np.stack(residuals, axis=-1)


def _fit_target(x, y, x_valid, y_valid, target):
    """Returns kernel, least scale and residuals of one target."""
    targets, window, horizon = y.shape[-1], x.shape[1], y.shape[1]
    scale = np.abs(np.diff(x[..., target], axis=1)).mean(axis=1)
    least = float(np.quantile(scale[scale > 0], _QUIET)) if scale.any() else 1.0

    def in_units(x, y):
        """Returns windows and targets relative to the last values, in units of the scale."""
        last = np.where(np.arange(x.shape[-1]) < targets, x[:, -1:], 0)
        k = np.maximum(np.abs(np.diff(x[..., target], axis=1)).mean(axis=1), least)[:, None]
        return (x - last) / k[..., None], (y[..., target] - last[..., target]) / k

    (u, v), (u_valid, v_valid) = in_units(x, y), in_units(x_valid, y_valid)
    own, own_valid = u[..., target], u_valid[..., target]
    season = best_season(own, v)
    smoothings = _smoothings(window, horizon, season)
    smoothings.sort(key=lambda m: mean_error(v - own @ m) + mean_error(v_valid - own_valid @ m))
    priors = smoothings[0], np.mean(smoothings[:5], axis=0)
    # Adds as many of the last steps of the other channels as the number of features allows.
    others = [i for i in range(x.shape[-1]) if i != target]
    reach = min(window, max(horizon, _MOST_FEATURES // x.shape[-1]))
    best = (np.inf,)
    for channels in [[], others] if others else [[]]:
        f, f_valid = (
            np.concatenate([u[..., target], *(u[:, -reach:, i] for i in channels)], axis=1)
            for u in (u, u_valid)
        )
        ridge = Ridge(f, v)
        parts = [(Ridge(f[fitted], v[fitted]), held) for fitted, held in folds(len(f), horizon)]
        for prior, penalty in itertools.product(priors, PENALTIES):
            prior = np.pad(prior, ((0, f.shape[1] - window), (0, 0)))
            held = v - f @ prior
            for part, rows in parts:
                held[rows] = v[rows] - f[rows] @ part.shrunk(prior, penalty)
            kernel = ridge.shrunk(prior, penalty) if parts else prior
            left = v_valid - f_valid @ kernel
            score = mean_error(held) + mean_error(left)
            if score < best[0]:
                best = score, kernel, channels, np.concatenate([held, left])
    _, kernel, channels, residuals = best
    own, v = np.concatenate([own, own_valid]), np.concatenate([v, v_valid])
    simple = min(_simple(window, horizon, season), key=lambda m: mean_error(v - own @ m))
    left = v - own @ simple
    if not is_gain(_window_errors(left) - _window_errors(residuals), horizon):
        kernel = (kernel + np.pad(simple, ((0, len(kernel) - window), (0, 0)))) / 2
        residuals = (residuals + left) / 2
    whole = np.zeros((window, x.shape[-1], horizon))
    whole[:, target] = kernel[:window]
    for n, i in enumerate(channels):
        whole[-reach:, i] = kernel[window + n * reach : window + (n + 1) * reach]
    # Values are relative to the last ones.
    whole[-1, :targets] -= whole[:, :targets].sum(axis=0)
    whole[-1, target] += 1
    return whole, least, residuals


def fill(x: np.ndarray) -> np.ndarray:
    """Returns float64 windows (n, W, channels), with missing values filled as in `LinearMap`."""
    x = np.array(x, "float64")
    for t in range(1, x.shape[1]):
        np.copyto(x[:, t], x[:, t - 1], where=np.isnan(x[:, t]))
    for t in reversed(range(x.shape[1] - 1)):
        np.copyto(x[:, t], x[:, t + 1], where=np.isnan(x[:, t]))
    return np.nan_to_num(x, nan=0.0)


def best_season(x: np.ndarray, y: np.ndarray) -> int:
    """Returns the lag whose naive forecast of windows is best, or nearly so and shorter.

    Returns 1, the last value, unless the gain is more than noise.

    Args:
        x: Array (windows, W).
        y: Array (windows, H). Missing values are NaN.
    """
    rows = np.linspace(0, len(x) - 1, min(_MOST_WINDOWS, len(x))).astype(int)
    x, y, (window, horizon) = x[rows], y[rows], (x.shape[1], y.shape[1])
    ahead = np.arange(horizon)
    left = {m: y - x[:, window - m + ahead % m] for m in range(1, window + 1)}
    season = shortest_season({m: mean_error(residuals) for m, residuals in left.items()})
    gains = _window_errors(left[1]) - _window_errors(left[season])
    return season if is_gain(gains, horizon) else 1


def shortest_season(errors: dict[int, float]) -> int:
    """Returns the shortest lag, of 2 or more, whose error is a local minimum near the best one.

    Args:
        errors: The error of the naive forecast of each lag.
    """
    best = min(errors, key=errors.__getitem__)
    for m in sorted(errors):
        around = min(errors.get(m - 1, np.inf), errors.get(m + 1, np.inf))
        if 1 < m < best and errors[m] <= min(around, NEAR * errors[best]):
            return m
    return best


def is_gain(gains: np.ndarray, horizon: int) -> bool:
    """Returns whether gains have a mean of more than one standard error above 0.

    Args:
        gains: Array (windows,), the decrease of the errors. Missing values (NaN) are ignored.
        horizon: Positive integer. Windows that share targets count as one.
    """
    gains = gains[~np.isnan(gains)]
    count = max(len(gains) / horizon, 1.0)
    return bool(len(gains) and gains.mean() > gains.std() / np.sqrt(count))


def _simple(window, horizon, season):
    """Returns naive forecasts and the drift as maps (window, horizon)."""
    drift = _naive(window, horizon, 1)
    slope = np.arange(1, horizon + 1) / (window - 1)
    drift[-1] += slope
    drift[0] -= slope
    return [*(_naive(window, horizon, m) for m in sorted({1, season})), drift]


def _smoothings(window, horizon, season):
    """Returns simple forecasts and exponential smoothings as maps (window, horizon)."""
    maps = _simple(window, horizon, season)
    # The theta method: half the slope of the regression line, plus a level.
    time = np.arange(window) - (window - 1) / 2
    slope = np.outer(time / (time @ time), np.arange(1, horizon + 1))
    for level in _LEVELS[1:]:
        maps.append(_smoothing(window, horizon, 1, level, 0.0, 1.0, 0.0) + slope / 2)
    if 1 < season < window:  # the last season, plus the change since then
        moved = np.eye(window)[-1] - np.eye(window)[-1 - season]
        maps.append(_naive(window, horizon, season) + moved[:, None])
    for level, (trend, damping) in itertools.product(_LEVELS, _TRENDS):
        maps.append(_smoothing(window, horizon, 1, level, trend, damping, 0.0))
        if season > 1:
            parameters = [(level, trend, damping, rate) for rate in _SEASONS]
            maps += [_smoothing(window, horizon, season, *of) for of in parameters]
    return maps


def _naive(window, horizon, season):
    steps = np.arange(horizon)
    naive = np.zeros((window, horizon))
    naive[window - season + steps % season, steps] = 1
    return naive


def _smoothing(window, horizon, season, alpha, beta, damping, gamma):
    """Returns the additive Holt-Winters method with a damped trend as a linear map.

    Level, trend and the `season` seasonal terms are linear combinations of the window's steps,
    initialized with the means of the first two seasons.
    """
    unit = np.eye(window)
    level, trend = unit[:season].mean(axis=0), np.zeros(window)
    seasons = unit[:season] - level
    if window >= 2 * season:
        second = unit[season : 2 * season].mean(axis=0)
        seasons = (seasons + unit[season : 2 * season] - second) / 2
        trend = (second - level) / season * (beta > 0)
    level = level - trend * (season + 1) / 2
    for t in range(window):
        error = unit[t] - (level + damping * trend + seasons[t % season])
        level, trend = (
            level + damping * trend + alpha * error,
            damping * trend + alpha * beta * error,
        )
        seasons[t % season] += gamma * (1 - alpha) * error
    ahead = np.arange(horizon)
    trends = np.cumsum(damping ** (ahead + 1))[:, None] * trend
    return (level + trends + seasons[(window + ahead) % season]).T


class Ridge:
    """Solves min |Y - X (P + B)|^2 + l |B|^2 for any P and l, after eigendecompositions.

    Rows with a missing output are left out. If there are many, each of up to eight groups of
    neighbouring outputs has a decomposition of its own, and leaves out the rows where one of its
    own outputs is missing.

    Args:
        x: Array (rows, features).
        y: Array (rows, outputs). Missing values are NaN.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        outputs = y.shape[1]
        groups = [np.arange(outputs)]
        if np.isnan(y).any(axis=1).mean() > _FEW:
            groups = np.array_split(groups[0], min(outputs, _GROUPS))
        self._solved = [(group, *self._solve(x, y[:, group])) for group in groups]

    def _solve(self, x, y):
        known = ~np.isnan(y).any(axis=1)
        x, y = x[known], y[known]
        gram = x.T @ x
        values, vectors = np.linalg.eigh(gram)
        values = np.maximum(values, 0)
        unit = max(values.mean(), np.finfo("float64").tiny)
        return gram, x.T @ y, values, vectors, unit

    def shrunk(self, prior: np.ndarray, penalty: float) -> np.ndarray:
        """Returns P + B (features, outputs).

        Args:
            prior: P.
            penalty: l, in units of the mean eigenvalue.
        """
        found = np.array(prior)
        for group, gram, right, values, vectors, unit in self._solved:
            left = vectors.T @ (right - gram @ prior[:, group])
            found[:, group] += vectors @ (left / (values + penalty * unit)[:, None])
        return found


def folds(count: int, gap: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields training and held-out rows of blocks, without the `gap` rows on either side."""
    for block in np.array_split(np.arange(count), _FOLDS):
        if len(block):
            fitted = np.r_[: max(block[0] - gap, 0), min(block[-1] + gap + 1, count) : count]
            if len(fitted) >= _FOLDS:
                yield fitted, block


def _window_errors(residuals):
    """Returns the mean error of each window, (windows,), or NaN for windows without targets."""
    counts = ~np.isnan(residuals)
    errors = np.where(counts, np.abs(residuals), 0).sum(axis=1)
    return errors / np.where(counts.any(axis=1), counts.sum(axis=1), np.nan)


def mean_error(residuals: np.ndarray) -> float:
    """Returns the mean absolute value, ignoring missing values; 0 if all are missing."""
    known = residuals[~np.isnan(residuals)]
    return np.abs(known).mean() if known.size else 0.0
