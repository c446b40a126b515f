"""A run: a folder in which a model is trained by a recipe, and training resumes after a kill.

recipe.json          all settings
paths.json           where the data are on this machine; omit it when you share the run
environment.json     hardware, versions, commit and precision of the processes that trained
history.csv          a row per epoch
best.keras           the model with the lowest validation loss, with its vocabulary
checkpoints/         where an interrupted run resumes
tensorboard/         logs for TensorBoard

A recipe is any object with the attributes and methods of `trellis_keras.zoo.Recipe`.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_streams import files
from keras_streams.files import atomic_write
from trellis_keras.files import (
    check_no_links,
    folder_lock,
    make_writable,
    own_file,
    read_json,
    remove_unfinished,
    write_error,
)
from trellis_keras.models.base import BackboneModel
from trellis_keras.models.saved_files import load_model
from trellis_keras.terminal import printable
from trellis_keras.training import devices as parallel
from trellis_keras.training.checkpoint import (
    Checkpoint,
    RestOfEpoch,
    has_memory,
    is_complete,
    latest,
    progress,
    read_state,
)
from trellis_keras.training.monitors import (
    BatchProgress,
    BestModel,
    EpochInterrupted,
    GradientNorms,
    HistoryCSV,
    ProgressBar,
    StopOnNaN,
    TextSamples,
    TimeLimit,
    write_graph,
    write_hparams,
)
from trellis_keras.zoo.environment import record
from trellis_keras.zoo.run_folder import RECIPE, recipe_path

PATHS = "paths.json"
ENVIRONMENT = "environment.json"
BEST = "best.keras"
SPLITS = ("train", "valid", "test")
FILE_OPTIONS = ("path",)  # options of data sets that are paths if they are strings

# The files and folders that a run writes.
FILES = {RECIPE, PATHS, ENVIRONMENT, BEST, "history.csv", "checkpoints", "tensorboard"}

# Settings that may change when a run is resumed: its length, the location of the data, and how
# the machine computes.
_RESUMABLE_WITH = {
    "epochs",
    "data_dir",
    "data_checksum",
    "vocabulary_size",
    "jit_compile",
    "dtype_policy",
}
_PROMPT = 64  # tokens
_UNIFORM_NLL = {"perplexity": float, "bpc": math.log2, "cross_entropy": math.log}


@dataclasses.dataclass(frozen=True)
class Observation:
    """TensorBoard logs of a run besides metrics and learning rate. They do not affect training.

    Args:
        gradient_norms: Integer, number of batches on which to measure gradient norms after each
            epoch (see `training.GradientNorms`), by block, layer or cell. They are also written to
            `history.csv`. Defaults to 0, no measurement.
        sample_length: Integer, number of tokens that a language model samples after each epoch (see
            `training.TextSamples`), continuing the start of the validation text. Defaults to 0,
            no samples.
        graph: Whether to write the model's graph before training starts (on TensorFlow).
        profile: (first, last) training batch to profile, counted from 1 in this process. Defaults
            to None, no profile.
    """

    gradient_norms: int = 0
    sample_length: int = 0
    graph: bool = False
    profile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("gradient_norms", "sample_length"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be 0 or more. Received: {getattr(self, name)}")
        if self.profile is not None and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError(
                "`profile` must be the first and the last batch, counted from 1. "
                f"Received: {self.profile}"
            )

    def callbacks(
        self, folder: pathlib.Path, model: keras.Model, stream: Any, loaded: Any, batches: int
    ) -> list[keras.callbacks.Callback]:
        """Writes the graph, and returns the callbacks for `fit`.

        Args:
            folder: The run's folder.
            model: The model.
            stream: Batches of the training data, in the same order each time.
            loaded: The data. A language model continues the start of its `valid` split.
            batches: Number of batches left to train on.

        Raises:
            ValueError: A profile without TensorFlow, or of batches beyond the end of the run.
        """
        self._check_profile(batches)
        # One folder each: TensorBoard may follow only the newest of several files in a folder.
        logs = folder / "tensorboard"
        has_tensorflow = _has_tensorflow()
        if not has_tensorflow:
            print("TensorFlow is not installed: no TensorBoard logs are written.", flush=True)
        # Keras cannot write the graph of a subclassed model; `write_graph` can.
        board = keras.callbacks.TensorBoard
        callbacks = []
        if has_tensorflow:
            callbacks = [board(logs, write_graph=False, profile_batch=self.profile or 0)]
        if self.gradient_norms:
            # First, because the others write the logs that it adds.
            callbacks = [GradientNorms(stream, steps=self.gradient_norms), *callbacks]
        if has_tensorflow and self.sample_length:
            callbacks += self._samples(logs / "samples", model, loaded)
        if has_tensorflow and self.graph and keras.backend.backend() == "tensorflow":
            write_graph(model, stream[0], logs / "graph")
        return callbacks

    def _check_profile(self, batches):
        if self.profile is None:
            return
        if not _has_tensorflow():
            raise ValueError("Profiling requires TensorFlow, which is not installed.")
        if keras.backend.backend() == "jax" and sys.version_info < (3, 12):
            raise ValueError(
                "On JAX, profiling requires Python 3.12 or newer: omit `profile`, or use "
                "another Python, or TensorFlow."
            )
        if self.profile[1] > batches:
            raise ValueError(
                f"The last batch to profile, {self.profile[1]}, is beyond the {batches} batches "
                "left in this run."
            )

    def _samples(self, directory, model, loaded):
        if getattr(model, "vocabulary", None) is None:
            return []
        try:
            return [TextSamples(loaded.valid[:_PROMPT], directory, length=self.sample_length)]
        except ImportError as error:
            print(f"No text samples are written. {error}", flush=True)
            return []


def train(
    recipe: Any,
    folder: str | os.PathLike,
    verbose: str | int = "auto",
    callbacks: Sequence[keras.callbacks.Callback] = (),
    observation: Observation | None = None,
    max_minutes: float | None = None,
    save_minutes: float | None = 10,
    devices: int | None = None,
) -> keras.Model:
    """Trains a model with its recipe, or resumes an interrupted run.

    On several machines (JAX), call `training.devices.join` first in each process, then `train` with
    the same arguments. Process 0 writes the run; the others receive from it the checkpoint to
    resume from, and write nothing.

    Args:
        recipe: A `zoo.Recipe`. If `folder` contains a run, it must be that run's recipe; epochs,
            data paths, precision and `jit_compile` may differ.
        folder: The run's folder, created if necessary. Only one process can train in it.
        verbose: As in `keras.Model.fit`, but `"auto"` is 1 only where there is a terminal or a
            notebook, and a line per epoch (2) elsewhere, such as in a file. Defaults to `"auto"`.
        callbacks: Callbacks in addition to the recipe's. Their state is saved with the run (see
            `training.Checkpoint`).
        observation: `Observation`, additional logs for TensorBoard; it may differ when a run is
            resumed. Defaults to none.
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
            recipe; the data are wrong; `max_minutes` or `save_minutes` is not positive; there are
            fewer devices than `devices`, or they cannot divide a batch evenly; or an option is
            not supported with several processes.
        FileNotFoundError: The data are missing.
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
    observation = observation or Observation()
    if verbose == "auto":
        verbose = 1 if sys.stdout.isatty() or "ipykernel" in sys.modules else 2
    _check_processes(recipe, observation, limit)
    if parallel.process_index():
        with tempfile.TemporaryDirectory() as copy:
            options = 0, callbacks, observation, None, save_minutes, devices
            return _train(recipe, pathlib.Path(copy), *options)
    model = _train(recipe, folder, verbose, callbacks, observation, limit, save_minutes, devices)
    if verbose and (folder / BEST).is_file():
        print(printable(_describe_end(recipe, folder)), flush=True)
    return model


