"""`fit`, `evaluate` and `predict` of a model that reads a text, batch after batch."""

import math

import keras
import numpy as np

from trellis_keras.layers.base import check_tokens
from trellis_keras.models import checks, devices


class OrderedBatches:
    """For a `keras.Model` with a `backbone`, which may carry its state, and a `vocabulary_size`."""

    def fit(
        self,
        x=None,
        y=None,
        batch_size=None,
        epochs=1,
        verbose="auto",
        callbacks=None,
        *,
        validation_data=None,
        shuffle=None,
        **kwargs,
    ):
        """As `keras.Model.fit`, but batches of a text stay in order.

        Token ids of arrays and of `data.TokenStream`s are checked before anything else.

        Args:
            x, y, batch_size, epochs, verbose, callbacks, validation_data: As in Keras.
            shuffle: Default: True for arrays, False for a `PyDataset`, whose batches Keras would
                shuffle, and with a stateful backbone, whose history would be lost.

            **kwargs: Keras' other arguments, but for `class_weight`.

        A stateful backbone's history is reset at the begin of each epoch.
        """
        checks.check_class_weight(kwargs)
        self._check_tokens(x, y)
        self._check_tokens(
            *(validation_data[:2] if isinstance(validation_data, tuple) else [validation_data])
        )
        stateful = getattr(self.backbone, "stateful", False)
        if shuffle is None:
            shuffle = not (stateful or isinstance(x, keras.utils.PyDataset))
        if stateful:
            if shuffle:
                raise ValueError("A stateful backbone needs its batches in order: shuffle=False.")
            trained = _without_validation(x, kwargs.get("validation_split"))
            self.allocate_history(trained, batch_size, training=True)
            callbacks = [_ResetHistory(), *keras.tree.flatten(callbacks or [])]
        return super().fit(
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            verbose=verbose,
            callbacks=callbacks,
            validation_data=validation_data,
            shuffle=shuffle,
            **kwargs,
        )

    def evaluate(self, x=None, y=None, batch_size=None, **kwargs):
        """As `keras.Model.evaluate`; a stateful backbone starts with an empty history."""
        self._check_tokens(x, y)
        if getattr(self.backbone, "stateful", False):
            self.allocate_history(x, batch_size, training=False)
        return super().evaluate(x, y, batch_size=batch_size, **kwargs)

    def predict(self, x, batch_size=None, **kwargs):
        """As `keras.Model.predict`; a stateful backbone starts with an empty history."""
        self._check_tokens(x)
        if getattr(self.backbone, "stateful", False):
            self.allocate_history(x, batch_size, training=False)
        return super().predict(x, batch_size=batch_size, **kwargs)

    def _check_tokens(self, *sources):
        for source in sources:
            if keras.ops.is_tensor(source):
                source = keras.ops.convert_to_numpy(source)
            if isinstance(source, np.ndarray):
                checks.check_rank("tokens", source, "(batch, time)")
                check_tokens(source, self.vocabulary_size)
            elif hasattr(source, "token_range"):  # a data.TokenStream
                check_tokens(np.array(source.token_range), self.vocabulary_size)
            elif isinstance(source, keras.utils.PyDataset):
                self._check_tokens(*keras.utils.unpack_x_y_sample_weight(source[0])[:2])

    def allocate_history(self, x, batch_size, training):
        """Gives the stateful backbone an empty history for the batches of x."""
        self.backbone.reset_state(_batch_rows(x, batch_size), training)
        phase, held = f"_held_{training}", self.backbone.state_cache.state_variables(training)
        if getattr(self, phase, None) is not held:
            # A function that was compiled for any batch size goes on with the variables of one.
            for function in ["train"] if training else ["test", "predict"]:
                setattr(self, f"{function}_function", None)
            object.__setattr__(self, phase, held)  # to Keras' tracking they would be weights


class _ResetHistory(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.backbone.reset_state(training=True)


def _without_validation(x, validation_split):
    """The rows of arrays that are trained on."""
    return x[: math.floor(len(x) * (1 - validation_split))] if validation_split else x


def _batch_rows(x, batch_size):
    """Rows of the batches that Keras will make of x, which must all have as many."""
    return _rows_here(x, batch_size) * devices.processes()


def _rows_here(x, batch_size):
    if isinstance(x, keras.utils.PyDataset):
        return len(keras.utils.unpack_x_y_sample_weight(x[0])[0])
    if hasattr(x, "element_spec"):
        spec = x.element_spec[0] if isinstance(x.element_spec, tuple) else x.element_spec
        if spec.shape[0] is None:
            raise ValueError(
                "A stateful backbone needs batches of one size: batch(..., drop_remainder=True)."
            )
        return spec.shape[0]
    if not hasattr(x, "__len__"):
        raise ValueError(
            "A stateful backbone needs batches of one size that is known beforehand: arrays, a "
            "`keras.utils.PyDataset`, or a `tf.data.Dataset` of batch(..., drop_remainder=True). "
            f"Received: {type(x).__name__}"
        )
    rows = min(batch_size or 32, len(x))
    if len(x) % rows:
        raise ValueError(
            "A stateful backbone needs batches of one size. "
            f"Received: {len(x)} rows with batch_size={rows}"
        )
    return rows
