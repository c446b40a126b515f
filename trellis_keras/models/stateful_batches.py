"""Batches of a stateful model: their number of rows, and the reset at the start of an epoch."""

from typing import Any

import keras

from trellis_keras.types import Logs


class ResetStates(keras.callbacks.Callback):
    """Resets the states of a model's backbone at the start of each epoch of training."""

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.model.backbone.reset_state(training=True)


def rows_per_batch(x: Any, batch_size: int | None) -> int:
    """Returns the number of rows of the batches that Keras will read from x, in all processes."""
    return _rows_here(x, batch_size) * _processes()


def _rows_here(x, batch_size):
    if isinstance(x, keras.utils.PyDataset):
        return len(keras.utils.unpack_x_y_sample_weight(x[0])[0])
    if hasattr(x, "element_spec"):  # a tf.data.Dataset
        spec = x.element_spec[0] if isinstance(x.element_spec, tuple) else x.element_spec
        if spec.shape[0] is None:
            raise ValueError(
                "A stateful backbone needs batches of equal size: batch(..., drop_remainder=True)."
            )
        return spec.shape[0]
    if not hasattr(x, "__len__"):
        raise ValueError(
            "A stateful backbone needs batches of equal size, known in advance: arrays, a "
            "`keras.utils.PyDataset`, or a `tf.data.Dataset` of batch(..., drop_remainder=True). "
            f"Received: {type(x).__name__}"
        )
    rows = min(batch_size or 32, len(x))
    if len(x) % rows:
        raise ValueError(
            "A stateful backbone needs batches of equal size. "
            f"Received: {len(x)} rows with batch_size={rows}"
        )
    return rows


def _processes():
    """Returns the number of processes among which the rows of every batch are divided."""
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.auto_shard_dataset:
        return 1
    import jax

    return jax.process_count()
