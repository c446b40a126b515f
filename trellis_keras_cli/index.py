"""What `list` and `recipe` print, and the words that they take, known without Keras.

index.json is written by `python -m tools.index`.
"""

import difflib
import fnmatch
import functools
import json
import pathlib
from collections.abc import Iterable
from typing import Any

PATH = pathlib.Path(__file__).parent / "index.json"


@functools.cache
def read() -> dict[str, Any]:
    """Returns the index.

    It has `rows`, what `list` prints of each model and published run, and `models`: for each name
    its `options`, the names of all that `zoo.recipe` takes, and its `recipe`.
    """
    return json.loads(PATH.read_text(encoding="utf-8"))


def rows(pattern: str, pretrained: bool) -> list[list[str]]:
    """Returns the rows of `list`, for models whose names match a shell-style pattern."""
    found = [row for row in read()["rows"] if fnmatch.fnmatch(row[0].split()[0], pattern)]
    return [row for row in found if not pretrained or row[-1] == "yes"]


def recipe(name: str) -> dict[str, Any]:
    """Returns a model's own recipe as `Recipe.to_dict` does."""
    return read()["models"][name]["recipe"]


def check(name: str, options: Iterable[str]) -> None:
    """Raises ValueError unless the zoo has a model with these options."""
    models = read()["models"]
    if name not in models:
        near = _suggestion(name, models) or " `trellis-keras list` shows them."
        raise ValueError(f"Unknown model {name!r}.{near}")
    known = models[name]["options"]
    for option in options:
        near = _suggestion(option, known)
        # Others have more to be said about them, by the recipe.
        if option not in known and near:
            raise ValueError(f"{name} has no option {option!r}.{near}")


def _suggestion(name, known):
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
