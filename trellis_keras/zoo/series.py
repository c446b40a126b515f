"""Models and data sets for your own time series.

The window determines the size of the network: its receptive field covers as much of the window as
the dilations can reach, and no more, so a stream sees what a window shows. The sizes are not from a
paper.

    trellis-keras train tcn_forecaster --csv load.csv --target load --horizon 24 --output runs/load
"""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import keras

from trellis_keras.data.streams import check_integer
from trellis_keras.data.text import Shares, check_shares
from trellis_keras.files import own_file
from trellis_keras.forecasting import (
    Columns,
    Forecaster,
    LabelledSeries,
    LabelledWindows,
    SeriesStream,
    TimeSeries,
    WindowStream,
)
from trellis_keras.forecasting.estimator import (
    QUANTILES,
    TRAINING,
    choose_window,
    default_scale,
    dilations_within,
)
from trellis_keras.forecasting.series import DEFAULT_SPLIT, warn_left_out
from trellis_keras.layers import LRU, TCN, TrellisLayer
from trellis_keras.models import RocketClassifier, SequenceClassifier
from trellis_keras.zoo.datasets.registry import DataDir, Dataset
from trellis_keras.zoo.datasets.registry import register as register_data
from trellis_keras.zoo.recipe import Training, check_choice
from trellis_keras.zoo.registry import register, sub_seed

__all__ = [
    "lru_forecaster",
    "rocket_classifier",
    "tcn_classifier",
    "tcn_forecaster",
    "trellisnet_classifier",
    "trellisnet_forecaster",
]

_TRAINING = Training(optimizer="adam", schedule="patience", **TRAINING)


_WINDOW = 168  # largest default window of a forecaster: a week of hours
_FORECASTS: dict[str, Any] = {
    "data": "series",
    "metric": "mae",
    "data_options": {"window": None, "horizon": 24},
    "channels": 1,  # set from the data
    "training": _TRAINING,
}
_CLASSES = _FORECASTS | {
    "data": "labelled_series",
    "metric": "accuracy",
    "data_options": {"window": 50},
}
# Chosen on half of the sets of `benchmarks/classification.py`.
_WHOLE: dict[str, Any] = {
    "window": None,  # from the data
    "batch_size": 16,
    "epochs": 20,
    "schedule": "cosine",
    "stop_patience": None,
}
_WHOLE_TCN: dict[str, Any] = {
    "kernel_size": 7,
    "dropout": 0.0,
    "normalization": "batch",
    "pooling": "average_max",
    "learning_rate": 5e-3,
    "stretch": 0.1,
}


def _forecaster(
    backbone, window, horizon, quantiles, targets, future_channels, dropout, linear, scale, seed
):
    if horizon > window:
        raise ValueError(
            f"`horizon` must be at most `window`. Received: horizon={horizon}, window={window}"
        )
    if scale == "window" and not linear:
        raise ValueError("`scale='window'` needs linear=True. Received: linear=False")
    return Forecaster(
        backbone,
        horizon,
        targets,
        quantiles=quantiles,
        future_channels=future_channels,
        normalize=True,
        output_dropout=dropout,
        linear_window=window if linear else None,
        scale=scale or "data",
        seed=seed,
    )


def _dilations(window, kernel_size, convolutions=1):
    if window is None:
        raise ValueError("`window` must be the number of steps to read. Received: None")
    return dilations_within(window, kernel_size, convolutions)


def _classifier(
    backbone, channels, num_classes, class_names, pooling, dropout, seed, normalization=None
):
    check_choice("pooling", pooling, _POOLING)
    if pooling != "last":
        backbone = _pooled(backbone, channels, pooling, normalization)
    return SequenceClassifier(
        backbone,
        num_classes,
        class_names=class_names,
        nan_padding=pooling != "last",
        normalize=True,
        output_dropout=dropout,
        seed=seed,
    )


