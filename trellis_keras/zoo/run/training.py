"""Trains a model with its recipe; training resumes after a kill.

A recipe is any object with the attributes and methods of `trellis_keras.zoo.Recipe`.
"""

import contextlib
import functools
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import keras

from keras_streams.files import atomic_write
from trellis_keras.data import EpochOrder
from trellis_keras.files import own_file
from trellis_keras.jobs import Job, different_settings
from trellis_keras.terminal import printable
from trellis_keras.training import devices as parallel
from trellis_keras.training.best_model import BestModel
from trellis_keras.training.checkpoint import Checkpoint, RestOfEpoch, has_memory
from trellis_keras.training.checkpoint_files import latest, progress
from trellis_keras.training.history import HistoryCSV
from trellis_keras.training.progress_bar import BatchProgress, ProgressBar
from trellis_keras.training.stopping import EpochInterrupted, StopOnNaN, TimeLimit
from trellis_keras.zoo.environment import record
from trellis_keras.zoo.run.description import describe, describe_end
from trellis_keras.zoo.run.failures import explained
from trellis_keras.zoo.run.folder import (
    BEST,
    CHECKPOINTS,
    ENVIRONMENT,
    FILES,
    HISTORY,
    PATHS,
    RECIPE,
    epochs_done,
    files_of,
    flat,
    has_run,
    is_finished,
    is_run_file,
    read_settings,
    resuming,
    without_paths,
)
from trellis_keras.zoo.run.observers import observers, write_settings

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


def train(
    recipe: Any,
    folder: str | os.PathLike,
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
        recipe: A `zoo.Recipe`. If `folder` contains a run, it must be that run's recipe; epochs,
            data paths, precision and `jit_compile` may differ.
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
    observed = {
        "gradient_norms": gradient_norms,
        "sample_length": sample_length,
        "graph": graph,
        "profile": profile,
    }
    _check_processes(recipe, limit, observed)
    if verbose == "auto":
        verbose = 1 if sys.stdout.isatty() or "ipykernel" in sys.modules else 2
    options = {
        "callbacks": callbacks,
        "observed": observed,
        "limit": limit,
        "save_minutes": save_minutes,
        "devices": devices,
    }
    if parallel.process_index():
        with tempfile.TemporaryDirectory() as copy:
            return _train(recipe, pathlib.Path(copy), verbose=0, **options)
    model = _train(recipe, folder, verbose=verbose, **options)
    if verbose and (folder / BEST).is_file():
        print(printable(describe_end(recipe, folder)), flush=True)
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


def _train(recipe, folder, devices, **options):
    with Job(folder, FILES, functools.partial(has_run, folder)).open():
        _share(folder)
        recipe = _continued(recipe, folder)
        _check_input(recipe, folder)
        loaded = recipe.load_data()
        recipe = recipe.with_data(loaded)
        parallelism = parallel.data_parallel(devices, recipe.training.batch_size)
        with parallelism as building, explained(folder):
            return _fit(recipe, loaded, folder, building, **options)


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


def _check_input(recipe, folder):
    """Raises ValueError if the run would overwrite the user's data."""
    for path in files_of(recipe.data_options).values():
        path = own_file(path, recipe.data_dir)
        inside = path.resolve().parent == folder.resolve()
        if inside and is_run_file(pathlib.Path(path.resolve().name)):
            raise ValueError(
                f"A run in {folder} would replace its data, {path}. Choose another folder."
            )


def _continued(recipe, folder):
    """Returns the recipe with the data checksum of the folder's run, after comparing both."""
    if not (folder / RECIPE).exists() or latest(folder / CHECKPOINTS) is None:
        return recipe  # a process killed before its first checkpoint left nothing to keep
    there = read_settings(folder)
    name = there["name"]
    if name == recipe.name:
        known = {key: there["arguments"].get(key) for key in recipe.from_data}
        recipe = recipe.replace(**{k: v for k, v in known.items() if v is not None})
    old, new = (_without_files(flat(settings)) for settings in (there, recipe.to_dict()))
    if different := different_settings(old, new, free=_RESUMABLE_WITH):
        raise ValueError(
            f"{folder} holds a run with other settings: {different}. Choose another folder, or "
            f"resume that run: {resuming(folder)}"
        )
    return recipe.replace(data_checksum=there["data_checksum"])


def _without_files(settings):
    # A file may move; the checksum identifies it.
    options = settings["data_options"]
    kept = {name: value for name, value in options.items() if name not in files_of(options)}
    return {**settings, "data_options": kept}


def _fit(recipe, loaded, folder, building, verbose, callbacks, observed, limit, save_minutes):
    with building:
        model = recipe.build(vocabulary=loaded.vocabulary if recipe.reads_text else None)
    train_stream = recipe.stream(loaded.train, shuffle=True)
    valid_stream = recipe.stream(loaded.valid)
    epochs, batches = progress(folder / CHECKPOINTS)
    if hasattr(train_stream, "epoch"):
        train_stream.epoch = epochs
    left = len(train_stream) * (recipe.training.epochs - epochs) - batches
    watching = observers(folder, model, recipe.stream(loaded.train), loaded, left, **observed)
    if verbose:
        watching.append(ProgressBar())
    if verbose == 2:
        watching.append(BatchProgress())
    if not (folder / RECIPE).exists():
        write_settings(recipe, folder)
    if verbose:
        print(printable(describe(recipe, model, loaded)), flush=True)
    first = _callbacks(recipe, folder, train_stream, callbacks, watching)
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


def _callbacks(recipe, folder, train_stream, others, watching):
    # Each epoch has its own order, also after a resume.
    order = [EpochOrder(train_stream)] if hasattr(train_stream, "epoch") else []
    # The recipe's and other callbacks come first, so that their logs are recorded.
    records = [*watching, HistoryCSV(folder / HISTORY), BestModel(folder / BEST)]
    # StopOnNaN first, so that no other callback records an epoch with a NaN loss.
    return [StopOnNaN(), *order, *recipe.callbacks(), *others, *records]


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
