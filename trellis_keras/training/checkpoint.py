"""Checkpoints from which a killed run resumes bit for bit."""

import numbers
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from time import monotonic
from typing import Any

import keras
import numpy as np
from keras import ops

from trellis_keras._keras_internals import (
    all_layers,
    mark_as_seeded,
    seed_generators,
    set_initial_epoch,
)
from trellis_keras.files import make_writable, remove_unfinished
from trellis_keras.layers.checks import check_integer
from trellis_keras.training.checkpoint_files import (
    KINDS,
    TRANSIENT,
    is_complete,
    numbered,
    read,
    read_newest,
    stored_dtype,
    write,
)
from trellis_keras.types import Logs

_KEPT = 2  # checkpoints after an epoch
# Keras' callbacks reset these when training begins, before Checkpoint restores them.
_KERAS_MEMORY = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "wait"),
    keras.callbacks.ModelCheckpoint: ("best",),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
}


class Checkpoint(keras.callbacks.Callback):
    """Saves the complete training state after each epoch, and resumes from the newest checkpoint.

    `keras.callbacks.BackupAndRestore` is not exact: it restores neither random generators nor the
    state of callbacks. With this callback a run that is killed, at any moment and any number of
    times, ends with the same bits as an uninterrupted one, provided that

    * this callback is the last in the list given to `fit` (only `TimeLimit` may follow), and
      `callbacks` lists the callbacks that have state;
    * the order of the data depends only on the epoch. The state of Keras' own shuffling, and that
      of `tf.data`, cannot be saved: pass `shuffle=False` to `fit`, and shuffle with
      `data.SequenceStream(shuffle=True)` and the callback `data.EpochOrder`;
    * each epoch reads the whole data set, without `steps_per_epoch`: Keras would continue it in the
      next epoch.

    A checkpoint contains the model's weights, the optimizer's variables (including iteration and
    learning rate, which override the compiled ones), the epoch, and the callbacks' states. Two
    are kept, so that a damaged one costs only one epoch. At the start of every epoch the model's
    random generators are seeded from `seed` and the epoch. The states that a stateful layer carries
    between batches are only in checkpoints within an epoch, because `LanguageModel` resets them
    when an epoch starts. In a model of your own, reset those of Keras' stateful layers there: on
    TensorFlow they are in no checkpoint.

    To resume from a checkpoint within an epoch, the model must have the variables of its metrics,
    and `fit` must receive the remaining batches of that epoch, and stop after it: see
    `RestOfEpoch`.

    Args:
        directory: Folder of the checkpoints, created if needed.
        seed: Integer >= 0, determines all random numbers of the training. Defaults to `0`.
        callbacks: Callbacks with state, in the same order whenever the run is resumed: those
            with `get_state() -> dict` and `set_state(dict)`, such as `PlateauDecay`, and Keras'
            `EarlyStopping`, `ModelCheckpoint` and `ReduceLROnPlateau`.
        save_minutes: Positive number, minutes between checkpoints within an epoch. The newest is
            kept until the epoch ends. Defaults to `None`, no checkpoints within an epoch.

    Raises:
        ValueError: If an argument is out of range or the folder cannot be written to. When training
            begins, if all checkpoints are damaged, or the newest one belongs to another model,
            optimizer, seed or list of callbacks. After the first epoch, if one of `callbacks` comes
            after this one in the list given to `fit`, or if the weights are exchanged for their
            averages at the end of an epoch.
        FloatingPointError, OSError: After an epoch, if a weight is not finite or the checkpoint
            cannot be written. Older checkpoints are kept.

    Example:

    >>> decay = trellis_keras.training.PlateauDecay(factor=0.5, rule="worst_of_last", window=5)
    >>> checkpoint = trellis_keras.training.Checkpoint("run/checkpoints", callbacks=[decay])
    >>> model.fit(train, validation_data=valid, epochs=500, shuffle=False,
    ...     callbacks=[decay, checkpoint])
    """

    def __init__(
        self,
        directory: str | PathLike,
        *,
        seed: int = 0,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        save_minutes: float | None = None,
    ) -> None:
        super().__init__()
        self.seed = check_integer("seed", seed, minimum=0)
        is_number = isinstance(save_minutes, numbers.Real)
        if save_minutes is not None and not (is_number and save_minutes > 0):
            raise ValueError(
                f"`save_minutes` must be a positive number. Received: {save_minutes!r}"
            )
        if not isinstance(callbacks, (list, tuple)):
            raise ValueError(f"`callbacks` must be a list of callbacks. Received: {callbacks!r}")
        for callback in callbacks:
            _check_memory(callback)
        self.directory = make_writable(directory)
        self.callbacks = list(callbacks)
        self.save_minutes = save_minutes
        self.async_safe = save_minutes is None  # Keras need not wait for the logs of a step
        self._last_saved = None  # (path, callbacks' states, `_averaged_weight()`)
        self._written = None  # the newest checkpoint of this object
        self._within = None  # (path, state, arrays) of a checkpoint within an epoch
        self._batches_before = 0  # of this epoch, in an earlier process

    def on_train_begin(self, logs: Logs = None) -> None:
        _check_built(self.model)
        if self.save_minutes is not None:
            check_steps(self.params, "`save_minutes`")
        remove_unfinished(self.directory)
        if (found := read_newest(self.directory)) is not None:
            self._resume(*found)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._check_averages()
        self._check_order()
        # `fit` has read it; left in place, it would shorten the next `fit`.
        set_initial_epoch(self.model, None)
        set_seeds(self.model, self.seed, epoch)
        self._epoch, self._batches_done = epoch, self._batches_before
        self._last_time = monotonic()
        if self._within is not None:
            # Callbacks have begun the epoch once more: what was saved within it counts.
            (path, state, arrays), self._within = self._within, None
            _assign(self.model, KINDS, state, arrays, path)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._batches_done = self._batches_before + batch + 1
        if self.save_minutes is None or batch + 1 >= self.params["steps"]:
            return
        is_due = monotonic() - self._last_time >= 60 * self.save_minutes
        if is_due and not self.model.stop_training:
            self.save_within_epoch()

    def save_within_epoch(self) -> None:
        """Saves the state after the current batch, for callbacks that stop training there."""
        self._save(self._epoch, {}, self._batches_done)
        self._last_time = monotonic()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._batches_before = 0
        self._save(epoch + 1, logs or {})

    def on_train_end(self, logs: Logs = None) -> None:
        self._check_order()
        set_initial_epoch(self.model, None)

    def _save(self, epoch, logs, batch=0):
        arrays, names = _collect(self.model, epoch, with_transient=batch > 0)
        state = {
            "epoch": epoch,
            "batch": batch,
            "batches": self._batches_before + (self.params["steps"] or 0) if batch else 0,
            "seed": self.seed,
            "epochs": self.params["epochs"],
            "stopped": bool(self.model.stop_training),
            "logs": {name: np.asarray(value).tolist() for name, value in logs.items()},
            "callbacks": self._memories(),
            "variables": names,
        }
        path = self.directory / f"epoch-{epoch:04d}{f'-batch-{batch:08d}' if batch else ''}.npz"
        write(path, arrays, state)
        self._written = path
        older = [(number, p) for number, p in numbered(self.directory) if number <= (epoch, batch)]
        within = [p for (_, batches), p in older if batches and p != path]
        whole = [p for (_, batches), p in older if not batches]
        for outdated in [*within, *whole[:-_KEPT]]:
            outdated.unlink()
        saved = path, state["callbacks"], self._averaged_weight()
        self._last_saved = None if batch else saved

    def _memories(self):
        return [{"class": type(c).__name__, "state": _get_memory(c)} for c in self.callbacks]

    def _averaged_weight(self):
        """Returns the value of one weight, if the optimizer averages weights."""
        weights = self.model.trainable_variables
        if not weights or not getattr(self.model.optimizer, "use_ema", False):
            return None
        return np.array(ops.convert_to_numpy(weights[0]))

    def _check_averages(self):
        """Removes the last checkpoint if it has the averages of the weights in their place."""
        if self._last_saved is None or self._last_saved[-1] is None:
            return
        path, _, saved = self._last_saved
        if not np.array_equal(saved, self._averaged_weight()):
            self._last_saved = None
            path.unlink()
            raise ValueError(
                f"The weights have changed after {path.name} was written, as by "
                "SwapEMAWeights(swap_on_epoch=True). The checkpoint was removed. Pass "
                "swap_on_epoch=False."
            )

    def _check_order(self):
        """Removes the last checkpoint if a callback has changed its state since."""
        if self._last_saved is None:
            return
        (path, saved, _), self._last_saved = self._last_saved, None
        for before, now in zip(saved, self._memories(), strict=True):
            if before != now:
                path.unlink()
                raise ValueError(
                    f"{now['class']} changed its state after {path.name} was written. The "
                    "checkpoint was removed. Put Checkpoint last in the list given to `fit`."
                )

    def _resume(self, path, state, arrays):
        self._check_settings(path, state)
        _assign(self.model, ("model", "optimizer"), state, arrays, path)
        self._batches_before = state["batch"]
        self._within = (path, state, arrays) if state["batch"] else None
        for callback, saved in zip(self.callbacks, state["callbacks"], strict=True):
            _set_memory(callback, saved, path)
        epoch, epochs = state["epoch"], self.params["epochs"]
        if is_complete(state, epochs):
            by_callback = ", stopped by a callback" if epoch < epochs else ""
            self._say(
                f"{path}: training is complete after {epoch} epochs{by_callback}. To continue, "
                "pass a larger `epochs` (--epochs)."
            )
        elif path != self._written:  # otherwise `fit` continues in this process
            part = f"batch {state['batch']} of epoch {epoch + 1}" if state["batch"] else ""
            self._say(f"Resuming after {part or f'epoch {epoch}'} from {path}.")
        set_initial_epoch(self.model, epochs if is_complete(state, epochs) else epoch)

    def _check_settings(self, path, state):
        saved = state["seed"], [callback["class"] for callback in state["callbacks"]]
        given = self.seed, [type(callback).__name__ for callback in self.callbacks]
        if saved != given:
            raise ValueError(
                f"{path} was written with seed={saved[0]} and the states of callbacks {saved[1]}. "
                f"Received: seed={given[0]}, callbacks={given[1]}"
            )
        steps, rest = self.params["steps"], state["batches"] - state["batch"]
        is_needed = state["batch"] and not is_complete(state, self.params["epochs"])
        if is_needed and steps != rest:
            raise ValueError(
                f"{path} was written after {state['batch']} of {state['batches']} batches of an "
                f"epoch: `fit` must be given the remaining {rest}, see `RestOfEpoch`. Received: "
                f"{steps} batches"
            )

    def _say(self, text):
        if self.params.get("verbose"):
            print(text)


