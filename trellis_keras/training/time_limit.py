"""Training within a limited time."""

import time

import keras


class TimeLimit(keras.callbacks.Callback):
    """Stops training after an epoch if another one would end too late.

    For a batch queue, or a notebook that ends after so many minutes: the time that is left is
    enough to leave in good order, and the next process goes on from the last checkpoint. The time
    counts from the moment when this callback is made, so make it before the data are loaded and the
    model is built.
    Another epoch is expected to take as long as the longest of this `fit` did, with validation, all
    callbacks and, in the first one, compiling. An epoch is never cut short: one is always trained,
    however little time there is.

    Put it BEHIND `Checkpoint`, the only one that belongs there. Checkpoint notes whether training
    was stopped, and does not go on where it was; here it has saved the epoch before training is
    stopped, as one of an interrupted run. This callback has no memory that a checkpoint could miss.
    With a `save_freq` of more than one epoch those since the last checkpoint are trained again.

    Args:
        seconds: how long training may take, counted from now.
        command: what to type in order to go on, for the line that says why training has ended.
        clock: function that returns the time in seconds.

    Attributes:
        stopped: whether it has stopped the last `fit`.

    Raises:
        ValueError: when constructed, if `seconds` is not positive.

    Example:

    >>> limit = trellis_keras.training.TimeLimit(3600)
    >>> checkpoint = trellis_keras.training.Checkpoint("run/in_an_hour")
    >>> model.fit(x, y, epochs=3, shuffle=False, callbacks=[checkpoint, limit])
    """

    def __init__(self, seconds, *, command=None, clock=time.monotonic):
        super().__init__()
        if not seconds > 0:
            raise ValueError(f"`seconds` must be positive. Received: seconds={seconds}")
        self.command = command
        self.stopped = False
        self._clock = clock
        self._end = clock() + seconds
        self._done = 0  # epochs
        self._before = None  # when the epoch before ended
        self._longest = 0.0

    def on_train_begin(self, logs=None):
        self.stopped = False
        self._before = self._clock()
        self._longest = 0.0

    def on_epoch_end(self, epoch, logs=None):
        now = self._clock()
        # From end to end, so that what the others do when an epoch begins counts too.
        self._longest = max(self._longest, now - self._before)
        self._before = now
        self._done = epoch + 1
        over = self._done == self.params["epochs"] or self.model.stop_training
        if not over and now + self._longest > self._end:
            self.stopped = self.model.stop_training = True

    def on_train_end(self, logs=None):
        # Here, because a progress bar is still on its line when an epoch ends.
        if self.stopped and self.params.get("verbose"):
            print(
                f"{self._done} of {self.params['epochs']} epochs are done; the time limit leaves "
                "no room for another." + (f" To go on: {self.command}" if self.command else ""),
                flush=True,
            )
