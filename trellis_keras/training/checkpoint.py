"""Checkpoints from which a killed run goes on as if it had not been killed."""

import re

import keras
import numpy as np
from keras import ops

from trellis_keras.training import checkpoint_files, checkpoint_state
from trellis_keras.training.checkpoint_files import latest
from trellis_keras.training.checkpoint_state import FORMAT, KINDS


class Checkpoint(keras.callbacks.Callback):
    """Saves the whole state of training after an epoch, and resumes from the newest one.

    Takes the place of `keras.callbacks.BackupAndRestore`, which saves no random state and no
    callback's memory, so that a resumed run ends elsewhere. Here a run that was killed, at any
    moment and any number of times, ends with the weights of one that was not, if

    * this callback is the LAST in the list given to `fit`, so that what the others do at the end
      of an epoch is saved (only `TimeLimit`, which has no memory, comes behind it); the callbacks
      with a memory are named in `callbacks`;
    * the order of the data depends on the epoch alone. Keras shuffles arrays and `PyDataset`s with
      a random state that nothing can save: give `fit` the argument `shuffle=False`, and shuffle
      in the data set if need be.

    Saved are the model's weights, the optimizer's variables with iteration and learning rate, the
    epoch and the callbacks' states. The history that a stateful layer carries is not: a
    `LanguageModel` begins each epoch with an empty one. Random generators are not saved either: at
    the begin of an epoch each one in the model is set from `seed` and the epoch. What was restored
    comes before what was compiled: to go on with another learning rate, set it after the restart
    in a callback.

    A checkpoint is a folder `epoch-0007` (seven epochs finished), see `checkpoint_files`. It is
    written aside and then renamed, and older ones are removed only then.

    Args:
        directory: where the folders go. Created if need be.
        seed: integer, 0 or more, from which all random numbers of the training follow.
        callbacks: objects with `get_state() -> JSON-able dict` and `set_state(dict)`, such as
            `PlateauDecay`, in the same order when resuming.
        keep: number of checkpoints to keep, 1 or more. With 2 a damaged one costs an epoch.
        save_freq: `"epoch"`, or the number of epochs from one checkpoint to the next. The last
            epoch is always saved.

    Raises:
        ValueError: when constructed, for a directory that cannot be written to and for arguments
            out of range; when training begins, if no checkpoint there is whole or the newest is of
            another model, optimizer, seed or list of callbacks; after the first epoch, if a
            callback in `callbacks` comes later than this one in the list given to `fit`.
        FloatingPointError: after an epoch, if a weight is not finite. Nothing is written then: the
            checkpoints that are there are good ones. `StopOnNaN` stops earlier.
        OSError: after an epoch, if its checkpoint cannot be written. The older ones stay.

    Example:

    >>> decay = trellis_keras.training.PlateauDecay.trellisnet_word()
    >>> checkpoint = trellis_keras.training.Checkpoint("run/checkpoints", callbacks=[decay])
    >>> model.fit(train, validation_data=valid, epochs=500, shuffle=False,
    ...     callbacks=[decay, checkpoint])
    """

    def __init__(self, directory, *, seed=0, callbacks=(), keep=2, save_freq="epoch"):
        super().__init__()
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"`seed` must be an integer of 0 or more. Received: seed={seed!r}")
        if keep < 1:
            raise ValueError(f"`keep` must be 1 or more. Received: keep={keep}")
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq >= 1):
            raise ValueError(
                "`save_freq` must be 'epoch' or a number of epochs of 1 or more. "
                f"Received: save_freq={save_freq!r}"
            )
        for callback in callbacks:
            if not (hasattr(callback, "get_state") and hasattr(callback, "set_state")):
                raise ValueError(
                    f"{type(callback).__name__} in `callbacks` has no `get_state` and `set_state`, "
                    "so its memory cannot be saved. Name only those that have."
                )
        self.directory = checkpoint_files.make_writable(directory)
        self.seed = seed
        self.callbacks = list(callbacks)
        self.keep = keep
        self.save_freq = save_freq
        self._saved = None  # (folder, callbacks' states) of the epoch that has just ended

    def on_train_begin(self, logs=None):
        _check_built(self.model)
        _build_optimizer(self.model)
        checkpoint_files.remove_unfinished(self.directory)
        folder = latest(self.directory)
        if folder is not None:
            self._resume(folder)

    def on_epoch_begin(self, epoch, logs=None):
        self._check_order()
        # `fit` has read it by now; left there, it would also shorten the next `fit`.
        self.model._initial_epoch = None
        set_seeds(self.model, self.seed, epoch)

    def on_epoch_end(self, epoch, logs=None):
        last = epoch + 1 == self.params["epochs"] or self.model.stop_training
        if last or (epoch + 1) % (1 if self.save_freq == "epoch" else self.save_freq) == 0:
            self._save(epoch + 1, logs or {})

    def on_train_end(self, logs=None):
        self._check_order()
        self.model._initial_epoch = None

    def _save(self, epoch, logs):
        _check_finite(self.model, epoch)
        arrays, names = _take(self.model)
        states = self._states()
        state = {
            "format": FORMAT,
            "epoch": epoch,
            "seed": self.seed,
            "epochs": self.params["epochs"],
            "stopped": bool(self.model.stop_training),
            "logs": {name: float(value) for name, value in logs.items()},
            "callbacks": states,
            "variables": names,
        }
        folder = checkpoint_files.write(self.directory, epoch, arrays, state)
        checkpoint_files.remove_older(self.directory, epoch, self.keep)
        self._saved = (folder, states)

    def _states(self):
        return [{"class": type(c).__name__, "state": c.get_state()} for c in self.callbacks]

    def _check_order(self):
        if self._saved is None:
            return
        (folder, saved), self._saved = self._saved, None
        for before, now in zip(saved, self._states(), strict=True):
            if before != now:
                checkpoint_files.remove(folder)
                raise ValueError(
                    f"{now['class']} changed its state after {folder.name} was written. Put "
                    "Checkpoint last in the list of callbacks given to `fit`. The checkpoint "
                    "was removed."
                )

    def _resume(self, folder):
        state, arrays = checkpoint_state.read(folder)
        self._check_settings(folder, state)
        _put(self.model, arrays, state["variables"], folder, KINDS)
        for callback, saved in zip(self.callbacks, state["callbacks"], strict=True):
            _restore_memory(callback, saved, folder)
        epoch, epochs = state["epoch"], self.params["epochs"]
        stopped = state["stopped"] and epochs <= state["epochs"]
        if stopped or epoch >= epochs:
            self._say(
                f"{folder}: training is complete after {epoch} epochs"
                f"{', when a callback stopped it' if stopped else ''}. Nothing is left to do; "
                "give `fit` a larger `epochs` to go on."
            )
            epoch = max(epoch, epochs)
        else:
            self._say(f"Resuming after epoch {epoch} from {folder}.")
        self.model._initial_epoch = epoch

    def _check_settings(self, folder, state):
        if state["seed"] != self.seed:
            raise ValueError(
                f"{folder} was written with seed={state['seed']}, which the rest of the run must "
                f"have too. Received: seed={self.seed}"
            )
        saved = [callback["class"] for callback in state["callbacks"]]
        given = [type(callback).__name__ for callback in self.callbacks]
        if saved != given:
            raise ValueError(
                f"{folder} holds the states of callbacks {saved}. Received: callbacks={given}"
            )

    def _say(self, text):
        if self.params.get("verbose"):
            print(text)


