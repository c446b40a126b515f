"""Forecasts the series of Parquet files, with many workers.

python examples/batch/forecast.py 24 history/ forecasts/ --workers 8
"""

import numpy as np
import pandas as pd
import workers

from trellis_series import Forecasts


class Forecast:
    """Adds the forecast of each series, a row with the times `ds` and the values `y` as lists."""

    def __init__(self, horizon):
        self.horizon = int(horizon)

    def __call__(self, batch):
        sizes = [len(y) for y in batch["y"]]
        rows = np.arange(len(sizes)).repeat(sizes)
        table = {
            "unique_id": rows,
            "ds": np.concatenate(batch["ds"]),
            "y": np.concatenate(batch["y"]),
        }
        # Without a network, which would make forecasts depend on the number of rows.
        found = Forecasts(self.horizon, network=None).fit(pd.DataFrame(table)).predict()
        names = ["ours", "ours-lo-80", "ours-hi-80"]
        return {**batch, **{name: found[name].to_numpy().reshape(len(sizes), -1) for name in names}}


if __name__ == "__main__":
    options = workers.arguments("Forecasts the series of Parquet files.", "number of steps")
    workers.run(Forecast, options)