def _describe_end(recipe, folder):
    """Returns lines that say what a run has written, and how to go on from it."""
    others = sorted(path.name for path in folder.iterdir() if path.name in FILES - {BEST})
    commands = ["evaluate {}", *["generate {}"] * recipe.reads_text, "export {} {}/serving"]
    quoted = shlex.quote(str(folder))
    next_steps = "\n      ".join(f"trellis-keras {c.format(quoted, quoted)}" for c in commands)
    return f"{folder} has the best model, {BEST}, and {', '.join(others)}.\nNext: {next_steps}"


def _check_processes(recipe, observation, limit):
    """Raises ValueError for options that several processes do not support."""
    if parallel.process_count() == 1:
        return
    if limit is not None or observation != Observation():
        raise ValueError(
            "Several processes must execute the same steps: omit "
            "`max_minutes`, gradient norms, samples, graph and profile."
        )
    if recipe.seed is None:
        raise ValueError("Several processes must start with the same weights: set `seed`.")


def _train(recipe, folder, verbose, callbacks, observation, limit, save_minutes, devices):
    created = not folder.exists()
    folder = make_writable(folder)
    try:
        with folder_lock(folder):
            check_no_links(folder)
            remove_unfinished(folder)
            _share(folder)
            recipe = _continued(recipe, folder)
            _check_input(recipe, folder)
            loaded = recipe.load_data()
            recipe = recipe.with_data(loaded)
            batch_size = recipe.training.batch_size
            with (
                parallel.data_parallel(devices, batch_size) as building,
                explained(folder),
                _discarding_without_checkpoint(folder),
            ):
                options = verbose, callbacks, observation, limit, save_minutes
                return _fit(recipe, loaded, folder, building, *options)
    except BaseException:
        if created:
            with contextlib.suppress(OSError):  # it is not empty: there is a checkpoint
                folder.rmdir()
        raise


