"""Counts the floating-point operations of a TrellisNet's training step."""

import numpy as np


def operations(model, batch, cone=True):
    """Counts the operations of a step's matrix products: forward, and twice that for gradients.

    Gates, softmax, dropout, weight norm and the optimizer are not counted.

    Args:
        model: A zoo model with a `TrellisLayer`.
        batch: A batch (x, y, weight) from its recipe's stream.
        cone: Whether to count only the positions that the layer computes: those that the loss can
            see and, in loops, a few more. Otherwise counts all positions of all levels.

    Returns:
        A float.
    """
    layer, (x, y, _) = model.backbone, batch
    rows, time = x.shape[:2]
    counted = y.shape[1] if layer.return_sequences else 1
    plan = layer.plan_levels(time, counted if cone else None)
    # Without carried states, the inputs of level 1 are zeros.
    multiplying = range(1 if layer.stateful else 2, layer.depth + 1)
    hidden = layer.units * sum(len(plan.positions[level]) for level in multiplying)
    entering = {}
    for level in filter(layer.injects_input, range(1, layer.depth + 1)):
        entering.setdefault(layer.dilation(level), []).append(plan.positions[level])
    # Levels with the same dilation share the product with x.
    injected = sum(len(np.unique(np.concatenate(levels))) for levels in entering.values())
    core = layer.kernel_size * layer.cell.kernel_units * (hidden + _channels(model) * injected)
    return 6.0 * rows * (core + _head(layer, model, counted))


def _channels(model):
    return getattr(model, "embedding_dim", None) or model.input_spec.axes[-1]


def _head(layer, model, counted):
    """Counts the products per row, for the last level and each auxiliary one."""
    outputs = getattr(model, "vocabulary_size", None) or model.head.units
    levels = 1 + layer.return_aux * len(layer.aux_levels)
    return counted * levels * layer.output_units * outputs
