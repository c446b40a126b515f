"""Learning-rate rules of the published recipes, as callbacks that survive a restart.

Each has `get_state()` and `set_state(state)` with plain JSON values, which
`trellis_keras.training.Checkpoint` saves and restores.
"""

import math

import keras
from keras import ops

_RULES = ("best_before", "worst_of_last", "patience")


class _LearningRateCallback(keras.callbacks.Callback):
    """Access to the optimizer's learning rate, with an error where it cannot be set."""

    def on_train_begin(self, logs=None):
        if not isinstance(self.model.optimizer.learning_rate, keras.Variable):
            raise ValueError(
                f"{type(self).__name__} sets the learning rate, but the optimizer follows a "
                "schedule or a function of its own. Compile the model with a float "
                "`learning_rate`, or leave this callback out."
            )

    @property
    def _learning_rate(self):
        return float(ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set_learning_rate(self, epoch, rate, verbose):
        if verbose and rate != self._learning_rate:
            print(f"\nEpoch {epoch + 1}: {type(self).__name__} sets the learning rate to {rate:g}.")
        self.model.optimizer.learning_rate = rate

    def on_epoch_end(self, epoch, logs=None):
        if logs is not None:
            logs["learning_rate"] = self._learning_rate  # for CSVLogger, as Keras' own do


class PlateauDecay(_LearningRateCallback):
    """Multiplies the learning rate by a factor when a value has stopped getting better.

    What "stopped" means differs between the programs of the papers, and it decides the result of
    a word-level language model. With v the value after this epoch, `rule` is one of:

    * `"best_before"`: v is worse than the best of all earlier epochs but the last `window`. The
      TrellisNet program's rule (Bai et al., 2019, word-level): it goes on decaying epoch after
      epoch until v is a new best.
    * `"worst_of_last"`: v is not better than the WORST of the `window` epochs before. The TCN
      programs' rule (Bai et al., 2018); it fires later than the others.
    * `"patience"`: v was not better than the best by `min_delta` for `window` epochs in a row, as
      in `keras.callbacks.ReduceLROnPlateau`.

    `PlateauDecay.trellisnet_word()`, `.tcn_word()` and `.tcn_char()` (also for polyphonic music)
    are the settings of those programs. Unlike in Keras, the memory starts with the callback and
    lasts through several `fit`s.

    Args:
        monitor: name of the value in the logs of an epoch. It must be there after every epoch.
        factor: multiplies the learning rate, between 0 and 1.
        rule: see above.
        window: number of epochs, 1 or more; see above.
        min_lr: the learning rate does not fall below this.
        strict: whether an equal value is good enough not to decay. Defaults to the programs'
            habit: `True` for `"best_before"`, `False` for `"worst_of_last"`; not used by
            `"patience"`.
        min_delta: least change that counts as better; only for `"patience"`.
        cooldown: epochs after a decay that do not count; only for `"patience"`.
        mode: `"min"` if smaller values are better, `"max"` if larger ones are.
        verbose: 1 prints a line at every change.

    Raises:
        ValueError: for settings out of range or that the rule has no use for; when training
            begins with a learning-rate schedule; after the first epoch without `monitor`.

    Example:

    >>> decay = trellis_keras.training.PlateauDecay(
    ...     factor=0.25, rule="best_before", window=10, min_lr=0.02)
    >>> model.fit(x, y, validation_split=0.1, epochs=100, callbacks=[decay])
    """

    def __init__(
        self,
        monitor="val_loss",
        *,
        factor,
        rule="patience",
        window,
        min_lr=0.0,
        strict=None,
        min_delta=0.0,
        cooldown=0,
        mode="min",
        verbose=0,
    ):
        super().__init__()
        _check_factor(factor)
        if rule not in _RULES:
            raise ValueError(f"`rule` must be one of {_RULES}. Received: rule={rule!r}")
        if window < 1 or min_lr < 0 or min_delta < 0 or cooldown < 0:
            raise ValueError(
                "`window` must be 1 or more, `min_lr`, `min_delta` and `cooldown` 0 or more. "
                f"Received: window={window}, min_lr={min_lr}, min_delta={min_delta}, "
                f"cooldown={cooldown}"
            )
        if mode not in ("min", "max"):
            raise ValueError(f"`mode` must be 'min' or 'max'. Received: mode={mode!r}")
        if rule == "patience" and strict is not None:
            raise ValueError("`strict` has no meaning for rule='patience': use `min_delta`.")
        if rule != "patience" and (min_delta or cooldown):
            raise ValueError(
                f"`min_delta` and `cooldown` belong to rule='patience'. Received: rule={rule!r}"
            )
        self.monitor = monitor
        self.factor = factor
        self.rule = rule
        self.window = window
        self.min_lr = min_lr
        self.strict = rule == "best_before" if strict is None else strict
        self.min_delta = min_delta
        self.cooldown = cooldown
        self.mode = mode
        self.verbose = verbose
        self._values = []
        self._best = math.inf
        self._wait = 0
        self._cooldown_left = 0

    @classmethod
    def trellisnet_word(cls, monitor="val_loss", **kwargs):
        """The TrellisNet program's word-level rule: a quarter, 10 epochs, down to 0.02."""
        settings = {"factor": 0.25, "rule": "best_before", "window": 10, "min_lr": 0.02}
        return cls(monitor, **(settings | kwargs))

    @classmethod
    def tcn_word(cls, monitor="val_loss", **kwargs):
        """The TCN word-level program's rule: half, not better than the worst of the last 5."""
        settings = {"factor": 0.5, "rule": "worst_of_last", "window": 5, "strict": False}
        return cls(monitor, **(settings | kwargs))

    @classmethod
    def tcn_char(cls, monitor="val_loss", **kwargs):
        """The TCN character-level and music programs': a tenth, worse than the last 3."""
        settings = {"factor": 0.1, "rule": "worst_of_last", "window": 3, "strict": True}
        return cls(monitor, **(settings | kwargs))

    def get_state(self):
        """Returns the rule's memory as a JSON-able dict."""
        return {
            "values": list(self._values),
            "best": self._best,
            "wait": self._wait,
            "cooldown_left": self._cooldown_left,
        }

    def set_state(self, state):
        """Takes up the memory that `get_state` returned."""
        self._values = [remembered(value) for value in state["values"]]
        self._best = remembered(state["best"])
        self._wait = state["wait"]
        self._cooldown_left = state["cooldown_left"]

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        value = self._value(logs or {})
        # The rules are written for values that should fall.
        falling = value if self.mode == "min" else -value
        if getattr(self, f"_{self.rule}")(falling):
            self._decay(epoch)
        self._values.append(remembered(falling))

    def _value(self, logs):
        if self.monitor not in logs:
            raise ValueError(
                f"PlateauDecay watches {self.monitor!r}, which this epoch did not produce. It has "
                f"{sorted(logs)}. Set `monitor` to one of these, or give `fit` the "
                "`validation_data` for it (and `validation_freq=1`)."
            )
        return float(logs[self.monitor])

    def _not_below(self, value, reference):
        return value > reference if self.strict else value >= reference

    def _best_before(self, value):
        earlier = self._values[: -self.window]
        return bool(earlier) and self._not_below(value, min(earlier))

    def _worst_of_last(self, value):
        last = self._values[-self.window :]
        return len(last) == self.window and self._not_below(value, max(last))

    def _patience(self, value):
        if self._cooldown_left:
            self._cooldown_left -= 1
            self._wait = 0
        if value < self._best - self.min_delta:
            self._best = value
            self._wait = 0
        elif not self._cooldown_left:
            self._wait += 1
        return self._wait >= self.window

    def _decay(self, epoch):
        rate = self._learning_rate
        if rate <= self.min_lr * (1 + 1e-6):  # in float32 a rate of 0.1 is a little more than 0.1
            return
        self._set_learning_rate(epoch, max(rate * self.factor, self.min_lr), self.verbose)
        self._wait = 0
        self._cooldown_left = self.cooldown


class _EpochDecay(_LearningRateCallback):
    """The rate as a function of the epoch and the base rate alone.

    The base rate is the optimizer's when training first begins. It is kept in the state, because
    the optimizer of a restarted run holds a rate that was decayed already.
    """

    def __init__(self, factor, verbose):
        super().__init__()
        _check_factor(factor)
        self.factor = factor
        self.verbose = verbose
        self._base_learning_rate = None

    def get_state(self):
        """Returns the base rate as a JSON-able dict."""
        return {"base_learning_rate": self._base_learning_rate}

    def set_state(self, state):
        """Takes up the base rate that `get_state` returned."""
        self._base_learning_rate = state["base_learning_rate"]

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        if self._base_learning_rate is None:
            self._base_learning_rate = self._learning_rate

    def on_epoch_begin(self, epoch, logs=None):
        rate = self._base_learning_rate * self.factor ** self._decays(epoch)
        self._set_learning_rate(epoch, rate, self.verbose)

    def _decays(self, epoch):
        """Returns how often the rate was multiplied before the epoch, counted from 0."""
        raise NotImplementedError


class StepDecay(_EpochDecay):
    """Multiplies the learning rate by a factor after given numbers of epochs.

    A tenth after 220 and a hundredth after 350 epochs is what the TrellisNet program does for
    characters (Bai et al., 2019). The base rate is the optimizer's when training first begins.

    Args:
        epochs: numbers of finished epochs after which the rate is multiplied, in rising order.
        factor: multiplies the learning rate, between 0 and 1.
        verbose: 1 prints a line at every change.

    Raises:
        ValueError: if `epochs` is not rising or a setting is out of range; when training begins
            with a learning-rate schedule.

    Example:

    >>> decay = trellis_keras.training.StepDecay(epochs=(220, 350), factor=0.1)
    >>> model.fit(x, y, epochs=400, callbacks=[decay])
    """

    def __init__(self, epochs=(220, 350), factor=0.1, verbose=0):
        super().__init__(factor, verbose)
        epochs = tuple(epochs)
        if not epochs or epochs[0] < 1 or list(epochs) != sorted(set(epochs)):
            raise ValueError(
                f"`epochs` must be rising numbers of 1 or more. Received: epochs={epochs}"
            )
        self.epochs = epochs

    def _decays(self, epoch):
        return sum(epoch >= after for after in self.epochs)


class ExponentialDecay(_EpochDecay):
    """Multiplies the learning rate by a factor after every epoch.

    The LRU paper (Ahuja & Morency, 2018, "Training Details") has the factor 0.9; that it is an
    epoch's is the rule of its program. The base rate is the optimizer's when training first
    begins, and that of the first epoch.

    Args:
        factor: multiplies the learning rate, between 0 and 1.
        verbose: 1 prints a line at every change.

    Raises:
        ValueError: if the factor is out of range; when training begins with a learning-rate
            schedule.

    Example:

    >>> decay = trellis_keras.training.ExponentialDecay(0.9)
    >>> model.fit(x, y, epochs=20, callbacks=[decay])
    """

    def __init__(self, factor=0.9, verbose=0):
        super().__init__(factor, verbose)

    def _decays(self, epoch):
        return epoch


def remembered(value):
    """A falling value as later ones are compared with it: one that is none is worse than any."""
    return math.inf if value is None or math.isnan(value) else value


def _check_factor(factor):
    if not 0 < factor < 1:
        raise ValueError(f"`factor` must be between 0 and 1. Received: factor={factor}")
