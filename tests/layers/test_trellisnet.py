"""TrellisLayer. `test_trellisnet_golden.py` compares it with the authors' code."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keras import ops

from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import (
    TENSORFLOW,
    assert_all_close,
    assert_close,
    check_backwards,
    check_kernels,
    check_layer,
    check_streaming,
    made,
    noise,
    outputs_and_gradients,
    outputs_of,
    sigmoid,
)
from tests.support.parameters import SLOW_ON_JAX, slow_but
from trellis_keras import kernels
from trellis_keras.kernels import mixed_group
from trellis_keras.kernels.activations import tanh
from trellis_keras.layers import GatedActivation, MixedGroupKernel, TrellisLayer

pytestmark = pytest.mark.both_backends

UNITS, CHANNELS = 4, 3
DOUBLING = [1, 1, 2, 4, 8, 16]
in_double = pytest.mark.parametrize("floatx", ["float64"], indirect=True)
only_tensorflow = pytest.mark.skipif(not TENSORFLOW, reason="about TensorFlow")


@keras.saving.register_keras_serializable("tests")
class ScaledGate(GatedActivation):
    """A user's cell, with a weight of its own and a state that nothing reads but itself."""

    state_blocks = 2
    preactivation_blocks = 2

    def __init__(self, units, **kwargs):
        super().__init__(units, **kwargs)
        self.scale = self.add_weight(name="scale", shape=(units,), initializer="ones")

    def call(self, inputs, states):
        gate, candidate = ops.split(inputs, 2, axis=-1)
        gate = ops.sigmoid(gate * ops.cast(self.scale, inputs.dtype))
        h = gate * states[0] + (1 - gate) * tanh(candidate)
        return h, [h, 0.5 * states[1] + h]


def maker(units=UNITS, depth=5, **options):
    """A function that makes equal layers."""
    if options.get("cell") == "user":
        options["cell"] = ScaledGate(units, dtype=keras.config.floatx())
    return functools.partial(TrellisLayer, units, depth, seed=5, **options)


def initial_states(layer, batch):
    return [noise(batch, UNITS, seed=7 + i) for i in range(len(layer.cell.state_size))]


# The shared check

VARIANTS = {
    "lstm": {"output_units": 3, "dropout": 0.3, "weight_dropout": 0.4, "return_state": True},
    "gru": {"cell": "gru", "kernel_size": 3, "dilation_rate": [1, 2], "weight_norm": True},
    "auxiliary": {"cell": "rnn", "injection_every": 2, "aux_every": 2, "return_aux": True},
    "last step": {"kernel_size": 1, "return_sequences": False},
    "groups": {
        "kernel_structure": "mixed_group",
        "groups": [1, 3],
        "group_starts": [1, 2],
        "output_units": 3,
        "output_length": 6,
    },
}


@pytest.mark.parametrize("variant", slow_but(VARIANTS, "lstm"))
def test_layer(variant):
    check_layer(maker(**VARIANTS[variant]), (2, 9, CHANNELS))


@pytest.mark.both_backends(slow=True)
def test_backwards():
    options = {"dilation_rate": [2, 1], "return_state": True, "cell": "gru"}
    check_backwards(maker(**options), (2, 7, CHANNELS))


# The equation of a level, in NumPy


def gates(cell, current, past, bias, states):
    """f of what the current tap and the past taps add: (batch, time, blocks, units) each."""
    a = current + past + bias[: current.shape[2]]
    if cell == "rnn":
        return [np.tanh(a[:, :, 0])]
    if cell == "lstm":
        i, f, g, o = np.moveaxis(a, 2, 0)
        c = sigmoid(f) * states[1] + sigmoid(i) * np.tanh(g)
        return [sigmoid(o) * np.tanh(c), c]
    z, r = sigmoid(a[:, :, 0]), sigmoid(a[:, :, 1])
    candidate = np.tanh(current[:, :, -1] + bias[-2] + r * (past[:, :, -1] + bias[-1]))
    return [z * states[0] + (1 - z) * candidate]


