"""Run folders: a recipe trains a model there, and a killed run resumes from there.

recipe.json          all settings
paths.json           where the data are on this machine; omit it when you share the run
environment.json     hardware, versions, commit and precision of the processes that trained
history.csv          a row per epoch
best.keras           the model with the lowest validation loss, with its vocabulary
checkpoints/         where an interrupted run resumes
tensorboard/         logs for TensorBoard
"""

import contextlib
import functools
import json
import math
import os
import pathlib
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_streams import files
from keras_streams.files import atomic_write
from trellis_keras.data import EpochOrder
from trellis_keras.files import checksum, own_file, read_json, write_error
from trellis_keras.jobs import Job, different_settings
from trellis_keras.layers.checks import check_choice
from trellis_keras.models.base import BackboneModel
from trellis_keras.models.saved_files import load_model
from trellis_keras.scoring import METRICS
from trellis_keras.terminal import printable
from trellis_keras.training import devices as parallel
from trellis_keras.training.best_model import BestModel
from trellis_keras.training.checkpoint import Checkpoint, RestOfEpoch, has_memory
from trellis_keras.training.checkpoint_files import is_complete, latest, progress, read_state
from trellis_keras.training.gradient_norms import GradientNorms
from trellis_keras.training.history import HistoryCSV, read_history
from trellis_keras.training.progress_bar import BatchProgress, ProgressBar
from trellis_keras.training.stopping import EpochInterrupted, StopOnNaN, TimeLimit
from trellis_keras.training.tensorboard import TextSamples, summary_writer, write_graph
from trellis_keras.zoo.datasets.registry import SPLITS, Dataset
from trellis_keras.zoo.environment import record
from trellis_keras.zoo.recipe import Recipe
from trellis_keras.zoo.registry import recipe_from_dict

RECIPE = "recipe.json"
PATHS = "paths.json"
ENVIRONMENT = "environment.json"
HISTORY = "history.csv"
BEST = "best.keras"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
_FILES = {RECIPE, PATHS, ENVIRONMENT, BEST, HISTORY, CHECKPOINTS, TENSORBOARD}

# Settings that may change when a run is resumed: its length, what comes from the data, and how the
# machine computes.
_RESUMABLE_WITH = ("epochs", "data_checksum", "vocabulary_size", "jit_compile", "dtype_policy")
_PROMPT = 64  # tokens that a sample continues
_LOSSES = ("mse", "cross_entropy", "frame_nll")  # published figures that are the loss


# The folder


