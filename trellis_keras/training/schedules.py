"""Callbacks that change learning rate, averaging and depth by a schedule.

Callbacks with state have `get_state` and `set_state`, which `Checkpoint` uses to save and restore
it. `keras.saving.serialize_keras_object` writes the arguments of each.
"""

import math
import numbers
from collections.abc import Sequence

import keras
import numpy as np
from keras import ops

from trellis_keras.layers import TrellisLayer
from trellis_keras.layers.checks import (
    check_choice,
    check_integer,
    check_not_negative,
    check_positive,
    is_integer,
)
from trellis_keras.models.base import BackboneModel
from trellis_keras.training.callbacks import SavedArguments, monitored_value
from trellis_keras.training.optimizers import ASGD
from trellis_keras.types import Logs


class _Monitor(SavedArguments, keras.callbacks.Callback):
    """Remembers the monitored value of every epoch, negated if larger is better."""

    def __init__(self, monitor, mode, window):
        super().__init__()
        check_choice("mode", mode, ("min", "max"))
        self.monitor = monitor
        self.mode = mode
        self.window = check_integer("window", window, 1)
        self._values = []

    def get_state(self) -> dict:
        return {"values": list(self._values)}

    def set_state(self, state: dict) -> None:
        self._values = [_nan_to_inf(value) for value in state["values"]]

    def _read(self, logs):
        value = monitored_value(self, logs)
        return value if self.mode == "min" else -value

    def _earlier_best(self):
        """The best value before the last `window` epochs.

        NaN in the first epochs: no value compares as larger.
        """
        return min(self._values[: -self.window], default=math.nan)


