"""Callbacks that stop training, record it, and log to TensorBoard."""

import contextlib
import csv
import io
import itertools
import json
import math
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.files import atomic_write
from keras_streams.protocol import at_least_float32, without_carried_states
from trellis_keras.files import read_text
from trellis_keras.models.gradients import with_gradient
from trellis_keras.training.checkpoint import Checkpoint
from trellis_keras.types import Logs, Tensor

# Stopping


class StopOnNaN(keras.callbacks.Callback):
    """Raises an error when the loss is NaN or infinite, before anything is saved.

    `keras.callbacks.TerminateOnNaN` lets the epoch end as usual: the invalid weights are validated,
    recorded and saved. Its `raise_error=True` leaves the model without variables on JAX. This
    callback raises at the end of the epoch, before other callbacks run: place it first in the list.
    A NaN or infinite validation loss also stops training, because the last step of an epoch may
    corrupt the weights after its loss was computed.

    Raises:
        FloatingPointError: In `fit`, with the epoch and the step, both counted from 1. With
            `steps_per_execution` the step is the last one of the execution.

    Example:

    >>> checkpoint = trellis_keras.training.Checkpoint("run/not_lost")
    >>> model.fit(x, y, callbacks=[trellis_keras.training.StopOnNaN(), checkpoint])
    """

    def __init__(self) -> None:
        super().__init__()
        self._error: str | None = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch
        self._error = None

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        loss = logs["loss"]  # the mean of the epoch so far: once NaN, it stays NaN
        if not math.isfinite(loss) and self._error is None:
            self._error = f"The loss is {loss} at step {batch + 1} of epoch {self._epoch + 1}."
            # Raised later: on JAX the model has no variables until the epoch ends.
            self.model.stop_training = True

    def on_test_begin(self, logs: Logs = None) -> None:
        self._check()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._check()
        loss = (logs or {}).get("val_loss", 0.0)
        if not math.isfinite(loss):
            raise FloatingPointError(f"The validation loss after epoch {epoch + 1} is {loss}.")

    def _check(self):
        if self._error is not None:
            raise FloatingPointError(self._error)


class _Longest:
    """The longest of several times, without the first one, which includes compilation."""

    def __init__(self):
        self._count = 0

    def add(self, seconds):
        """Counts a time, and returns the longest one (the first one, if it is the only one)."""
        self._count += 1
        self._seconds = seconds if self._count <= 2 else max(self._seconds, seconds)
        return self._seconds


