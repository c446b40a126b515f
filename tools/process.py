"""Helpers for measured processes: peak memory, the start of an epoch, random words."""

import resource


def peak_memory():
    """Returns the peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux


def begin_epoch(model, rows):
    """Resets carried states, as `fit` does before an epoch, for use with `train_on_batch`."""
    if getattr(model.backbone, "stateful", False):
        model.backbone.reset_state(rows, training=True)


def words(rng, vocabulary_size, shape):
    """Returns int32 random word ids of the given shape with Zipf's frequencies, 1/n."""
    import numpy as np

    frequency = 1 / np.arange(1, vocabulary_size + 1)
    chosen = rng.choice(vocabulary_size, shape, p=frequency / frequency.sum())
    return chosen.astype("int32")
