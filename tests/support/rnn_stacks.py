"""Random stacks of Keras' recurrent layers, and what they compute when truncated."""

import keras
import numpy as np
import pytest

LAYERS = {"rnn": keras.layers.SimpleRNN, "lstm": keras.layers.LSTM, "gru": keras.layers.GRU}
CHANNELS = 3

# Largest error, the outputs being of order 1.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@pytest.fixture
def exact_tanh(monkeypatch):
    """Keeps Keras' own layers in float64 on JAX, where their tanh leaves it."""
    if keras.backend.backend() == "jax":
        import jax

        monkeypatch.setattr("keras.src.backend.jax.numpy.tanh", jax.numpy.tanh)


def randomize(layer, seed=0):
    """Gives a built layer or model normally distributed weights, biases too."""
    rng = np.random.default_rng(seed)
    layer.set_weights([rng.normal(0, 0.6, w.shape) for w in layer.get_weights()])
    return layer


def random_stack(cell, widths, biased=True, seed=0, **options):
    """A list of built layers, the bottom one first; `biased` is one boolean, or one per layer."""
    biased = [biased] * len(widths) if isinstance(biased, bool) else biased
    layers, channels = [], CHANNELS
    for i, (units, use_bias) in enumerate(zip(widths, biased, strict=True)):
        options = {"return_sequences": True} | options
        layer = LAYERS[cell](units, use_bias=use_bias, **options)
        layer.build((None, None, channels))
        layers.append(randomize(layer, seed + i))
        channels = units
    return layers


def random_input(batch=2, time=8, channels=CHANNELS, seed=0):
    x = np.random.default_rng(seed).normal(size=(batch, time, channels))
    return x.astype(keras.config.floatx())


def run(layers, *inputs):
    """The output of a layer, or of layers one above the other, as arrays."""
    first, *others = layers if isinstance(layers, list) else [layers]

    def forward(*inputs):
        x = first(*inputs)
        for layer in others:
            x = layer(x)
        return x

    if keras.backend.backend() == "jax":  # much faster than one operation after the other
        import jax

        forward = jax.jit(forward)
    return keras.tree.map_structure(np.asarray, forward(*inputs))


def truncated(layers, x, truncation):
    """The outputs of all steps t, each of the RNN that begins at max(1, t - truncation + 1)."""
    y = run(layers, x[:, :truncation])  # these begin at the first step
    later = range(truncation, x.shape[1])
    if not later:
        return y
    windows = np.concatenate([x[:, t - truncation + 1 : t + 1] for t in later])
    last = np.split(run(layers, windows)[:, -1], len(later))
    return np.concatenate([y, np.stack(last, axis=1)], axis=1)


def assert_same(actual, expected, tolerance=None):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype == keras.config.floatx()
    assert actual.shape == expected.shape
    error = np.max(np.abs(actual - expected), initial=0.0)
    assert error <= (tolerance or TOLERANCE[keras.config.floatx()]), f"error {error:.3g}"
