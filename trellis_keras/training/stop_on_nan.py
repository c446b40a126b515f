"""The end of a training that has diverged."""

import math

import keras


class StopOnNaN(keras.callbacks.Callback):
    """Ends training with an error as soon as the loss is no finite number any more.

    `keras.callbacks.TerminateOnNaN` lets the epoch end as any other, so that the lost weights
    are validated, recorded and saved. Here `fit` raises before the callbacks behind this one learn
    of the epoch's end: put it FIRST in the list. What they have saved is that of the epoch before.

    A validation loss that is not finite ends training too: the last step of an epoch may spoil the
    weights when its own loss is worked out already.

    Raises:
        FloatingPointError: by `fit`, with the epoch and the step, both counted from 1. With
            `steps_per_execution` it is the last step of those that ran together.

    Example:

    >>> checkpoint = trellis_keras.training.Checkpoint("run/not_lost")
    >>> model.fit(x, y, callbacks=[trellis_keras.training.StopOnNaN(), checkpoint])
    """

    def __init__(self):
        super().__init__()
        self._epoch = 0
        self._lost = []  # (step, loss)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._lost = []

    def on_train_batch_end(self, batch, logs=None):
        if "loss" not in (logs or {}):
            raise ValueError(f"StopOnNaN watches 'loss', which is not in the logs: {logs}")
        loss = logs["loss"]  # the epoch's mean so far, which no later step makes finite again
        if not math.isfinite(loss):
            self._lost.append((batch + 1, loss))
            # No error here: on JAX the model's variables are empty until the epoch has ended.
            self.model.stop_training = True

    def on_test_begin(self, logs=None):
        self._check()  # nothing is left to validate

    def on_epoch_end(self, epoch, logs=None):
        self._check()
        loss = (logs or {}).get("val_loss", 0.0)
        if not math.isfinite(loss):
            raise FloatingPointError(f"The validation loss after epoch {epoch + 1} is {loss}.")

    def _check(self):
        if self._lost:
            step, loss = min(self._lost)
            raise FloatingPointError(
                f"The loss is {loss} at step {step} of epoch {self._epoch + 1}."
            )
