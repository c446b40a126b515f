"""Use a forecaster in sktime: its pipelines, backtests, tuning and ensembles.

    pip install sktime
    python examples/sktime_forecaster.py

Copy the class into your project. To test it, run sktime's `check_estimator`, which takes a while.
"""

import statistics

import numpy as np
import pandas as pd
from sktime.forecasting.base import BaseForecaster

from trellis_keras import forecasting

LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)


class TrellisForecaster(BaseForecaster):
    """The linear map and the network of `trellis_keras.forecasting.fit`.

    Args:
        window: Integer, number of past steps to read. Defaults to `None`, chosen from the data.
        epochs: Integer, maximum number of epochs; 0 fits only the linear map. Defaults to 30.
        seed: Integer seed of the network. Defaults to 0.

    Examples
    --------
    >>> from sktime.datasets import load_airline
    >>> from sktime_forecaster import TrellisForecaster
    >>> forecaster = TrellisForecaster(epochs=0).fit(load_airline(), fh=range(1, 13))
    >>> len(forecaster.predict())
    12
    """

    _tags = {
        "authors": "trellis_keras",
        "python_dependencies": ["trellis-keras"],
        "capability:multivariate": True,
        "y_inner_mtype": "pd.DataFrame",
        "X_inner_mtype": "pd.DataFrame",
        "capability:exogenous": False,
        "capability:insample": False,
        "capability:missing_values": True,
        "capability:pred_int": True,
        "capability:pred_int:insample": False,
        "requires-fh-in-fit": True,
    }

    def __init__(self, window=None, epochs=30, seed=0):
        self.window = window
        self.epochs = epochs
        self.seed = seed
        super().__init__()

    def _fit(self, y, X, fh):
        # It must fit in each split of the series; later steps are rolled out.
        horizon = max(min(self._steps(fh).max(), len(y) // 10), 1)
        self.y_, table = y, _table(y)
        self.fitted_ = forecasting.fit(
            table,
            horizon,
            list(table),
            window=self.window,
            quantiles=LEVELS,
            epochs=self.epochs,
            seed=self.seed,
        )
        return self

    def _update(self, y, X=None, update_params=True):
        self.y_ = y.combine_first(self.y_)[self.y_.columns]  # what forecasts continue
        return self._fit(self.y_, X, self._fh) if update_params else self

    def _predict(self, fh, X):
        middle = self._bands(fh)[..., LEVELS.index(0.5)]
        return pd.DataFrame(middle, self._times(fh), self.y_.columns)

    def _predict_quantiles(self, fh, X, alpha):
        """Interpolates the model's quantiles linearly in those of the normal distribution."""
        normal = statistics.NormalDist()
        known = np.array([normal.inv_cdf(level) for level in LEVELS])
        bands, found = self._bands(fh), {}
        for i, name in enumerate(self._get_varnames()):
            for level in alpha:
                z = normal.inv_cdf(level)
                k = int(np.clip(np.searchsorted(known, z), 1, len(known) - 1))
                share = (z - known[k - 1]) / (known[k] - known[k - 1])
                found[name, level] = (1 - share) * bands[:, i, k - 1] + share * bands[:, i, k]
        return pd.DataFrame(found, self._times(fh))

    def _bands(self, fh):
        """The quantiles of the steps of a horizon, (steps, targets, quantiles)."""
        steps = self._steps(fh)
        found = self.fitted_.predict(_table(self.y_), int(steps.max()))
        quantiles = found.filter(regex="^q").to_numpy()
        bands = quantiles.reshape(self.y_.shape[1], -1, len(LEVELS))
        return np.moveaxis(bands, 0, 1)[steps - 1]

    def _steps(self, fh):
        return fh.to_relative(self.cutoff).to_numpy().astype(int)

    def _times(self, fh):
        return fh.to_absolute_index(self.cutoff)

    @classmethod
    def get_test_params(cls, parameter_set="default"):
        return [{"epochs": 0}, {"window": 6, "epochs": 0, "seed": 1}]


def _table(y):
    return {f"y{i}": y.iloc[:, i].to_numpy("float64") for i in range(y.shape[1])}


if __name__ == "__main__":
    from sktime.datasets import load_airline
    from sktime.forecasting.model_evaluation import evaluate
    from sktime.forecasting.naive import NaiveForecaster
    from sktime.performance_metrics.forecasting import MeanAbsoluteError
    from sktime.split import ExpandingWindowSplitter

    splitter = ExpandingWindowSplitter(fh=range(1, 13), initial_window=108, step_length=12)
    for forecaster in (NaiveForecaster("last", sp=12), TrellisForecaster()):
        scores = evaluate(forecaster, splitter, load_airline(), scoring=MeanAbsoluteError())
        print(f"{type(forecaster).__name__}: {scores['test_MeanAbsoluteError'].mean():.1f}")
