"""The checks of every recurrent cell: what `keras.layers.RNN` does with one of Keras' own.

Each check takes `make(**options)`, which makes a new cell whose weights follow from a seed, and an
array x (batch, time, channels) as wide as the cell's output, so that cells can be stacked.
"""

import functools
import re

import keras
import numpy as np
from keras import ops

BACKEND = keras.backend.backend()


def exact():
    return {"float64": 1e-12, "float32": 2e-6}[keras.config.floatx()]


def random(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def numpy(tensors):
    return keras.tree.map_structure(ops.convert_to_numpy, tensors)


def assert_same(actual, reference, tolerance=None):
    """Arrays, or lists of arrays, agree to `tolerance` times the largest number."""
    tolerance = exact() if tolerance is None else tolerance
    actual, reference = (keras.tree.flatten(numpy(list(a))) for a in (actual, reference))
    assert len(actual) == len(reference)
    for a, b in zip(actual, reference, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-30)


def run(make, x, mask=None, states=None, **options):
    """All outputs, and the final states."""
    rnn = keras.layers.RNN(make(), return_sequences=True, return_state=True, **options)
    y, *states = rnn(x, mask=mask, initial_state=states)
    return y, states


def check_pieces(make, x):
    """Two pieces, the states handed over, are the whole; so is a layer that keeps its states."""
    y, states = run(make, x)
    first, between = run(make, x[:, :3])
    second, last = run(make, x[:, 3:], states=between)
    assert_same([ops.concatenate([first, second], axis=1), *last], [y, *states])
    stateful = keras.layers.RNN(make(), stateful=True)
    assert_same(stateful(x[:, :3]), first[:, -1])
    assert_same(stateful(x[:, 3:]), second[:, -1])
    stateful.reset_state()
    assert_same(stateful(x[:, :3]), first[:, -1])


def check_masks(make, x, **options):
    """A row with masked steps is as one without them, in its valid steps and its final states."""
    x, mask = x[:2], np.ones((2, x.shape[1]), bool)
    mask[0, :3] = mask[1, -3:] = False  # padding before and after
    y, states = numpy(run(make, x, mask=mask, **options))
    for row in range(2):
        alone, ends = numpy(run(make, x[row : row + 1, mask[row]]))
        assert_same([y[row, mask[row]]], [alone[0]])
        assert_same([s[row] for s in states], [s[0] for s in ends])


def check_stack(make, x):
    """Two cells in one layer are two layers; `unroll` changes nothing."""
    cells = [make(seed=1), make(seed=2)]
    y = keras.layers.RNN(cells, return_sequences=True)(x)
    for cell in cells:
        x = keras.layers.RNN(cell, return_sequences=True)(x)
    assert_same(y, x)
    inputs = keras.Input(x.shape[1:])
    model = keras.Model(inputs, keras.layers.RNN(cells, return_state=True, unroll=True)(inputs))
    assert_same(model(x)[0], keras.layers.RNN(cells)(x))


def check_bidirectional(make, x):
    layer = keras.layers.Bidirectional(keras.layers.RNN(make(), return_sequences=True))
    y = numpy(layer(x))
    backward = layer.backward_layer.cell
    reversed_y, _ = run(lambda: backward, np.flip(x, 1).copy())
    assert_same(y[..., : y.shape[-1] // 2], run(lambda: layer.forward_layer.cell, x)[0])
    assert_same(y[..., y.shape[-1] // 2 :], np.flip(numpy(reversed_y), 1))


def check_file(make, x, path):
    """Configuration and `.keras` file give the same cell again."""
    cell = make(dropout=0.1, recurrent_dropout=0.2, seed=4)
    again = type(cell).from_config(cell.get_config())
    assert again.get_config() == cell.get_config()
    model = keras.Sequential([keras.Input((None, x.shape[-1])), keras.layers.RNN([cell, make()])])
    model.save(path)
    loaded = keras.models.load_model(path)
    assert loaded.layers[0].cell.cells[0].get_config() == cell.get_config()
    assert_same(loaded.predict(x, verbose=0), model.predict(x, verbose=0), 0)


def check_shapes(make, x):
    """Shapes of a symbolic call, also where batch and time are not known."""
    rnn = keras.layers.RNN(make(), return_sequences=True, return_state=True)
    y, *states = rnn(keras.Input((None, x.shape[-1])))
    found, *ends = rnn(x)
    assert y.shape == (None, None, found.shape[-1])
    assert [s.shape for s in states] == [(None, s.shape[-1]) for s in ends]


def check_half_precision(make, x):
    """Mixed precision: float32 weights, and about the same results."""
    weights = make()
    reference, _ = run(lambda: weights, x)
    for policy, error in (("mixed_float16", 5e-3), ("mixed_bfloat16", 5e-2)):
        cell = make(dtype=policy)
        y, states = run(lambda cell=cell: cell, x, dtype=policy)
        assert {w.dtype for w in cell.weights} == {"float32"}
        for tensor in [y, *states]:
            assert keras.backend.standardize_dtype(tensor.dtype) == policy.removeprefix("mixed_")
        assert_same(ops.cast(y, keras.config.floatx()), reference, error)


def check_fit(make, x):
    """Compiled training with dropout lowers the loss."""
    cell = make(dropout=0.1, recurrent_dropout=0.1)
    model = keras.Sequential([keras.layers.RNN(cell), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=True)
    x = np.concatenate([x] * 8)
    losses = model.fit(x, x[:, 0, :1], batch_size=len(x), epochs=10, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def check_inference_is_not_random(make, x):
    """Without training there is no random operation, with it there are some."""
    rnn = keras.layers.RNN([make(dropout=0.4, recurrent_dropout=0.4, seed=s) for s in (1, 2)])
    assert_same(rnn(x), rnn(x), 0)
    for training, random_operations in ((False, False), (True, True)):
        text = _graph(functools.partial(rnn, training=training), x)
        assert bool(re.search("[Rr]andom|threefry", text)) == random_operations
    seeds = [v for v in rnn.variables if "seed" in v.path]
    before = numpy([v.value for v in seeds])
    assert len(seeds) == 4
    rnn(x)
    keras.Sequential([rnn]).predict(x, verbose=0)
    assert_same(before, numpy([v.value for v in seeds]), 0)


def _graph(function, x):
    """The operations of `function(x)`, those of loop bodies too, as text."""
    if BACKEND == "jax":
        import jax

        with keras.StatelessScope():
            return str(jax.make_jaxpr(function)(x))
    import tensorflow as tf

    graph = tf.function(function).get_concrete_function(tf.constant(x)).graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return " ".join(node.op for node in nodes)


CHECKS = [
    check_pieces,
    check_masks,
    check_stack,
    check_bidirectional,
    check_shapes,
    check_half_precision,
    check_fit,
    check_inference_is_not_random,
]