_POOLING = {
    "last": (),
    "average": (keras.layers.GlobalAveragePooling1D,),
    "average_max": (keras.layers.GlobalAveragePooling1D, keras.layers.GlobalMaxPooling1D),
}


def _pooled(backbone, channels, pooling, normalization):
    """Pools the steps of a backbone. (Max pooling treats masked steps as 0, as ReLU allows.)"""
    x = keras.Input((None, channels))
    steps = backbone(x)
    parts = [pool()(steps) for pool in _POOLING[pooling]]
    y = parts[0] if len(parts) == 1 else keras.layers.Concatenate()(parts)
    if normalization == "batch":
        # Scales all features equally, as classes may differ only slightly in a large one.
        y = keras.layers.BatchNormalization(momentum=0.9)(y)
    return keras.Model(x, y, name=f"pooled_{backbone.name}")


@register(**_FORECASTS)
def tcn_forecaster(
    window: int | None = None,
    horizon: int = 24,
    kernel_size: int = 3,
    depth: int | None = None,
    filters: int = 32,
    dropout: float = 0.0,
    quantiles: tuple[float, ...] | None = QUANTILES,
    channels: int = 1,
    targets: int = 1,
    future_channels: int = 0,
    linear: bool = True,
    scale: str | None = None,
    seed: int | None = 0,
) -> Forecaster:
    """TCN that forecasts your time series, 37K parameters for a week and a day of hours.

    Inputs and outputs are in the units of the data, whose statistics are saved with the model.

    Args:
        window: Positive integer, number of past steps to read. Defaults to None, 168 steps; a run
            chooses it from its data, as `forecasting.fit` does, up to 168.
        horizon: Positive integer, at most `window`, number of steps to forecast.
        kernel_size: Integer of 2 or more, taps of the convolutions.
        depth: Positive integer, number of blocks, with dilations 1, 2, 4, ... Defaults to as many
            as fit the window; the last dilation fills the remainder.
        filters: Positive integer, channels of each block.
        dropout: Dropout rate after each convolution, and before the outputs.
        quantiles: Increasing floats between 0 and 1, the quantiles to forecast. None forecasts one
            value.
        channels: Positive integer, channels of the input. A run takes it, `targets` and
            `future_channels` from its data.
        targets: Positive integer, number of channels to forecast, the first ones.
        future_channels: Integer, number of channels known in the future, the last ones.
        linear: Boolean, whether to forecast with a linear map of the window, fitted before
            training, and train the network on its residuals.
        scale: `"data"` or `"window"`, how the network reads the targets, see
            `forecasting.Forecaster`. Defaults to None, `"data"`; a run on several series with a
            linear map takes `"window"`.
        seed: Seed of the weights, dropout and the order of windows. None is not reproducible.
        weights: None, or path of a weights file.
        dtype_policy: Keras' dtype policy of all layers. Defaults to the global one.
        jit_compile: Whether to compile training with XLA. Defaults to None, an automatic choice.

    Returns:
        A compiled `Forecaster`.
    """
    window = _WINDOW if window is None else window
    backbone = _tcn(window, kernel_size, depth, filters, dropout, seed)
    return _forecaster(
        backbone, window, horizon, quantiles, targets, future_channels, dropout, linear, scale, seed
    )


