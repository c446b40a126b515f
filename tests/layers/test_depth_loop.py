"""Cone and depth loop against the plain layer that computes everything (`reference.py`)."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from keras import ops

from tests.support.trellis_checks import (
    BATCH,
    CHANNELS,
    QUIET,
    TENSORFLOW,
    UNITS,
    assert_same,
    calls,
    check,
    check_random,
    compute,
    fixed_mask,
    inputs_of,
    make,
)
from trellis_keras.layers import GatedActivation, LSTMGates, TrellisLayer
from trellis_keras.layers.depth_loop import plan_levels

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]

DOUBLING = [1, 1, 2, 4, 8, 16]

# (time, kept outputs, history, mask, constructor arguments)
CASES = {
    "chop": (20, 8, False, False, {"depth": 12, "aux_every": 5, "return_aux": True}),
    "last step": (16, 1, True, False, {"depth": 11, "return_state": True}),
    "dilation cycle": (19, 6, True, False, {"depth": 9, "dilation_rate": [1, 3]}),
    "doubling": (32, 1, False, False, {"depth": 6, "dilation_rate": [1, 1, 2, 4, 8, 16]}),
    "doubling, two steps": (
        32,
        2,
        False,
        False,
        {"depth": 6, "dilation_rate": [1, 1, 2, 4, 8, 16]},
    ),
    "kernel 1": (9, 4, True, False, {"depth": 5, "kernel_size": 1, "dilation_rate": 2}),
    "kernel 3": (17, 5, True, False, {"depth": 6, "kernel_size": 3, "weight_norm": True}),
    "gru": (15, 7, True, False, {"depth": 7, "cell": "gru", "aux_every": 3, "return_aux": True}),
    "mgu": (12, 5, True, False, {"depth": 6, "cell": "mgu", "kernel_size": 3}),
    "groups": (14, 5, True, True, {"depth": 8, "groups": [1, 2, 1], "group_starts": [1, 5, 3]}),
    "rnn": (15, 7, False, False, {"depth": 7, "cell": "rnn", "injection_every": 3}),
    "user cell": (12, 5, True, False, {"depth": 6, "cell": "user", "injection_every": 2}),
    "masked": (14, 5, True, True, {"depth": 7, "return_state": True, "dilation_rate": [2, 1]}),
    "masked, no history": (14, 5, False, True, {"depth": 7}),
    "aux at every level": (8, 3, False, False, {"depth": 4, "aux_every": 1, "return_aux": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_same_as_plain(case, floatx, loops):
    time, kept, history, masked, options = CASES[case]
    check(options, time, [True, False], floatx, kept, history, masked, how="graph")


XLA = ["chop", "dilation cycle", "kernel 3", "gru", "user cell", "masked"]


@pytest.mark.skipif(not TENSORFLOW, reason="JAX always compiles")
@pytest.mark.parametrize("case", XLA)
def test_same_as_plain_under_xla_with_unknown_batch(case, floatx, loops):
    time, kept, history, masked, options = CASES[case]
    check(options, time, [False], floatx, kept, history, masked, how="xla")


# (time, kept outputs, history, constructor arguments)
FAST = {
    "cone": (21, 7, False, {"depth": 12, "aux_every": 5, "return_aux": True}),
    "odd length, history": (9, None, True, {"depth": 7, "return_state": True, "dropout": 0.0}),
}


@pytest.mark.skipif(not TENSORFLOW, reason="TensorFlow's fast path")
@pytest.mark.parametrize("how", ["graph", "xla"])
@pytest.mark.parametrize("memory", ["fast", "lean"])
@pytest.mark.parametrize("case", FAST)
def test_fast_path(case, memory, how, floatx, loops, monkeypatch):
    from trellis_keras.layers import depth_loop_tf

    used = []
    fast = depth_loop_tf.lstm_levels
    monkeypatch.setattr(
        depth_loop_tf, "lstm_levels", lambda *a, **k: used.append(1) or fast(*a, **k)
    )
    time, kept, history, options = FAST[case]
    check(options | {"memory": memory}, time, [False], floatx, kept, history, how=how)
    assert used


@pytest.mark.skipif(not TENSORFLOW, reason="TensorFlow's fast path")
def test_no_sums_of_three_in_the_loops(floatx):
    """Of these TensorFlow's memory optimizer makes temporary variables, which loops cannot have."""
    import tensorflow as tf

    layer, _ = make({"depth": 6, "memory": "lean"}, None, 8)
    x, *_ = inputs_of(layer, 8, False, False)

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            value = ops.sum(layer(x, training=True))
        return tape.gradient(value, layer.trainable_weights)

    functions = gradient.get_concrete_function(tf.convert_to_tensor(x)).graph.as_graph_def()
    bodies = [function.node_def for function in functions.library.function]
    sums = [{node.name: node for node in body if node.op in ("AddV2", "Add")} for body in bodies]
    assert any(sums)
    for body in sums:
        for node in body.values():
            assert not any(name.split(":")[0] in body for name in node.input), node