def check_steps(params: dict[str, Any], option: str) -> None:
    """Raises ValueError unless `fit` knows the number of batches, which an option needs."""
    if params["steps"] is None:
        raise ValueError(
            f"{option} needs a data set with a known number of batches. Received: data of unknown "
            "length"
        )


class RestOfEpoch(keras.utils.PyDataset):
    """The batches of a data set that an interrupted epoch has not read yet.

    Args:
        dataset: A `keras.utils.PyDataset`.
        batches: Number of batches that the epoch has read.

    Example:

    >>> checkpoint = trellis_keras.training.Checkpoint("run/in_parts", save_minutes=10)
    >>> epoch, batches = trellis_keras.training.checkpoint_progress("run/in_parts")
    >>> if batches:
    ...     model.evaluate(train, steps=1, verbose=0)  # creates the variables of the metrics
    ...     rest = trellis_keras.training.RestOfEpoch(train, batches)
    ...     stop = keras.callbacks.LambdaCallback(  # after this epoch
    ...         on_epoch_end=lambda epoch, logs: setattr(model, "stop_training", True))
    ...     model.fit(rest, epochs=500, shuffle=False, callbacks=[checkpoint, stop])
    >>> model.fit(train, epochs=500, shuffle=False, callbacks=[checkpoint])
    """

    def __init__(self, dataset: keras.utils.PyDataset, batches: int) -> None:
        super().__init__()
        self.dataset = dataset
        self.batches = batches
        self._has_begun = False

    def __len__(self) -> int:
        return len(self.dataset) - self.batches

    def on_epoch_begin(self) -> None:
        self._has_begun = True
        self.dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.dataset.on_epoch_end()

    def __getitem__(self, index: int) -> Any:
        # Before the epoch, Keras on TensorFlow infers the varying axes from two batches, so it sees
        # those of a whole epoch. A single remaining batch has its own shape.
        is_sample = not self._has_begun and len(self) > 1
        return self.dataset[index if is_sample else self.batches + index]