def numpy_trellisnet(layer, x, initial, mask=1.0):
    """The states of the last level at every step; `mask` (batch, 1, units) is of the dropout."""
    cell = type(layer.cell).__name__.removesuffix("Gates").lower()
    units, taps = layer.units, range(layer.kernel_size)
    kernel, recurrent = (
        np.asarray(k.effective_kernel()).reshape(
            layer.kernel_size, -1, layer.cell.kernel_units // units, units
        )
        for k in (layer.kernel, layer.recurrent_kernel)
    )
    bias = np.asarray(layer.bias).reshape(-1, units)
    starts = np.repeat(layer.group_starts or [1], layer.groups or [units])
    time = x.shape[1]

    def earlier(z, z_0, steps):
        return np.stack([z[:, t - steps] if t >= steps else z_0 for t in range(time)], axis=1)

    states = [np.zeros((len(x), time, units)) for _ in initial]
    for level in range(1, layer.depth + 1):
        d = layer.dilations[(level - 1) % len(layer.dilations)]
        added = []
        for j in taps:
            h_j = mask * earlier(states[0], initial[0], j * d)
            a = np.einsum("btc,cgu->btgu", h_j, recurrent[-1 - j])
            if (level - 1) % layer.injection_every == 0:
                x_j = earlier(x, np.zeros_like(x[:, 0]), j * d)
                a = a + np.einsum("btc,cgu->btgu", x_j, kernel[-1 - j])
            added.append(a)
        before = [earlier(s, s_0, d) for s, s_0 in zip(states, initial, strict=True)]
        states = gates(cell, added[0], sum(added[1:], np.zeros_like(added[0])), bias, before)
        states = [np.where(starts <= level, s, 0) for s in states]
    return states


EQUATIONS = {
    "lstm": {"dilation_rate": [2, 1], "weight_norm": True, "dropout": 0.3},
    "gru": {"cell": "gru", "kernel_size": 3, "groups": [1, 3], "group_starts": [4, 1]},
    "rnn": {"cell": "rnn", "injection_every": 3, "dilation_rate": [1, 2]},
    "kernel 1": {"cell": "rnn", "kernel_size": 1, "dilation_rate": 2},
    "groups": {"kernel_structure": "mixed_group", "groups": [1, 2, 1], "group_starts": [1, 2, 3]},
}


@in_double
@pytest.mark.parametrize(
    "plain", [False, pytest.param(True, marks=SLOW_ON_JAX)], ids=["kernels", "plain"]
)
@pytest.mark.parametrize("name", EQUATIONS)
def test_equation(name, plain, floatx):
    layer = made(maker(return_state=True, **EQUATIONS[name]), (2, 7, CHANNELS))
    x, initial = noise(2, 7, CHANNELS), initial_states(layer, 2)
    mask = np.array([[[0, 2, 0.5, 1]], [[2, 1, 0, 3]]], floatx)
    layer.hidden_dropout.draw = lambda shape: ops.convert_to_tensor(mask)
    with kernels.disabled() if plain else contextlib.nullcontext():
        y, *states = outputs_of(layer, x, initial_state=initial, training=True)
    expected = numpy_trellisnet(layer, x, initial, mask if layer.dropout else 1.0)
    assert_close(y, expected[0])
    assert_all_close(states, [state[:, -1] for state in expected])


# Kernels against the plain pass: (time, output length, initial state, mask, arguments)

CASES = {
    "chop": (14, 5, False, False, {"depth": 8, "aux_every": 3, "return_aux": True}),
    "last step": (12, 1, True, False, {"depth": 8, "return_state": True}),
    "odd": (7, 7, True, False, {"depth": 6}),
    "dilation cycle": (15, 4, True, False, {"depth": 7, "dilation_rate": [1, 3]}),
    "doubling": (32, 1, False, False, {"depth": 6, "dilation_rate": DOUBLING, "unroll": None}),
    "kernel 3": (13, 4, True, False, {"kernel_size": 3, "weight_norm": True}),
    "gru": (10, 5, True, False, {"depth": 6, "cell": "gru", "aux_every": 3, "return_aux": True}),
    "starts": (12, 4, True, True, {"depth": 7, "groups": [1, 2, 1], "group_starts": [1, 4, 3]}),
    "groups": (
        *(10, 3, True, False),
        {"depth": 6, "groups": [2, 2], "kernel_structure": "mixed_group"},
    ),
    "user": (10, 4, True, False, {"cell": "user", "injection_every": 2}),
    "masked": (12, 4, True, True, {"depth": 6, "return_state": True, "dilation_rate": [2, 1]}),
}