def read_recipe(folder: str | os.PathLike) -> Recipe:
    """Returns the recipe of the run in a folder, or raises FileNotFoundError or ValueError."""
    path = _path(folder, RECIPE)
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run: {RECIPE} is missing.")
    written = read_json(path, "a recipe of this version")
    paths = _path(folder, PATHS)
    places = read_json(paths, "a record of where the data are") if paths.exists() else {}
    if not all(isinstance(place, str) for place in places.values()):
        raise ValueError(f"{paths} must hold paths. Received: {places}")
    try:
        if "path" in places:
            written["data_options"]["path"] = places["path"]
        return recipe_from_dict({**written, "data_dir": places.get("data_dir")})
    # Any error that a damaged file may cause: a missing key, a list for a dict, a huge number.
    except (OverflowError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a recipe of this version: {error!r}") from error


def write_recipe(recipe: Recipe, folder: str | os.PathLike) -> None:
    """Writes the recipe of a run, and apart from it where the data are."""
    given = {"path": recipe.data_options.get("path"), "data_dir": recipe.data_dir}
    paths = {name: path for name, path in given.items() if path is not None}
    for name, content in ((PATHS, paths), (RECIPE, recipe.without_folders())):
        if not content and not _path(folder, name).exists():
            continue  # data without a path
        with atomic_write(_path(folder, name)) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def has_run(folder: str | os.PathLike) -> bool:
    """Returns whether there is a run in `folder` that can be resumed."""
    return latest(_path(folder, CHECKPOINTS)) is not None


def epochs_done(folder: str | os.PathLike) -> int:
    """Returns the number of epochs after which the run in `folder` would resume."""
    return progress(_path(folder, CHECKPOINTS))[0]


def is_finished(folder: str | os.PathLike) -> bool:
    """Returns whether the run has finished its last epoch, or was stopped by its rule.

    Raises:
        FileNotFoundError: There is no run.
        ValueError: Its recipe or its checkpoint cannot be read.
    """
    epochs = read_recipe(folder).training.epochs
    checkpoint = latest(_path(folder, CHECKPOINTS))
    return checkpoint is not None and is_complete(read_state(checkpoint), epochs)


def resuming(folder: str | os.PathLike) -> str:
    """Returns the shell command that resumes the run in `folder`.

    Example:

    >>> resuming("runs/my first")
    "trellis-keras train --output 'runs/my first'"
    """
    return f"trellis-keras train --output {shlex.quote(str(folder))}"


def history(folder: str | os.PathLike) -> list[dict[str, float]]:
    """Returns the rows of a run's history, with NaN for missing values."""
    rows = read_history(_path(folder, HISTORY))
    return [{key: float(value or "nan") for key, value in row.items()} for row in rows]


def best_epoch(rows: list[dict[str, float]]) -> dict[str, float]:
    """Returns the row of a history with the lowest validation loss."""
    return min(rows, key=lambda row: (math.isnan(row["val_loss"]), row["val_loss"]))


def check_output(
    path: str | os.PathLike, inputs: Iterable[str | os.PathLike] = (), overwrite: bool = False
) -> pathlib.Path:
    """As `keras_streams.files.check_output`, and raises ValueError for a file of a run."""
    check_no_file_of_a_run(path)
    return files.check_output(path, inputs, overwrite)


def check_no_file_of_a_run(path: str | os.PathLike) -> None:
    """Raises ValueError if a path belongs to the files of a run. Symbolic links are followed."""
    resolved = pathlib.Path(path).expanduser().resolve()
    for folder in resolved.parents:
        name = resolved.relative_to(folder).parts[0].casefold()  # some file systems ignore case
        if name in _FILES and (folder / RECIPE).is_file():
            raise ValueError(f"{path} is a file of the run in {folder}. Choose another name.")


def _path(folder, name):
    return pathlib.Path(folder).expanduser() / name


# Its best model


def load_best(folder: str | os.PathLike, kind: type[keras.Model] = BackboneModel) -> keras.Model:
    """Returns the best model of the run in `folder`, uncompiled.

    Raises:
        FileNotFoundError: There is no run, or it has not finished an epoch.
        ValueError: The model's file is damaged, or does not hold a model of the class `kind`.
    """
    path = _path(folder, BEST)
    if not path.is_file():
        read_recipe(folder)
        raise FileNotFoundError(f"{folder} has no {BEST}: the run has not finished an epoch yet.")
    try:
        model = load_model(path)
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}. Restore a copy of it, or train in another folder."
        ) from error
    if not isinstance(model, kind):
        raise ValueError(f"{path} must hold a {kind.__name__}. Received: {type(model).__name__}")
    return model


