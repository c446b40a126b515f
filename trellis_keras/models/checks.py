"""Checks of arrays where they enter a sequence model, before training begins."""

import numpy as np


def check_rank(name, array, axes):
    """Refuses an array without the axes, given as text such as "(batch, time, channels)".

    Raises:
        ValueError: Another number of axes.
    """
    if array.ndim != axes.count(",") + 1:
        raise ValueError(f"`{name}` must have axes {axes}. Received: shape {array.shape}")


def check_labels(labels, classes):
    """Refuses labels that a loss would take silently, or make NaN of.

    Raises:
        ValueError: A label is no whole number, or lies outside [0, classes).
    """
    whole = np.issubdtype(labels.dtype, np.integer) or np.all(np.floor(labels) == labels)
    if not whole or labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(
            f"Labels must be whole numbers in [0, {classes}), also where the sample weight is 0. "
            f"Received: values from {labels.min()} to {labels.max()} of type {labels.dtype}"
        )


def check_piano_roll(name, roll, keys):
    """Refuses what is no piano roll (batch, time, keys) of 0 and 1.

    Raises:
        ValueError: Wrong axes or number of keys, or another value.
    """
    check_rank(name, roll, "(batch, time, keys)")
    if roll.shape[-1] != keys:
        raise ValueError(f"`{name}` must have {keys} keys. Received: shape {roll.shape}")
    wrong = ~np.isin(roll, (0, 1))
    if wrong.any():
        row, time, key = np.argwhere(wrong)[0]
        raise ValueError(
            f"`{name}` must hold 0 (silent) and 1 (sounds) only. "
            f"Received: {roll[row, time, key]} in row {row}, frame {time}, key {key}"
        )


def check_weights(weights):
    """Refuses sample weights (batch, time) with a row in which no step counts.

    Raises:
        ValueError: There is such a row; it is named.
    """
    if weights.ndim < 2:
        return
    empty = np.flatnonzero(~np.any(weights.reshape(len(weights), -1), axis=1))
    if empty.size:
        raise ValueError(
            f"Row {empty[0]} has no step that counts: all its sample weights are 0. "
            f"Leave such rows out ({empty.size} of {len(weights)})."
        )


def check_class_weight(arguments):
    """Refuses Keras' `class_weight` where targets have a time axis, which it takes for classes.

    Raises:
        ValueError: It is among the arguments of `fit`.
    """
    if arguments.get("class_weight") is not None:
        raise ValueError(
            "`class_weight` is not for targets (batch, time): Keras would take the largest target "
            "of a row for its class. Pass sample_weight=np.vectorize(class_weight.get)(y)"
        )


def refuse_quantization(model):
    """Keras would quantize layers that the model's configuration does not name.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        "Keras' quantization makes a model of this kind that cannot be loaded again. Use "
        'export.export(model, path, format="litert", quantization="int8"). '
        f"Received: {model.name}"
    )