def restore_checkpoint(
    model: keras.Model, path: str | PathLike, *, weights_only: bool = False
) -> dict[str, Any]:
    """Loads a checkpoint into a built model, or raises an error and leaves it unchanged.

    Args:
        model: A built model of the same architecture.
        path: A checkpoint, or a folder of checkpoints, from which the newest undamaged one is
            loaded.
        weights_only: Boolean, whether to leave the optimizer unchanged, for evaluation. Defaults to
            `False`, or to `True` if the model is not compiled.

    Returns:
        The checkpoint's state as a dict, with `"epoch"`, the number of finished epochs, and
        `"logs"`.

    Example:

    >>> state = trellis_keras.training.restore_checkpoint(
    ...     model, "run/checkpoints", weights_only=True)
    >>> model.evaluate(test)
    """
    _check_built(model)
    path = Path(path).expanduser()
    found = (path, *read(path)) if path.is_file() else read_newest(path)
    if found is None:
        raise ValueError(f"There is no checkpoint in {str(path)!r}.")
    path, state, arrays = found
    with_optimizer = not weights_only and getattr(model, "optimizer", None) is not None
    _assign(model, ("model", "optimizer") if with_optimizer else ("model",), state, arrays, path)
    return state


def set_seeds(model: keras.Model, seed: int, epoch: int) -> None:
    """Sets every random generator of a model, nested layers included, from a seed and an epoch.

    Args:
        model: A built model.
        seed: Integer >= 0.
        epoch: Integer >= 0.
    """
    generators = [v for v in _unique(model.variables) if v.name == "seed_generator_state"]
    for index, generator in enumerate(generators):
        (value,) = np.random.SeedSequence((seed, epoch, index)).generate_state(1)
        # A generator's state is a key and a counter. 31 bits fit every backend's integer.
        generator.assign(np.array([value >> 1, 0]))
    if keras.backend.backend() == "torch":
        # There Keras' Dropout draws from its generator only if the generator was given a seed.
        for layer in all_layers(model):
            for generator in seed_generators(layer):
                mark_as_seeded(generator, seed)


