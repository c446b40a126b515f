"""Stopping when a value has stopped falling, with a memory that survives a restart."""

import math

import keras

_AGAINST = ("best", "previous")


class EarlyStopping(keras.callbacks.Callback):
    """Stops training after so many epochs in a row in which a value did not get better.

    Takes the place of `keras.callbacks.EarlyStopping`, which forgets its count when a run is
    restarted. An epoch's value is better if it is below a reference by more than `min_delta`:

    * `against="best"`: the last value that was better, as in Keras;
    * `against="previous"`: the value of the epoch before. The rule of the LRU paper's program
      (Ahuja & Morency, 2018): a value that rose and falls again counts as a fall there, so that it
      stops later than Keras does. The first epoch, with none before it, does not count.

    `EarlyStopping.lru()` has that program's settings: three epochs in a row without a fall of the
    validation loss by more than 1e-4. The memory starts with the callback and lasts through
    several `fit`s. The weights are left as they are: save the best ones with
    `keras.callbacks.ModelCheckpoint` or, as the zoo does, `training.records.BestModel`.

    Args:
        monitor: name of the value in the logs of an epoch. It must be there after every epoch.
        patience: number of epochs in a row, 1 or more.
        min_delta: a change of no more than this is none.
        against: see above.
        mode: `"min"` if smaller values are better, `"max"` if larger ones are.
        verbose: 1 prints a line when training is stopped.

    Raises:
        ValueError: for settings out of range; after the first epoch without `monitor`.

    Example:

    >>> stopping = trellis_keras.training.EarlyStopping.lru()
    >>> checkpoint = trellis_keras.training.Checkpoint("run/lru", callbacks=[stopping])
    >>> model.fit(train, validation_data=valid, epochs=60, callbacks=[stopping, checkpoint])
    """

    def __init__(
        self,
        monitor="val_loss",
        *,
        patience,
        min_delta=0.0,
        against="best",
        mode="min",
        verbose=0,
    ):
        super().__init__()
        if patience < 1 or min_delta < 0:
            raise ValueError(
                "`patience` must be 1 or more and `min_delta` 0 or more. "
                f"Received: patience={patience}, min_delta={min_delta}"
            )
        if against not in _AGAINST:
            raise ValueError(f"`against` must be one of {_AGAINST}. Received: against={against!r}")
        if mode not in ("min", "max"):
            raise ValueError(f"`mode` must be 'min' or 'max'. Received: mode={mode!r}")
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.against = against
        self.mode = mode
        self.verbose = verbose
        self._reference = None
        self._wait = 0

    @classmethod
    def lru(cls, monitor="val_loss", **kwargs):
        """The LRU program's rule: 3 epochs in a row without a fall of more than 1e-4."""
        settings = {"patience": 3, "min_delta": 1e-4, "against": "previous"}
        return cls(monitor, **(settings | kwargs))

    def get_state(self):
        """Returns the rule's memory as a JSON-able dict."""
        return {"reference": self._reference, "wait": self._wait}

    def set_state(self, state):
        """Takes up the memory that `get_state` returned."""
        self._reference = state["reference"]
        self._wait = state["wait"]

    def on_epoch_end(self, epoch, logs=None):
        value = self._value(logs or {})
        falling = value if self.mode == "min" else -value
        better = self._is_better(falling)
        self._wait = 0 if better else self._wait + 1
        if better or self.against == "previous":
            self._reference = falling
        if self._wait >= self.patience:
            self._stop(epoch)

    def _value(self, logs):
        if self.monitor not in logs:
            raise ValueError(
                f"EarlyStopping watches {self.monitor!r}, which this epoch did not produce. It has "
                f"{sorted(logs)}. Set `monitor` to one of these, or give `fit` the "
                "`validation_data` for it (and `validation_freq=1`)."
            )
        return float(logs[self.monitor])

    def _is_better(self, value):
        if self._reference is None or (math.isnan(self._reference) and not math.isnan(value)):
            return True
        return value + self.min_delta < self._reference

    def _stop(self, epoch):
        self.model.stop_training = True
        if self.verbose:
            print(
                f"\nEpoch {epoch + 1}: EarlyStopping ends training: {self.monitor} has not "
                f"{'fallen' if self.mode == 'min' else 'risen'} by more than {self.min_delta:g} "
                f"for {self._wait} epochs."
            )
