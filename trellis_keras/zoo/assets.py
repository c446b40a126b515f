"""Cards, results and weights of the zoo's models: where they are, and loading them."""

import os
import pathlib

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
    for folder in (checkout / "zoo", _PACKAGE / "_assets"):
        # site-packages could hold somebody else's `zoo`: ours has a README of its own.
        if (folder / "README.md").is_file() and (folder != checkout / "zoo" or _is_ours(checkout)):
            return folder
    raise FileNotFoundError(
        "The zoo's assets are missing from this installation. Set TRELLIS_KERAS_ZOO to a copy "
        "of the repository's zoo/ folder."
    )


def _is_ours(checkout):
    return (checkout / "setup.py").is_file()


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
    path = pathlib.Path(weights)
    if weights == "pretrained":
        path = assets_folder() / name / "weights.weights.h5"
    if not path.is_file():
        available = sorted(p.parent.name for p in assets_folder().glob("*/weights.weights.h5"))
        raise ValueError(
            f"{name}: no weights at {path}. Pretrained weights come with: "
            f"{', '.join(available) or 'no model yet'}"
        )
    model.load_weights(path)
    return model