def restore(model, path, *, weights_only=False):
    """Loads a checkpoint of `Checkpoint` into a model.

    Args:
        model: a built model of the same architecture.
        path: the folder of a checkpoint, or the directory that holds them, of which the newest
            whole one is taken.
        weights_only: whether to leave the optimizer as it is, for evaluation. That is also done
            for a model that was not compiled.

    Returns:
        The dict of `state.json`, with `"epoch"`, the number of finished epochs, and `"logs"`.

    Raises:
        ValueError: if there is no checkpoint, if it is damaged, or if a variable differs; the
            model is then unchanged.

    Example:

    >>> state = trellis_keras.training.restore(model, "run/checkpoints", weights_only=True)
    >>> model.evaluate(test)
    """
    folder = checkpoint_files.find(path)
    _check_built(model)
    kinds = ("model",)
    if not weights_only and getattr(model, "optimizer", None) is not None:
        _build_optimizer(model)
        kinds = KINDS
    state, arrays = checkpoint_state.read(folder)
    _put(model, arrays, state["variables"], folder, kinds)
    return state


def set_seeds(model, seed, epoch):
    """Sets every random generator of a model from a seed and an epoch.

    Args:
        model: a model; generators are found in its layers and theirs.
        seed: integer, 0 or more.
        epoch: integer, 0 or more.

    Example:

    >>> trellis_keras.training.set_seeds(model, seed=0, epoch=3)
    """
    # Other variables that are no weights, such as a carried history, keep their values.
    generators = [v for v in _unique(model.variables) if v.name == "seed_generator_state"]
    for index, generator in enumerate(generators):
        (value,) = np.random.SeedSequence((seed, epoch, index)).generate_state(1)
        # A generator's state is a key and a count. 31 bits fit every backend's integer.
        generator.assign(np.array([value >> 1, 0]))


