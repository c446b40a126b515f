"""Windows of time series with a class each, such as sensor readings of people.

    trellis-keras train tcn_classifier --csv exercises.csv --target exercise --past ax --past ay \\
        --series person --window 50 --output runs/exercises
"""

import hashlib
import os
from collections.abc import Sequence

import numpy as np

from trellis_keras.data.registry import DataDir, Dataset, register
from trellis_keras.data.series import (
    DEFAULT_SPLIT,
    Columns,
    TimeSeries,
    WindowStream,
)
from trellis_keras.data.sources import own_file
from trellis_keras.data.streams import check_integer
from trellis_keras.data.text import Shares, check_shares


class LabelledWindows:
    """Windows within which the class stays the same, of some of the series.

    Args:
        series: `TimeSeries` of the inputs.
        labels: Integer array (rows,), the class of each row, -1 where it is missing.
        window: Positive integer, number of rows that a model reads.
        stride: Positive integer, rows from the start of a window to the next.
        chosen: Numbers of the series.
    """

    def __init__(
        self,
        series: TimeSeries,
        labels: np.ndarray,
        window: int,
        stride: int,
        chosen: Sequence[int],
    ):
        self.series = series
        self.labels = labels
        self.window = check_integer("window", window, 1)
        self.stride = check_integer("stride", stride, 1)
        self.chosen = list(chosen)
        starts = [np.zeros(0, "int64")]
        for rows in map(series.rows, self.chosen):
            edges = np.flatnonzero(np.diff(labels[rows])) + 1 + rows.start
            for first, last in zip([rows.start, *edges], [*edges, rows.stop], strict=True):
                if labels[first] >= 0:
                    starts.append(np.arange(first, last - window + 1, stride))
        self.starts = np.concatenate(starts)

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self) -> list[np.ndarray]:
        """Return the rows of each series, (rows, channels), whose statistics a model takes."""
        return [self.series.values[self.series.rows(i)] for i in self.chosen]

    def read(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `(x, y)`: inputs float32 (batch, window, channels), and classes int32 (batch,).

        Args:
            index: Integer array (batch,).
        """
        starts = self.starts[index]
        return self.series.read(starts, self.window), self.labels[starts]


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
    if targets[0] in (*past, series):
        raise ValueError(f"Each column has one role. Received twice: {targets[0]}")
    file = own_file(path, data_dir)
    table, names = TimeSeries.from_labelled_csv(file, Columns(past, series=series), targets[0])
    classes, labels = np.unique(names, return_inverse=True)
    labels = labels.astype("int32")
    if classes[0] == "":  # missing
        classes, labels = classes[1:], labels - 1
    if len(classes) < 2:
        raise ValueError(f"{file}: `{targets[0]}` must name two classes. Received: {classes}")
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
            "class_names": tuple(map(str, classes)),
        },
    )
