"""Windows of time series with a class each, such as sensor readings of people.

    trellis-keras train tcn_classifier --csv exercises.csv --target exercise --past ax --past ay \\
        --series person --window 50 --output runs/exercises
"""

from collections.abc import Sequence

import numpy as np

from trellis_keras.data.streams import check_integer
from trellis_keras.forecasting.series import (
    TimeSeries,
)


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
        """Return the rows of each series, (rows, channels), whose statistics a model takes."""
        return [self.series.values[self.series.rows(i)] for i in self.chosen]

    def read(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `(x, y)`: inputs float32 (batch, window, channels), and classes int32 (batch,).

        Args:
            index: Integer array (batch,).
        """
        starts = self.starts[index]
        return self.series.read(starts, self.window), self.labels[starts]