def _restore_memory(callback, saved, folder):
    try:
        callback.set_state(saved["state"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} has no state of {saved['class']}: {error!r}") from error


def _check_built(model):
    if not model.built:
        raise ValueError(
            "A checkpoint needs a model with variables. Build it first, by `build` or by calling "
            "it on a batch."
        )


def _check_finite(model, epoch):
    for variable in _unique(model.weights):
        if not keras.backend.is_float_dtype(variable.dtype):
            continue
        # A constant, such as a mask, may be infinite.
        lost = ops.convert_to_numpy(variable)
        lost = ~np.isfinite(lost) if variable.trainable else np.isnan(lost)
        if lost.any():
            raise FloatingPointError(
                f"After epoch {epoch} the weight {variable.path!r} is not finite."
            )


def _build_optimizer(model):
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _unique(variables):
    return list({id(variable): variable for variable in variables}.values())


def _variables(model, kind):
    return _unique(model.weights if kind == "model" else model.optimizer.variables)


def _take(model):
    """Returns all variables' values by name in the file, and what they are called."""
    arrays, names = {}, {}
    for kind in KINDS:
        variables = _variables(model, kind)
        names[kind] = [
            {"path": v.path, "dtype": keras.backend.standardize_dtype(v.dtype)} for v in variables
        ]
        for index, variable in enumerate(variables):
            array = ops.convert_to_numpy(variable)
            arrays[f"{kind}.{index:05d}"] = array.view(_storable(array.dtype))
    return arrays, names


def _storable(dtype):
    """NumPy's files do not know bfloat16 and float8: their bits are saved as integers."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"uint{8 * dtype.itemsize}")


def _put(model, arrays, names, folder, kinds):
    """Assigns saved values to all variables, or raises before the first."""
    pairs = []
    for kind in kinds:
        variables = _variables(model, kind)
        for index, (variable, name) in enumerate(zip(variables, names[kind], strict=False)):
            array = arrays[f"{kind}.{index:05d}"]
            _check_same(kind, variable, name, array, folder)
            dtype = ops.convert_to_numpy(variable).dtype
            pairs.append((variable, array.view(dtype) if _storable(dtype) != dtype else array))
        _check_number(kind, variables, names[kind], folder)
    for variable, array in pairs:
        variable.assign(array)


def _check_same(kind, variable, name, array, folder):
    dtype = keras.backend.standardize_dtype(variable.dtype)
    stored = _storable(ops.convert_to_numpy(variable).dtype)
    integers = "int" in dtype and "int" in name["dtype"]  # the iteration: int32 on JAX
    if (
        tuple(variable.shape) != array.shape
        or _role(kind, variable.path) != _role(kind, name["path"])
        or not (integers or dtype == name["dtype"])
        or not (array.dtype.kind == stored.kind and (integers or array.dtype == stored))
    ):
        raise ValueError(
            f"{folder} is not a checkpoint of this model and optimizer. The first difference: it "
            f"has {name['path']!r} of shape {array.shape} and dtype {name['dtype']} (stored as "
            f"{array.dtype}) where the model has {variable.path!r} of shape "
            f"{tuple(variable.shape)} and dtype {dtype}. Nothing was changed."
        )


def _check_number(kind, variables, names, folder):
    if len(variables) != len(names):
        wanted, saved = [v.path for v in variables], [name["path"] for name in names]
        first = max(wanted, saved, key=len)[min(len(wanted), len(saved))]
        raise ValueError(
            f"{folder} is not a checkpoint of this model and optimizer. It has {len(saved)} {kind} "
            f"variables where {len(wanted)} are wanted; the first without a counterpart is "
            f"{first!r}. Nothing was changed."
        )


def _role(kind, path):
    """Returns the part of a path that is the same whenever the same model is made.

    The names above a layer's depend on how the model was built, and Keras numbers the layers of
    a process's second model. An optimizer's path has all that in one word; its last part says
    `momentum` or `velocity`.
    """
    if kind == "optimizer":
        return re.split("[/_]", path)[-1]
    return re.sub(r"_\d+(?=/|$)", "", "/".join(path.split("/")[-2:]))
