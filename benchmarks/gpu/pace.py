"""How long the epochs of a run take, and whether there is room for even one."""

import json
import pathlib
import statistics
import time

import keras

from benchmarks.__main__ import write

SKIPPED, SAMPLE = 5, 25  # batches of an epoch: those of compiling, and those that tell its time


# An epoch that was killed so often with as much time as now is not begun again: once may be chance.
TRIES = 2
MORE = 1.05  # times as much time is more, as loading and building do not always take the same


class NoRoom(Exception):
    """An epoch would not end in time. Nothing of it is saved.

    Args:
        seconds: What it takes at least.
    """

    def __init__(self, seconds):
        super().__init__(f"An epoch takes at least {seconds:.0f} s.")
        self.seconds = seconds


class Pace(keras.callbacks.Callback):
    """Writes the seconds of each epoch into a file; ends a training that cannot finish any.

    `training.TimeLimit` learns what an epoch takes when one has ended. On a machine that is taken
    away before the first one has, that is too late: so its end is foretold from its first batches,
    without its validation. Where validation and checkpoint are what does not fit, the file tells
    it: an epoch that was begun and not ended stays in it, unless the process left in good order.
    It is a context manager, to know that.

    Args:
        path: JSON file `{"epochs": {number: seconds}, "at_least_s": seconds, "begun": [...]}`,
            with the time and the precision that epochs without an end had. It keeps what earlier
            processes have written.
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
        self._before = self._skipped = self._begun = None
        self._first = True

    def __enter__(self):
        return self

    def __exit__(self, *error):
        """What ends now was not killed."""
        if self._begun is not None:
            self._forget()
            self._write()

    def _forget(self):
        """An epoch that has ended had room, and with it those that were killed before."""
        if self._first:
            self._times["begun"].remove(self._begun)
        else:
            self._times["begun"] = []
        self._begun = None

    def on_train_begin(self, logs=None):
        self._before = self._clock()

    def on_epoch_begin(self, epoch, logs=None):
        if self._begun is not None:  # only now has the checkpoint of the one before been written
            self._forget()
        room = self.end - self._clock()
        policy = self.model.dtype_policy.name
        killed = [
            other["room_s"]
            for other in self._times["begun"]
            if other["dtype_policy"] == policy and room < MORE * other["room_s"]
        ]
        if self._first and len(killed) >= TRIES:
            raise NoRoom(max(killed))
        self._begun = {"room_s": room, "dtype_policy": policy}
        self._times["begun"].append(self._begun)
        self._write()

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
            raise NoRoom(self._times["at_least_s"])

    def _write(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write(self.path, json.dumps(self._times, indent=1) + "\n")


def read(path):
    """Returns what `Pace` has written, or the same with nothing in it."""
    path = pathlib.Path(path)
    times = {"epochs": {}, "at_least_s": None, "begun": []}
    return times | (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})


def epoch_s(times):
    """Returns what an epoch takes: the median, else what it takes at least. None: unknown."""
    if times["epochs"]:
        return statistics.median(times["epochs"].values())
    return times["at_least_s"]