@pytest.mark.skipif(not TENSORFLOW, reason="TensorFlow's fast path")
def test_fast_path_in_inference_has_a_gradient(floatx):
    layer, plain = make({"depth": 6}, None, 8)
    arguments = inputs_of(layer, 8, True, False)
    found = compute(layer, *arguments, training=False, how="graph")
    assert_same(found, compute(plain, *arguments, training=False), floatx)


# JAX compiles each call by itself, for seconds.
@settings(
    max_examples=12 if TENSORFLOW else 5,
    deadline=None,
    derandomize=True,
    suppress_health_check=QUIET,
)
@given(calls())
def test_random_calls(floatx, loops, call):
    check_random(call, floatx)


# Of 600 random calls in float32, one had a gradient over 2e-6 (2.4e-6; outputs were within 4e-7),
# and that is no mistake of the cone: the plain layer's own gradients were up to 5.4e-6 away from
# those in float64, where both agree within 5e-15. A search for the worst call needs such a bound.
@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=QUIET)
@given(calls())
def test_many_random_calls(floatx, loops, call):
    check_random(call, floatx, float32_bound=6e-6)


def test_unknown_length_is_the_same(floatx):
    if not TENSORFLOW:
        pytest.skip("JAX has no unknown lengths")
    import tensorflow as tf

    layer, plain = make({"depth": 6, "dilation_rate": [1, 2], "kernel_size": 3}, None, None)
    x, states, _ = inputs_of(layer, 4, True, False)  # fewer steps than the taps reach back
    spec = tf.TensorSpec((None, None, CHANNELS), floatx)
    found = tf.function(lambda x: layer(x, initial_state=states), input_signature=[spec])(x)
    assert_same([np.asarray(found)], [np.asarray(plain(x, initial_state=states))], floatx)


def test_static_batch_of_a_history_and_unknown_batch_of_x(floatx):
    layer, plain = make({"depth": 6, "stateful": True}, False, 7)
    x, _, _ = inputs_of(layer, 7, False, False)
    for _ in range(2):
        actual = compute(layer, x, [], None, training=False, how="graph")
        assert_same(actual, compute(plain, x, [], None, training=False), floatx)
        for one in (layer, plain):  # on JAX a gradient's side effects are dropped
            one(x)


def test_rule():
    def turns(time=50, kept=None, **options):
        layer = TrellisLayer(UNITS, **options)
        return [b.turns for b in plan_levels(layer, time, kept).blocks]

    assert turns(depth=30) == [1, 29]
    assert turns(depth=30, aux_every=10) == [1, 9, 10, 10]
    assert turns(depth=8, dilation_rate=[1, 2]) == [1, 3, 1]
    assert turns(depth=8, dilation_rate=[2, 2]) == [1, 7]
    assert turns(depth=30, unroll=True) == [1] * 30
    assert turns(depth=30, groups=[1, 3], group_starts=[1, 2]) == [1, 29]
    assert turns(depth=30, groups=[1, 1, 2], group_starts=[1, 2, 3]) == [1, 1, 28]
    assert turns(depth=30, groups=[2, 2], group_starts=[20, 1]) == [1, 18, 11]
    assert turns(time=None, kept=1, depth=30) == [1, 29]
    assert turns(depth=12, dilation_rate=DOUBLING, kept=1) == [1] * 12
    assert max(turns(depth=18, dilation_rate=DOUBLING, kept=1, unroll=False)) > 1
    assert 1 < max(turns(depth=40, kept=1))


def test_small_models_have_fewer_loops():
    def plan(units, depth, time, kept):
        return plan_levels(TrellisLayer(units, depth), time, kept)

    small, large = plan(64, 140, 280, 140), plan(1400, 140, 280, 140)
    assert len(small.blocks) == 3 and len(large.blocks) > 5
    least = plan_levels(TrellisLayer(64, 140, unroll=True), 280, 140).count
    assert large.count < 1.07 * least and small.count < 1.17 * least


