"""Cards, results and weights of the zoo's models: where they are, and loading them."""

import os
import pathlib

WEIGHTS = "weights.weights.h5"

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


def load_weights(model, name, weights):
    """Loads weights into a zoo model and returns it.

    Args:
        model: A built model.
        name: Its name in the zoo.
        weights: None (leave as it is), `"pretrained"`, or the path of a weights file.

    Raises:
        ValueError: There are no pretrained weights of this model, or the file is missing.
    """
    if weights is None:
        return model
    if weights == "pretrained":
        path = _pretrained(name)
    else:
        path = pathlib.Path(weights).expanduser()
        if not path.is_file():
            raise ValueError(
                f'{name}: `weights` must be None, "pretrained" or a file. There is none at {path}'
            )
    model.load_weights(path)
    return model


def _pretrained(name):
    assets = assets_folder()
    path = assets / name / WEIGHTS
    if not path.is_file():
        there = sorted(folder.parent.name for folder in assets.glob(f"*/{WEIGHTS}"))
        raise ValueError(
            f"There are no pretrained weights of {name}. There are some of: "
            f"{', '.join(there) or 'no model yet'}"
        )
    return path