def _share(folder):
    """Sends the recipe and checkpoint that process 0 resumes from to the other processes."""
    if parallel.process_count() == 1:
        return
    checkpoint = latest(folder / "checkpoints")
    found = [] if checkpoint is None else [RECIPE, f"checkpoints/{checkpoint.name}"]
    for name in json.loads(parallel.broadcast(json.dumps(found).encode())):
        content = parallel.broadcast((folder / name).read_bytes() if found else b"")
        if not found:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


@contextlib.contextmanager
def _discarding_without_checkpoint(folder):
    """Removes the files of a run that fails before its first checkpoint."""
    earlier = set(os.listdir(folder))
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, ValueError):  # they would hide the reason
            if latest(folder / "checkpoints") is None:
                for name in FILES - earlier:
                    remove = shutil.rmtree if (folder / name).is_dir() else pathlib.Path.unlink
                    if (folder / name).exists():
                        remove(folder / name)
        raise


def _check_input(recipe, folder):
    """Raises ValueError if the run would overwrite the user's data."""
    for path in _files_of(recipe.data_options).values():
        path = own_file(path, recipe.data_dir)
        inside = path.resolve().parent == folder.resolve()
        if inside and _is_run_file(pathlib.Path(path.resolve().name)):
            raise ValueError(
                f"A run in {folder} would replace its data, {path}. Choose another folder."
            )


def _files_of(data_options):
    """{option: path} of the files among the options of a data set."""
    found = {name: data_options.get(name) for name in FILE_OPTIONS}
    return {name: path for name, path in found.items() if isinstance(path, str)}


