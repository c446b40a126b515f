"""Where a run keeps its recipe."""

import os
import pathlib

RECIPE = "recipe.json"


def recipe_path(folder: str | os.PathLike) -> pathlib.Path:
    """Returns the path of a run's recipe.

    Raises:
        FileNotFoundError: There is no run.
    """
    path = pathlib.Path(folder).expanduser() / RECIPE
    if not path.is_file():
        within = sorted(path.parent.glob(f"*/{RECIPE}"))
        hint = f" There is one in {within[0].parent}." if within else ""
        raise FileNotFoundError(f"{folder} holds no run: {RECIPE} is missing.{hint}")
    return path
