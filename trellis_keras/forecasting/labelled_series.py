"""Labelled time series: windows, such as sensor readings of people, and whole series.

    trellis-keras train tcn_classifier --csv exercises.csv --target exercise --past ax --past ay \\
        --series person --window 50 --output runs/exercises
    trellis-keras train rocket_classifier --csv GunPoint_TRAIN.ts --test GunPoint_TEST.ts \\
        --output runs/gunpoint
"""

import hashlib
import os
import warnings
from collections.abc import Sequence

import numpy as np

from trellis_keras.data.streams import Batch, check_integer
from trellis_keras.forecasting.archive_file import read_archive_file
from trellis_keras.forecasting.series import TimeSeries, WindowStream


class LabelledWindows:
    """Windows with a single class, from some of the series.

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
        self.left_out: list[str] = []  # names of the series without a window
        starts = [np.zeros(0, "int64")]
        for i in self.chosen:
            rows, before = series.rows(i), len(starts)
            edges = np.flatnonzero(np.diff(labels[rows])) + 1 + rows.start
            for first, last in zip([rows.start, *edges], [*edges, rows.stop], strict=True):
                if labels[first] >= 0 and last - first >= window:
                    starts.append(np.arange(first, last - window + 1, stride))
            if len(starts) == before:
                self.left_out.append(series.names[i])
        self.starts = np.concatenate(starts)

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self) -> list[np.ndarray]:
        """Returns the rows of each series, (rows, channels), for computing statistics."""
        return [self.series.values[self.series.rows(i)] for i in self.chosen]

    def read(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns `(x, y)`: inputs float32 (batch, window, channels), and classes int32 (batch,).

        Args:
            index: Integer array (batch,).
        """
        starts = self.starts[index]
        return self.series.read(starts, self.window), self.labels[starts]