def check_case(case, how="graph", **more):
    time, output_length, has_initial, has_mask, options = (
        CASES[case] if isinstance(case, str) else case
    )
    options = {"output_units": 3, "dropout": 0.4, "weight_dropout": 0.3, "unroll": False} | options
    make = maker(**options | more)
    call = {"output_length": output_length}
    if has_initial:
        call["initial_state"] = initial_states(make(), 3)
    if has_mask:
        call["mask"] = np.random.default_rng(1).random((3, time)) > 0.3
        call["mask"][0] = False
    check_kernels(lambda: fix_masks(make()), (3, time, CHANNELS), how, **call)


def fix_masks(layer):
    """Replaces random masks: under XLA, TensorFlow draws other numbers from a seed."""

    def draw(shape):
        shape = tuple(n if isinstance(n, int) else 3 for n in shape)  # of an unknown batch
        kept = np.random.default_rng(6).random(shape) >= 0.3
        return ops.convert_to_tensor(kept / 0.7, keras.config.floatx())

    for kernel in (layer.kernel, layer.recurrent_kernel):
        kernel.drop_connect.draw = draw
    layer.hidden_dropout.draw = draw
    return layer


@in_double
@pytest.mark.parametrize("name", slow_but(CASES, "chop", "masked", "groups", "user"))
def test_kernels_equal_the_plain_pass(name, floatx, loops, monkeypatch):
    monkeypatch.setattr(mixed_group, "is_worthwhile", lambda groups: True)
    check_case(name)


@in_double
@only_tensorflow
@pytest.mark.parametrize("name", slow_but(["user", "masked", "groups"], "masked"))
def test_under_xla_with_unknown_batch(name, floatx, loops, monkeypatch):
    monkeypatch.setattr(mixed_group, "is_worthwhile", lambda groups: True)
    check_case(name, how="xla")


@pytest.fixture
def fused(monkeypatch):
    """The values of `rematerialize` with which the fused loop is called."""
    from trellis_keras.kernels import depth_loop_tf

    calls, loop = [], depth_loop_tf.lstm_levels
    monkeypatch.setattr(
        depth_loop_tf,
        "lstm_levels",
        lambda *args, **options: calls.append(options["rematerialize"]) or loop(*args, **options),
    )
    return calls


@in_double
@only_tensorflow
@pytest.mark.parametrize(
    "name, how, rematerialize", [("odd", "xla", False), ("chop", "graph", True)]
)
def test_fused_loop(name, how, rematerialize, floatx, loops, fused):
    check_case(name, how=how, rematerialize=rematerialize)
    assert set(fused) == {rematerialize}


@pytest.mark.both_backends
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX's loop")
def test_rematerialization_takes_less_memory():
    import jax

    def results(rematerialize):
        layer = made(maker(depth=32, rematerialize=rematerialize), (3, 20, CHANNELS))
        weights, others = (
            [variable.value for variable in variables]
            for variables in (layer.trainable_variables, layer.non_trainable_variables)
        )

        def loss(weights):
            y, _ = layer.stateless_call(weights, others, noise(3, 20, CHANNELS))
            return ops.sum(ops.sin(y))

        gradient = jax.jit(jax.grad(loss)).lower(weights).compile()
        return gradient(weights), gradient.memory_analysis().temp_size_in_bytes

    (expected, more), (gradients, less) = results(False), results(True)
    assert less < 0.7 * more
    assert_all_close(gradients, expected)


