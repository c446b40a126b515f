"""The model with the best value of a metric."""

import math
from os import PathLike
from pathlib import Path

import keras

from keras_streams.files import atomic_write
from trellis_keras.files import check_can_write
from trellis_keras.layers.checks import check_choice
from trellis_keras.training.callbacks import monitored_value
from trellis_keras.types import Logs


class BestModel(keras.callbacks.Callback):
    """Saves the model whenever a metric is the best so far.

    `keras.callbacks.ModelCheckpoint` overwrites its file in place, so a kill can lose both the
    old and the new model. This callback replaces the file atomically. NaN is never the best.

    Args:
        path: The `.keras` file. Its folder is created when training begins.
        monitor: String, name of the monitored value in the logs. Defaults to `"val_loss"`.
        mode: `"min"` if smaller values are better, `"max"` if larger ones are. Defaults to `"min"`.

    Raises:
        ValueError: If training begins after the first epoch, the file exists, and the best value is
            unknown: list this callback in `Checkpoint(callbacks=[...])` too.

    Example:

    >>> model.fit(x, y, validation_split=0.1, callbacks=[BestModel("run/best.keras")])
    """

    def __init__(
        self, path: str | PathLike, monitor: str = "val_loss", *, mode: str = "min"
    ) -> None:
        super().__init__()
        check_choice("mode", mode, ("min", "max"))
        self.path = Path(path).expanduser()
        if self.path.suffix != ".keras":
            raise ValueError(f"`path` must end in .keras. Received: path={str(path)!r}")
        self.monitor = monitor
        self.mode = mode
        self.best = math.inf if mode == "min" else -math.inf
        self._knows_best = False

    def get_state(self) -> dict:
        return {"best": self.best}

    def set_state(self, state: dict) -> None:
        self.best = state["best"]
        self._knows_best = True

    def on_train_begin(self, logs: Logs = None) -> None:
        check_can_write(self.path)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if epoch > 0 and not self._knows_best and self.path.exists():
            raise ValueError(
                f"{self.path} may be from an earlier epoch, and better. Pass this BestModel to "
                f"Checkpoint(callbacks=[...]), which saves the best {self.monitor}, or another "
                "`path`."
            )
        self._knows_best = True

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        value = monitored_value(self, logs)
        is_better = value < self.best if self.mode == "min" else value > self.best
        if is_better:
            self.best = value
            with atomic_write(self.path) as temporary:
                self.model.save(temporary)
