"""Nets of several kinds with equally many parameters."""

import math

import keras

from trellis_keras.layers import TCN
from trellis_keras.zoo.tcn import ForgetBias

LABELS = {"tcn": "TCN", "lstm": "LSTM", "gru": "GRU", "rnn": "RNN"}
RECURRENT = {"lstm": keras.layers.LSTM, "gru": keras.layers.GRU, "rnn": keras.layers.SimpleRNN}


def build(net, task, *, size=None, seed=0, **tcn_options):
    """A compiled model for a task.

    Args:
        net: "tcn", "lstm", "gru" or "rnn".
        task: A `tasks.Task`.
        size: Number of parameters, to which the width is fitted. Default: of a TCN whatever
            the paper's width gives, of others the task's size.
        seed: Of weights and dropout.
        **tcn_options: Arguments of `TCN` in place of the task's.

    Raises:
        ValueError: An unknown kind of net, or a size that none has.
    """
    if net not in LABELS:
        raise ValueError(f"Unknown net {net!r}. Known: {', '.join(LABELS)}.")
    # Weight initializers without their own seed use Keras' global one.
    keras.utils.set_random_seed(seed)

    def make(width):
        return _model(net, task, width, seed, tcn_options)

    width = task.filters
    if size is not None or net != "tcn":
        width = fitted_width(make, task.size if size is None else size)
        keras.utils.set_random_seed(seed)
    model = make(width)
    metrics = task.metrics()
    metrics = {} if metrics is None else {"weighted_metrics": metrics}
    model.compile(task.make_optimizer(net), jit_compile="auto", **metrics)
    return model


def fitted_width(make, size):
    """Returns the width for which `make(width)` has the number of parameters closest to `size`."""
    counts = {}

    def count(width):
        if width not in counts:
            counts[width] = make(width).count_params()
        return counts[width]

    high = 1
    while count(high) < size:
        high *= 2
    low = max(high // 2, 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < size else (low, middle)
    width = min((low, high), key=lambda w: abs(count(w) - size))
    if abs(count(width) - size) > size / 4:
        raise ValueError(
            f"No width comes near to {size} parameters: {low} has {count(low)}, {high} has "
            f"{count(high)}."
        )
    return width


def depth(steps, kernel_size):
    """Returns the smallest number of TCN blocks whose receptive field covers that many steps."""
    return math.ceil(math.log2((steps - 1) / (2 * (kernel_size - 1)) + 1))


def _model(net, task, width, seed, tcn_options):
    if net == "tcn":
        options = {"kernel_size": task.kernel_size, "depth": task.depth, "dropout": task.dropout}
        options |= tcn_options
        filters = [width] * options["depth"]
        if task.last_filters:
            filters[-1] = task.last_filters
        backbone = TCN(filters, return_sequences=task.per_step, seed=seed, **options)
        model = task.model(backbone, seed=seed)
    else:
        backbone = _stacked(net, task, width, seed)
        model = task.model(backbone, output_dropout=task.recurrent.dropout, seed=seed)
    model.build((None, None) if task.last_filters else (None, None, task.channels))
    return model


def _stacked(net, task, width, seed):
    options = {}
    if net == "lstm":
        bias = ForgetBias(task.recurrent.forget_bias)
        options = {"unit_forget_bias": False, "bias_initializer": bias}
    layers = [
        RECURRENT[net](
            width,
            return_sequences=task.per_step or i < task.recurrent.layers - 1,
            seed=seed + i,
            **options,
        )
        for i in range(task.recurrent.layers)
    ]
    return layers[0] if len(layers) == 1 else keras.Sequential(layers)
