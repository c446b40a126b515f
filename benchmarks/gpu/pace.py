"""How long the epochs of a run take, and whether there is time for at least one."""

import json
import pathlib
import statistics
import time

import keras

from benchmarks.__main__ import write

SKIPPED, SAMPLE = 5, 25  # batches of an epoch: skipped because of compiling, and timed


# An epoch killed this often is not started again without more time. (Once may be bad luck.)
TRIES = 2
MORE = 1.05  # factor that counts as more time, as loading and building times vary


class NoRoom(Exception):
    """An epoch would not end in time. Nothing of it is saved.

    Args:
        seconds: Lower bound of the epoch's time.
    """

    def __init__(self, seconds):
        super().__init__(f"An epoch takes at least {seconds:.0f} s.")
        self.seconds = seconds


class Pace(keras.callbacks.Callback):
    """Writes the seconds of each epoch to a file, and stops training if no epoch can finish.

    `training.TimeLimit` knows the time of an epoch only after the first one. That is too late on a
    machine that is taken away before, so this callback estimates the first epoch, without
    validation, from its first batches. If it is validation or the checkpoint that takes too long,
    the file shows it: an epoch that was started but not finished remains listed, unless the process
    exits normally, which the callback detects as a context manager.

    Args:
        path: JSON file `{"epochs": {number: seconds}, "at_least_s": seconds, "begun": [...]}`;
            "begun" has the available time and the precision of unfinished epochs. Entries of
            earlier processes are kept.
        end: When the time is over, by the clock.
        clock: Function that returns seconds.

    Raises:
        NoRoom: From `fit`, in the first epoch.
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
        """Forgets the current epoch, which was not killed."""
        if self._begun is not None:
            self._forget()
            self._write()

    def _forget(self):
        """Forgets killed epochs, since one has now finished in the available time."""
        if self._first:
            self._times["begun"].remove(self._begun)
        else:
            self._times["begun"] = []
        self._begun = None

    def on_train_begin(self, logs=None):
        self._before = self._clock()

    def on_epoch_begin(self, epoch, logs=None):
        if self._begun is not None:  # only now is the previous epoch's checkpoint written
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
    """Returns the content of a file of `Pace`, or empty content if there is no file."""
    path = pathlib.Path(path)
    times = {"epochs": {}, "at_least_s": None, "begun": []}
    return times | (json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})


def epoch_s(times):
    """Returns the time of an epoch: the median, or else a lower bound, or None if unknown."""
    if times["epochs"]:
        return statistics.median(times["epochs"].values())
    return times["at_least_s"]
