"""What is printed while a model trains."""

from time import monotonic

import keras

from trellis_keras.types import Logs


class BatchProgress(keras.callbacks.Callback):
    """Prints a progress line at intervals within long epochs.

    For output to a file or a pipe, where Keras prints nothing before an epoch ends.

    Args:
        seconds: Positive number, the minimum time between two lines. Defaults to `60`.
    """

    def __init__(self, seconds: float = 60) -> None:
        super().__init__()
        self.seconds = seconds

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch, self._last = epoch, monotonic()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if monotonic() - self._last >= self.seconds:
            self._last = monotonic()
            of = f"/{steps:,}" if (steps := self.params["steps"]) else ""
            figures = "".join(f" - {name}: {float(v):.4f}" for name, v in (logs or {}).items())
            print(
                f"Epoch {self._epoch + 1}/{self.params['epochs']}: "
                f"batch {batch + 1:,}{of}{figures}",
                flush=True,
            )


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Keras' progress bar, without the gradient norms of individual layers."""

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        shown = {k: v for k, v in (logs or {}).items() if not k.startswith("gradient_norm/")}
        super().on_epoch_end(epoch, shown)