# Variables


def _unique(variables):
    return list({id(variable): variable for variable in variables}.values())


def _check_built(model):
    if not model.built:
        raise ValueError("The model has no variables yet. Build it first, or call it on a batch.")


def _variables(model, kind):
    if kind == "model":
        return _unique(model.weights)
    if kind == TRANSIENT:
        metrics = [v for metric in model.metrics for v in metric.variables]
        known = {id(variable) for variable in (*model.weights, *metrics)}
        others = [v for v in model.variables if id(v) not in known]
        # Evaluation states are reset by each evaluation; they may not exist yet.
        return _unique([*(v for v in others if "evaluation_state" not in v.path), *metrics])
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return _unique(model.optimizer.variables)


def _collect(model, epoch, with_transient=False):
    """Returns the values of all variables by their names in the file, and their descriptions."""
    arrays, names = {}, {kind: [] for kind in KINDS}
    for kind in KINDS if with_transient else KINDS[:-1]:
        for index, variable in enumerate(_variables(model, kind)):
            array = ops.convert_to_numpy(variable)
            if kind == "model" and keras.backend.is_float_dtype(array.dtype.name):
                # A constant, such as a mask, may be infinite.
                valid = np.isfinite(array) if variable.trainable else ~np.isnan(array)
                if not valid.all():
                    raise FloatingPointError(
                        f"After epoch {epoch} the weight {variable.path!r} is not finite."
                    )
            arrays[f"{kind}.{index:05d}"] = array.view(stored_dtype(array.dtype))
            names[kind].append({"path": variable.path, "dtype": array.dtype.name})
    return arrays, names