def evaluate(
    recipe: Recipe,
    model: keras.Model | str | os.PathLike,
    split: str = "test",
    *,
    target_counting: str = "all",
    loaded: Dataset | None = None,
    verbose: str | int = 0,
) -> dict[str, float]:
    """Evaluates the best model of a run, or another model of its recipe.

    Args:
        recipe: The run's recipe, see `zoo.read_recipe`. `data_dir` may differ.
        model: The run's folder, or a model, which is compiled by the recipe.
        split: `"train"`, `"valid"` or `"test"`.
        target_counting: For text: `"all"` counts each target once, `"original"` follows the
            authors' code, see `data.TokenStream`.
        loaded: The result of `recipe.load_data()`. Defaults to None, which loads the data.
        verbose: As in `keras.Model.evaluate`.

    Returns:
        A dict of the metrics, including the published one, and the number of items that they
        average over: `targets` for text, `frames` for music, otherwise `sequences`.

    Raises:
        ValueError: An unknown split or counting, changed data, or a damaged file.
        FileNotFoundError: There is no run, it has not finished an epoch, or the data are missing.
    """
    check_choice("split", split, SPLITS)
    model = model if isinstance(model, keras.Model) else load_best(model)
    recipe.compile(model)
    loaded = recipe.load_data() if loaded is None else loaded
    stream = recipe.batches(getattr(loaded, split), target_counting)
    results = model.evaluate(stream, return_dict=True, verbose=verbose)
    if recipe.metric in _LOSSES:
        results.setdefault(recipe.metric, results["loss"])
    elif recipe.metric not in results:
        raise ValueError(f"{recipe.name} has no metric {recipe.metric!r}. Received: {[*results]}")
    for kind in ("targets", "frames", "sequences"):
        if hasattr(stream, f"{kind}_counted"):
            return {**results, kind: getattr(stream, f"{kind}_counted")}
    return results


def representative_data(recipe: Recipe, rows: int = 32) -> np.ndarray:
    """Returns inputs from the whole training data, for quantization in `export`.

    An array (rows, steps, channels), or tokens (rows, steps) for text, with at most `rows` rows.
    """
    stream = recipe.batches(recipe.load_data().train)
    places = np.unique(np.linspace(0, len(stream) - 1, rows, dtype="int64"))
    batches = [stream[int(place)][0] for place in places]
    steps = min(x.shape[1] for x in batches)
    # A row of a text's batches is always from the same part of the text.
    return np.stack([x[i % len(x), :steps] for i, x in enumerate(batches)])


# Training