def _fit(recipe, loaded, folder, building, verbose, callbacks, observation, limit, save_minutes):
    with building:
        model = recipe.build(vocabulary=loaded.vocabulary if recipe.reads_text else None)
    train_stream = recipe.stream(loaded.train, shuffle=True)
    valid_stream = recipe.stream(loaded.valid)
    epochs, batches = progress(folder / "checkpoints")
    if hasattr(train_stream, "epoch"):
        train_stream.epoch = epochs
    observers = observation.callbacks(
        folder,
        model,
        recipe.stream(loaded.train),
        loaded,
        batches=len(train_stream) * (recipe.training.epochs - epochs) - batches,
    )
    if verbose:
        observers.append(ProgressBar())
    if verbose == 2:
        observers.append(BatchProgress())
    if _has_tensorflow() and not (folder / RECIPE).exists():
        settings, _ = without_paths(recipe.to_dict())
        digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()
        write_hparams(_flat(settings), f"{folder.name} {digest[:8]}", folder / "tensorboard")
    if verbose:
        print(printable(describe(recipe, model, loaded)), flush=True)
    first = _callbacks(recipe, folder, train_stream, callbacks, observers)
    # Observers may differ when a run is resumed.
    remembering = [c for c in first if has_memory(c) and c not in observers]
    # After them, so that it saves their state at the end of the epoch.
    checkpoint = Checkpoint(
        folder / "checkpoints",
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
        if batches:
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
    return model


def _record(recipe, folder):
    """Writes the recipe and the environment of a run."""
    settings, paths = without_paths(recipe.to_dict())
    for name, content in ((PATHS, paths), (RECIPE, settings)):
        if not content and not (folder / name).exists():
            continue  # data without a path
        with atomic_write(folder / name) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if not is_finished(folder):
        record(folder / ENVIRONMENT, recipe.dtype_policy, epochs_done(folder) + 1)


def _callbacks(recipe, folder, train_stream, others, observers):
    order = []
    if hasattr(train_stream, "epoch"):  # each epoch has its own order, also after a resume
        order = [
            keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: setattr(train_stream, "epoch", epoch)
            )
        ]
    # The recipe's and other callbacks come first, so that their logs are recorded.
    records = [*observers, HistoryCSV(folder / "history.csv"), BestModel(folder / BEST)]
    # StopOnNaN first, so that no other callback records an epoch with a NaN loss.
    return [StopOnNaN(), *order, *recipe.callbacks(), *others, *records]


def _continued(recipe, folder):
    """Returns the recipe with the data checksum of the folder's run, after comparing both."""
    if not (folder / RECIPE).exists() or latest(folder / "checkpoints") is None:
        return recipe  # a process killed before its first checkpoint left nothing to keep
    there = read_settings(folder)
    name = there["name"]
    if name == recipe.name:
        known = {key: there["arguments"].get(key) for key in recipe.from_data}
        recipe = recipe.replace(**{k: v for k, v in known.items() if v is not None})
    old, new = _flat(there), _flat(recipe.to_dict())
    different = [
        f"{key} {old.get(key)!r} there, {new.get(key)!r} here"
        for key in {**new, **old}
        if key not in _RESUMABLE_WITH and _without_path(old.get(key)) != _without_path(new.get(key))
    ]
    if different:
        raise ValueError(
            f"{folder} holds a run with other settings: {'; '.join(different)}. Choose another "
            f"folder, or resume that run: {resuming(folder)}"
        )
    return recipe.replace(data_checksum=there["data_checksum"])


def _flat(settings):
    """{field: value} of a recipe's dict."""
    flat = {"model" if key == "name" else key: value for key, value in settings.items()}
    nested = [flat.pop(key) for key in ("arguments", "training")]
    flat.pop("trellis_keras", None)
    return {**flat, **nested[0], **nested[1]}


def _without_path(value):
    # A file may move; the checksum identifies it.
    if not isinstance(value, dict):
        return value
    return {k: v for k, v in value.items() if k not in _files_of(value)}


# The contents of a run's folder


def has_run(folder: str | os.PathLike) -> bool:
    """Returns whether there is a run in `folder` that can be resumed."""
    return latest(pathlib.Path(folder).expanduser() / "checkpoints") is not None


