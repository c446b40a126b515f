"""Cards, results and weights of the zoo's models: where they are."""

import json
import os
import pathlib

WEIGHTS = "weights.weights.h5"
# Which ones are published; `publish` sees to it.
WEIGHTS_KEPT = (
    "the zoo keeps those of its own benchmarks that are under 5 MB, and of language models those "
    "that read characters"
)
RESULTS = "results.json"
COSTS = "costs.json"

_PACKAGE = pathlib.Path(__file__).parent


def assets_folder():
    """Returns the folder of the zoo's assets, one folder per model in it.

    Looked for in this order: the folder that TRELLIS_KERAS_ZOO names, `zoo/` beside the package
    (a checkout or an editable install), `_assets/` inside it (an installed wheel).

    Raises:
        FileNotFoundError: TRELLIS_KERAS_ZOO is not a folder, or there is none anywhere.
    """
    named = os.environ.get("TRELLIS_KERAS_ZOO")
    if named is not None:
        if not os.path.isdir(named):
            raise FileNotFoundError(f"TRELLIS_KERAS_ZOO is not a folder: {named}")
        return pathlib.Path(named)
    checkout = _PACKAGE.parent.parent
    # Where a wheel is installed, a `zoo` beside the package would be somebody else's.
    is_checkout = (checkout / "setup.py").is_file()
    for folder in [checkout / "zoo"] * is_checkout + [_PACKAGE / "_assets"]:
        if (folder / "README.md").is_file():
            return folder
    raise FileNotFoundError(
        "The zoo's assets are missing from this installation. Set TRELLIS_KERAS_ZOO to a copy "
        "of the repository's zoo/ folder."
    )


def read_results(path):
    """Returns what a `results.json` holds, a dict.

    Raises:
        ValueError: It is damaged.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(results["model"], str):
            raise ValueError(f"its model is {results['model']!r}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} holds no results of a model: {error!r}") from error
    return results


def all_results(folder):
    """Returns [(folder, results)] of everything that was published, by name.

    Raises:
        ValueError: A `results.json` is damaged.
    """
    return [(path.parent, read_results(path)) for path in sorted(folder.glob(f"*/{RESULTS}"))]


def read_costs(folder):
    """Returns what `costs.json` holds, a dict: what training each model would cost, and where."""
    return json.loads((folder / COSTS).read_text(encoding="utf-8"))


def cost_of(name, costs):
    """Returns what `costs.json` holds of one model.

    Raises:
        ValueError: It does not have it.
    """
    if name not in costs["models"]:
        raise ValueError(
            f"{COSTS} does not have {name}. Measure it: python -m benchmarks.zoo_costs {name}"
        )
    return costs["models"][name]