def train(
    recipe: Recipe,
    folder: str | os.PathLike,
    *,
    verbose: str | int = "auto",
    callbacks: Sequence[keras.callbacks.Callback] = (),
    gradient_norms: int = 0,
    sample_length: int = 0,
    graph: bool = False,
    profile: tuple[int, int] | None = None,
    max_minutes: float | None = None,
    save_minutes: float | None = 10,
    devices: int | None = None,
) -> keras.Model:
    """Trains a model with its recipe, or resumes an interrupted run.

    On several machines (JAX), call `training.devices.join` first in each process, then `train` with
    the same arguments. Process 0 writes the run; the others receive from it the checkpoint to
    resume from, and write nothing.

    Args:
        recipe: If `folder` contains a run, it must be that run's recipe; epochs, data paths,
            precision and `jit_compile` may differ.
        folder: The run's folder, created if necessary. Only one process can train in it.
        verbose: As in `keras.Model.fit`, but `"auto"` is 1 only where there is a terminal or a
            notebook, and a line per epoch (2) elsewhere, such as in a file. Defaults to `"auto"`.
        callbacks: Callbacks in addition to the recipe's. Their state is saved with the run (see
            `training.Checkpoint`).
        gradient_norms: Integer, number of batches on which to measure gradient norms after each
            epoch (see `training.GradientNorms`), by block, layer or cell, for TensorBoard and
            `history.csv`. Defaults to 0, no measurement. This and the next three do not affect
            training, and may differ when a run is resumed.
        sample_length: Integer, number of tokens that a language model samples for TensorBoard after
            each epoch (see `training.TextSamples`), continuing the start of the validation text.
            Defaults to 0, no samples.
        graph: Whether to write the model's graph for TensorBoard before training starts (on
            TensorFlow).
        profile: (first, last) training batch to profile for TensorBoard, counted from 1 in this
            process. Defaults to None, no profile.
        max_minutes: Time limit, before which training stops, even within an epoch (see
            `training.TimeLimit`); the next call resumes. Defaults to None, no limit.
        save_minutes: Minutes between checkpoints within an epoch. With None there are checkpoints
            only after epochs, and `max_minutes` stops training after an epoch. Defaults to 10.
        devices: Positive integer, number of devices on this machine among which the rows of a
            batch are divided. It may differ when a run is resumed. Defaults to None, one device,
            or, with several processes, all devices of each.

    Returns:
        The trained model.

    Raises:
        ValueError: The folder cannot be written to, is in use, or contains a run with another
            recipe; or the data, the devices or another argument are wrong.
        FloatingPointError: The loss is no longer finite. Nothing from that epoch was saved.
        OSError: A file could not be written, or the data could not be read. The run resumes from
            the last checkpoint.

    Example:

    >>> recipe = zoo.recipe("trellisnet_char", epochs=3)
    >>> model = train(recipe, "runs/first")
    """
    folder = pathlib.Path(folder).expanduser()
    for name, minutes in (("max_minutes", max_minutes), ("save_minutes", save_minutes)):
        if minutes is not None and not minutes > 0:
            raise ValueError(f"`{name}` must be positive. Received: {minutes}")
    # Before loading the data, which also takes time.
    limit = max_minutes and TimeLimit(60 * max_minutes, command=resuming(folder))
    observed = {
        "gradient_norms": gradient_norms,
        "sample_length": sample_length,
        "graph": graph,
        "profile": profile,
    }
    _check_processes(recipe, limit, observed)
    if verbose == "auto":
        verbose = 1 if sys.stdout.isatty() or "ipykernel" in sys.modules else 2
    with contextlib.ExitStack() as stack:
        if parallel.process_index():
            folder, verbose = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())), 0
        stack.enter_context(Job(folder, _FILES, functools.partial(has_run, folder)).open())
        _share(folder)
        recipe = _continued(recipe, folder)
        loaded = recipe.load_data()
        recipe = recipe.with_data(loaded)
        parallelism = parallel.data_parallel(devices, recipe.training.batch_size)
        with parallelism as building, explained(folder):
            with building:
                model = recipe.build(vocabulary=loaded.vocabulary if recipe.reads_text else None)
            _fit(recipe, model, loaded, folder, verbose, callbacks, observed, limit, save_minutes)
        if verbose and (folder / BEST).is_file():
            print(printable(_describe_end(recipe, folder)), flush=True)
    return model


def _check_processes(recipe, limit, observed):
    """Raises ValueError for options that several processes do not support."""
    if parallel.process_count() == 1:
        return
    if limit is not None or any(observed.values()):
        raise ValueError(
            "Several processes must execute the same steps: omit "
            "`max_minutes`, gradient norms, samples, graph and profile."
        )
    if recipe.seed is None:
        raise ValueError("Several processes must start with the same weights: set `seed`.")


def _share(folder):
    """Sends the recipe and checkpoint that process 0 resumes from to the other processes."""
    if parallel.process_count() == 1:
        return
    checkpoint = latest(folder / CHECKPOINTS)
    found = [] if checkpoint is None else [RECIPE, f"{CHECKPOINTS}/{checkpoint.name}"]
    for name in json.loads(parallel.broadcast(json.dumps(found).encode())):
        content = parallel.broadcast((folder / name).read_bytes() if found else b"")
        if not found:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


def _continued(recipe, folder):
    """Returns the recipe with the data checksum of the folder's run, after comparing both."""
    if recipe.data == "text" and (path := recipe.data_options.get("path")):
        data = own_file(path, recipe.data_dir).resolve()
        if data.parent == folder.resolve() and data.name.casefold() in _FILES:
            raise ValueError(
                f"A run in {folder} would replace its data, {data}. Choose another folder."
            )
    if not (folder / RECIPE).exists() or not has_run(folder):
        # A process killed between the records of its first epoch and the checkpoint leaves one row.
        if len(history(folder)) > 1:
            raise ValueError(
                f"{folder} has a trained model, which training would replace, but no checkpoint "
                f"from which to resume. Choose another folder, or restore {CHECKPOINTS}."
            )
        return recipe
    there = read_recipe(folder)
    if different := different_settings(_compared(there), _compared(recipe), free=_RESUMABLE_WITH):
        raise ValueError(
            f"{folder} holds a run with other settings: {different}. Choose another folder, or "
            f"resume that run: {resuming(folder)}"
        )
    return recipe.replace(data_checksum=there.data_checksum)