def read_settings(folder: str | os.PathLike) -> dict[str, Any]:
    """Returns the recipe of a run as the dict in its file.

    Raises:
        FileNotFoundError: There is no run.
        ValueError: The file is damaged.
    """
    path = recipe_path(folder)
    settings = read_json(path, "a recipe of this version")
    try:
        _flat(settings)["epochs"], settings["name"], settings["data_checksum"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a recipe of this version: {error!r}") from error
    return settings


def without_paths(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns a recipe's dict without the user's folders, and the paths of the data.

    The dict keeps the names of files. The paths are those of `FILE_OPTIONS` and `data_dir`, where
    given.
    """
    options = settings["data_options"]
    paths = _files_of(options)
    names = {name: os.path.basename(path) for name, path in paths.items()}
    shared = {**settings, "data_options": {**options, **names}, "data_dir": None}
    if isinstance(settings["data_dir"], str):
        paths["data_dir"] = settings["data_dir"]
    return shared, paths


def read_paths(folder: str | os.PathLike) -> dict[str, str]:
    """Returns the paths of a run's data, or an empty dict if the file is missing (a shared run).

    Raises:
        ValueError: The file is damaged.
    """
    file = pathlib.Path(folder).expanduser() / PATHS
    if not file.exists():
        return {}
    paths = read_json(file, "a record of where the data are")
    if not all(isinstance(path, str) for path in paths.values()):
        raise ValueError(f"{file} must hold paths. Received: {paths}")
    return paths


def flat_settings(folder: str | os.PathLike) -> dict[str, Any]:
    """Returns {name: value} of all settings of a run; its zoo model is `model`.

    Raises:
        FileNotFoundError: There is no run.
        ValueError: The file is damaged.
    """
    return _flat(read_settings(folder))


def epochs_done(folder: str | os.PathLike) -> int:
    """Returns the number of epochs after which the run in `folder` would resume."""
    return progress(pathlib.Path(folder).expanduser() / "checkpoints")[0]


def is_finished(folder: str | os.PathLike) -> bool:
    """Returns whether the run in `folder` has finished its last epoch or was stopped by its rule.

    Raises:
        FileNotFoundError: There is no run.
        ValueError: Its recipe or its checkpoint cannot be read.
    """
    epochs = read_settings(folder)["training"]["epochs"]
    checkpoint = latest(pathlib.Path(folder).expanduser() / "checkpoints")
    return checkpoint is not None and is_complete(read_state(checkpoint), epochs)


def best_path(folder: str | os.PathLike) -> pathlib.Path:
    """Returns the path of the best model of the run in `folder`.

    Raises:
        FileNotFoundError: There is no run, or it has not finished an epoch.
    """
    path = recipe_path(folder).with_name(BEST)
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {BEST}: the run has not finished an epoch yet.")
    return path


def load_best(folder: str | os.PathLike, kind: type[keras.Model] = BackboneModel) -> keras.Model:
    """Returns the best model of the run in `folder`, uncompiled.

    Args:
        folder: The run's folder.
        kind: Required class of the model. Defaults to any model of the package.

    Raises:
        FileNotFoundError: There is no run, or it has not finished an epoch.
        ValueError: The model's file is damaged, or holds a model of another class.
    """
    path = best_path(folder)
    try:
        model = load_model(path)
    except ValueError as error:
        raise ValueError(
            f"{str(error).rstrip('.')}. Restore a copy of it, or train in another folder."
        ) from error
    if not isinstance(model, kind):
        raise ValueError(f"{path} must hold a {kind.__name__}. Received: {type(model).__name__}")
    return model


def representative_data(recipe: Any, rows: int = 32) -> np.ndarray:
    """Returns inputs sampled from the whole training data, for quantization in `export`.

    Args:
        recipe: The run's recipe, see `zoo.read_recipe`.
        rows: Positive integer, maximum number of sequences. Defaults to 32.

    Returns:
        An array (rows, steps, channels), or tokens (rows, steps) for text.
    """
    stream = recipe.stream(recipe.load_data().train)
    places = np.unique(np.linspace(0, len(stream) - 1, rows, dtype="int64"))
    batches = [stream[int(place)][0] for place in places]
    steps = min(x.shape[1] for x in batches)
    return np.concatenate([_without_padding(x[:1, :steps]) for x in batches])


def _without_padding(x):
    """x (1, steps, ...), with trailing NaN replaced by x repeated from its start."""
    has_value = ~np.isnan(x[0]).reshape(len(x[0]), -1).all(axis=1)
    return np.resize(x[0, : np.flatnonzero(has_value)[-1] + 1], x.shape)


def evaluate(
    recipe: Any,
    folder: str | os.PathLike,
    split: str = "test",
    target_counting: str = "all",
    verbose: str | int = 0,
) -> dict[str, float]:
    """Evaluates the best model of a run.

    Args:
        recipe: The run's recipe, see `zoo.read_recipe`. `data_dir` may differ.
        folder: The run's folder.
        split: `"train"`, `"valid"` or `"test"`.
        target_counting: For text: `"all"` counts each target once, `"original"` follows the
            authors' code, see `data.TokenStream`.
        verbose: As in `keras.Model.evaluate`.

    Returns:
        A dict of the metrics, including the published one, and the number of items that they
        average over: `targets` for text, `frames` for music, otherwise `sequences`.

    Raises:
        ValueError: An unknown split or counting, changed data, or a damaged file.
        FileNotFoundError: There is no run, it has not finished an epoch, or the data are missing.
    """
    return evaluate_model(recipe, load_best(folder), split, target_counting, verbose)


def evaluate_model(
    recipe: Any,
    model: keras.Model,
    split: str = "test",
    target_counting: str = "all",
    verbose: str | int = 0,
) -> dict[str, float]:
    """Compiles a model by its recipe and evaluates it, see `evaluate`."""
    if split not in SPLITS:
        raise ValueError(f"`split` must be one of {', '.join(SPLITS)}. Received: {split!r}")
    recipe.compile(model)
    stream = recipe.stream(getattr(recipe.load_data(), split), target_counting)
    results = model.evaluate(stream, return_dict=True, verbose=verbose)
    # Some published figures are the loss, under another name.
    results.setdefault(recipe.metric, results["loss"])
    return {**results, **_counted(recipe, stream)}


def _counted(recipe, stream):
    if recipe.reads_text:
        return {"targets": stream.targets_counted}
    frames = getattr(stream, "frames_counted", None)
    return {"sequences": stream.sequences_counted} if frames is None else {"frames": frames}


def describe(recipe: Any, model: keras.Model, loaded: Any) -> str:
    """Returns a summary of a run in lines: model, data, batches, training, arithmetic."""
    training = recipe.training
    sizes = ", ".join(f"{split} {size:,}" for split, size in loaded.sizes.items())
    if recipe.reads_text:
        size = len(loaded.vocabulary)
        guess = _UNIFORM_NLL[recipe.metric](size)
        data_line = (
            f"{recipe.data}: {sizes} {loaded.vocabulary.unit}s, vocabulary {size:,} "
            f"(a uniform guess: {recipe.metric} {guess:.4g})"
        )
        batches = f"{training.batch_size} x {training.sequence_length} tokens, " + (
            "carrying the state over"
            if recipe.stateful
            else f"the first {training.context_length} of each row context"
        )
    else:
        data_line = f"{recipe.data}: {sizes} sequences"
        batches = f"{training.batch_size} sequences, in a new order in each epoch"
    training_lines = [
        f"batches of {batches}",
        f"{training.optimizer} {training.learning_rate:g}, up to epoch {training.epochs}",
        *_describe_cycle(recipe, loaded),
    ]
    chosen = ", ".join(f"{k}={v}" for k, v in recipe.arguments.items() if v not in (None, 0, ()))
    lines = [
        f"{recipe.name}: {model.count_params():,} parameters ({chosen})",
        data_line,
        *(training_lines if training.epochs else ["no epochs: fitted in closed form"]),
        _describe_arithmetic(recipe, model),
    ]
    return "\n".join(lines)


def _describe_cycle(recipe, loaded):
    """Returns a warning if the cycle of the learning rate does not end with the last epoch."""
    training = recipe.training
    if training.decay_steps is None:
        return []
    warmup = training.warmup_steps or 0
    steps, cycle = training.epochs * len(recipe.stream(loaded.train)), warmup + training.decay_steps
    if steps == cycle:
        return []
    return [
        f"WARNING: the learning rate falls to 0 in {cycle:,} steps, but the run has {steps:,}: "
        f"set --decay-steps {max(steps - warmup, 1)}"
    ]


def _describe_arithmetic(recipe, model):
    """Describes the precision of a step, its compiler, and who chose the compiler."""
    compiler = "compiled by XLA" if model.jit_compile else "without XLA"
    why = "as requested" if recipe.jit_compile is not None else "chosen for model and machine"
    return f"{model.backbone.compute_dtype}, {compiler} ({why})"


# Outputs


def check_output(
    path: str | os.PathLike, inputs: Iterable[str | os.PathLike] = (), overwrite: bool = False
) -> pathlib.Path:
    """Returns the path of a file that may be written: see `keras_streams.files.check_output`.

    Raises:
        ValueError: If it is a file of a run, or as in `keras_streams.files.check_output`.
        FileNotFoundError: If its folder does not exist.
    """
    check_no_file_of_a_run(path)
    return files.check_output(path, inputs, overwrite)


def check_no_file_of_a_run(path: str | os.PathLike) -> None:
    """Raises ValueError if a path belongs to the files of a run. Symbolic links are followed."""
    resolved = pathlib.Path(path).expanduser().resolve()
    for folder in resolved.parents:
        if _is_run_file(resolved.relative_to(folder)) and (folder / RECIPE).is_file():
            raise ValueError(f"{path} is a file of the run in {folder}. Choose another name.")


def _is_run_file(name: pathlib.Path) -> bool:
    """Returns whether a path relative to a run's folder is one that the run writes."""
    return name.parts[0].casefold() in FILES  # some file systems ignore case


# Failures

_NOTHING = "Nothing was saved."


def resuming(folder: str | os.PathLike) -> str:
    """Returns the shell command that resumes the run in `folder`.

    Example:

    >>> resuming("runs/my first")
    "trellis-keras train --output 'runs/my first'"
    """
    return f"trellis-keras train --output {shlex.quote(str(folder))}"


@contextlib.contextmanager
def explained(folder: pathlib.Path) -> Iterator[None]:
    """Adds to an error the last checkpoint of the run and the command that resumes it.

    Args:
        folder: The run's folder.

    Raises:
        FloatingPointError: The training has diverged.
        OSError: A file could not be written or read, including TensorFlow's own errors.
    """
    try:
        yield
    except FloatingPointError as error:
        saved = _saved(folder)
        again = (
            "Resuming would diverge again: train in another folder, with" if saved else "Train with"
        )
        raise FloatingPointError(
            f"{error} {saved or _NOTHING} {again} a smaller learning rate or clip norm."
        ) from error
    except Exception as error:
        reason = _reason(error, folder)
        if reason is None:
            raise
        if parallel.process_count() > 1:
            raise OSError(
                f"{reason}. The same commands in all processes resume from the last checkpoint."
            ) from error
        saved = _saved(folder)
        again = f"resume with: {resuming(folder)}" if saved else "train again."
        raise OSError(f"{reason}. {saved or _NOTHING} When that is fixed, {again}") from error


def _saved(folder):
    """Returns a sentence that names the last checkpoint, or "" if there is none."""
    try:
        checkpoint = latest(folder / "checkpoints")
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


def _has_tensorflow():
    try:
        import tensorflow  # noqa: F401
    except ImportError:
        return False
    return True