@only_tensorflow
def test_what_is_not_fused(loops, fused):
    for other in (
        {"cell": "gru", "return_state": False},
        {"kernel_size": 3},
        {"dilation_rate": 2},
        {"injection_every": 2},
        {"unroll": True},
    ):
        layer = made(maker(**{"depth": 6} | other), (3, 8, CHANNELS))
        tensorflow_graph(layer, (3, 8, CHANNELS))
    layer = made(maker(depth=6), (3, 8, CHANNELS))
    tensorflow_graph(layer, (3, None, CHANNELS))
    tensorflow_graph(layer, (3, 8, CHANNELS), mask=np.ones((3, 8), bool))
    assert not fused
    tensorflow_graph(layer, (3, 8, CHANNELS))
    assert fused


def tensorflow_graph(layer, shape, **call):
    import tensorflow as tf

    function = tf.function(lambda x: layer(x, **call))
    return function.get_concrete_function(tf.TensorSpec(shape, keras.config.floatx())).graph


@only_tensorflow
def test_no_sums_of_three_in_the_loops():
    """Of these TensorFlow's memory optimizer makes temporary variables, which loops cannot have."""
    import tensorflow as tf

    layer = made(maker(depth=6, rematerialize=True), (3, 8, CHANNELS))

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            value = ops.sum(layer(x, training=True))
        return tape.gradient(value, layer.trainable_weights)

    x = tf.convert_to_tensor(noise(3, 8, CHANNELS))
    functions = gradient.get_concrete_function(x).graph.as_graph_def()
    bodies = [function.node_def for function in functions.library.function]
    sums = [{node.name: node for node in body if node.op in ("AddV2", "Add")} for body in bodies]
    assert any(sums)
    for body in sums:
        for node in body.values():
            assert not any(name.split(":")[0] in body for name in node.input), node


@st.composite
def calls(draw):
    time, depth = draw(st.integers(4, 20)), draw(st.integers(1, 9))
    aux_every = draw(st.none() | st.integers(1, depth))
    groups = draw(st.sampled_from([None, [4], [1, 3], [2, 1, 1]]))
    options = {
        "depth": depth if groups is None else max(depth, len(groups)),
        "dilation_rate": draw(st.sampled_from([1, 2, [1, 2], [1, 1, 2, 4], [3, 1, 2]])),
        "kernel_size": draw(st.integers(1, 3)),
        "cell": draw(st.sampled_from(["lstm", "lstm", "gru", "rnn"])),
        "injection_every": draw(st.sampled_from([1, 1, 2, 3])),
        "weight_norm": draw(st.booleans()),
        "aux_every": aux_every,
        "return_aux": aux_every is not None,
        "return_state": draw(st.booleans()),
        "unroll": draw(st.sampled_from([None, False])),
        "dropout": 0.3,
        "weight_dropout": 0.3,
    }
    if groups is not None:
        options |= {"groups": groups, "kernel_structure": "mixed_group"}
        if draw(st.booleans()):
            starts = st.lists(
                st.integers(1, options["depth"]), min_size=len(groups), max_size=len(groups)
            )
            options["group_starts"] = draw(starts)
    return time, draw(st.integers(1, time)), draw(st.booleans()), draw(st.booleans()), options


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
# JAX compiles each call by itself, for seconds.
FASTEST = "eager" if TENSORFLOW else "graph"


@pytest.mark.both_backends(slow=True)
@in_double
@settings(
    max_examples=6 if TENSORFLOW else 3,
    deadline=None,
    derandomize=True,
    suppress_health_check=QUIET,
)
@given(calls())
def test_random_calls(floatx, loops, call):
    check_case(call, how=FASTEST)