class LabelledSeries:
    """Whole series with one class each, such as a file of the UCR or UEA archive.

    Args:
        series: List of arrays (steps, channels), NaN where a value is missing. They may differ in
            length.
        labels: Integer array (series,), the classes; `None` where they are not known.
        classes: Names of the classes.
        window: Positive integer, steps that are read of a series, from its start. Defaults to
            `None`, those of the longest one.

    Raises:
        ValueError: If there are no series, or their numbers of channels differ.

    Example:

    >>> series = LabelledSeries([np.zeros((3, 1)), np.ones((2, 1))], [0, 1], ("low", "high"))
    >>> x, y = series.read(np.array([1]))
    >>> x[..., 0], y
    (array([[ 1.,  1., nan]], dtype=float32), array([1], dtype=int32))
    """

    def __init__(
        self,
        series: Sequence[np.ndarray],
        labels: Sequence[int] | np.ndarray | None = None,
        classes: Sequence[str] = (),
        window: int | None = None,
    ):
        self.series = [np.asarray(each, "float32") for each in series]
        shapes = [each.shape for each in self.series]
        if not shapes or {len(s) for s in shapes} != {2} or len({s[1] for s in shapes}) > 1:
            raise ValueError(
                "`series` must be arrays (steps, channels) with the same channels. "
                f"Received: shapes {shapes[:5]}"
            )
        self.classes = tuple(classes)
        self.labels = np.full(len(shapes), -1) if labels is None else np.asarray(labels)
        self.labels = self.labels.astype("int32")
        if self.labels.shape != (len(shapes),):
            raise ValueError(
                f"`labels` must have the shape ({len(shapes)},). "
                f"Received: shape {self.labels.shape}"
            )
        longest = max(steps for steps, _ in shapes)
        self.window = longest if window is None else check_integer("window", window, 1)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike,
        classes: Sequence[str] | None = None,
        window: int | None = None,
    ) -> "LabelledSeries":
        """Reads a `.ts`, `.arff`, `.tsv` or `.txt` file of the UCR or UEA archive.

        Args:
            path: The file, see `forecasting.archive_file`.
            classes: Names of the classes, in the order of their numbers. Defaults to `None`, those
                of the file.
            window: As above. Longer series are truncated, with a warning.

        Raises:
            ValueError: If the file is malformed, or has a class that is not in `classes`. The
                message names the line, or the class.
            OSError: If the file cannot be read.
        """
        found = read_archive_file(path)
        names = found.classes if classes is None else tuple(classes)
        unknown = sorted(set(found.labels) - set(names))
        if unknown:
            raise ValueError(
                f"{path}: the classes must be among {', '.join(names[:20])}. Received: "
                f"{', '.join(unknown[:5])}"
            )
        labels = [names.index(label) for label in found.labels] or None
        loaded = cls(found.series, labels, names, window)
        longer = sum(len(each) > loaded.window for each in loaded.series)
        if longer:
            warnings.warn(
                f"{path}: of {longer} of {len(loaded)} series only the first {loaded.window} steps "
                "are read.",
                stacklevel=2,
            )
        return loaded

    def __len__(self) -> int:
        return len(self.series)

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.series[0].shape[1]

    @property
    def checksum(self) -> str:
        """Hexadecimal SHA-256 of values, lengths and classes."""
        lengths = [len(each) for each in self.series]
        digest = hashlib.sha256(repr((lengths, self.classes)).encode())
        for each in self.series:
            digest.update(np.ascontiguousarray(each).data)
        digest.update(self.labels.data)
        return digest.hexdigest()

    def rows(self) -> list[np.ndarray]:
        """Returns the steps of each series, (steps, channels), for computing statistics."""
        return [each[: self.window] for each in self.series]

    def chosen(self, index: Sequence[int] | np.ndarray) -> "LabelledSeries":
        """Returns the series with the given indices."""
        series = [self.series[i] for i in index]
        return LabelledSeries(series, self.labels[index], self.classes, self.window)

    def split(self, share: float) -> tuple["LabelledSeries", "LabelledSeries"]:
        """Splits off about a share of the series, the last ones of each class.

        Args:
            share: Float in (0, 1).
        """
        is_last = np.zeros(len(self), bool)
        for label in range(len(self.classes)):
            own = np.flatnonzero(self.labels == label)
            is_last[own[len(own) - round(share * len(own)) :]] = True
        if is_last.all() or not is_last.any():
            raise ValueError(
                f"{len(self)} series are too few to hold out a share of each of "
                f"{len(self.classes)} classes. Received: share={share}"
            )
        return self.chosen(np.flatnonzero(~is_last)), self.chosen(np.flatnonzero(is_last))

    def read(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns `(x, y)`: inputs float32 (batch, window, channels), and classes int32 (batch,).

        After the end of a series, x is NaN.

        Args:
            index: Integer array (batch,).
        """
        x = np.full((len(index), self.window, self.channels), np.nan, "float32")
        for row, i in enumerate(index):
            steps = self.series[i][: self.window]
            x[row, : len(steps)] = steps
        return x, self.labels[index]


class SeriesStream(WindowStream):
    """Batches `(x, y, weight)` of whole series, like `WindowStream`, with repeats and stretching.

    Args:
        series: `LabelledSeries`.
        batch_size, seed, shuffle: As in `WindowStream`.
        times: Positive integer, number of times an epoch reads each series. Defaults to 1.
        stretch: Float, 0 or more, amount of random time stretching: each time a series is read, it
            is resampled by linear interpolation to `exp(stretch * z)` times its length, at most the
            window, with z drawn from N(0, 1). Defaults to 0, no stretching.
    """

    def __init__(
        self,
        series: LabelledSeries,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = False,
        times: int = 1,
        stretch: float = 0.0,
    ):
        if not 0 <= stretch < np.inf:
            raise ValueError(f"`stretch` must be non-negative. Received: stretch={stretch}")
        super().__init__(series, batch_size, seed, shuffle)
        self._stretch = stretch
        times = check_integer("times", times, 1)
        self._groups = [np.tile(group, times) for group in self._groups]

    def _batch(self, group, rows, counts) -> Batch:
        x, y, weight = super()._batch(group, rows, counts)
        if self._stretch:
            generator = np.random.default_rng([self._seed, self.epoch, *rows])
            lengths = [min(len(self.windows.series[row]), len(x[0])) for row in rows]
            factors = np.exp(self._stretch * generator.normal(size=len(rows)))
            x = np.stack([_stretched(*each) for each in zip(x, lengths, factors, strict=True)])
        return x, y, weight


def _stretched(x, length, factor):
    """Resamples the first `length` steps of x to `factor` times as many, followed by NaN."""
    new_length = int(np.clip(round(length * factor), 1, len(x)))
    places, stretched = np.linspace(0, length - 1, new_length), np.full_like(x, np.nan)
    for channel, column in enumerate(x.T):
        stretched[:new_length, channel] = np.interp(places, np.arange(length), column[:length])
    return stretched
