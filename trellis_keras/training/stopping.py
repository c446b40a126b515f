"""Callbacks that stop training: without improvement, at a loss of NaN, at a time limit."""

import math
import numbers
from time import monotonic

import keras

from trellis_keras.layers.checks import check_choice
from trellis_keras.training.callbacks import SavedArguments
from trellis_keras.training.checkpoint import Checkpoint, check_steps
from trellis_keras.types import Logs


@keras.saving.register_keras_serializable("trellis_keras")
class EarlyStopping(SavedArguments, keras.callbacks.EarlyStopping):
    """Stops training when a metric no longer improves on the best or the previous value.

    `keras.callbacks.EarlyStopping` compares with the best value so far. The LRU authors' code
    (Ahuja & Morency 2018) compares with the previous epoch, so a value that falls again after a
    rise counts as an improvement: `against="previous", patience=3, min_delta=1e-4`.

    Args:
        monitor: String, name of the monitored value in the logs. Defaults to `"val_loss"`.
        against: `"best"` or `"previous"`. Defaults to `"best"`, Keras' rule.
        min_delta, patience, verbose, mode, baseline, restore_best_weights, start_from_epoch: As in
            `keras.callbacks.EarlyStopping`. `restore_best_weights` needs `against="best"`.

    Example:

    >>> stopping = trellis_keras.training.EarlyStopping(
    ...     against="previous", patience=3, min_delta=1e-4)
    >>> checkpoint = trellis_keras.training.Checkpoint("run/lru", callbacks=[stopping])
    >>> model.fit(train, validation_data=valid, epochs=60, callbacks=[stopping, checkpoint])
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        against: str = "best",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(
            monitor,
            min_delta=min_delta,
            patience=patience,
            verbose=verbose,
            mode=mode,
            baseline=baseline,
            restore_best_weights=restore_best_weights,
            start_from_epoch=start_from_epoch,
        )
        check_choice("against", against, ("best", "previous"))
        if against == "previous" and restore_best_weights:
            raise ValueError(
                "`restore_best_weights` needs against='best': Keras would restore the last epoch "
                "that improved on its predecessor. Received: against='previous', "
                "restore_best_weights=True"
            )
        self.against = against

    def get_config(self) -> dict:
        return super().get_config() | {"min_delta": abs(self.min_delta)}  # Keras flips its sign

    def _set_monitor_op(self):
        if self.mode == "auto":  # Keras finds no metric of a language model
            directions = {m.name: getattr(m, "_direction", None) for m in self.model.metrics}
            known = {"down": keras.ops.less, "up": keras.ops.greater}
            self.monitor_op = known.get(directions.get(self.monitor.removeprefix("val_")))
        super()._set_monitor_op()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        logs = logs or {}
        if self.against == "previous" and self.monitor in logs:
            self.best = logs[self.monitor]


class StopOnNaN(keras.callbacks.Callback):
    """Raises an error when the loss is NaN or infinite, before anything is saved.

    `keras.callbacks.TerminateOnNaN` lets the epoch end as usual: the invalid weights are validated,
    recorded and saved. Its `raise_error=True` leaves the model without variables on JAX. This
    callback raises at the end of the epoch, before other callbacks run: place it first in the list.
    It reads the loss of every step, for which Keras on JAX waits.
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


class _LongestTime:
    """The longest of several times; the first one, which includes compilation, only if alone."""

    def __init__(self):
        self._count = 0

    def add(self, seconds):
        """Counts a time, and returns the longest one."""
        self._count += 1
        self._seconds = seconds if self._count <= 2 else max(self._seconds, seconds)
        return self._seconds


class TimeLimit(keras.callbacks.Callback):
    """Stops training before a time limit, after an epoch or within one.

    For batch queues and notebooks: a later process resumes from the last checkpoint. The time
    counts from the construction of this callback. Training stops after an epoch if another one
    would exceed the limit; an epoch is expected to take as long as the longest one of this `fit`,
    including validation and other callbacks. The first one, which includes compilation, is
    dropped once there is a second. Without `checkpoint`, at least one epoch is trained.

    With `checkpoint`, training also stops within an epoch: when another two batches would exceed
    the limit, the state is saved and `EpochInterrupted` is raised. Batches are timed like epochs;
    the validation after the last one is not counted.

    Place it after `Checkpoint`: a checkpoint that records stopped training would not be resumed.

    Args:
        seconds: Positive number, the limit in seconds.
        checkpoint: The `Checkpoint` of the same `fit`. Defaults to `None`.
        command: String, the command that resumes training, for the final message. Defaults to
            `None`.

    Attributes:
        stopped: Boolean, whether the limit has stopped the last `fit`.

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
    ) -> None:
        super().__init__()
        is_number = isinstance(seconds, numbers.Real)
        if not (is_number and seconds > 0):
            raise ValueError(f"`seconds` must be a positive number. Received: seconds={seconds!r}")
        self.checkpoint = checkpoint
        self.command = command
        self.stopped = False
        self._deadline = monotonic() + seconds

    @property
    def async_safe(self) -> bool:
        """Whether Keras need not wait for the logs of a step."""
        return self.checkpoint is None

    def set_params(self, params: dict) -> None:
        super().set_params(params)
        if self.checkpoint is not None:  # refused here, before it resumes
            check_steps(params, "TimeLimit with a `checkpoint`")

    def on_train_begin(self, logs: Logs = None) -> None:
        self.stopped = False
        self._epochs = 0
        self._epoch_end = monotonic()
        self._epoch_times, self._batch_times = _LongestTime(), _LongestTime()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epochs = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self.checkpoint is not None:
            self._batch_begin = monotonic()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self.checkpoint is None:
            return
        now = monotonic()
        longest = self._batch_times.add(now - self._batch_begin)
        if now + 2 * longest <= self._deadline or batch + 1 >= self.params["steps"]:
            return  # `self.model` copies all variables on JAX
        if not self.model.stop_training:
            self.checkpoint.save_within_epoch()
            self.stopped = True
            if self.params.get("verbose") == 1:
                print()  # ends the line of the progress bar
            self._say(f"in epoch {self._epochs + 1} of {self.params['epochs']}")
            raise EpochInterrupted

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        now = monotonic()
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
    """Training was interrupted within an epoch, and its state is saved. `TimeLimit` raises it."""
