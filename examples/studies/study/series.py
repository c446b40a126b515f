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
class Fold:
    """Windows of one training.

    Attributes:
        parts: Dict from "train" and one or both of "valid" and "test" to (x, y): x (windows, time,
            channels), and y (windows, outputs) in the units of the data, or labels (windows,). The
            channels of x have mean 0 and deviation 1 in the training part.
        mean, scale: Of the target in the training part.
    """

    parts: dict
    mean: float = 0.0
    scale: float = 1.0


@dataclasses.dataclass
class Task:
    """A task: what to predict, and from which windows.

    Attributes:
        title: What it is, in words.
        outputs: Number of outputs: steps of the forecast, or classes.
        folds: List of `Fold`. A net is trained anew in each.
        unit: Unit of the target. None: the outputs are classes.
        future_channels: Number of last channels that are known in advance: at step t they hold what
            is known of step t + outputs.
    """

    title: str
    outputs: int
    folds: list
    unit: str | None = None
    future_channels: int = 0

    def without_test(self):
        """The task for a search: its validation fold, without test windows."""
        folds = [
            dataclasses.replace(fold, parts={k: v for k, v in fold.parts.items() if k != "test"})
            for fold in self.folds
            if "valid" in fold.parts
        ]
        return dataclasses.replace(self, folds=folds)

    def figures(self, predict):
        """The figures of all folds together.

        Args:
            predict: Function from a fold to {part: outputs (windows, outputs)} of its parts other
                than "train", in the units of the data, or scores of classes.

        Returns:
            Dict of `valid`, the error of the validation windows, and the figures of the test
            windows, if there are any: `mae` and `rmse`, or `accuracy`.
        """
        found = {"valid": [], "test": []}
        for fold in self.folds:
            for part, outputs in predict(fold).items():
                found[part].append(self._errors(outputs, fold.parts[part][1]))
        figures = {"valid": float(np.abs(np.concatenate(found["valid"])).mean())}
        if not found["test"]:
            return figures
        test = np.concatenate(found["test"])
        if self.unit is None:
            return {**figures, "accuracy": float(1 - test.mean())}
        mae, rmse = float(np.abs(test).mean()), float(np.sqrt(np.square(test).mean()))
        return {**figures, "mae": mae, "rmse": rmse}

    def _errors(self, outputs, y):
        return np.argmax(outputs, axis=-1) != y if self.unit is None else outputs - y


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
    borders = [round(share * len(y)) for share in (0, 0.6, 0.7, 0.8)]
    x, mean, scale = _standardized(x, x[: borders[1]])
    parts = {}
    for name, first, last in zip(("train", "valid", "test"), borders, borders[1:], strict=False):
        starts = np.arange(first, last - window - horizon + 1, stride)
        steps = starts[:, None] + np.arange(window + horizon)
        steps = steps[~np.isnan(y[steps[:, window:]]).any(axis=1)]
        parts[name] = x[steps[:, :window]], y[steps[:, window:]]
    return Task(
        f"Forecast: traffic on a motorway, {horizon} hours ahead", horizon,
        [Fold(parts, float(mean[0]), float(scale[0]))], "vehicles an hour", calendar.shape[1],
    )  # fmt: skip


# People of the validation windows, and of the test windows of each other fold.
VALID = (7, 8)
TESTED = ((1, 2), (3, 4), (5, 6), (9, 10))


def exercises(stride, window=50):
    """Which of seven exercises somebody does, from 4 s of a watch, by cross-validation."""
    data = read("exercises.csv.gz")
    names, label = np.unique(data["exercise"], return_inverse=True)
    raw = np.column_stack([data[name] for name in ("ax", "ay", "az", "wx", "wy", "wz")])
    person = data["person"].astype(int)
    record = person * 100 + label * 10 + (data["arm"] == "right")
    starts = np.arange(0, len(raw) - window + 1, stride)
    starts = starts[record[starts] == record[starts + window - 1]]
    folds = []
    for people in (VALID, *TESTED):
        is_other = np.isin(person, people)
        x = _standardized(raw, raw[~is_other])[0]
        parts = {}
        for name, own in {"train": ~is_other, people: is_other}.items():
            chosen = starts[own[starts]]
            name = {VALID: "valid", "train": "train"}.get(name, "test")
            parts[name] = x[chosen[:, None] + np.arange(window)], label[chosen]
        folds.append(Fold(parts))
    return Task("Classification: seven exercises from a watch, 4 seconds", len(names), folds)


def _standardized(x, training):
    """x (time, channels) with mean 0 and deviation 1 in the training rows, NaN as 0."""
    mean, scale = np.nanmean(training, axis=0), np.nanstd(training, axis=0)
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


# The setting that a search tries in addition to the defaults.
OTHER = {
    "tcn": "glu",
    "trellisnet": "three taps",
    "lru": "two layers",
    "keras_tcn": "glorot",
    "lstm": "two layers",
}


