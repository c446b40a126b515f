"""What a measured process is asked, and how its training begins."""

import resource


def peak_memory():
    """The most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux


def begin_epoch(model, rows):
    """Does what `fit` does before an epoch, for `train_on_batch`: empties a carried history."""
    if getattr(model.backbone, "stateful", False):
        model.backbone.reset_state(rows, training=True)


def words(rng, vocabulary_size, shape):
    """Random words, the n-th of which is 1/n times as frequent as the first: int32 of a shape."""
    import numpy as np

    frequency = 1 / np.arange(1, vocabulary_size + 1)
    chosen = rng.choice(vocabulary_size, shape, p=frequency / frequency.sum())
    return chosen.astype("int32")
