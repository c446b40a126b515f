"""What layers for sequences share: `output_length`, any length, sizes, seeds, freezing."""

import contextlib
import functools
import json

import keras
import numpy as np
import pytest

from tests.support.layer_checks import assert_close, made, noise
from trellis_keras import kernels
from trellis_keras.layers import (
    LRU,
    TCN,
    AdaptiveSoftmax,
    GridLSTMCell,
    LRUCell,
    RHNCell,
    StackedRNN,
    TrellisLayer,
)
from trellis_keras.layers.seeds import sub_seed
from trellis_keras.models import LanguageModel, SequenceClassifier

TENSORFLOW = keras.backend.backend() == "tensorflow"
N = np.int64


@pytest.mark.parametrize(
    "make", [TrellisLayer, lambda units, depth, **k: TCN(units, 2, depth, **k)]
)
def test_output_length_of_a_call(make):
    x = np.random.default_rng(0).normal(size=(2, 6, 3)).astype("float32")
    layer = make(4, 2)
    np.testing.assert_allclose(layer(x, output_length=2), layer(x)[:, -2:], atol=1e-6)
    for wrong in (0, -2, 2.5, True):
        with pytest.raises(ValueError, match=f"positive integer. Received: output_length={wrong}"):
            layer(x, output_length=wrong)
    last = make(4, 2, return_sequences=False)
    assert last(x, output_length=1).shape == (2, 4)
    for call in (last, lambda x, **k: last(keras.Input((6, 3)), **k)):
        with pytest.raises(ValueError, match="returns one step. Received: output_length=3"):
            call(x, output_length=3)
    for call in (layer, lambda x, **k: layer(keras.Input((6, 3)), **k)):
        with pytest.raises(ValueError, match="output_length=7, input length 6"):
            call(x, output_length=7)


@pytest.mark.skipif(not TENSORFLOW, reason="JAX knows every length")
@pytest.mark.parametrize("make", [TrellisLayer, lambda *a, **k: TCN(a[0], 2, a[1], **k)])
def test_output_length_of_an_unknown_length(make):
    import tensorflow as tf

    layer = make(4, 2, output_length=5)
    layer.build((None, None, 3))
    function = tf.function(layer, input_signature=[tf.TensorSpec((None, None, 3))])
    x = np.random.default_rng(0).normal(size=(2, 6, 3)).astype("float32")
    np.testing.assert_allclose(function(x), layer(x), atol=1e-6)
    with pytest.raises(tf.errors.InvalidArgumentError, match="output_length_exceeds_the_length"):
        function(x[:, :3])


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize(
    "make",
    [
        functools.partial(TrellisLayer, 4, 5, cell="gru", kernel_size=3, dilation_rate=[1, 8]),
        functools.partial(TCN, 5, 3, depth=4),
    ],
    ids=["trellis", "tcn"],
)
def test_inputs_shorter_than_a_dilation(make):
    """They equal the first steps of longer inputs, with and without kernels."""
    layer, x = made(make, (2, None, 3)), noise(2, 20, 3)
    expected = np.asarray(layer(x))
    for time, output_length in ((1, None), (3, None), (7, 1)):
        first = slice(time - (output_length or time), time)
        for context in (contextlib.nullcontext, kernels.disabled):
            with context():
                found = layer(x[:, :time], output_length=output_length)
            assert_close(found, expected[:, first])


@pytest.mark.parametrize("kind", [TCN, LRU])
def test_training_with_xla_on_any_length(kind):
    layer = made(functools.partial(kind, 3, depth=1, return_sequences=False), (1, 1, 3))
    model = keras.Sequential([keras.Input((None, 3)), keras.layers.Masking(), layer])
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=True)
    for batch, time in ((4, 9), (3, 7)):
        x = noise(batch, time, 3)
        x[0, 2:] = 0
        expected = np.asarray(layer(x, mask=np.any(x != 0, axis=-1)))
        loss = model.train_on_batch(x, np.ones(expected.shape))
        assert loss == pytest.approx(np.mean(np.square(expected - 1)), rel=1e-5)


