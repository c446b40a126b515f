"""Forecasts the series of Parquet files, with many workers.

python examples/batch/forecast.py runs/load history/ forecasts/ --workers 8
"""

import numpy as np
import workers

from trellis_keras.zoo.run import load_best


class Forecast:
    """Adds the forecast of each history (steps, channels); all have the same length."""

    def __init__(self, run):
        self.model = load_best(run)

    def __call__(self, batch):
        histories = np.array([np.stack(history) for history in batch["history"]], "float32")
        forecasts = self.model.forecast(histories)
        return {**batch, "forecast": forecasts.reshape(len(forecasts), -1)}


if __name__ == "__main__":
    workers.run(Forecast, workers.arguments("Forecasts the series of Parquet files."))