class TimeLimit(keras.callbacks.Callback):
    """Stops training before a time limit, after an epoch or within one.

    For batch queues and notebooks with limited time: a later process resumes from the last
    checkpoint. The time counts from the construction of this callback, so construct it before the
    data and the model. Training stops after an epoch if another one would exceed the limit; an
    epoch is expected to take as long as the longest one of this `fit`, including validation and
    other callbacks. The first one, which includes compilation, counts only until the second has
    ended. At least one epoch is trained.

    With `checkpoint`, training also stops within an epoch: when another two batches would exceed
    the limit, the state is saved and `EpochInterrupted` is raised. Batches are timed like epochs.

    Place it after `Checkpoint`: a checkpoint that records stopped training would not be resumed.

    Args:
        seconds: Positive number, the limit in seconds.
        checkpoint: The `Checkpoint` of the same `fit`, for its `save_within_epoch`. Defaults to
            `None`.
        command: String, the command that resumes training, for the final message. Defaults to
            `None`.
        clock: Callable that returns the time in seconds. Defaults to `time.monotonic`.

    Attributes:
        stopped: Boolean, whether the limit has stopped the last `fit`.

    Raises:
        ValueError: If `seconds` is not positive.
        EpochInterrupted: Within an epoch, once its state has been saved.

    Example:

    >>> limit = trellis_keras.training.TimeLimit(3600)
    >>> checkpoint = trellis_keras.training.Checkpoint("run/in_an_hour")
    >>> model.fit(x, y, epochs=3, shuffle=False, callbacks=[checkpoint, limit])
    """

    def __init__(
        self,
        seconds: float,
        *,
        checkpoint: Checkpoint | None = None,
        command: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        if not seconds > 0:
            raise ValueError(f"`seconds` must be positive. Received: seconds={seconds}")
        self.checkpoint = checkpoint
        self.command = command
        self.stopped = False
        self._clock = clock
        self._deadline = clock() + seconds

    def on_train_begin(self, logs: Logs = None) -> None:
        self.stopped = False
        self._epochs = 0
        self._epoch_end = self._clock()
        self._epoch_times, self._batch_times = _Longest(), _Longest()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epochs = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self.checkpoint is not None:
            self._batch_begin = self._clock()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self.checkpoint is None:
            return
        now = self._clock()
        longest = self._batch_times.add(now - self._batch_begin)
        if batch + 1 < self.params["steps"] and now + 2 * longest > self._deadline:
            self.checkpoint.save_within_epoch()
            self.stopped = True
            if self.params.get("verbose") == 1:
                print()  # ends the line of the progress bar
            self._say(f"in epoch {self._epochs + 1} of {self.params['epochs']}")
            raise EpochInterrupted

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        now = self._clock()
        # From end to end, which includes the other callbacks' `on_epoch_begin`.
        longest = self._epoch_times.add(now - self._epoch_end)
        self._epoch_end = now
        self._epochs = epoch + 1
        finished = self._epochs == self.params["epochs"] or self.model.stop_training
        next_end = now + (longest if self.checkpoint is None else 0)
        if not finished and next_end > self._deadline:
            self.stopped = self.model.stop_training = True

    def on_train_end(self, logs: Logs = None) -> None:
        if self.stopped:
            self._say(f"after {self._epochs} of {self.params['epochs']} epochs")

    def _say(self, when):
        if self.params.get("verbose"):
            resume = f" To resume: {self.command}" if self.command else ""
            print(f"Stopped by the time limit {when}.{resume}", flush=True)


class EpochInterrupted(Exception):
    """Training was interrupted within an epoch, and its state is saved. `run.train` raises it."""


class BatchProgress(keras.callbacks.Callback):
    """Prints a progress line at intervals within long epochs, if there is no progress bar.

    Args:
        seconds: Positive number, the minimum time between two lines. Defaults to 60.
        clock: Callable that returns the time in seconds. Defaults to `time.monotonic`.
    """

    def __init__(self, seconds: float = 60, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.seconds = seconds
        self._clock = clock

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch, self._last = epoch, self._clock()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._clock() - self._last >= self.seconds:
            self._last = self._clock()
            figures = "".join(f" - {name}: {float(v):.4f}" for name, v in (logs or {}).items())
            print(
                f"Epoch {self._epoch + 1}/{self.params['epochs']}: batch "
                f"{batch + 1:,}/{self.params['steps']:,}{figures}",
                flush=True,
            )


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Keras' progress bar, without the gradient norms of individual layers."""

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        shown = {k: v for k, v in (logs or {}).items() if not k.startswith("gradient_norm/")}
        super().on_epoch_end(epoch, shown)


# Recording


class HistoryCSV(keras.callbacks.Callback):
    """Writes exactly one CSV row per epoch, even if the run is killed and resumed.

    `keras.callbacks.CSVLogger` writes an epoch twice if the run is killed between its row and its
    checkpoint, and a killed process can leave half a row. This callback replaces the file
    atomically.

    Args:
        path: The CSV file, with the columns `epoch` (counted from 1) and the epoch's logs. Its
            folder is created when training begins.

    Example:

    >>> model.fit(x, y, callbacks=[HistoryCSV("run/history.csv")])
    """

    def __init__(self, path: str | PathLike) -> None:
        super().__init__()
        self.path = Path(path).expanduser()
        self._rows: Any = None  # read at the first epoch of a `fit`

    def on_train_begin(self, logs: Logs = None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rows = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if self._rows is None:
            self._rows = [row for row in read_history(self.path) if int(row["epoch"]) <= epoch]

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._rows.append({"epoch": epoch + 1, **(logs or {})})
        columns = list(dict.fromkeys(name for row in self._rows for name in row))
        with (
            atomic_write(self.path) as temporary,
            open(temporary, "w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self._rows)


def read_history(path: str | PathLike) -> list[dict[str, str]]:
    """Returns the rows of a `HistoryCSV` file, or an empty list if there is no file.

    Raises:
        ValueError: If the file is damaged.
    """
    path = Path(path).expanduser()
    if not path.exists():
        return []
    text = read_text(path)
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
        if not rows or not text.endswith("\n"):
            raise ValueError("it is truncated")
        for row in rows:
            if int(row["epoch"]) < 1 or None in row.values():
                raise ValueError(f"the row of epoch {row['epoch']} is truncated")
            for value in row.values():
                float(value or 0)  # empty if only other epochs have this column
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise ValueError(f"{path} is not a history, or damaged: {error!r}") from error
    return rows


class BestModel(keras.callbacks.Callback):
    """Saves the model whenever a metric is the lowest so far.

    `keras.callbacks.ModelCheckpoint` overwrites its file in place, so a kill can lose both the
    old and the new model. This callback replaces the file atomically. NaN is never the best.

    Args:
        path: The `.keras` file. Its folder is created when training begins.
        monitor: String, name of the monitored value in the logs. Defaults to `"val_loss"`.

    Raises:
        ValueError: After the first epoch, if `monitor` is missing from the logs.

    Example:

    >>> model.fit(x, y, validation_split=0.1, callbacks=[BestModel("run/best.keras")])
    """

    def __init__(self, path: str | PathLike, monitor: str = "val_loss") -> None:
        super().__init__()
        self.path = Path(path).expanduser()
        self.monitor = monitor
        self.best = math.inf

    def get_state(self) -> dict:
        """Returns the best value so far as a JSON-serializable dict."""
        return {"best": self.best}

    def set_state(self, state: dict) -> None:
        """Restores the result of `get_state`."""
        self.best = state["best"]

    def on_train_begin(self, logs: Logs = None) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if self.monitor not in (logs or {}):
            raise ValueError(
                f"BestModel monitors {self.monitor!r}, which is missing from the logs of this "
                f"epoch: {sorted(logs or {})}."
            )
        value = float(logs[self.monitor])
        if value < self.best:
            self.best = value
            with atomic_write(self.path) as temporary:
                self.model.save(temporary)


# Gradients


class GradientNorms(keras.callbacks.Callback):
    """Logs the norm of the gradient in each layer after every epoch.

    As in Figure 7 of the LRU paper (Ahuja & Morency, 2018), this shows whether gradients reach the
    lower layers of a deep stack. It is the gradient of the training loss, averaged over the given
    batches, at the end of the epoch: before clipping and L2, with dropout, and with zero initial
    states in stateful layers. (The paper's code sums the gradients of all batches of an epoch,
    while the weights change.) Training is not affected: its random numbers, metrics and carried
    states are the same as without this callback.

    It adds `gradient_norm`, over all trainable variables, and `gradient_norm/<group>` to the logs.
    Place callbacks that write logs after this one.

    Args:
        batches: A `keras.utils.PyDataset`, or a list of (x, y) or (x, y, sample_weight).
        steps: Positive integer, number of batches to use. Defaults to `None`, all of them.
        groups: Callable that takes the model and returns {name: list of trainable variables}.
            Defaults to `layer_groups`: blocks, layers or cells.

    Raises:
        ValueError: If `steps` is not positive; when training begins, if a group is empty or
            contains a non-trainable variable; after the first epoch, if there are no batches.

    Example:

    >>> norms = trellis_keras.training.GradientNorms([(x, y)])
    >>> history = model.fit(x, y, epochs=2, callbacks=[norms])
    >>> len(history.history["gradient_norm"])
    2
    """

    def __init__(
        self,
        batches: Iterable,
        *,
        steps: int | None = None,
        groups: Callable[[keras.Model], dict[str, list]] | None = None,
    ) -> None:
        super().__init__()
        if steps is not None and steps < 1:
            raise ValueError(f"`steps` must be positive or None. Received: steps={steps}")
        self.batches = batches
        self.steps = steps
        self.groups = layer_groups if groups is None else groups

    def on_train_begin(self, logs: Logs = None) -> None:
        self._gradient = LossGradient(self.model)
        self._indices = _group_indices(self.groups(self.model), self.model)
        # Runs out of memory now, if at all, before an epoch's work can be lost.
        for batch in itertools.islice(_each(self.batches), 1):
            self._gradient(batch)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        count, total = 0, None
        for batch in itertools.islice(_each(self.batches), self.steps):
            gradient = self._gradient(batch)
            total = gradient if total is None else list(map(ops.add, total, gradient))
            count += 1
        if total is None:
            raise ValueError("GradientNorms received no batches.")
        logs["gradient_norm"] = _norm(total) / count
        for name, indices in self._indices.items():
            logs[f"gradient_norm/{name}"] = _norm([total[i] for i in indices]) / count


def layer_groups(model: keras.Model) -> dict[str, list]:
    """Returns the trainable variables of a model by block, layer or cell.

    These are the blocks of a TCN, the layers of a stack, or the cells of a deep cell: the parts of
    the first layer that has more than one, searching inwards from the backbone (or the model).

    Args:
        model: A built model.

    Returns:
        A dict {name: trainable variables}, in order.

    Example:

    >>> backbone = trellis_keras.layers.TCN(4, kernel_size=2, depth=3)
    >>> model = trellis_keras.models.LanguageModel(7, 4, backbone)
    >>> model.build((None, None))
    >>> list(layer_groups(model))
    ['1_block', '2_block', '3_block']
    """
    parts = _parts(getattr(model, "backbone", model))
    width = len(str(len(parts)))
    return {
        # Without the number that Keras appends to a layer's name, which differs after a restart.
        f"{i:0{width}}_{re.sub(r'_[0-9]+$', '', part.name)}": part.trainable_variables
        for i, part in enumerate(parts, start=1)
    }


def _parts(layer):
    while not layer._trainable_variables:
        inner = layer._flatten_layers(include_self=False, recursive=False)
        parts = [part for part in inner if part.trainable_variables]
        if len(parts) != 1:
            return parts
        (layer,) = parts
    return [layer]


class LossGradient:
    """The gradient of the loss that `fit` minimizes, computed without side effects.

    Weights, random generators, metrics and carried states are unchanged; stateful layers start
    from zero states. The optimizer's clipping, L2 and loss scale are not included. On
    JAX it can be called between epochs, but not within one.

    Args:
        model: A built and compiled model.

    Call arguments:
        batch: (x, y) or (x, y, sample_weight), as a `PyDataset` returns them.

    Returns:
        A list of tensors, one per variable of `model.trainable_variables`, at least float32.

    Example:

    >>> gradients = LossGradient(model)((x, y))
    """

    def __init__(self, model: keras.Model) -> None:
        if not (model.built and model.compiled):
            raise ValueError("The gradient of the loss requires a built and compiled model.")
        self.model = model
        self._gradient = _compiled_gradient(self._loss, model)

    def __call__(self, batch: Sequence) -> list[Tensor]:
        batch = keras.tree.map_structure(_to_tensor, keras.utils.unpack_x_y_sample_weight(batch))
        others = [_to_tensor(v.value) for v in self._other_variables()]
        # Small gradients would be 0 in float16 without the optimizer's loss scale.
        scale = ops.convert_to_tensor(self.model.optimizer.scale_loss(ops.ones(())))
        with without_carried_states(self.model):
            gradients = self._gradient(self._weights(), others, batch, scale)
        return self._unscale(gradients, scale)

    def _weights(self):
        return [_to_tensor(v.value) for v in self.model.trainable_variables]

    def _unscale(self, gradients, scale):
        dtypes = [at_least_float32(keras.backend.standardize_dtype(g.dtype)) for g in gradients]
        pairs = zip(gradients, dtypes, strict=True)
        return [ops.cast(g, dtype) / ops.cast(scale, dtype) for g, dtype in pairs]

    def _other_variables(self):
        return [*self.model.non_trainable_variables, *self.model.metrics_variables]

    def _loss(self, weights, others, batch, scale):
        variables = [*self.model.trainable_variables, *self._other_variables()]
        mapping = list(zip(variables, [*weights, *others], strict=True))
        # Assignments to variables stay in the scope.
        with (
            keras.StatelessScope(state_mapping=mapping, collect_losses=True),
            _training_outputs(self.model, batch),
        ):
            x, y, sample_weight = batch
            y_pred = self.model(x, training=True)
            loss = self.model.compute_loss(x, y, y_pred, sample_weight, training=True)
            return loss * ops.cast(scale, loss.dtype)


def _training_outputs(model, batch):
    """Makes a `LanguageModel` return what its loss needs, as in its own `train_step`."""
    loss_mode = getattr(model, "loss_mode", None)
    return contextlib.nullcontext() if loss_mode is None else loss_mode(batch)


def _compiled_gradient(loss, model):
    """Differentiates with respect to the first argument, compiled like the model's train step."""
    backend = keras.backend.backend()
    if backend not in ("tensorflow", "jax", "torch"):
        raise ValueError(
            "Gradients require the TensorFlow, JAX or PyTorch backend. "
            f"Received: backend={backend!r}"
        )
    differentiate = with_gradient(lambda *arguments: (loss(*arguments), ()))

    def gradient(*arguments):
        return differentiate(*arguments)[1]

    if model.run_eagerly or backend == "torch":
        return gradient
    if backend == "jax":
        import jax

        return jax.jit(gradient)
    import tensorflow as tf

    return tf.function(gradient, jit_compile=bool(model.jit_compile), autograph=False)


def _group_indices(groups, model):
    """Returns {name: indices into the model's trainable variables}."""
    index = {id(variable): i for i, variable in enumerate(model.trainable_variables)}
    for name, variables in groups.items():
        wrong = [v.path for v in variables if id(v) not in index]
        if wrong or not variables:
            raise ValueError(
                "`groups` must return lists of trainable variables of the model. "
                f"Received: {name!r}: {wrong or []}"
            )
    return {name: [index[id(v)] for v in variables] for name, variables in groups.items()}


def _each(batches):
    if isinstance(batches, keras.utils.PyDataset):
        return (batches[i] for i in range(len(batches)))
    return iter(batches)


def _norm(gradients):
    squares = [ops.sum(ops.square(gradient)) for gradient in gradients]
    return float(ops.convert_to_numpy(ops.sqrt(sum(squares))))


def _to_tensor(leaf):
    return None if leaf is None else ops.convert_to_tensor(leaf)


# TensorBoard, in addition to `keras.callbacks.TensorBoard`


class TextSamples(keras.callbacks.Callback):
    """Writes a text sample of a language model to TensorBoard after every epoch.

    Prompt and seed are the same every time, so the samples show what the weights have learned.
    Training is not affected: its random numbers, metrics and carried states are the same as without
    this callback. An epoch with a NaN loss has no sample.

    It costs one compilation of the model's step, and `length` steps of one row per epoch.

    Args:
        prompt: String, or integers, the token ids of the prompt.
        directory: Folder for TensorBoard's logs.
        length: Positive integer, number of tokens to generate. Defaults to `200`.
        seed: Integer, seed of the sampler. Defaults to `0`.
        temperature: Positive float, temperature of the sampler, which draws from all tokens: with
            top-k or top-p a weak model does not leave a run of spaces. Defaults to `0.8`.

    Raises:
        ValueError: If an argument is out of range or TensorFlow is not installed; when training
            begins, if the model has no vocabulary or does not stream, or the prompt is empty.
        ImportError: If Keras-NLP is not installed.

    Example:

    >>> callbacks = [TextSamples("the ", "run/tensorboard", length=100)]
    """

    def __init__(
        self,
        prompt: str | Sequence[int],
        directory: str | PathLike,
        *,
        length: int = 200,
        seed: int = 0,
        temperature: float = 0.8,
    ) -> None:
        super().__init__()
        if length < 1 or temperature <= 0:
            raise ValueError(
                "`length` and `temperature` must be positive. "
                f"Received: length={length}, temperature={temperature}"
            )
        try:
            from keras_nlp import samplers
        except ImportError as error:
            raise ImportError(
                "TextSamples requires Keras-NLP. Install it with `pip install keras-nlp`."
            ) from error
        self.prompt = prompt
        self.directory = directory
        self.length = length
        self.seed = seed
        self._sampler = samplers.RandomSampler(temperature=temperature)
        self._description = f"Random sampling, temperature {temperature:g}, seed {seed}."
        _summary()

    def on_train_begin(self, logs: Logs = None) -> None:
        vocabulary = getattr(self.model, "vocabulary", None)
        if vocabulary is None:
            raise ValueError(
                "TextSamples requires a language model with a vocabulary. "
                f"Received: {type(self.model).__name__} without one"
            )
        self.model.initial_cache(1)  # raises if the model does not stream
        ids = self.prompt
        if isinstance(ids, str):
            ids = vocabulary.encode(ids, final_eos=False)
        if not len(ids):
            raise ValueError(f"`prompt` must not be empty. Received: prompt={self.prompt!r}")
        self._ids = np.asarray(ids, "int32")[None]
        self._writer: Any = None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if not math.isfinite((logs or {}).get("loss", 0.0)):
            return
        if self._writer is None:
            self._writer = _summary_writer(self.directory)
        with self._writer.as_default(step=epoch):
            _summary().text("sample", self._markdown(), description=self._description)
        self._writer.flush()

    def _markdown(self):
        prompt_length = self._ids.shape[1]
        (ids,) = self.model.generate(
            self._ids, prompt_length + self.length, sampler=self._sampler, seed=self.seed
        )
        decode = self.model.vocabulary.decode
        prompt, added = decode(ids[:prompt_length]), decode(ids[prompt_length:])
        return f"After the prompt\n\n{_code(prompt)}\n\nthe model writes\n\n{_code(added)}"


_WRAPPER = textwrap.TextWrapper(
    80, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False
)


def _code(text):
    """Returns text as an indented Markdown block, displayed verbatim."""
    lines = [part for line in text.splitlines() for part in _WRAPPER.wrap(line) or [""]]
    return textwrap.indent("\n".join(lines), "    ", lambda line: True)


def write_graph(model: keras.Model, batch: Sequence, directory: str | PathLike) -> None:
    """Writes the TensorFlow graph of a model's forward pass for TensorBoard.

    `keras.callbacks.TensorBoard(write_graph=True)` does not support subclassed models.

    Args:
        model: A built model.
        batch: (x, ...), an example batch. The graph accepts any batch size.
        directory: Folder for TensorBoard's logs.

    Raises:
        ValueError: If the backend is not TensorFlow.

    Example:

    >>> write_graph(model, train[0], "run/tensorboard")
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(f"Graphs require the TensorFlow backend. Received: backend={backend!r}")
    import tensorflow as tf

    x = keras.utils.unpack_x_y_sample_weight(batch)[0]
    spec = keras.tree.map_structure(lambda x: tf.TensorSpec((None, *x.shape[1:]), x.dtype), x)
    with without_carried_states(model):
        # `__call__` would put everything in one node.
        function = tf.function(lambda inputs: model.call(inputs, training=False), autograph=False)
        graph = function.get_concrete_function(spec).graph
    writer = _summary_writer(directory)
    with writer.as_default(step=0):
        tf.summary.graph(graph)
    writer.close()


def write_hparams(settings: dict[str, Any], name: str, directory: str | PathLike) -> None:
    """Writes the hyperparameters of a run for TensorBoard's HParams tab, one row per run.

    The metrics of the row come from the logs in the subfolders of `directory`.

    Args:
        settings: {name: value}. Values other than numbers, booleans and strings are written as
            JSON; None is left out.
        name: Name of the row. Runs with the same name share it.
        directory: Folder for TensorBoard's logs of the run.

    Example:

    >>> write_hparams({"filters": 24, "dilations": [1, 2]}, "first run", "run/tensorboard")
    """
    from tensorboard.plugins.hparams import api

    values = {
        key: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
        for key, value in settings.items()
        if value is not None
    }
    writer = _summary_writer(directory)
    with writer.as_default(step=0):
        api.hparams(values, trial_id=name)
    writer.close()


def _summary():
    try:
        import tensorflow as tf
    except ImportError as error:
        message = "TensorBoard logs require TensorFlow, which is not installed."
        raise ValueError(message) from error
    return tf.summary


def _summary_writer(directory):
    return _summary().create_file_writer(str(Path(directory).expanduser()))