@register(**_CLASSES, on={"whole_series": _WHOLE | _WHOLE_TCN})
def tcn_classifier(
    window: int | None = 50,
    kernel_size: int = 3,
    depth: int | None = None,
    filters: int = 32,
    dropout: float = 0.2,
    normalization: str | None = None,
    pooling: str = "last",
    channels: int = 1,
    num_classes: int = 2,
    class_names: tuple[str, ...] | None = None,
    seed: int | None = 0,
) -> SequenceClassifier:
    """TCN that classifies your time series, or windows of them, 22K parameters for 50 steps.

    Inputs are in the units of the data, whose statistics are saved with the model.

    Args:
        window: Positive integer, number of steps to read, which determines `depth`. For whole
            series, a run takes it from its data.
        normalization: `"batch"` normalizes the convolutions and the pooled features (the recipe for
            whole series), `"layer"` the convolutions, and None uses weight normalization instead.
            Defaults to None.
        pooling: The outputs that are classified: `"last"`, the last step; `"average"`, the mean of
            all steps; `"average_max"`, mean and maximum, which is the recipe for whole series
            (`data="whole_series"`), where padding with NaN at the end is masked. A stream pools the
            steps so far. Defaults to `"last"`.
        num_classes: Positive integer, number of classes. A run takes it, `class_names` and
            `channels` from its data.
        class_names: Names of the classes, saved with the model. None numbers the classes.
        **: As in `tcn_forecaster`.
    """
    backbone = _tcn(
        window, kernel_size, depth, filters, dropout, seed, normalization, pooling != "last"
    )
    return _classifier(
        backbone, channels, num_classes, class_names, pooling, dropout, seed, normalization
    )


@register(
    data="whole_series",
    metric="accuracy",
    channels=1,  # set from the data
    training=Training(optimizer="adam", learning_rate=1e-4, batch_size=16, epochs=0),
)
def rocket_classifier(
    window: int | None = None,
    features: int = 3_360,
    channels: int = 1,
    num_classes: int = 2,
    class_names: tuple[str, ...] | None = None,
    seed: int | None = 0,
) -> RocketClassifier:
    """MiniRocket's features and ridge regression, for whole series; fitted without training.

    Inputs are in the units of the data, whose statistics are saved with the model. The recipe has
    no epochs: `adapt` fits the model in closed form, see `models.RocketClassifier`.

    Args:
        window: Positive integer, number of steps to read. A run takes it from its data.
        features: Positive integer, number of features.
        seed: Seed of the thresholds, and of the channels that each kernel reads. None is not
            reproducible.
        **: As in `tcn_classifier`.
    """
    if window is None:
        raise ValueError("`window` must be the number of steps to read. Received: None")
    return RocketClassifier(
        window,
        channels,
        num_classes,
        features=features,
        class_names=class_names,
        seed=sub_seed(seed, 10),
    )


def _tcn(
    window, kernel_size, depth, filters, dropout, seed, normalization=None, return_sequences=False
):
    return TCN(
        filters,
        kernel_size,
        depth,
        dilations=None if depth is not None else _dilations(window, kernel_size, 2),
        dropout=dropout,
        weight_norm=normalization is None,
        normalization=normalization,
        return_sequences=return_sequences,
        seed=sub_seed(seed, 10),
        name="tcn",
    )


@register(**_FORECASTS)
def trellisnet_forecaster(
    window: int | None = None,
    horizon: int = 24,
    kernel_size: int = 2,
    dilations: tuple[int, ...] | None = None,
    hidden_units: int = 64,
    dropout: float = 0.0,
    quantiles: tuple[float, ...] | None = QUANTILES,
    channels: int = 1,
    targets: int = 1,
    future_channels: int = 0,
    linear: bool = True,
    scale: str | None = None,
    seed: int | None = 0,
) -> Forecaster:
    """TrellisNet that forecasts your time series, 38K parameters for a week and a day of hours.

    Args:
        dilations: Dilation of each level. Defaults to 1, 2, 4, ..., as many as fit the window; the
            last one fills the remainder.
        hidden_units: Positive integer, channels of each level.
        dropout: Variational dropout rate of h in the convolution, and dropout rate before the
            outputs.
        **: As in `tcn_forecaster`.
    """
    window = _WINDOW if window is None else window
    backbone = _trellisnet(window, kernel_size, dilations, hidden_units, dropout, seed)
    return _forecaster(
        backbone, window, horizon, quantiles, targets, future_channels, dropout, linear, scale, seed
    )


