"""Results of the papers (published.csv) and of the zoo's own runs (folders of zoo/).

A zoo run is stored in `zoo/MODEL`, or in `zoo/MODEL/VARIANT` if its arguments differ from the
defaults: card, results.json, history, learning curve and small weights.
"""

import csv
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

from trellis_keras.files import read_json

WEIGHTS = "weights.weights.h5"
RESULTS = "results.json"
COSTS = "costs.json"

_PACKAGE = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Published:
    """A row of published.csv: a result on the test split in a paper.

    `options` has those of `zoo.recipe` for it, `parameters` the size given in the paper, such
    as "24M", `epochs` the epoch of the lowest validation loss, or None if the paper does not say.
    """

    model: str
    options: dict[str, Any]
    metric: str
    value: float
    parameters: str
    epochs: int | None
    source: str


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of the zoo: its folder with a results.json, and the contents of that file.

    `variant` is the folder's name below the model's, such as "T=200"; "" for the default.
    """

    folder: pathlib.Path
    variant: str
    results: dict[str, Any]

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe of the run, in the form of `Recipe.to_dict`."""
        return self.results["recipe"]

    @property
    def model(self) -> str:
        """Name of the zoo's model."""
        return self.recipe["name"]

    @property
    def title(self) -> str:
        """The model, with its variant."""
        return f"{self.model} ({self.variant})" if self.variant else self.model

    @property
    def seeds(self) -> list[dict[str, Any]]:
        """The results of each seed, of which the first one's weights are stored."""
        return [self.results, *self.results["other_seeds"]]

    @property
    def values(self) -> list[float]:
        """The test result of each seed, for generated tasks the mean over several test sets."""
        if all("test_sets" in seed for seed in self.seeds):
            return [seed["test_sets"]["mean"] for seed in self.seeds]
        return [seed["test"] for seed in self.seeds]

    @property
    def mean(self) -> float:
        """The mean over all seeds."""
        return sum(self.values) / len(self.values)

    @property
    def has_weights(self) -> bool:
        """Whether the run's weights are available."""
        return (self.folder / WEIGHTS).is_file()


@functools.cache
def published() -> tuple[Published, ...]:
    """Returns all rows of published.csv."""
    with open(_PACKAGE / "published.csv", newline="", encoding="utf-8") as file:
        return tuple(_row(**row) for row in csv.DictReader(file))


def _row(options, value, epochs, **row):
    words = [word.partition("=") for word in options.split()]
    return Published(
        options={name: _parsed(text) for name, _, text in words},
        value=float(value),
        epochs=int(epochs) if epochs else None,
        **row,
    )


def _parsed(text):
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def assets_folder() -> pathlib.Path:
    """Returns the folder of the zoo runs.

    Searched in this order: the folder named by TRELLIS_KERAS_ZOO, `zoo/` beside the package
    (a checkout or an editable install), `_assets/` inside it (an installed wheel).

    Raises:
        FileNotFoundError: If TRELLIS_KERAS_ZOO is not a folder, or no folder was found.
    """
    named = os.environ.get("TRELLIS_KERAS_ZOO")
    if named is not None:
        if not os.path.isdir(named):
            raise FileNotFoundError(f"TRELLIS_KERAS_ZOO is not a folder: {named}")
        return pathlib.Path(named)
    checkout = _PACKAGE.parent.parent
    # A folder `zoo` beside an installed package would belong to something else.
    is_checkout = (checkout / "setup.py").is_file()
    for folder in [checkout / "zoo"] * is_checkout + [_PACKAGE / "_assets"]:
        if (folder / "README.md").is_file():
            return folder
    raise FileNotFoundError(
        "The results of the zoo are missing from this installation. Set TRELLIS_KERAS_ZOO to a "
        "copy of the repository's folder zoo/."
    )


def all_runs() -> list[Run]:
    """Returns the zoo runs, sorted by model and variant."""
    folder = assets_folder()
    paths = [*folder.glob(f"*/{RESULTS}"), *folder.glob(f"*/*/{RESULTS}")]
    return sorted(map(read_run, paths), key=lambda run: (run.model, run.variant))


def read_run(path: pathlib.Path) -> Run:
    """Returns the zoo run of a results.json, or raises ValueError if it is damaged."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        recipe = results["recipe"]
        if not isinstance(recipe["name"], str) or not isinstance(recipe["arguments"], dict):
            raise ValueError("its recipe has no name or no arguments")
        if not isinstance(results["other_seeds"], list):
            raise ValueError(f"other_seeds is not a list: {results['other_seeds']!r}")
        for name in ("test", "parameters"):
            if type(results[name]) not in (int, float):
                raise ValueError(f"{name} is not a number: {results[name]!r}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} holds no results of a model: {error!r}") from error
    folder = path.parent
    variant = folder.name if folder.parent.name == recipe["name"] else ""
    return Run(folder, variant, results)


def read_costs() -> dict[str, Any]:
    """Returns the contents of costs.json: the parameters and training cost of each model."""
    path = assets_folder() / COSTS
    if not path.is_file():
        return {"machine": {}, "models": {}}
    return read_json(path, "a table of costs")