def backbone(net, width, dilations, setting):
    """A net from (batch, time, channels) to the last step's (batch, width).

    All arguments have their defaults, except for what `setting` names. Both TCNs have three taps;
    a TrellisNet has two, and more levels, so that its receptive field is as large.
    """
    if net not in NETS:
        raise ValueError(f"Unknown net {net!r}. Known: {', '.join(LABELS)}.")
    other = setting == OTHER[net]
    if net == "tcn":
        options = {"activation": "glu"} if other else {}
        return TCN(width, 3, dilations=dilations, return_sequences=False, **options)
    if net == "keras_tcn":
        from tcn import TCN as KerasTCN

        options = {"kernel_initializer": "glorot_uniform"} if other else {}
        return KerasTCN(width, kernel_size=3, dilations=dilations, **options)
    if net == "trellisnet":
        kernel_size = 3 if other else 2
        levels = [*dilations, 2 * dilations[-1]]
        levels += [] if other else [4 * dilations[-1]]
        return TrellisLayer(
            width, len(levels), kernel_size=kernel_size, dilation_rate=levels,
            return_sequences=False,
        )  # fmt: skip
    if net == "lru":
        return LRU(width, depth=1 + other, input_projection=True, return_sequences=False)
    layers = [keras.layers.LSTM(width, return_sequences=True)] if other else []
    return keras.Sequential([*layers, keras.layers.LSTM(width)])


def build(net, task, settings, rate, seed, setting="default"):
    """A compiled net of about `settings["size"]` parameters."""
    x, _ = task.folds[0].parts["train"]
    window, channels = x.shape[1:]
    dilations = [1]
    while 1 + 4 * sum(dilations) < window:
        dilations.append(2 * dilations[-1])

    def make(width):
        layers = [backbone(net, width, dilations, setting), keras.layers.Dense(task.outputs)]
        return keras.Sequential([keras.Input((window, channels)), *layers])

    width = fitted_width(make, settings["size"])
    keras.utils.set_random_seed(seed)
    model = make(width)
    loss = "mae"
    if task.unit is None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    steps = settings["epochs"] * -(-len(x) // settings["batch_size"])
    decay = keras.optimizers.schedules.CosineDecay(rate, steps)
    model.compile(keras.optimizers.Adam(decay, clipnorm=1.0), loss)
    return model


def train(net, task, settings, rate, seed, setting="default"):
    """Trains a net in each fold, and returns its row."""
    row = {"seconds": 0.0}

    def predict(fold):
        model = build(net, task, settings, rate, seed, setting)
        row["parameters"] = model.count_params()
        x, y = fold.parts["train"]
        y = y if task.unit is None else (y - fold.mean) / fold.scale
        start = time.process_time()
        model.fit(x, y, settings["batch_size"], settings["epochs"], verbose=0)
        row["seconds"] += time.process_time() - start
        return {
            name: model.predict(x, batch_size=256, verbose=0) * fold.scale + fold.mean
            for name, (x, _) in fold.parts.items()
            if name != "train"
        }

    return {**task.figures(predict), **row}


def boost(task, rate, seed):
    """Gradient boosting: of lags, one model an hour ahead; of statistics of the window."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    options = {"learning_rate": rate, "max_iter": 100, "early_stopping": False}
    options["random_state"] = seed

    def classify(fold):
        features = {name: _statistics(x) for name, (x, _) in fold.parts.items()}
        model = HistGradientBoostingClassifier(**options)
        model.fit(features.pop("train"), fold.parts["train"][1])
        return {name: model.predict_proba(x) for name, x in features.items()}

    def forecast(fold):
        outputs = {"valid": [], "test": []}
        for step in range(task.outputs):
            model = HistGradientBoostingRegressor(loss="absolute_error", **options)
            features = {name: _lags(x, step, task) for name, (x, _) in fold.parts.items()}
            model.fit(features["train"], fold.parts["train"][1][:, step])
            for name, found in outputs.items():
                found.append(model.predict(features[name]))
        return {name: np.stack(found, axis=1) for name, found in outputs.items()}

    start = time.process_time()
    figures = task.figures(classify if task.unit is None else forecast)
    return {**figures, "seconds": time.process_time() - start}


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
    """Predicts the value of a week ago, or the most frequent class."""

    def predict(fold):
        others = {name: x for name, (x, _) in fold.parts.items() if name != "train"}
        if task.unit is not None:
            last_week = slice(task.outputs)
            return {name: x[:, last_week, 0] * fold.scale + fold.mean for name, x in others.items()}
        often = np.bincount(fold.parts["train"][1]).argmax()
        return {
            name: np.tile(np.eye(task.outputs)[often], (len(x), 1)) for name, x in others.items()
        }

    return task.figures(predict)