@register(**_CLASSES, on={"whole_series": _WHOLE | {"pooling": "average"}})
def trellisnet_classifier(
    window: int | None = 50,
    kernel_size: int = 2,
    dilations: tuple[int, ...] | None = None,
    hidden_units: int = 48,
    dropout: float = 0.2,
    pooling: str = "last",
    channels: int = 1,
    num_classes: int = 2,
    class_names: tuple[str, ...] | None = None,
    seed: int | None = 0,
) -> SequenceClassifier:
    """TrellisNet that classifies your time series, or windows, 19K parameters for 50 steps.

    Args:
        dilations, hidden_units, dropout: As in `trellisnet_forecaster`.
        pooling: `"last"` or `"average"`.
        **: As in `tcn_classifier`.
    """
    sizes = window, kernel_size, dilations, hidden_units
    if pooling == "average_max":
        raise ValueError("Max pooling over time needs a TCN, whose outputs are never negative.")
    backbone = _trellisnet(*sizes, dropout, seed, pooling != "last")
    return _classifier(backbone, channels, num_classes, class_names, pooling, dropout, seed)


def _trellisnet(
    window, kernel_size, dilations, hidden_units, dropout, seed, return_sequences=False
):
    if dilations is None:
        dilations = _dilations(window, kernel_size)
    return TrellisLayer(
        hidden_units,
        len(dilations),
        kernel_size=kernel_size,
        dilation_rate=list(dilations),
        dropout=dropout,
        return_sequences=return_sequences,
        seed=sub_seed(seed, 10),
        name="trellis",
    )


@register(**_FORECASTS)
def lru_forecaster(
    window: int | None = None,
    horizon: int = 24,
    layers: int = 1,
    hidden_units: int = 48,
    dropout: float = 0.0,
    quantiles: tuple[float, ...] | None = QUANTILES,
    channels: int = 1,
    targets: int = 1,
    future_channels: int = 0,
    linear: bool = True,
    scale: str | None = None,
    seed: int | None = 0,
) -> Forecaster:
    """Lattice Recurrent Unit that forecasts your time series, 32K parameters for a day of hours.

    Args:
        layers: Positive integer, number of layers.
        hidden_units: Positive integer, number of units.
        dropout: Dropout rate before the outputs.
        **: As in `tcn_forecaster`.
    """
    window = _WINDOW if window is None else window
    backbone = LRU(
        hidden_units,
        depth=layers,
        input_projection=True,
        return_sequences=False,
        seed=sub_seed(seed, 10),
        name="lru",
    )
    return _forecaster(
        backbone, window, horizon, quantiles, targets, future_channels, dropout, linear, scale, seed
    )


# The data


@register_data(citation="time series of your own", licence="the terms of the file")
def series(
    data_dir: DataDir,
    *,
    path: str | os.PathLike,
    targets: Sequence[str],
    window: int | None = None,
    horizon: int,
    past: Sequence[str] = (),
    future: Sequence[str] = (),
    static: Sequence[str] = (),
    time: str | None = None,
    series: str | None = None,
    stride: int = 1,
    split: Shares = DEFAULT_SPLIT,
) -> Dataset:
    """Windows of the time series in your own CSV file.

    `window` defaults to the window that `forecasting.fit` would choose, up to 168 rows.
    """
    columns = Columns(targets, past, future, static, time, series)
    table = TimeSeries.from_csv(own_file(path, data_dir), columns)
    if window is None:
        longest = max(_WINDOW, check_integer("horizon", horizon, 1))
        window = min(choose_window(table, horizon, check_shares("split", split)[0]), longest)
    parts = table.split(window, horizon, stride=stride, shares=split)
    return Dataset(
        "series",
        *parts,
        checksum=table.checksum,
        make_stream=WindowStream,
        model_arguments={
            "channels": table.values.shape[1],
            "targets": table.targets,
            "future_channels": table.future_channels,
            "window": window,
            "scale": default_scale(table),
        },
    )