def _compared(recipe):
    """Returns the settings of a recipe without the file of a text: the checksum identifies it."""
    options = {"model": recipe.name, **recipe.options()}
    others = {name: value for name, value in options["data_options"].items() if name != "path"}
    return options | {"data_options": others}


def _fit(recipe, model, loaded, folder, verbose, callbacks, observed, limit, save_minutes):
    train_stream = recipe.batches(loaded.train, shuffle=True)
    valid_stream = recipe.batches(loaded.valid)
    epochs, batches = progress(folder / CHECKPOINTS)
    if hasattr(train_stream, "epoch"):
        train_stream.epoch = epochs
    left = len(train_stream) * (recipe.training.epochs - epochs) - batches
    watching = observers(folder, model, recipe.batches(loaded.train), loaded, left, **observed)
    if verbose:
        watching.append(ProgressBar())
    if verbose == 2:
        watching.append(BatchProgress())
    if not (folder / RECIPE).exists():
        _write_settings(recipe, folder)
    if verbose:
        print(printable(describe(recipe, model, loaded)), flush=True)
    # Each epoch has its own order, also after a resume.
    order = [EpochOrder(train_stream)] if hasattr(train_stream, "epoch") else []
    # StopOnNaN first, so that no other callback records an epoch with a NaN loss. The recipe's and
    # other callbacks next, so that their logs are recorded.
    records = [*watching, HistoryCSV(folder / HISTORY), BestModel(folder / BEST)]
    first = [StopOnNaN(), *order, *recipe.training.callbacks(), *callbacks, *records]
    # Observers may differ when a run is resumed.
    remembering = [c for c in first if has_memory(c) and c not in watching]
    # After them, so that it saves their state at the end of the epoch.
    checkpoint = Checkpoint(
        folder / CHECKPOINTS,
        seed=recipe.seed or 0,
        callbacks=remembering,
        save_minutes=save_minutes,
    )
    # After the checkpoint, which rejects a model other than the run's.
    last = [keras.callbacks.LambdaCallback(on_train_begin=lambda logs: _record(recipe, folder))]
    if limit is not None:  # also after it: a run stopped by the limit is not finished
        limit.checkpoint = checkpoint if save_minutes is not None else None
        last.append(limit)

    def fit(stream, *more):
        model.fit(
            parallel.own_rows(stream),
            validation_data=parallel.own_rows(valid_stream),
            epochs=recipe.training.epochs,
            callbacks=[*first, checkpoint, *last, *more],
            shuffle=False,  # the stream shuffles; Keras would do it without a seed
            verbose=verbose,
        )

    with contextlib.suppress(EpochInterrupted):
        if batches and epochs < recipe.training.epochs:
            last_batch = RestOfEpoch(train_stream, len(train_stream) - 1)
            # It creates the variables of all metrics.
            model.evaluate(parallel.own_rows(last_batch), verbose=0)
            # After the checkpoint, so that it does not record training as finished.
            stop = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", True)
            )
            fit(RestOfEpoch(train_stream, batches), stop)
        if not (batches and limit is not None and limit.stopped):
            fit(train_stream)


def _record(recipe, folder):
    """Writes the recipe and the environment of a run."""
    write_recipe(recipe, folder)
    if not is_finished(folder):
        record(folder / ENVIRONMENT, recipe.dtype_policy, epochs_done(folder) + 1)


