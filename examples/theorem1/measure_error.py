"""Measures the rounding error of Theorem 1, and the error without start levels.

    python examples/theorem1/measure_error.py --floatx float64

Random stacks of Keras layers with biases are converted and compared with the original layers, run
separately on every window. It reports the largest difference of any output (all lie in (-1, 1)).
"""

from typing import Annotated

import numpy as np
import typer

from trellis_keras.layers import TrellisLayer
from trellis_keras.theorem1 import to_trellis

# isort: split
import keras

BATCH, TIME, CHANNELS = 2, 48, 5


def main(
    floatx: Annotated[str, typer.Option(help="float32 or float64 (JAX: JAX_ENABLE_X64=1).")] = (
        "float32"
    ),
    draws: Annotated[int, typer.Option(min=1, help="Random stacks of each kind and depth.")] = 3,
):
    """Prints the largest errors as a Markdown table."""
    keras.config.set_floatx(floatx)
    kinds = (keras.layers.SimpleRNN, keras.layers.LSTM, keras.layers.GRU)
    typer.echo(f"| {floatx} | layers | largest error | without start levels |\n|---|---|---|---|")
    for kind in kinds:
        for depth in (1, 2, 3, 4):
            errors = np.max([errors_of(kind, depth, seed) for seed in range(draws)], axis=0)
            without = f"{errors[1]:.0e}" if depth > 1 else "-"
            typer.echo(f"| {kind.__name__} | {depth} | {errors[0]:.0e} | {without} |")


def errors_of(kind, depth, seed):
    """The errors of one random stack with start levels and without."""
    rng = np.random.default_rng(seed)
    truncation = int(rng.integers(2, 33))
    layers = random_layers(kind, rng.integers(8, 65, depth), rng)
    x = rng.normal(size=(BATCH, TIME, CHANNELS))
    trellis = to_trellis(layers, truncation)
    wanted = every_window(layers, x, truncation)
    nets = (trellis, without_start_levels(trellis))
    return [np.max(np.abs(np.asarray(net(x)) - wanted)) for net in nets]


def random_layers(kind, widths, rng):
    layers, channels = [], CHANNELS
    for width in map(int, widths):
        layer = kind(width, return_sequences=True)
        layer.build((None, None, channels))
        weights = [rng.normal(0, len(w) ** -0.5 if w.ndim > 1 else 0.5, w.shape)
                   for w in layer.get_weights()]  # fmt: skip
        layer.set_weights(weights)
        layers.append(layer)
        channels = width
    return layers


def every_window(layers, x, truncation):
    """The M-truncated RNN by definition: the output at t of a run over the last M steps."""
    windows = np.lib.stride_tricks.sliding_window_view(x, truncation, axis=1)
    y = windows.swapaxes(2, 3).reshape(-1, truncation, CHANNELS)
    for layer in layers:
        y = layer(y)
    y = np.asarray(y).reshape(BATCH, -1, truncation, y.shape[-1])
    # The first window is begun at the first step: so are those of the steps before its last.
    return np.concatenate([y[:, 0], y[:, 1:, -1]], axis=1)


def without_start_levels(trellis):
    net = TrellisLayer.from_config({**trellis.get_config(), "group_starts": None})
    net.build((None, None, CHANNELS))
    net.set_weights(trellis.get_weights())
    return net


if __name__ == "__main__":
    typer.run(main)