@keras.saving.register_keras_serializable("trellis_keras")
class PlateauDecay(_Monitor):
    """Multiplies the learning rate by a factor when a metric has stopped improving.

    The published programs define a plateau in two ways that `keras.callbacks.ReduceLROnPlateau`
    does not offer, and the results of word-level language models depend on it:

    * `rule="best_before"`: the value is worse than the best of all epochs before the last `window`.
      The rate decays after every such epoch. The word-level TrellisNet program (Bai et al. 2019)
      uses `factor=0.25, window=10, min_lr=0.02`.
    * `rule="worst_of_last"`: the value is not better than the worst of the last `window` epochs.
      The TCN programs (Bai et al. 2018) use `factor=0.5, window=5` for words, and
      `factor=0.1, window=3, strict=True` for characters and music.

    The callback keeps its state across calls of `fit`.

    Args:
        monitor: String, name of the monitored value in the logs. Defaults to `"val_loss"`.
        factor: Float between 0 and 1, factor of the learning rate.
        rule: `"best_before"` or `"worst_of_last"`.
        window: Positive integer, number of epochs in the rule.
        min_lr: Float, lower limit of the learning rate. Defaults to `0.0`.
        strict: Boolean, whether only a worse value counts as a plateau; otherwise an equal value
            counts too. Defaults to `None`, as in the authors' programs: `True` for `"best_before"`,
            `False` for `"worst_of_last"`.
        mode: `"min"` if smaller values are better, `"max"` if larger ones are. Defaults to `"min"`.
        verbose: 0 or 1. 1 prints a line at every decay. Defaults to `0`.

    Example:

    >>> decay = trellis_keras.training.PlateauDecay(
    ...     factor=0.25, rule="best_before", window=10, min_lr=0.02)
    >>> model.fit(x, y, validation_split=0.1, epochs=100, callbacks=[decay])
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        factor: float,
        rule: str,
        window: int,
        min_lr: float = 0.0,
        strict: bool | None = None,
        mode: str = "min",
        verbose: int = 0,
    ) -> None:
        super().__init__(monitor, mode, window)
        _check_factor(factor)
        check_choice("rule", rule, ("best_before", "worst_of_last"))
        check_not_negative(min_lr=min_lr)
        self.factor = factor
        self.rule = rule
        self.min_lr = min_lr
        self.strict = rule == "best_before" if strict is None else strict
        self.verbose = verbose

    def on_train_begin(self, logs: Logs = None) -> None:
        if not isinstance(self.model.optimizer.learning_rate, keras.Variable):
            raise ValueError(
                "PlateauDecay cannot set the learning rate of an optimizer that has a schedule. "
                "Compile the model with a float `learning_rate`, or remove the callback."
            )

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        value = self._read(logs)
        rate = float(ops.convert_to_numpy(self.model.optimizer.learning_rate))
        logs["learning_rate"] = rate
        if self.rule == "best_before":
            reference = self._earlier_best()
        else:
            last = self._values[-self.window :]
            reference = max(last) if len(last) == self.window else math.nan
        is_plateau = value > reference if self.strict else value >= reference
        if is_plateau:
            decayed = min(rate, max(rate * self.factor, self.min_lr))
            if self.verbose and decayed < rate:
                print(f"\nEpoch {epoch + 1}: PlateauDecay sets the learning rate to {decayed:g}.")
            self.model.optimizer.learning_rate = decayed
        self._values.append(_nan_to_inf(value))


# Both schedules multiply the current rate, which `Checkpoint` saves with the optimizer, so they
# need no state: after a resume within an epoch it restores the rate once they have acted. (The
# schedules in `keras.optimizers` count steps instead of epochs.)


@keras.saving.register_keras_serializable("trellis_keras")
class StepDecay(SavedArguments, keras.callbacks.LearningRateScheduler):
    """Multiplies the learning rate by a factor after given numbers of epochs.

    The character-level TrellisNet program (Bai et al. 2019) divides the rate by 10 after
    220 epochs and again after 350.

    Args:
        epochs: Increasing integers, the numbers of finished epochs after which the rate is
            multiplied.
        factor: Float between 0 and 1. Defaults to `0.1`.
        verbose: 0 or 1. 1 prints the rate of every epoch. Defaults to `0`.

    Example:

    >>> decay = trellis_keras.training.StepDecay(epochs=(220, 350), factor=0.1)
    >>> model.fit(x, y, epochs=400, callbacks=[decay])
    """

    def __init__(self, epochs: Sequence[int], factor: float = 0.1, verbose: int = 0) -> None:
        _check_factor(factor)
        is_list = np.ndim(epochs) == 1 and len(epochs) > 0
        is_valid = is_list and all(is_integer(epoch, 1) for epoch in epochs)
        if not is_valid or list(epochs) != sorted(set(epochs)):
            raise ValueError(
                f"`epochs` must be a list of increasing integers >= 1. Received: epochs={epochs!r}"
            )
        epochs = tuple(epochs)
        super().__init__(
            lambda epoch, rate: rate * factor if epoch in epochs else rate, verbose=verbose
        )
        self.epochs = epochs
        self.factor = factor


@keras.saving.register_keras_serializable("trellis_keras")
class ExponentialDecay(SavedArguments, keras.callbacks.LearningRateScheduler):
    """Multiplies the learning rate by a factor after every epoch.

    The LRU paper (Ahuja & Morency 2018, "Training Details") uses a factor of 0.9, which the
    authors' code applies once per epoch.

    Args:
        factor: Float between 0 and 1. Defaults to `0.9`.
        verbose: 0 or 1. 1 prints the rate of every epoch. Defaults to `0`.
    """

    def __init__(self, factor: float = 0.9, verbose: int = 0) -> None:
        _check_factor(factor)
        super().__init__(lambda epoch, rate: rate * factor if epoch else rate, verbose=verbose)
        self.factor = factor


@keras.saving.register_keras_serializable("trellis_keras")
class ASGDSwitch(_Monitor):
    """Starts averaging the weights when a metric has stopped improving.

    This is the non-monotonic trigger of Merity et al. (2018), the plateau of
    `PlateauDecay(rule="best_before")`, which this callback replaces in the word-level TrellisNet
    program (Bai et al. 2019): the learning rate stays constant.

    From the next epoch on, the `ASGD` optimizer averages the weights. The model holds the
    averages during validation and after each epoch, so that other callbacks evaluate and save
    them; the weights are swapped back when the next epoch begins. After `fit` the model keeps
    the averages, and a later `fit` with this callback resumes training where it stopped. If the
    `ASGD` has a `t0`, averaging starts there.

    Place it before callbacks that save the model.

    Args:
        window: Positive integer, number of epochs in the rule. Defaults to `10`, as in the
            TrellisNet program; Merity et al. use 5.
        monitor: String, name of the monitored value in the logs. Defaults to `"val_loss"`.
        mode: `"min"` if smaller values are better, `"max"` if larger ones are. Defaults to `"min"`.
        verbose: 0 or 1. 1 prints a line when averaging starts. Defaults to `0`.

    Example:

    >>> model.compile(trellis_keras.training.ASGD(0.1), "mse")
    >>> switch = trellis_keras.training.ASGDSwitch(window=5)
    >>> checkpoint = trellis_keras.training.Checkpoint("run/averaged", callbacks=[switch])
    >>> model.fit(train, validation_data=valid, epochs=500, shuffle=False,
    ...     callbacks=[switch, checkpoint])
    """

    def __init__(
        self, window: int = 10, monitor: str = "val_loss", *, mode: str = "min", verbose: int = 0
    ) -> None:
        super().__init__(monitor, mode, window)
        self.verbose = verbose

    def on_train_begin(self, logs: Logs = None) -> None:
        if not isinstance(self._optimizer, ASGD):
            raise ValueError(
                "ASGDSwitch requires the optimizer `trellis_keras.training.ASGD`. "
                f"Received: {type(self._optimizer).__name__}"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._optimizer.use_weights()

    def on_test_begin(self, logs: Logs = None) -> None:
        self._optimizer.use_average()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if not self._optimizer.has_start:
            value = self._read(logs)
            if value > self._earlier_best():
                self._optimizer.start_averaging()
                if self.verbose:
                    print(f"\nEpoch {epoch + 1}: ASGDSwitch starts averaging the weights.")
            self._values.append(_nan_to_inf(value))
        self._optimizer.use_average()  # there may have been no validation

    @property
    def _optimizer(self):
        """The optimizer inside a `LossScaleOptimizer`."""
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)


@keras.saving.register_keras_serializable("trellis_keras")
class GrowingDepth(SavedArguments, keras.callbacks.Callback):
    """Trains a TrellisNet with fewer levels for some epochs, then with all of them.

    All levels of a TrellisNet share their weights, so a shallower network trains the same weights
    at a fraction of the cost, as in Deep Equilibrium Models (Bai, Kolter & Koltun 2019). Its
    receptive field is shorter, so the last epochs, with all levels, teach the network to use its
    whole context. Validation has the depth of the epoch. Auxiliary outputs that the shallower
    network has are trained throughout.

    Args:
        depth: Positive integer, number of levels in the first epochs.
        epochs: Positive integer, number of these epochs.

    Raises:
        ValueError: When training starts, unless the model is from `trellis_keras.models` and its
            backbone is a `TrellisLayer` with at least `depth` levels.
    """

    def __init__(self, depth: int, epochs: int) -> None:
        super().__init__()
        self.depth, self.epochs = check_positive(depth=depth, epochs=epochs)

    def on_train_begin(self, logs: Logs = None) -> None:
        backbone = self.model.backbone if isinstance(self.model, BackboneModel) else None
        if not isinstance(backbone, TrellisLayer) or backbone.depth < self.depth:
            raise ValueError(
                f"GrowingDepth(depth={self.depth}) needs a model of `trellis_keras.models` with a "
                f"TrellisLayer of at least as many levels. Received: {backbone or self.model!r}"
            )
        self._full_depth = backbone.depth  # to which `fit` returns

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.model.set_depth(self.depth if epoch < self.epochs else self._full_depth)


def _nan_to_inf(value):
    """NaN compares as worst."""
    return math.inf if math.isnan(value) else value


def _check_factor(factor):
    if not isinstance(factor, numbers.Real) or not 0 < factor < 1:
        raise ValueError(f"`factor` must be between 0 and 1. Received: factor={factor!r}")
