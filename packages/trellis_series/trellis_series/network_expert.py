"""A network as one more expert, for long or many series."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from trellis_keras.layers import TCN
from trellis_keras.training import Adam, StopOnNaN
from trellis_series.ensemble import Ensemble
from trellis_series.fitting import Fitting
from trellis_series.forecaster import Forecaster, windows, with_lead

_LONGEST = 336  # window
_TRAIN, _VALID = 0.7, 0.85  # shares of a series up to the ends of these parts
_BATCH, _STEPS, _EPOCHS = 64, 200, 20
# Values with which a network is tried: of a series, in all, and in all with covariates.
_LONG, _MANY, _SOME = 15_000, 100_000, 10_000
_SHARES = np.array([0.0, 0.25, 0.5, 0.75, 1.0])


def forecast(
    model: Forecaster, y: Any, past: Any = None, future: Any = None, ahead: Any = None
) -> Any:
    """Returns a network's forecasts (batch, horizon).

    Args:
        model: `Forecaster` with `scale="window"`, whose channels are the values, covariates known
            up to the present, and those known in the future.
        y: Tensor (batch, window), in units of the scale.
        past, future: Arrays (batch, window, channels), or `None`, without covariates.
        ahead: Array (batch, horizon, channels), the covariates known in the future.
    """
    last = y[:, -1:]  # without it, float32 is precise enough for any level
    x = ops.cast(y - last, "float32")[..., None]
    if past is not None:
        x = np.concatenate([x, past, future], axis=-1, dtype="float32")
        x = with_lead(x, ahead.astype("float32")) if future.shape[-1] else x
    return last + ops.cast(model(x)[..., 0], last.dtype)


def add(
    fittings: Sequence[Fitting], models: Sequence[Ensemble], kind: Any, seed: int
) -> tuple[Forecaster | None, Sequence[Ensemble]]:
    """Returns a network and the models that use it, or `None` if it does not help.

    `fittings` and `models` are those of each series; `kind` is the argument of `Forecasts`.
    """
    if kind is None or (isinstance(kind, str) and not _is_worth_trying(fittings)):
        return None, models
    network = kind if isinstance(kind, Forecaster) else train(fittings, kind, seed)
    if network is None:
        return None, models
    first = fittings[0]
    check(network, first.horizon, 1 + first.past.shape[1] + first.future.shape[1])
    share, gain = weigh(network, fittings)
    if not share:
        return None, models
    found, reach = [], network.linear_kernel.shape[0]
    for fitting, model in zip(fittings, models, strict=True):
        model = model._replace(net_share=share, reach=reach, errors=model.errors * (1 - gain))
        found.append(model._replace(state=fitting.state(model.length)))
    return network, found


def check(network: Forecaster, horizon: int, channels: int | None = None) -> None:
    """Raises ValueError unless forecasts can use a network, whose channels may be unknown yet."""
    if not network.built:
        raise ValueError("`network` must be a built Forecaster. Received: an unbuilt one")
    size = network.input_spec.axes[-1]
    needed = "window", horizon, 1, None, size if channels is None else channels
    has = network.scale, network.horizon, network.targets, network.quantiles, size
    if has != needed:
        raise ValueError(
            "`network` must be a Forecaster with (scale, horizon, targets, quantiles, channels) = "
            f"{needed}. Received: {has}"
        )


def _is_worth_trying(fittings):
    lengths = [len(fitting.y) for fitting in fittings]
    covariates = fittings[0].future.shape[1] + fittings[0].past.shape[1]
    total = sum(lengths)
    return max(lengths) >= _LONG or total >= _MANY or (covariates > 0 and total >= _SOME)


def train(fittings: Sequence[Fitting], backbone: Any, seed: int) -> Forecaster | None:
    """Trains a network on the first 70 % of each series, with early stopping on the next 15 %.

    Args:
        fittings: `Fitting` of each series.
        backbone: Causal layer, or `"auto"`, a TCN that reaches over the window.
        seed: Integer seed.

    Returns:
        The network, or `None` if all series are too short.
    """
    horizon = fittings[0].horizon
    lags = np.median([fitting.lags for fitting in fittings])
    window = int(min(max(lags, 2 * horizon), _LONGEST))
    if backbone == "auto":
        backbone = TCN(32, 3, dilations=_dilations(window), return_sequences=False, seed=seed)
    else:
        backbone = backbone.from_config(backbone.get_config())
    parts: tuple[list, list] = [], []
    for fitting in fittings:
        y = (fitting.y - fitting.y.mean())[:, None]
        rows = np.concatenate([y, fitting.past, fitting.future], axis=1).astype("float32")
        first, second = (int(share * len(rows)) for share in (_TRAIN, _VALID))
        if first >= window + horizon:
            parts[0].append(rows[:first])
            parts[1].append(rows[first - window : second])
    if not parts[0]:
        return None
    channels = parts[0][0].shape[1]
    future = fittings[0].future.shape[1]
    model = Forecaster(
        backbone,
        horizon,
        future_channels=future,
        normalize=True,
        linear_window=window,
        scale="window",
        seed=seed,
    )
    model.build((None, window, channels))
    model.adapt(*parts)
    model.compile(Adam(2e-3, clip_norm=1.0))
    fitted, valid = (Batches(part, window, horizon, future, seed) for part in parts)
    model.fit(
        fitted,
        validation_data=valid,
        epochs=_EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[
            StopOnNaN(),
            keras.callbacks.ReduceLROnPlateau(factor=0.3, patience=2, min_delta=0),
            keras.callbacks.EarlyStopping(patience=5, restore_best_weights=True),
        ],
    )
    return model


class Batches(keras.utils.PyDataset):
    """Random windows of series, at most 200 batches of them an epoch."""

    def __init__(self, series, window, horizon, future, seed):
        super().__init__()
        self.parts = [windows(rows, window, horizon, 1, future) for rows in series]
        counts = [len(x) for x, _ in self.parts]
        self.starts = np.cumsum([0, *counts])
        self.rng = np.random.default_rng(seed)
        self.on_epoch_end()

    def on_epoch_end(self):
        self.order = self.rng.permutation(self.starts[-1])[: _BATCH * _STEPS]

    def __len__(self):
        return -(-len(self.order) // _BATCH)

    def __getitem__(self, index):
        chosen = np.sort(self.order[index * _BATCH : (index + 1) * _BATCH])
        part = np.searchsorted(self.starts, chosen, "right") - 1
        pairs = [
            (self.parts[p][0][i], self.parts[p][1][i])
            for p, i in zip(part, chosen - self.starts[part], strict=True)
        ]
        return tuple(np.stack(side) for side in zip(*pairs, strict=True))


def weigh(network: Forecaster, fittings: Sequence[Fitting]) -> tuple[float, float]:
    """Returns the weight of a network, and a lower bound on the share by which it lowers the error.

    The first is a multiple of 1/4, and 0 unless the error at origins after the network's data
    falls by more than one standard error.
    """
    gains, sizes, independent = [], [], 0.0
    window = network.linear_kernel.shape[0]
    for each in fittings:
        is_late = each.origins[:-1] >= max(_VALID * len(each.y), window)
        if is_late.any():
            late = each.origins[:-1][is_late]
            rows = late[:, None] - window + np.arange(window)
            y, past, future = (values[rows] for values in (each.y, each.past, each.future))
            ahead = each.future[late[:, None] + np.arange(each.horizon)]
            ours, actual = each.combined[:-1][is_late], each.actual[is_late]
            moved = np.asarray(forecast(network, y, past, future, ahead)) - ours
            errors = np.abs(ours - actual + _SHARES[:, None, None] * moved)
            errors = np.nanmean(errors, axis=-1)  # of each origin
            gains.append(errors[:1] - errors)
            sizes.append(errors[0])
            independent += each.independent_of(late)
    if not gains:
        return 0.0, 0.0
    found, error = np.concatenate(gains, axis=1), np.nanmean(np.concatenate(sizes))
    best = int(np.nanmean(found, axis=1).argmax())
    noise = np.nanstd(found[best]) / np.sqrt(min(independent, found.shape[1]))
    gain = np.nanmean(found[best]) - noise  # less the luck of the best of several weights
    return (float(_SHARES[best]), float(gain / error)) if gain > 0 else (0.0, 0.0)


def _dilations(window):
    """Returns dilations 1, 2, 4, ... and a remainder: two convolutions each reach over a window."""
    reach, dilations = (window - 1) // 4, [1]
    while (rest := reach - sum(dilations)) > 0:
        dilations.append(min(2 * dilations[-1], rest))
    return dilations