@in_double
@only_tensorflow
def test_unknown_length(floatx):
    import tensorflow as tf

    layer = made(maker(depth=6, dilation_rate=[1, 2], kernel_size=3), (3, None, CHANNELS))
    x, initial = noise(3, 4, CHANNELS), initial_states(layer, 3)  # shorter than the taps reach

    def output(x):
        return layer(x, initial_state=initial)

    signature = [tf.TensorSpec((None, None, CHANNELS), floatx)]
    with kernels.disabled():
        expected = output(x)
    assert_close(tf.function(output, input_signature=signature)(x), expected)


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("carried", [pytest.param(False, marks=pytest.mark.slow), True])
def test_half_precision_keeps_states_and_weight_gradients_in_full(carried):
    # Without weight dropout, whose kernels are scaled to a precision of 8 bits.
    options = {"depth": 4, "return_state": True, "dropout": 0.4, "unroll": False}
    full, half = (
        made(maker(**options), (3, 12, CHANNELS), dtype=d) for d in ("float32", "mixed_bfloat16")
    )
    states = [np.full((3, UNITS), value, "float32") for value in (0.3, -0.4)]
    exact, rough = (
        outputs_and_gradients(layer, (3, 12, CHANNELS), initial_state=states if carried else None)
        for layer in (full, half)
    )
    dtypes = [keras.backend.standardize_dtype(a.dtype) for a in rough]
    assert dtypes == ["bfloat16", *["float32"] * (len(exact) - 1)]
    for a, b in zip(rough, exact, strict=True):
        a, b = (np.asarray(ops.cast(z, "float32")) for z in (a, b))
        assert np.linalg.norm(a - b) < 0.03 * np.linalg.norm(b)


# Which levels are looped over


def turns(time=50, output_length=None, units=UNITS, **options):
    layer = TrellisLayer(units, **options)
    return [block.turns for block in layer.plan_levels(time, output_length).blocks]


def test_plan():
    assert turns(depth=30) == [1, 29]
    assert turns(depth=30, aux_every=10) == [1, 29]  # without return_aux nobody reads the others
    assert turns(depth=30, aux_every=10, return_aux=True) == [1, 9, 10, 10]
    assert turns(depth=8, dilation_rate=[1, 2]) == [1, 3, 1]
    assert turns(depth=8, dilation_rate=[2, 2]) == [1, 7]
    assert turns(depth=30, unroll=True) == [1] * 30
    assert turns(depth=30, groups=[1, 3], group_starts=[1, 2]) == [1, 29]
    assert turns(depth=30, groups=[1, 1, 2], group_starts=[1, 2, 3]) == [1, 1, 28]
    assert turns(depth=30, groups=[2, 2], group_starts=[20, 1]) == [1, 18, 11]
    assert turns(time=None, output_length=1, depth=30) == [1, 29]
    assert turns(depth=12, dilation_rate=DOUBLING, output_length=1) == [1] * 12
    assert max(turns(depth=18, dilation_rate=DOUBLING, output_length=1, unroll=False)) > 1
    assert 1 < max(turns(depth=40, output_length=1))


def test_a_cell_that_draws_random_numbers_is_unrolled():
    class NoisyGates(GatedActivation):
        def __init__(self, units, **kwargs):
            super().__init__(units, **kwargs)
            self.seed_generator = keras.random.SeedGenerator(1)

        def call(self, inputs, states):
            h = ops.tanh(inputs) + keras.random.normal(ops.shape(inputs), seed=self.seed_generator)
            return h, [h]

    assert turns(time=20, depth=9, cell=NoisyGates(UNITS)) == [1] * 9
    layer = TrellisLayer(UNITS, 9, cell=NoisyGates(UNITS))
    assert layer(noise(2, 20, CHANNELS)).shape == (2, 20, UNITS)


# Arguments


@pytest.mark.parametrize(
    "expected, options",
    [
        (6, {}),
        (1 + 2 * (1 + 3 + 1 + 3 + 1), {"kernel_size": 3, "dilation_rate": [1, 3]}),
        # The gates read the states one dilation ago; x entered at level 1 last.
        (1 + 2 * 4, {"kernel_size": 1, "dilation_rate": 2}),
        (4, {"kernel_structure": "mixed_group", "groups": [1, 3], "output_units": 3}),
        (6, {"groups": [1, 3], "group_starts": [2, 1]}),
        (5, {"groups": [1, 3], "group_starts": [2, 2]}),
    ],
)
def test_receptive_field(expected, options):
    assert TrellisLayer(UNITS, 5, **options).receptive_field == expected