def test_a_cell_that_draws_random_numbers_is_unrolled():
    class NoisyGates(GatedActivation):
        def __init__(self, units, **kwargs):
            super().__init__(units, **kwargs)
            self.seed_generator = keras.random.SeedGenerator(1)

        def call(self, inputs, states):
            h = ops.tanh(inputs) + keras.random.normal(ops.shape(inputs), seed=self.seed_generator)
            return h, [h]

    layer = TrellisLayer(UNITS, depth=9, cell=NoisyGates(UNITS))
    assert {b.turns for b in plan_levels(layer, 20, None).blocks} == {1}
    assert layer(np.zeros((2, 20, 3), keras.config.floatx())).shape == (2, 20, UNITS)


@pytest.mark.parametrize("memory", ["fast", None])
@pytest.mark.parametrize("unroll", [True, False])
def test_half_precision_keeps_states_and_weight_gradients_in_full(unroll, memory):
    # Without weight dropout, whose kernels are scaled to a precision of 8 bits.
    options = {"depth": 9, "return_state": True, "dropout": 0.4, "seed": 1}
    full = TrellisLayer(UNITS, dtype="float32", **options)
    half = TrellisLayer(UNITS, dtype="mixed_bfloat16", unroll=unroll, memory=memory, **options)
    x = np.random.default_rng(0).standard_normal((BATCH, 12, CHANNELS)).astype("float32")
    past = [np.full((BATCH, UNITS), value, "float32") for value in (0.3, -0.4)]
    for layer in (full, half):
        layer.build(x.shape)
        layer.hidden_dropout.draw = fixed_mask(layer.hidden_dropout.compute_dtype, 5)
    half.set_weights([10 * w for w in full.get_weights()])
    full.set_weights(half.get_weights())
    for states in ([], past):
        rough = compute(half, x, states, None, how="graph")
        exact = compute(full, x, states, None, how="graph")
        dtypes = ["float32"] * (6 + len(states))
        assert [str(a.dtype) for a in rough] == ["bfloat16", *dtypes]
        for a, b in zip(rough, exact, strict=True):
            assert np.linalg.norm(a.astype("float32") - b) < 0.02 * np.linalg.norm(b)


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_half_precision_of_the_weights_too(policy):
    layer = TrellisLayer(UNITS, depth=9, dtype=policy, dropout=0.4, weight_norm=True, seed=1)
    x = np.random.default_rng(0).standard_normal((BATCH, 12, CHANNELS)).astype("float32")
    layer.build(x.shape)
    found = compute(layer, x, [], None, how="graph")
    assert all(np.all(np.isfinite(a.astype("float32"))) for a in found)
    assert {str(a.dtype) for a in found[:-1]} == {policy}  # the output and the weights' gradients


def test_a_cell_of_ones_own_computes_in_the_layers_precision():
    # A layer, so Keras would cast what it gets to the policy that it was made under.
    layers = [TrellisLayer(UNITS, 9, cell=cell, seed=1) for cell in (LSTMGates(UNITS), "lstm")]
    wide = TrellisLayer(UNITS, 9, cell=LSTMGates(UNITS, dtype="bfloat16"), seed=1)
    x = np.random.default_rng(0).standard_normal((BATCH, 12, CHANNELS)).astype("float32")
    expected = layers[1](x)
    for layer in (layers[0], wide):
        layer.build(x.shape)
        layer.set_weights(layers[1].get_weights())
        np.testing.assert_allclose(layer(x), expected, rtol=1e-6)


@pytest.mark.skipif(not TENSORFLOW, reason="JAX pads nothing: it compiles for each batch size")
@pytest.mark.parametrize("dataset", [False, True])
def test_fit_under_xla_with_a_partial_batch(dataset, floatx):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            piece = slice(4 * i, 4 * i + 4)
            return x[piece], y[piece]

    random = np.random.default_rng(0)
    x = random.standard_normal((7, 10, CHANNELS)).astype(floatx)
    y = random.standard_normal((7, 5, UNITS)).astype(floatx)
    layer = TrellisLayer(UNITS, depth=8, aux_every=4, dropout=0.2, output_length=5)
    model = keras.Sequential([keras.Input((10, CHANNELS)), layer])
    model.compile("sgd", "mse", jit_compile=True)
    data = (Batches(),) if dataset else (x, y)
    batch_size = None if dataset else 4
    history = model.fit(*data, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    assert np.all(np.isfinite(history.history["loss"]))