def _assign(model, kinds, state, arrays, path):
    """Assigns saved values to all variables, or raises before the first assignment."""
    pairs = []
    for kind in kinds:
        variables, saved = _variables(model, kind), state["variables"][kind]
        for index, (variable, entry) in enumerate(zip(variables, saved, strict=False)):
            array = arrays[f"{kind}.{index:05d}"].view(np.dtype(entry["dtype"]))
            dtype = keras.backend.standardize_dtype(variable.dtype)
            if _signature(kind, variable.path, variable.shape, dtype) != _signature(
                kind, entry["path"], array.shape, entry["dtype"]
            ):
                raise ValueError(
                    f"{path} is a checkpoint of another model or optimizer. The first difference: "
                    f"the checkpoint has {entry['path']!r} of shape {array.shape} and dtype "
                    f"{entry['dtype']}, the model has {variable.path!r} of shape "
                    f"{tuple(variable.shape)} and dtype {dtype}. Nothing was changed."
                )
            pairs.append((variable, array))
        if len(variables) != len(saved):
            ours, theirs = [v.path for v in variables], [entry["path"] for entry in saved]
            extra = max(ours, theirs, key=len)[min(len(ours), len(theirs))]
            by_metrics = kind == TRANSIENT and len(ours) < len(theirs)
            remedy = " Evaluate a batch first: that creates the variables of metrics."
            raise ValueError(
                f"{path} is a checkpoint of another model or optimizer. It has {len(theirs)} "
                f"{kind} variables, the model has {len(ours)}; the first without a counterpart is "
                f"{extra!r}. Nothing was changed.{remedy if by_metrics else ''}"
            )
    for variable, array in pairs:
        variable.assign(array)
    if derived := [x for x in all_layers(model) if isinstance(x, keras.layers.Normalization)]:
        for layer in derived:  # which computes with constants, as after `load_weights`
            layer.finalize_state()
        for kind in ("train", "test", "predict"):  # compiled with the former constants
            if getattr(model, f"{kind}_function", None) is not None:
                getattr(model, f"make_{kind}_function")(force=True)


def _signature(kind, path, shape, dtype):
    """Returns what a variable shares with its counterpart in another process or backend."""
    return _role(kind, path), tuple(shape), "int" if "int" in dtype else dtype


def _role(kind, path):
    """Returns the part of a path that is the same whenever the model is created.

    The names before a layer's own depend on how the model was built, and Keras numbers the layers
    of a second model in a process.
    """
    if kind == TRANSIENT:  # generators, metrics and states are identified by their order
        return re.sub(r"_\d+$", "", path.split("/")[-1])
    if kind == "optimizer":  # one word, which ends with `momentum` or `velocity`
        return re.split("[/_]", re.sub(r"_\d+$", "", path))[-1]
    return re.sub(r"_\d+(?=/|$)", "", "/".join(path.split("/")[-2:]))


# Callbacks


def has_memory(callback: keras.callbacks.Callback) -> bool:
    """Returns whether `Checkpoint` can save what a callback remembers."""
    return hasattr(callback, "get_state") or isinstance(callback, tuple(_KERAS_MEMORY))


def _check_memory(callback):
    if not has_memory(callback):
        raise ValueError(
            f"{type(callback).__name__} in `callbacks` has no methods `get_state` and `set_state`."
        )
    if getattr(callback, "restore_best_weights", False):
        raise ValueError(
            "The weights that EarlyStopping(restore_best_weights=True) keeps cannot be saved. Save "
            "the best model with BestModel instead."
        )


def _memory_attributes(callback):
    return next(names for kind, names in _KERAS_MEMORY.items() if isinstance(callback, kind))


def _get_memory(callback):
    if hasattr(callback, "get_state"):
        return callback.get_state()
    return {name: getattr(callback, name) for name in _memory_attributes(callback)}


def _set_memory(callback, saved, path):
    try:
        if hasattr(callback, "set_state"):
            callback.set_state(saved["state"])
            return
        for name in _memory_attributes(callback):
            value = saved["state"][name]
            if not isinstance(value, (int, float, type(None))):
                raise ValueError(f"{name} is {value!r}")
            setattr(callback, name, value)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has no state of {saved['class']}: {error!r}") from error