LAYERS = {
    "TrellisLayer": (
        TrellisLayer,
        {
            "units": N(4),
            "depth": N(3),
            "dilation_rate": 2 ** np.arange(3),
            "kernel_structure": "mixed_group",
            "groups": [N(1), N(3)],
            "group_starts": (N(1), N(2)),
            "aux_every": N(1),
            "output_length": N(2),
            "dropout": np.float32(0.1),
            "seed": N(1),
        },
    ),
    "TCN of a list": (TCN, {"filters": [N(4)], "dilations": [N(3)], "output_length": N(2)}),
    "LRU": (LRU, {"units": N(4), "depth": N(2), "cells_per_node": N(1)}),
    "GridLSTMCell": (GridLSTMCell, {"units": N(4), "depth": N(2)}),
    "AdaptiveSoftmax": (AdaptiveSoftmax, {"vocabulary_size": N(9), "cutoffs": [N(4)]}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_sizes_of_numpy(name):
    kind, options = LAYERS[name]
    layer = kind(**options)
    assert kind.from_config(json.loads(json.dumps(layer.get_config()))).name == layer.name
    layer.build((None, 4) if name.endswith("Cell") else (None, None, 4))


def test_seeds_are_unrelated():
    seeds = [sub_seed(seed, *path) for seed in range(9) for path in ((), ("a",), ("b",), ("a", 1))]
    assert len(set(seeds)) == len(seeds)
    assert sub_seed(None, "a") is None
    assert sub_seed(3, "a", 1) == sub_seed(3, "a", 1)


def seed_states(layer):
    """The states of all random generators in a layer or model."""
    parts = [layer, *layer._flatten_layers(include_self=False)]
    generators = [p.seed_generator for p in parts if getattr(p, "seed_generator", None)]
    return [np.asarray(g.state.value).tobytes() for g in generators]


def test_no_two_parts_draw_the_same_numbers():
    options = {"dropout": 0.1, "weight_dropout": 0.1}
    trellis = [TrellisLayer(4, 2, seed=seed, **options) for seed in range(3)]
    states = {"return_sequences": True, "return_state": True}
    stack = StackedRNN(
        [keras.layers.RNN(RHNCell(4, 2, dropout=0.1, seed=s), **states) for s in range(2)]
    )
    others = [TCN(4, 2, 2, dropout=0.1, seed=0), LRU(4, dropout=0.1, seed=0), stack]
    model = LanguageModel(
        9, 4, TrellisLayer(4, 2, seed=3, **options), input_dropout=0.1, output_dropout=0.1, seed=3
    )
    last = TCN(4, 2, 2, dropout=0.1, return_sequences=False, seed=4)
    classifier = SequenceClassifier(last, 3, input_dropout=0.1, output_dropout=0.1, seed=4)
    states = [s for part in (*trellis, *others, model, classifier) for s in seed_states(part)]
    assert len(states) > 20 and len(set(states)) == len(states)
    kernels = []
    for layer in (*trellis, *others):
        layer.build((None, None, 4))
        kernels += [
            np.asarray(w).ravel()[:8] for w in layer.trainable_weights if "bias" not in w.path
        ]
    assert len({np.sort(k).tobytes() for k in kernels}) == len(kernels)


SEEDED = {
    "trellis": functools.partial(TrellisLayer, 4, 2),
    "tcn": functools.partial(TCN, [4, 8, 4, 8], 3, 4),
    "lru": functools.partial(LRU, 4, 3, cells_per_node=2),
    "lru cell": functools.partial(LRUCell, 4),
    "rhn": functools.partial(RHNCell, 4, 2),
    "grid lstm": functools.partial(GridLSTMCell, 4, 2),
}


def weights(layer):
    layer.build((None, 4) if hasattr(layer, "state_size") else (None, None, 4))
    return [np.asarray(w) for w in layer.weights]


@pytest.mark.parametrize("name", SEEDED)
def test_every_weight_has_numbers_of_its_own(name):
    kinds = ["kernel"] if name == "tcn" else ["kernel", "recurrent", "bias"]

    def drawn(initializer, seed=None):
        options = {f"{kind}_initializer": initializer for kind in kinds}
        return weights(SEEDED[name](seed=seed, **options))

    first, again, other = (drawn("random_normal", seed) for seed in (5, 5, 6))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    of_shared = drawn(keras.initializers.RandomNormal(seed=3))  # by all weights of the layer
    for arrays in (first + other, of_shared):
        lowest = [np.sort(w.ravel())[:8] for w in arrays if w.std() > 0]
        assert len({w.tobytes() for w in lowest}) == len(lowest)


@pytest.mark.filterwarnings("ignore:.*`quantize` method")
def test_quantized_parts_are_saved(tmp_path):
    both = keras.layers.Bidirectional(TCN(4, 2, 2))
    model = keras.Sequential([keras.Input((None, 3)), both, keras.layers.Dense(5)])
    model.quantize("float8")
    model.save(tmp_path / "model.keras")
    x = noise(2, 7, 3)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x), model(x))
