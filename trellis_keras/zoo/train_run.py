"""Trains a recipe in a run folder, or resumes the run there."""

import contextlib
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import keras

from trellis_keras.data import EpochOrder
from trellis_keras.files import checksum, own_file
from trellis_keras.jobs import Job, different_settings
from trellis_keras.terminal import printable
from trellis_keras.training import devices as parallel
from trellis_keras.training.best_model import BestModel
from trellis_keras.training.checkpoint import Checkpoint, RestOfEpoch, has_memory
from trellis_keras.training.checkpoint_files import is_complete, latest_checkpoint
from trellis_keras.training.gradient_norms import GradientNorms
from trellis_keras.training.history import HistoryCSV
from trellis_keras.training.stopping import EpochInterrupted, StopOnNaN, TimeLimit
from trellis_keras.training.tensorboard import TextSamples, summary_writer, write_graph
from trellis_keras.zoo import run
from trellis_keras.zoo.environment import record
from trellis_keras.zoo.progress_bar import BatchProgress, ProgressBar
from trellis_keras.zoo.registry import Recipe
from trellis_keras.zoo.run_messages import describe, describe_end, explained

# Settings that may change when a run is resumed: its length, what comes from the data, and how the
# machine computes.
_RESUMABLE_WITH = ("epochs", "data_checksum", "vocabulary_size", "jit_compile", "dtype_policy")
_PROMPT = 64  # tokens that a sample continues


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
            `history.csv`. Defaults to `0`, no measurement. This and the next three do not affect
            training, and may differ when a run is resumed.
        sample_length: Integer, number of tokens that a language model samples for TensorBoard after
            each epoch (see `training.TextSamples`), continuing the start of the validation text.
            Defaults to `0`, no samples.
        graph: Boolean, whether to write the model's graph for TensorBoard before training starts
            (on TensorFlow).
        profile: (first, last) training batch to profile for TensorBoard, counted from 1 in this
            process. Defaults to `None`, no profile.
        max_minutes: Time limit, before which training stops, even within an epoch (see
            `training.TimeLimit`); the next call resumes. Defaults to `None`, no limit.
        save_minutes: Minutes between checkpoints within an epoch. With None there are checkpoints
            only after epochs, and `max_minutes` stops training after an epoch. Defaults to `10`.
        devices: Positive integer, number of devices on this machine among which the rows of a
            batch are divided. It may differ when a run is resumed. Defaults to `None`, one device,
            or, with several processes, all devices of each.

    Returns:
        The trained model.

    Raises:
        ValueError: If the folder cannot be written to, is in use, or contains a run with another
            recipe; or the data, the devices or another argument are wrong.
        FloatingPointError: If the loss is no longer finite. Nothing from that epoch was saved.
        OSError: If a file could not be written, or the data could not be read. The run resumes from
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
    limit = max_minutes and TimeLimit(60 * max_minutes, command=run.resuming(folder))
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
        # The folder is locked, and a failed start leaves nothing in it.
        stack.enter_context(
            Job(folder, run.FILES, lambda: run.saved_state(folder) is not None).open()
        )
        _share(folder)
        state = run.saved_state(folder)
        recipe = _continued(recipe, folder, state)
        loaded = recipe.load_data()
        recipe = recipe.with_data(loaded)
        parallelism = parallel.data_parallel(devices, recipe.training.batch_size)
        with parallelism as building, explained(folder):
            with building:
                model = recipe.build(vocabulary=loaded.vocabulary)
            settings = observed, callbacks, verbose, limit, save_minutes
            _fit(recipe, model, loaded, folder, state, *settings)
        if verbose and (folder / run.BEST).is_file():
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


def _share(folder):
    """Sends the recipe and checkpoint that process 0 resumes from to the other processes."""
    if parallel.process_count() == 1:
        return
    checkpoint = latest_checkpoint(folder / run.CHECKPOINTS)
    found = [] if checkpoint is None else [run.RECIPE, f"{run.CHECKPOINTS}/{checkpoint.name}"]
    for name in json.loads(parallel.broadcast(json.dumps(found).encode())):
        content = parallel.broadcast((folder / name).read_bytes() if found else b"")
        if not found:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)