# Callbacks and messages


def observers(
    folder: pathlib.Path,
    model: keras.Model,
    stream: Any,
    loaded: Any,
    batches: int,
    gradient_norms: int = 0,
    sample_length: int = 0,
    graph: bool = False,
    profile: tuple[int, int] | None = None,
) -> list[keras.callbacks.Callback]:
    """Writes the graph, and returns the callbacks for `fit`.

    `stream` has batches of the training data in the same order each time, of which `batches` are
    left to train on. A language model continues the start of the `valid` split of `loaded`.
    """
    has_tensorflow = _has_tensorflow()
    if profile is not None:
        if not 1 <= profile[0] <= profile[1] <= batches:
            raise ValueError(
                "`profile` must be the first and the last batch, counted from 1, of the "
                f"{batches} that are left in this run. Received: {profile}"
            )
        if not has_tensorflow:
            raise ValueError("Profiling requires TensorFlow, which is not installed.")
        if keras.backend.backend() == "jax" and sys.version_info < (3, 12):
            raise ValueError("On JAX, profiling requires Python 3.12 or newer: omit `profile`.")
    # First, because the others write the logs that it adds.
    callbacks = [GradientNorms(stream, steps=gradient_norms)] if gradient_norms else []
    if not has_tensorflow:
        print("TensorFlow is not installed: no TensorBoard logs are written.", flush=True)
        return callbacks
    # One folder each: TensorBoard may follow only the newest of several files in a folder.
    logs = folder / TENSORBOARD
    # Keras cannot write the graph of a subclassed model; `write_graph` can.
    board = keras.callbacks.TensorBoard(logs, write_graph=False, profile_batch=profile or 0)
    callbacks.append(board)
    if sample_length and getattr(model, "vocabulary", None) is not None:
        try:
            samples = TextSamples(loaded.valid[:_PROMPT], logs / "samples", length=sample_length)
            callbacks.append(samples)
        except ImportError as error:
            print(f"No text samples are written. {error}", flush=True)
    if graph and keras.backend.backend() == "tensorflow":
        write_graph(model, stream[0], logs / "graph")
    return callbacks


def _write_settings(recipe, folder):
    """Writes a new run's recipe as a row of TensorBoard's HParams tab, if there is TensorFlow."""
    if not _has_tensorflow():
        return
    from tensorboard.plugins.hparams import api

    values = {
        name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
        for name, value in {"model": recipe.name, **recipe.options()}.items()
        if value is not None
    }
    writer = summary_writer(folder / TENSORBOARD)
    with writer.as_default(step=0):
        digest = checksum([os.fsencode(folder.resolve())])
        api.hparams(values, trial_id=f"{folder.name} {digest[:8]}")
    writer.close()


def _has_tensorflow():
    try:
        import tensorflow  # noqa: F401
    except ImportError:
        return False
    return True


def describe(recipe: Recipe, model: keras.Model, loaded: Any) -> str:
    """Returns a summary of a run in lines: model, data, batches, training, arithmetic."""
    training, options = recipe.training, recipe.training.options()
    sizes = ", ".join(f"{k} {size:,}" for k, size in loaded.sizes.items())
    if recipe.reads_text:
        size, context = len(loaded.vocabulary), options["context_length"]
        guess = f"a uniform guess: {recipe.metric} {METRICS[recipe.metric](math.log(size)):.4g}"
        data = f"{loaded.vocabulary.unit}s, vocabulary {size:,} ({guess})"
        carried = "carrying the state over"
        rest = carried if recipe.stateful else f"the first {context} of each row context"
        batches = f"{training.batch_size} x {options['sequence_length']} tokens, {rest}"
    else:
        data = "sequences"
        batches = f"{training.batch_size} sequences, in a new order in each epoch"
    chosen = ", ".join(f"{k}={v}" for k, v in recipe.arguments.items() if v not in (None, 0, ()))
    lines = [
        f"{recipe.name}: {model.count_params():,} parameters ({chosen})",
        f"{recipe.data}: {sizes} {data}",
        f"batches of {batches}",
        f"{options['optimizer']} {options['learning_rate']:g}, up to epoch {training.epochs}",
    ]
    if "decay_steps" in options:
        warmup = options.get("warmup_steps", 0)
        cycle, steps = warmup + options["decay_steps"], len(recipe.batches(loaded.train))
        steps *= training.epochs
        if steps != cycle:
            lines.append(
                f"WARNING: the learning rate falls to 0 in {cycle:,} steps, but the run has "
                f"{steps:,}: set --decay-steps {max(steps - warmup, 1)}"
            )
    compiler = "compiled by XLA" if model.jit_compile else "without XLA"
    why = "chosen for model and machine" if recipe.jit_compile is None else "as requested"
    return "\n".join([*lines, f"{model.backbone.compute_dtype}, {compiler} ({why})"])


