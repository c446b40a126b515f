"""How long the epochs of a run take, and whether there is room for even one."""

import json
import pathlib
import statistics
import time

import keras

from benchmarks.__main__ import write

SKIPPED, SAMPLE = 5, 25  # batches of an epoch: those of compiling, and those that tell its time


class NoRoom(Exception):
    """An epoch would not end in time. Nothing of it is saved."""


class Pace(keras.callbacks.Callback):
    """Writes the seconds of each epoch into a file; ends a training that cannot finish any.

    `training.TimeLimit` learns what an epoch takes when one has ended. On a machine that is taken
    away before the first one has, that is too late: so its end is foretold from its first batches,
    without its validation.

    Args:
        path: JSON file `{"epochs": {number: seconds}, "at_least_s": seconds}`. It keeps what
            earlier processes have written.
        end: When the time is over, by the clock.
        clock: Function that returns seconds.

    Raises:
        NoRoom: by `fit`, in the first epoch.
    """

    def __init__(self, path, end, clock=time.monotonic):
        super().__init__()
        self.path = pathlib.Path(path)
        self.end = end
        self._clock = clock
        self._times = read(self.path)
        self._before = self._skipped = None
        self._first = True

    def on_train_begin(self, logs=None):
        self._before = self._clock()

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 == SKIPPED:
            self._skipped = self._clock()
        if self._first and batch + 1 == SAMPLE:
            self._foretell()

    def on_epoch_end(self, epoch, logs=None):
        now = self._clock()
        self._times["epochs"][str(epoch + 1)] = now - self._before
        self._before, self._first = now, False
        self._write()

    def _foretell(self):
        now = self._clock()
        batch_s = (now - self._skipped) / (SAMPLE - SKIPPED)
        self._times["at_least_s"] = batch_s * self.params["steps"]
        self._write()
        if now + batch_s * (self.params["steps"] - SAMPLE) > self.end:
            raise NoRoom

    def _write(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write(self.path, json.dumps(self._times, indent=1) + "\n")


def read(path):
    """Returns what `Pace` has written, or the same with nothing in it."""
    path = pathlib.Path(path)
    if not path.exists():
        return {"epochs": {}, "at_least_s": None}
    return json.loads(path.read_text(encoding="utf-8"))


def epoch_s(times):
    """Returns what an epoch takes: the median, else what it takes at least. None: unknown."""
    if times["epochs"]:
        return statistics.median(times["epochs"].values())
    return times["at_least_s"]