def _continued(recipe, folder, state):
    """Returns the recipe with the data checksum of the folder's run, after comparing both."""
    if recipe.data == "text" and (path := recipe.data_options.get("path")):
        data = own_file(path, recipe.data_dir).resolve()
        if data.parent == folder.resolve() and data.name.casefold() in run.FILES:
            raise ValueError(
                f"A run in {folder} would replace its data, {data}. Choose another folder."
            )
    if not (folder / run.RECIPE).exists() or state is None:
        # A process killed between the records of its first epoch and the checkpoint leaves one row,
        # and then perhaps a model.
        rows = len(run.history(folder))
        if rows > 1 or (not rows and (folder / run.BEST).exists()):
            missing = run.RECIPE if state is not None else run.CHECKPOINTS
            raise ValueError(
                f"{folder} has a trained model, which training would replace, but cannot be "
                f"resumed: {missing} is missing. Choose another folder, or restore {missing}."
            )
        return recipe
    there = run.read_recipe(folder)
    if different := different_settings(_compared(there), _compared(recipe), free=_RESUMABLE_WITH):
        raise ValueError(
            f"{folder} holds a run with other settings: {different}. Choose another folder, or "
            f"resume that run: {run.resuming(folder)}"
        )
    return recipe.replace(data_checksum=there.data_checksum)


def _compared(recipe):
    """Returns the settings of a recipe without the file of a text: the checksum identifies it."""
    options = {"model": recipe.name, **recipe.options()}
    others = {name: value for name, value in options["data_options"].items() if name != "path"}
    return options | {"data_options": others}


def _fit(recipe, model, loaded, folder, state, observed, callbacks, verbose, limit, save_minutes):
    train_stream = recipe.batches(loaded.train, shuffle=True)
    valid_stream = recipe.batches(loaded.valid)
    recipe.batches(loaded.test)  # raises now, rather than after training, if it is too short
    epochs, batches = (state["epoch"], state["batch"]) if state else (0, 0)
    is_finished = state is not None and is_complete(state, recipe.training.epochs)
    if hasattr(train_stream, "epoch"):
        train_stream.epoch = epochs
    left = len(train_stream) * (recipe.training.epochs - epochs) - batches
    watching = observers(folder, model, recipe.batches(loaded.train), loaded, left, **observed)
    if verbose:
        watching.append(ProgressBar())
    if verbose == 2:
        watching.append(BatchProgress())
    if not (folder / run.RECIPE).exists():
        _write_settings(recipe, folder)
    if verbose:
        print(printable(describe(recipe, model, loaded, is_new=state is None)), flush=True)
    # Each epoch has its own order, also after a resume.
    order = [EpochOrder(train_stream)] if hasattr(train_stream, "epoch") else []
    # StopOnNaN first, so that no other callback records an epoch with a NaN loss. The recipe's and
    # other callbacks next, so that their logs are recorded.
    records = [*watching, HistoryCSV(folder / run.HISTORY), BestModel(folder / run.BEST)]
    first = [StopOnNaN(), *order, *recipe.training.callbacks(), *callbacks, *records]
    # Observers may differ when a run is resumed.
    remembering = [c for c in first if has_memory(c) and c not in watching]
    # After them, so that it saves their state at the end of the epoch.
    checkpoint = Checkpoint(
        folder / run.CHECKPOINTS,
        seed=recipe.seed or 0,
        callbacks=remembering,
        save_minutes=save_minutes,
    )

    # After the checkpoint, which rejects a model other than the run's.
    def write_records(logs):
        if not (is_finished and _was_finished(folder, state)):  # else nothing is trained
            run.write_recipe(recipe, folder)
        if not is_finished:
            record(folder / run.ENVIRONMENT, recipe.dtype_policy, epochs, batches)

    last = [keras.callbacks.LambdaCallback(on_train_begin=write_records)]
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
            # A batch creates the variables of all metrics. Not shuffled: Keras inspects the batch,
            # ends an epoch, then reads it, and the next epoch may end with another length.
            in_order = recipe.batches(loaded.train)
            last_batch = RestOfEpoch(in_order, len(in_order) - 1)
            model.evaluate(parallel.own_rows(last_batch), verbose=0)
            # After the checkpoint, so that it does not record training as finished.
            stop = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", True)
            )
            fit(RestOfEpoch(train_stream, batches), stop)
        if not (batches and limit is not None and limit.stopped):
            fit(train_stream)


def _was_finished(folder, state):
    """Returns whether a run is complete by its own recipe, which may have other epochs."""
    is_known = (folder / run.RECIPE).exists()
    return is_known and is_complete(state, run.read_recipe(folder).training.epochs)


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
    logs = folder / run.TENSORBOARD
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
    writer = summary_writer(folder / run.TENSORBOARD)
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