@register_data(citation="time series of your own", licence="the terms of the file")
def labelled_series(
    data_dir: DataDir,
    *,
    path: str | os.PathLike,
    targets: Sequence[str],
    past: Sequence[str],
    series: str,
    window: int,
    stride: int | None = None,
    split: Shares = DEFAULT_SPLIT,
) -> Dataset:
    """Windows of the series in a CSV file, with class names from a column.

    The splits consist of different series, in the order of the file, so a model is tested on
    held-out people, machines or days. `stride` defaults to a quarter of the window.
    """
    if len(targets) != 1:
        raise ValueError(
            f"`targets` must be a single column of class names. Received: {list(targets)}"
        )
    file = own_file(path, data_dir)
    columns = Columns(past, series=series)
    table, labels, classes = TimeSeries.from_labelled_csv(file, columns, targets[0])
    if len(classes) < 2:
        raise ValueError(f"{file}: `{targets[0]}` must name two classes. Received: {list(classes)}")
    count = len(table.lengths)
    if count < 3:
        raise ValueError(
            f"{file}: training, validation and test need different series, so at least three. "
            f"Received: {count} in the column {series!r}"
        )
    train, valid, _ = check_shares("split", split)
    first = min(max(round(train * count), 1), count - 2)
    second = min(max(round((train + valid) * count), first + 1), count - 1)
    stride = max(window // 4, 1) if stride is None else stride
    parts = []
    for name, a, b in (("train", 0, first), ("valid", first, second), ("test", second, count)):
        windows = LabelledWindows(table, labels, window, stride, range(a, b))
        if not len(windows):
            raise ValueError(
                f"{file}: the split {name!r} has no {window} consecutive rows of one class."
            )
        parts.append(windows)
    warn_left_out(parts, f"{window} rows of one class", count)
    digest = hashlib.sha256(table.checksum.encode() + "\n".join(classes).encode())
    digest.update(labels.data)
    return Dataset(
        "labelled_series",
        parts[0],
        parts[1],
        parts[2],
        checksum=digest.hexdigest(),
        make_stream=WindowStream,
        model_arguments={
            "channels": table.values.shape[1],
            "num_classes": len(classes),
            "class_names": classes,
        },
    )


@register_data(citation="time series of your own", licence="the terms of the file")
def whole_series(
    data_dir: DataDir,
    *,
    path: str | os.PathLike,
    test: str | os.PathLike,
    window: int | None = None,
    valid: float = 0.0,
) -> Dataset:
    """Whole labelled series, from two files of the UCR or UEA archive.

    `window` is the number of steps to read from the start of a series; it defaults to the length of
    the longest training series. `valid` is the fraction of the training series (the last ones of
    each class) used to choose the best epoch. With 0, all are used for both, as is usual for these
    small sets.
    """
    if not 0 <= valid < 1:
        raise ValueError(f"`valid` must be a share in [0, 1). Received: {valid}")
    files = [own_file(file, data_dir) for file in (path, test)]
    loaded = LabelledSeries.from_file(files[0], window=window)
    if len(loaded.classes) < 2 or loaded.labels[0] < 0:
        raise ValueError(
            f"{files[0]}: there must be at least two classes. Received: {list(loaded.classes)}"
        )
    tested = LabelledSeries.from_file(files[1], loaded.classes, loaded.window)
    if tested.labels[0] < 0 or tested.channels != loaded.channels:
        raise ValueError(
            f"{files[1]} must have classes, and {loaded.channels} channels like {files[0]}. "
            f"Received: {tested.channels} channels, "
            f"{'no ' if tested.labels[0] < 0 else ''}classes"
        )
    train, chooses = loaded.split(valid) if valid else (loaded, loaded)
    return Dataset(
        "whole_series",
        train,
        chooses,
        tested,
        checksum=hashlib.sha256((loaded.checksum + tested.checksum).encode()).hexdigest(),
        make_stream=SeriesStream,
        model_arguments={
            "channels": loaded.channels,
            "num_classes": len(loaded.classes),
            "class_names": loaded.classes,
            "window": loaded.window,
        },
    )