@pytest.mark.parametrize(("start", "levels"), [("bottom", [3, 6, 9]), ("top", [1, 4, 7])])
def test_levels_of_auxiliary_outputs(start, levels):
    assert TrellisLayer(UNITS, 10, aux_every=3, aux_from=start).aux_levels == levels


@pytest.mark.both_backends(slow=True)
@in_double
def test_last_step_of_rows_of_different_lengths(floatx):
    options = {"return_sequences": False, "aux_every": 2, "return_aux": True, "return_state": True}
    layer = made(maker(**options), (4, 9, CHANNELS))
    x, initial = noise(4, 9, CHANNELS), initial_states(layer, 4)
    valid = np.zeros((4, 9), bool)
    # Full, post- and pre-padded, empty. Of three steps, the last one still depends on the states.
    rows = [slice(0, 9), slice(0, 5), slice(6, 9), slice(0, 0)]
    for row, steps in enumerate(rows):
        valid[row, steps] = True
    found = layer(x, mask=valid, initial_state=initial)
    for row, steps in enumerate(rows[:3]):
        own = [s[row : row + 1] for s in initial]
        expected = layer(x[row : row + 1, steps], initial_state=own)
        assert_all_close([a[row] for a in found], [a[0] for a in expected])
    y, aux, h, c = (np.asarray(a)[3] for a in found)  # nothing is valid: the initial states
    np.testing.assert_array_equal([y, *aux, h], [initial[0][3]] * 4)
    np.testing.assert_array_equal(c, initial[1][3])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"output_units": 9}, "output_units"),
        ({"dilation_rate": [1, 0]}, "dilation_rate"),
        ({"dilation_rate": 2**29, "kernel_size": 5}, "kernel_size=5.*at most 268435456"),
        ({"output_length": 3, "return_sequences": False}, "output_length"),
        ({"aux_every": 6}, "aux_every"),
        ({"return_aux": True}, "aux_every"),
        ({"cell": "lstn"}, "cell"),
        ({"cell": ScaledGate(7)}, "units=8"),
        ({"kernel_structure": "mixed_group"}, "groups"),
        ({"groups": [3, 5]}, "groups"),
        ({"kernel_structure": "mixed_group", "groups": [3, 4]}, "groups"),
        ({"kernel_structure": "mixed_group", "groups": [4, 4], "depth": 1}, "depth"),
        ({"groups": [3, 5], "group_starts": [1, 6]}, "group_starts"),
        ({"unroll": "yes"}, "unroll"),
        ({"go_backwards": True, "stateful": True}, "stateful"),
        ({"go_backwards": True, "output_length": 2}, "output_length"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrellisLayer(**({"units": 8, "depth": 5} | arguments))


# Mixed-group kernels


def test_connections_of_a_mixed_group_kernel():
    options = {"groups": [1, 2], "initializer": "ones"}
    of_h = MixedGroupKernel(3, 6, recurrent=True, **options)
    of_x = MixedGroupKernel(3, 6, recurrent=False, **options)
    for kernel, channels in ((of_h, 3), (of_x, 2)):
        kernel.build((None, None, channels))
    past = [[1, 0, 0, 1, 0, 0], [0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 1, 1]]
    current = [[0, 1, 1, 0, 1, 1], [0] * 6, [0] * 6]
    np.testing.assert_array_equal(of_h(), [past, past, current])
    np.testing.assert_array_equal(of_x(), [np.zeros((2, 6))] * 2 + [[[1, 0, 0, 1, 0, 0]] * 2])
    with pytest.raises(ValueError, match="filters=7"):
        MixedGroupKernel(2, 7, groups=[1, 2], recurrent=True)
    for groups in ([], [0, 3], "ab", None):
        with pytest.raises(ValueError, match="list of positive channel widths"):
            MixedGroupKernel(2, 6, groups=groups, recurrent=True)


def off_zero(kernel):
    """A penalty whose gradient is not zero at zero."""
    return ops.sum(ops.square(kernel - 1))


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("weight_norm", [False, True])
def test_what_is_not_connected_has_no_gradient(weight_norm):
    layer = TrellisLayer(
        6,
        4,
        kernel_structure="mixed_group",
        groups=[2, 1, 3],
        weight_norm=weight_norm,
        weight_dropout=0.9,
        kernel_regularizer=off_zero,
        recurrent_regularizer=off_zero,
        recurrent_initializer="glorot_uniform",
    )
    layer.build((None, None, CHANNELS))
    x = noise(2, 6, CHANNELS)

    def loss():
        return ops.sum(ops.square(layer(x, training=True))) + sum(layer.losses), None

    variables = layer.trainable_variables
    _, gradients, _ = value_and_gradients(loss, variables)
    gradients = {v.path: np.asarray(g) for v, g in zip(variables, gradients, strict=True)}
    assert all(np.all(np.isfinite(g)) for g in gradients.values())
    for kernel in (layer.kernel, layer.recurrent_kernel):
        zeros = np.asarray(kernel.apply_connections(ops.ones(kernel.kernel.shape))) == 0
        gradient = gradients[kernel.kernel.path]
        assert np.all(np.asarray(kernel.kernel)[zeros] == 0) and np.all(gradient[zeros] == 0)
        assert np.any(gradient[~zeros] != 0)


# Streaming


def stream_maker(**options):
    return made(maker(**options), (2, None, CHANNELS))


@in_double
@pytest.mark.parametrize(
    "options",
    [
        {"dilation_rate": [4, 1], "weight_norm": True, "dropout": 0.5},
        {"kernel_size": 3, "dilation_rate": [1, 3, 2], "cell": "gru", "injection_every": 2},
        pytest.param({"kernel_size": 1, "cell": "user"}, marks=SLOW_ON_JAX),
        pytest.param(
            {"groups": [1, 2, 1], "group_starts": [2, 1, 4], "kernel_structure": "mixed_group"},
            marks=SLOW_ON_JAX,
        ),
    ],
)
def test_stream_equals_forward(options, floatx, monkeypatch):
    monkeypatch.setattr(mixed_group, "is_worthwhile", lambda groups: True)
    layer = stream_maker(**options)
    x, initial = noise(2, 9, CHANNELS), initial_states(layer, 2)
    check_streaming(layer, x, 6, initial_state=initial)
    with kernels.disabled():
        cache = layer.initial_cache(2, initial)
        assert_close(layer.step(x[:, 0], cache)[0], layer(x, initial_state=initial)[:, 0])


def test_the_program_of_a_step_does_not_grow_with_depth():
    assert program_size(stream_maker(depth=5)) == program_size(stream_maker(depth=60))


def program_size(layer):
    x = ops.convert_to_tensor(noise(1, 2, CHANNELS))

    def stream(x, cache):
        return layer.step(x[:, 0], cache), layer.prefill(x, cache)

    if not TENSORFLOW:
        import jax

        return str(jax.make_jaxpr(stream)(x, layer.initial_cache(1))).count("\n")
    import tensorflow as tf

    graph = tf.function(stream).get_concrete_function(x, layer.initial_cache(1)).graph
    definition = graph.as_graph_def()
    functions = [len(function.node_def) for function in definition.library.function]
    return len(definition.node) + sum(functions)


def test_a_cell_that_loses_an_argument_has_no_config():
    class Gates(GatedActivation):
        def __init__(self, units, slope):
            super().__init__(units)

    with pytest.raises(NotImplementedError, match="`slope`"):
        Gates(UNITS, 0.1).get_config()


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize(
    "result",
    [
        lambda h, states: h,
        lambda h, states: (h, [h, h]),
        lambda h, states: (h, [h + 1]),
        lambda h, states: (h[..., :-1], [h[..., :-1]]),
    ],
)
def test_a_cell_that_breaks_its_contract_is_named(result):
    class Gates(GatedActivation):
        def call(self, inputs, states):
            return result(ops.tanh(inputs), states)

    with pytest.raises(ValueError, match=r"Gates.*must return \(h, states\).*Received: shapes"):
        TrellisLayer(UNITS, 3, cell=Gates(UNITS))(np.zeros((2, 5, 3), "float32"))
