"""A user's own time series as data sets of runs."""

import hashlib
import os
from collections.abc import Sequence

from trellis_keras.data.text import Shares, check_shares
from trellis_keras.files import own_file
from trellis_keras.forecasting.columns import Columns
from trellis_keras.forecasting.labelled_series import LabelledWindows
from trellis_keras.forecasting.series import (
    DEFAULT_SPLIT,
    TimeSeries,
    WindowStream,
    warn_left_out,
)
from trellis_keras.zoo.datasets.registry import DataDir, Dataset, register


@register(citation="time series of your own", licence="the terms of the file")
def series(
    data_dir: DataDir,
    *,
    path: str | os.PathLike,
    targets: Sequence[str],
    window: int,
    horizon: int,
    past: Sequence[str] = (),
    future: Sequence[str] = (),
    static: Sequence[str] = (),
    time: str | None = None,
    series: str | None = None,
    stride: int = 1,
    split: Shares = DEFAULT_SPLIT,
) -> Dataset:
    """Windows of the time series in a CSV file of the user's own."""
    columns = Columns(targets, past, future, static, time, series)
    table = TimeSeries.from_csv(own_file(path, data_dir), columns)
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
        },
    )


@register(citation="time series of your own", licence="the terms of the file")
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
    """Windows of the series in a CSV file, with the class that a column of names gives.

    The parts are different series, in the order of the file, so that a model is tested on people,
    machines or days that it has not seen. `stride` defaults to a quarter of the window.
    """
    if len(targets) != 1:
        raise ValueError(f"`targets` must be one column of names. Received: {list(targets)}")
    file = own_file(path, data_dir)
    columns = Columns(past, series=series)
    table, labels, classes = TimeSeries.from_labelled_csv(file, columns, targets[0])
    if len(classes) < 2:
        raise ValueError(f"{file}: `{targets[0]}` must name two classes. Received: {list(classes)}")
    count = len(table.lengths)
    if count < 3:
        raise ValueError(
            f"{file}: training, validation and test are different series, so there must be three. "
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
                f"{file}: the part {name!r} has no {window} rows of one class in a row."
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