def _describe_end(recipe, folder):
    """Returns lines that say what a run has reached and written, and how to continue."""
    rows = history(folder)
    best = best_epoch(rows)
    reached = (f"{k} {value:.4g}" for k, value in best.items() if k.startswith("val_"))
    others = sorted(path.name for path in folder.iterdir() if path.name in _FILES - {BEST})
    commands = ["evaluate {}", *["generate {}"] * recipe.reads_text, "export {} {}/serving"]
    quoted = shlex.quote(str(folder))
    next_steps = "\n      ".join(f"trellis-keras {c.format(quoted, quoted)}" for c in commands)
    return (
        f"Best epoch: {best['epoch']:.0f} of {len(rows)}, {', '.join(reached)}\n"
        f"{folder} has its model, {BEST}, and {', '.join(others)}.\nNext: {next_steps}"
    )


@contextlib.contextmanager
def explained(folder: pathlib.Path) -> Iterator[None]:
    """Adds to an error the last checkpoint of the run and the command that resumes it.

    Raises:
        FloatingPointError: The training has diverged.
        OSError: A file could not be written or read, including TensorFlow's own errors.
    """
    try:
        yield
    except FloatingPointError as error:
        saved = _saved(folder)
        again = "Resuming would diverge again: train in another folder," if saved else "Train"
        raise FloatingPointError(
            f"{error} {saved or 'Nothing was saved.'} {again} with a smaller learning rate or clip "
            "norm."
        ) from error
    except Exception as error:
        reason = _reason(error, folder)
        if reason is None:
            raise
        if parallel.process_count() > 1:
            then = "The same commands in all processes resume from the last checkpoint."
        elif saved := _saved(folder):
            then = f"{saved} When that is fixed, resume with: {resuming(folder)}"
        else:
            then = "Nothing was saved. When that is fixed, train again."
        raise OSError(f"{reason}. {then}") from error


def _saved(folder):
    """Returns a sentence that names the last checkpoint, or "" without checkpoints."""
    try:
        checkpoint = latest(folder / CHECKPOINTS)
    except (OSError, ValueError):  # possibly because of the same disk
        return "The checkpoints cannot be read either."
    return "" if checkpoint is None else f"The last good state is {checkpoint}."


def _reason(error, folder):
    """Returns a description of a failure of the disk or the data, or None for other errors."""
    if isinstance(error, OSError):
        return str(error)
    if parallel.process_count() > 1 and re.search("gloo|nccl|coordination", str(error), re.I):
        return f"Another process of this run has exited or cannot be reached ({error})"
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or not isinstance(error, tensorflow.errors.OpError):
        return None
    written = write_error(error, folder)
    if written:
        return f"{written.filename} could not be written: {written.strerror}"
    # Python code in its graph reads the data.
    read = re.search(r"PyFunc.*\n(\w+: [^\n]+)\nTraceback", error.message, re.DOTALL)
    return f"The data could not be read: {read[1]}" if read else None
