"""Forecasting and classification of time series: data, nets of one size, and baselines."""

import csv
import dataclasses
import functools
import gzip
import pathlib
import time

import keras
import numpy as np

from study.nets import fitted_width
from trellis_keras.layers import LRU, TCN, TrellisLayer

DATA = pathlib.Path(__file__).resolve().parents[2] / "data"


@dataclasses.dataclass
class Task:
    """Windows, and what is to be told of them.

    Attributes:
        title: What it is, in words.
        outputs: Number of outputs: steps of the forecast, or classes.
        splits: Dict of "train", "valid" and "test" to (x, y): x (windows, time, channels), and y
            (windows, outputs) in the user's units or (windows,) labels. The channels of x have mean
            0 and deviation 1 in the training part.
        unit: The user's unit. None: the outputs are classes.
        mean, scale: Of the target in the training part.
        future_channels: Number of last channels that are known in advance: at step t they hold what
            is known of step t + outputs.
    """

    title: str
    outputs: int
    splits: dict
    unit: str | None = None
    mean: float = 0.0
    scale: float = 1.0
    future_channels: int = 0

    def figures(self, outputs):
        """Figures of outputs (windows, outputs) for the test part: units, or scores of classes."""
        y = self.splits["test"][1]
        if self.unit is None:
            return {"accuracy": float(np.mean(np.argmax(outputs, axis=-1) == y))}
        error = outputs - y
        return {"mae": float(np.abs(error).mean()), "rmse": float(np.sqrt(np.square(error).mean()))}


# Data


