"""SavedModels for TensorFlow Serving: numbered folders, each of which appears in one step."""

import contextlib
import json
import numbers
import os
import pathlib
import re
import shutil
import tempfile

from trellis_keras.files import sync_folder
from trellis_keras.serving import warmup
from trellis_keras.serving.endpoints import endpoints_of

EXTRA = "assets.extra"
SIGNATURES = "signatures.json"
VOCABULARY = "vocabulary.json"
# Calls of functions, whose operations are looked at too.
_CALLS = {"StatefulPartitionedCall"}
# Folders that are not whole yet. No integer, so no server takes them for versions.
_UNFINISHED = ".exporting-"


def write(model, path, version=None, warm_up=False):
    """Writes a version of a model, see `export`."""
    path = pathlib.Path(path).expanduser()
    _check(path, version)
    if warm_up:
        warmup.check_installed()
    endpoints = endpoints_of(model)
    with _unfinished(path) as folder:
        save(endpoints, folder, getattr(model, "vocabulary", None))
        extra = folder / EXTRA
        extra.mkdir()
        (extra / SIGNATURES).write_text(describe(endpoints), encoding="utf-8")
        if warm_up:
            warmup.write(endpoints, path.resolve().name, extra)
        _sync(folder)
        return _publish(folder, path, version)


def describe(endpoints):
    """Returns what `endpoints_of` found, but for the functions, as JSON."""

    def fields(of):
        return {
            name: {"dtype": field.dtype, "shape": field.shape, "meaning": field.meaning}
            for name, field in of.items()
        }

    described = {
        name: {
            "meaning": endpoint.meaning,
            "inputs": fields(endpoint.inputs),
            "outputs": fields(endpoint.outputs),
        }
        for name, endpoint in endpoints.items()
    }
    return json.dumps(described, indent=2) + "\n"


# The graphs


def save(endpoints, folder, vocabulary=None):
    """Writes endpoints as a SavedModel, with nothing beside it.

    Args:
        endpoints: Dict from name to `Endpoint`.
        folder: Path of the SavedModel, in a folder that can be written to.
        vocabulary: `data.Vocabulary` that becomes an asset.
    """
    import tensorflow as tf

    functions = {name: _traced(endpoint) for name, endpoint in endpoints.items()}
    module = tf.Module()
    module.parts = [part for endpoint in endpoints.values() for part in endpoint.tables]
    # The weights that are read, each once; the seeds of dropouts are none of them.
    read = {id(v): v for function in functions.values() for v in function.graph.variables}
    module.read = list(read.values())
    if vocabulary is not None:
        vocabulary.save(folder.parent / VOCABULARY)
        module.vocabulary = tf.saved_model.Asset(str(folder.parent / VOCABULARY))
    # A server differentiates nothing.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(module, str(folder), functions, options)


def _traced(endpoint):
    import tensorflow as tf

    function = tf.function(endpoint.checked, autograph=False)
    function = function.get_concrete_function(**endpoint.input_specs())
    found = operations(function)
    impure = {op for op in found if re.search("Assign|Random|Multinomial|^Stateful[A-Z]", op)}
    # A function of the request's seed alone.
    pure = {op for op in impure if endpoint.draws and op.startswith("Stateless")}
    impure = sorted(impure - pure - _CALLS)
    if impure:
        raise ValueError(
            f"The answers of `{endpoint.name}` would not follow from the request alone: its graph "
            f"has {', '.join(impure)}. Some layer of the model draws random numbers or assigns "
            "variables in inference, as Keras' recurrent layers with dropout do (put these into a "
            "StackedRNN)."
        )
    return function


def operations(function):
    """Returns the types of all operations that a traced function runs."""
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return {node.op for node in nodes}


# The folders


def _check(path, version):
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file. Give a folder, in which versions are numbered.")
    if _is_version(path.name) or (path / "saved_model.pb").exists():
        raise ValueError(
            f"{path} looks like one version of a model. Give the folder of all versions, such as "
            f"{path.parent}; in it the version is a folder that gets its number from `version`, "
            "or the next one."
        )
    if version is None:
        return
    whole = isinstance(version, numbers.Integral) and not isinstance(version, bool)
    if not whole or version < 1:
        raise ValueError(f"`version` must be a whole number from 1 on. Received: {version!r}")
    if (path / str(version)).exists():
        raise ValueError(_taken(path, version))


def _taken(path, version):
    return f"{path / str(version)} exists already. Choose another version, or remove it first."


def _is_version(name):
    return name.isascii() and name.isdecimal()


@contextlib.contextmanager
def _unfinished(path):
    """Yields the path of a folder to make beside the versions; whatever is left of it goes."""
    made = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(dir=path, prefix=_UNFINISHED))
    try:
        # One level down: `mkdtemp` keeps its own folder from other users, such as a server's.
        yield folder / "model"
    except BaseException:
        shutil.rmtree(folder)
        if made:
            with contextlib.suppress(OSError):  # of another exporter that is at work in it
                path.rmdir()
        raise
    shutil.rmtree(folder)


def _sync(folder):
    """Makes the disk have all files before a name promises that they are whole."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            sync_folder(path)
        else:
            with open(path, "rb+") as file:
                os.fsync(file.fileno())


def _publish(folder, path, version):
    """Renames the folder to its version: the one given or, whoever else exports, the next."""
    while True:
        target = path / str(version or 1 + _highest(path))
        try:
            # Of two that come at once, one finds a folder that is not empty.
            folder.rename(target)
        except OSError as error:
            if not target.exists():
                raise
            if version is not None:
                raise ValueError(_taken(path, version)) from error
        else:
            sync_folder(path)
            return target


def _highest(path):
    return max((int(found.name) for found in path.iterdir() if _is_version(found.name)), default=0)
