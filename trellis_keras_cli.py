"""The command `trellis-keras`.

`import trellis_keras` registers every class with Keras, and so imports Keras and TensorFlow, which
takes seconds. Help, `list`, `recipe` and mistyped words need neither. A module within the package
cannot be imported without it; this one is outside, and imports `trellis_keras.cli` alone.
"""

import importlib.util
import sys
import types


def _bare(name):
    """Makes the modules of a package importable, without its `__init__`."""
    spec = importlib.util.find_spec(name)
    package = types.ModuleType(name)
    package.__path__ = spec.submodule_search_locations
    sys.modules[name] = package
    return package


def main():
    """Runs the command line. A command that needs the whole package imports it."""
    if "trellis_keras" not in sys.modules:
        package = _bare("trellis_keras")
        package.zoo = _bare("trellis_keras.zoo")
    from trellis_keras import cli

    cli.main()