def read(name):
    """The columns of a file of examples/data: arrays of numbers, where they all are, or of text."""
    with gzip.open(DATA / name, "rt", encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    values = map(_numbers, zip(*rows, strict=True))
    return dict(zip(header, values, strict=True))


def _numbers(values):
    try:
        return np.array([value or "nan" for value in values], "float32")
    except ValueError:
        return np.array(values)


def traffic(stride, window=168, horizon=24):
    """A motorway's traffic of the next 24 hours from a week's, the weather and the calendar."""
    data = read("traffic.csv.gz")
    calendar = [data[name] for name in ("hour_sin", "hour_cos", "weekday", "workday")]
    calendar = np.stack(calendar, axis=-1)
    y = data["traffic"]
    past = [y, data["temperature"], data["clouds"]]
    x = np.column_stack([*past, np.roll(calendar, -horizon, axis=0)]).astype("float32")
    # The parts follow each other in time, and no window reaches over a border.
    borders = [round(share * len(y)) for share in (0, 0.8, 0.9, 1)]
    x, mean, scale = _standardized(x, borders[1])
    splits = {}
    for name, first, last in zip(("train", "valid", "test"), borders, borders[1:], strict=False):
        starts = np.arange(first, last - window - horizon + 1, stride)
        steps = starts[:, None] + np.arange(window + horizon)
        steps = steps[~np.isnan(y[steps[:, window:]]).any(axis=1)]
        splits[name] = x[steps[:, :window]], y[steps[:, window:]]
    return Task(
        f"Forecast: traffic on a motorway, {horizon} hours ahead", horizon, splits,
        "vehicles an hour", float(mean[0]), float(scale[0]), calendar.shape[1],
    )  # fmt: skip


def exercises(stride, window=50):
    """Which of seven exercises somebody does, from 4 s of a watch; other people in every part."""
    data = read("exercises.csv.gz")
    names, label = np.unique(data["exercise"], return_inverse=True)
    x = np.column_stack([data[name] for name in ("ax", "ay", "az", "wx", "wy", "wz")])
    person = data["person"].astype(int)
    record = person * 100 + label * 10 + (data["arm"] == "right")
    order = np.argsort(person, kind="stable")
    x, label, person, record = x[order], label[order], person[order], record[order]
    x = _standardized(x, np.searchsorted(person, 7))[0]
    starts = np.arange(0, len(x) - window + 1, stride)
    starts = starts[record[starts] == record[starts + window - 1]]
    splits = {}
    for name, people in {"train": range(1, 7), "valid": (7, 8), "test": (9, 10)}.items():
        own = starts[np.isin(person[starts], list(people))]
        splits[name] = x[own[:, None] + np.arange(window)], label[own]
    return Task("Classification: seven exercises from a watch, 4 seconds", len(names), splits)


def _standardized(x, training):
    """x (time, channels) with mean 0 and deviation 1 in its first `training` steps, NaN as 0."""
    mean, scale = np.nanmean(x[:training], axis=0), np.nanstd(x[:training], axis=0)
    return np.nan_to_num((x - mean) / scale), mean, scale


@functools.cache
def task(name, stride):
    """The task of this name, with a window every `stride` steps."""
    tasks = {"traffic": traffic, "exercises": exercises}
    if name not in tasks:
        raise ValueError(f"Unknown task {name!r}. Known: {', '.join(tasks)}.")
    return tasks[name](stride)


# Nets and baselines

LABELS = {
    "tcn": "TCN",
    "trellisnet": "TrellisNet",
    "lru": "LRU",
    "keras_tcn": "keras-tcn",
    "lstm": "Keras LSTM",
    "boosting": "gradient boosting",
    "naive": "naive",
}
NETS = ("tcn", "trellisnet", "lru", "keras_tcn", "lstm")


def backbone(net, width, dilations):
    """A net from (batch, time, channels) to the last step's (batch, width).

    All arguments that are not given have their defaults. Both TCNs have three taps; a TrellisNet
    has two and one level more, so that its receptive field is as large.
    """
    if net == "tcn":
        return TCN(width, 3, dilations=dilations, return_sequences=False)
    if net == "keras_tcn":
        from tcn import TCN as KerasTCN

        return KerasTCN(width, kernel_size=3, dilations=dilations)
    if net == "trellisnet":
        levels = [*dilations, 2 * dilations[-1], 4 * dilations[-1]]
        return TrellisLayer(width, len(levels), dilation_rate=levels, return_sequences=False)
    if net == "lru":
        return LRU(width, depth=1, input_projection=True)
    if net == "lstm":
        return keras.layers.LSTM(width)
    raise ValueError(f"Unknown net {net!r}. Known: {', '.join(LABELS)}.")


def build(net, task, settings, rate, seed):
    """A compiled net of about `settings["size"]` parameters."""
    window, channels = task.splits["train"][0].shape[1:]
    dilations = [1]
    while 1 + 4 * sum(dilations) < window:
        dilations.append(2 * dilations[-1])

    def make(width):
        layers = [backbone(net, width, dilations), keras.layers.Dense(task.outputs)]
        return keras.Sequential([keras.Input((window, channels)), *layers])

    width = fitted_width(make, settings["size"])
    keras.utils.set_random_seed(seed)
    model = make(width)
    loss = "mae"
    if task.unit is None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    steps = settings["epochs"] * -(-len(task.splits["train"][0]) // settings["batch_size"])
    decay = keras.optimizers.schedules.CosineDecay(rate, steps)
    model.compile(keras.optimizers.Adam(decay, clipnorm=1.0), loss)
    return model


def train(net, task, settings, rate, seed):
    """Trains a net, and returns its row."""
    model = build(net, task, settings, rate, seed)
    splits = task.splits
    if task.unit is not None:
        splits = {name: (x, (y - task.mean) / task.scale) for name, (x, y) in splits.items()}
    start = time.process_time()
    model.fit(*splits["train"], settings["batch_size"], settings["epochs"], verbose=0)
    seconds = time.process_time() - start
    outputs = model.predict(splits["test"][0], batch_size=256, verbose=0)
    return {
        "parameters": model.count_params(),
        "valid": model.evaluate(*splits["valid"], batch_size=256, verbose=0),
        **task.figures(outputs * task.scale + task.mean),
        "seconds": seconds,
    }


def boost(task, rate, seed):
    """Gradient boosting: of lags, one model an hour ahead; of statistics of the window."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    start = time.process_time()
    options = {"learning_rate": rate, "max_iter": 100, "early_stopping": False}
    if task.unit is None:
        features = {name: _statistics(x) for name, (x, _) in task.splits.items()}
        model = HistGradientBoostingClassifier(**options, random_state=seed)
        model.fit(features["train"], task.splits["train"][1])
        outputs = model.predict_proba(features["test"])
        y = task.splits["valid"][1]
        chosen = model.predict_proba(features["valid"])[np.arange(len(y)), y]
        valid = -np.log(np.maximum(chosen, 1e-7)).mean()
    else:
        outputs, errors = [], []
        options["loss"] = "absolute_error"
        for step in range(task.outputs):
            model = HistGradientBoostingRegressor(**options, random_state=seed)
            features = {name: _lags(x, step, task) for name, (x, _) in task.splits.items()}
            model.fit(features["train"], task.splits["train"][1][:, step])
            outputs.append(model.predict(features["test"]))
            error = model.predict(features["valid"]) - task.splits["valid"][1][:, step]
            errors.append(np.mean(np.abs(error / task.scale)))
        outputs, valid = np.stack(outputs, axis=1), np.mean(errors)
    seconds = time.process_time() - start
    return {"valid": float(valid), **task.figures(outputs), "seconds": seconds}


def _lags(x, step, task):
    """All past values, the last step's other channels, and the calendar of the step forecast."""
    known = x.shape[-1] - task.future_channels
    return np.concatenate(
        [x[:, :, 0], x[:, -1, 1:known], x[:, step - task.outputs, known:]], axis=1
    )


def _statistics(x):
    """Mean, deviation, extremes, quartiles and mean change of each channel."""
    quartiles = np.quantile(x, (0.25, 0.5, 0.75), axis=1)
    change = np.abs(np.diff(x, axis=1)).mean(axis=1)
    parts = [x.mean(axis=1), x.std(axis=1), x.min(axis=1), x.max(axis=1), *quartiles, change]
    return np.concatenate(parts, axis=1)


def naive(task):
    """What was a week ago, or the most frequent class."""
    x, y = task.splits["test"]
    if task.unit is None:
        often = np.bincount(task.splits["train"][1]).argmax()
        return task.figures(np.tile(np.eye(task.outputs)[often], (len(y), 1)))
    return task.figures(x[:, : task.outputs, 0] * task.scale + task.mean)
