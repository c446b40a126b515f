"""Mixed-group kernels and start levels: against NumPy, against the plain layer, and in training."""

import itertools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import check_streaming
from tests.support.trellis_checks import QUIET, TENSORFLOW, calls, check, check_random
from trellis_keras.layers import MixedGroupKernel, TrellisLayer, mixed_group

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]

CHANNELS = 3
LIVELY = {
    f"{name}_initializer": keras.initializers.RandomNormal(stddev=0.6, seed=i)
    for i, name in enumerate(("kernel", "recurrent", "bias"))
}


def make(groups, depth, **options):
    """A built mixed-group layer whose weights are large enough for errors to show."""
    arguments = {"kernel_structure": "mixed_group", "seed": 1, **LIVELY, **options}
    layer = TrellisLayer(sum(groups), depth, groups=groups, **arguments)
    layer.build((None, None, CHANNELS))
    return layer


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def close(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == keras.config.floatx()
    bound = 1e-12 if actual.dtype == np.float64 else 2e-6
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound)


@pytest.fixture(params=[True, False], ids=["by group", "with zeros"])
def split(request, monkeypatch):
    """Both ways to multiply, whatever the widths."""
    monkeypatch.setattr(mixed_group, "splits", lambda layer: request.param and _mixed(layer))
    return request.param


def _mixed(layer):
    return layer.kernel_structure == "mixed_group"


# NumPy: Eq. (5) group by group, at one step of one level at a time.


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def cell_step(cell, current, past, bias, states):
    """A cell of some channels: blocks of what the taps add, biases, states one dilation ago."""
    a = [sum(parts) for parts in zip(current, past, bias, strict=False)]
    if cell == "rnn":
        return [np.tanh(a[0])]
    if cell == "lstm":
        i, f, g, o = a
        c = sigmoid(f) * states[1] + sigmoid(i) * np.tanh(g)
        return [sigmoid(o) * np.tanh(c), c]
    gate = sigmoid(a[-2])
    candidate = np.tanh(current[-1] + bias[-2] + gate * (past[-1] + bias[-1]))
    update = 1 - gate if cell == "mgu" else sigmoid(a[0])
    return [update * states[0] + (1 - update) * candidate]


def numpy_levels(layer, x, history):
    """The states of the last level at the last step, each (batch, units), and all h of it."""
    cell = type(layer.cell).__name__.removesuffix("Gates").lower()
    kernel, recurrent, bias = map(
        np.asarray, (layer.kernel.kernel, layer.recurrent_kernel.kernel, layer.bias)
    )
    # (tap, in, block, channel) and (block, channel)
    kernel, recurrent = (w.reshape(*w.shape[:2], -1, layer.units) for w in (kernel, recurrent))
    bias = bias.reshape(-1, layer.units)
    ends = np.cumsum(layer.groups)
    groups = [slice(e - w, e) for w, e in zip(layer.groups, ends, strict=True)]
    starts = layer.group_starts or [1] * len(groups)
    states = [np.zeros((len(x), x.shape[1], layer.units)) for _ in history]
    for level in range(1, layer.depth + 1):
        below, states = states, [np.zeros_like(s) for s in states]

        def at(n, t, group, below=below):
            return (below[n][:, t] if t >= 0 else history[n])[:, group]

        for t, (j, group) in itertools.product(range(x.shape[1]), enumerate(groups)):
            if level < starts[j]:
                continue
            d, taps = layer.dilation(level), layer.kernel_size
            if j == 0:
                feeds, weights = x[:, t] * layer.enters(level), kernel[-1, :, :, group]
            else:
                feeds, weights = at(0, t, groups[j - 1]), recurrent[-1, groups[j - 1], :, group]
            current = np.einsum("bc,cgd->gbd", feeds, weights)
            past = sum(
                np.einsum(
                    "bc,cgd->gbd", at(0, t - n * d, group), recurrent[-1 - n, group, :, group]
                )
                for n in range(1, taps)
            )
            before = [at(n, t - d, group) for n in range(len(history))]
            found = cell_step(cell, current, past, bias[:, None, group], before)
            for state, value in zip(states, found, strict=True):
                state[:, t, group] = value
    return states[0], [s[:, -1] for s in states]


# (groups, depth, arguments, whether there is a history)
NUMPY_CASES = {
    "lstm": ([2, 3, 1], 5, {"group_starts": [1, 2, 3]}, True),
    "gru": ([2, 2], 4, {"cell": "gru", "kernel_size": 3, "group_starts": [1, 3]}, True),
    "mgu": ([1, 3], 4, {"cell": "mgu", "dilation_rate": [2, 1]}, False),
    "one group": ([3], 3, {"cell": "mgu", "kernel_size": 3}, True),
    "rnn": ([1, 2, 1], 5, {"cell": "rnn", "injection_every": 2, "group_starts": [2, 1, 4]}, False),
}


@pytest.mark.parametrize("name", NUMPY_CASES)
def test_same_as_numpy(name, split):
    groups, depth, options, with_history = NUMPY_CASES[name]
    layer = make(groups, depth, return_state=True, **options)
    x = noise(2, 6, CHANNELS)
    history = [noise(2, n, seed=i) * with_history for i, n in enumerate(layer.cell.state_size)]
    y, *states = layer(x, initial_state=history if with_history else None)
    h, expected = numpy_levels(layer, x, history)
    close(y, h)
    for actual, state in zip(states, expected, strict=True):
        close(actual, state)


# Against the plain layer, which multiplies with the zeros: (time, kept outputs, history, mask,
# constructor arguments) as in test_depth_loop.py, 4 channels.
CASES = {
    "cone": (14, 4, False, False, {"depth": 9, "groups": [2, 2], "group_starts": [1, 2]}),
    "history": (8, 3, True, True, {"depth": 7, "groups": [1, 3], "weight_norm": True}),
    "gru": (9, 9, True, False, {"depth": 5, "groups": [2, 1, 1], "cell": "gru", "kernel_size": 3}),
}


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize(
    "case, split",
    [("cone", True), ("cone", False), ("history", True), ("gru", True)],
    indirect=["split"],
)
def test_same_as_plain(case, floatx, loops, split, how="graph"):
    time, kept, history, masked, options = CASES[case]
    options = {"kernel_structure": "mixed_group", "return_state": True, **options}
    check(options, time, [False], floatx, kept, history, masked, how=how)


@pytest.mark.slow_elsewhere
@pytest.mark.skipif(not TENSORFLOW, reason="JAX always compiles")
@pytest.mark.parametrize("split", [True], indirect=True)
def test_same_as_plain_under_xla_with_unknown_batch(floatx, loops, split):
    test_same_as_plain("cone", floatx, loops, split, how="xla")


@st.composite
def grouped_calls(draw):
    options, *call = draw(calls())
    groups = draw(st.sampled_from([[4], [1, 3], [3, 1], [2, 1, 1], [1, 1, 1, 1]]))
    mixed = draw(st.booleans())
    options["depth"] = depth = max(options["depth"], len(groups))
    if not mixed or draw(st.booleans()):
        starts = st.integers(1, depth)
        options["group_starts"] = draw(st.lists(starts, min_size=len(groups), max_size=len(groups)))
    options |= {"groups": groups, "kernel_structure": "mixed_group" if mixed else "dense"}
    return options, *call


@settings(
    max_examples=10 if TENSORFLOW else 3,
    deadline=None,
    derandomize=True,
    suppress_health_check=QUIET,
)
@given(grouped_calls())
def test_random_calls(floatx, loops, split, call):
    check_random(call, floatx)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=QUIET)
@given(grouped_calls())
def test_many_random_calls(floatx, loops, split, call):
    check_random(call, floatx, float32_bound=6e-6)


@pytest.mark.parametrize(
    "split, options",
    [
        (True, {"dilation_rate": [1, 2], "kernel_size": 3}),
        (False, {"group_starts": [1, 2, 3], "cell": "gru"}),
        (False, {"kernel_structure": "dense", "group_starts": [2, 1, 4], "cell": "mgu"}),
    ],
    indirect=["split"],
)
def test_streams(options, split):
    layer = make([2, 1, 3], 5, output_units=3, **options)
    history = [noise(2, n, seed=i) for i, n in enumerate(layer.cell.state_size)]
    check_streaming(layer, noise(2, 7, CHANNELS), 4, initial_state=history)


def test_groups_are_split_where_they_are_wide():
    assert mixed_group.splits(make([16, 16], 2))
    assert not mixed_group.splits(make([1, 2, 3], 3))
    assert not mixed_group.splits(make([16, 16], 2, kernel_structure="dense", group_starts=[1, 1]))


def masked(layer):
    """Where the kernels of a layer have no connection: booleans of their shapes."""
    kernels = (layer.kernel, layer.recurrent_kernel)
    return [np.asarray(k.apply_connections(ops.ones(k.kernel.shape))) == 0 for k in kernels]


def weight_gradients(layer, x):
    """{path of a variable: its gradient}."""

    def loss():
        return ops.sum(ops.square(layer(x, training=True))) + sum(layer.losses), None

    _, gradients, _ = value_and_gradients(loss, layer.trainable_variables)
    paths = [variable.path for variable in layer.trainable_variables]
    found = {path: np.asarray(g) for path, g in zip(paths, gradients, strict=True)}
    assert all(np.all(np.isfinite(g)) for g in found.values())
    return found


def off_zero(kernel):
    """A penalty whose gradient is not zero at zero."""
    return ops.sum(ops.square(kernel - 1))


@pytest.mark.parametrize("weight_norm", [False, True])
def test_what_is_not_connected_has_no_gradient(weight_norm):
    options = {"weight_norm": weight_norm, "kernel_regularizer": off_zero}
    layer = make([2, 1, 3], 4, recurrent_regularizer=off_zero, weight_dropout=0.9, **options)
    x = noise(2, 6, CHANNELS)
    gradients = weight_gradients(layer, x)
    kernels = (layer.kernel.kernel, layer.recurrent_kernel.kernel)
    for variable, zeros in zip(kernels, masked(layer), strict=True):
        gradient = gradients[variable.path]
        assert np.all(np.asarray(variable)[zeros] == 0)
        assert np.all(gradient[zeros] == 0) and np.any(gradient[~zeros] != 0)
    assert layer.kernel.count_connections() == np.sum(~masked(layer)[0]) == 3 * 4 * 2
    assert layer.recurrent_kernel.count_connections() == np.sum(~masked(layer)[1])


@pytest.mark.slow_elsewhere
def test_training_and_saving_keep_the_zeros(tmp_path):
    options = {"weight_norm": True, "dropout": 0.2, "weight_dropout": 0.5}
    layer = make([3, 2], 4, group_starts=[1, 2], recurrent_regularizer="l2", **options)
    zeros = masked(layer)
    before = [np.asarray(k.kernel) for k in (layer.kernel, layer.recurrent_kernel)]
    model = keras.Sequential([keras.Input((6, CHANNELS)), layer])
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    model.compile(optimizer, "mse", jit_compile=True)
    x = noise(7, 6, CHANNELS)
    model.fit(x, noise(7, 6, 5), batch_size=4, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    close(loaded(x), model(x))
    layer = loaded.layers[0]
    after = [np.asarray(k.kernel) for k in (layer.kernel, layer.recurrent_kernel)]
    for old, new, zero in zip(before, after, zeros, strict=True):
        assert np.all(new[zero] == 0) and np.all(new[~zero] != old[~zero])


@pytest.mark.parametrize(
    "weight_norm", [pytest.param(False, marks=pytest.mark.slow_elsewhere), True]
)
def test_to_dense(weight_norm):
    starts = [1, 2, 3] if weight_norm else None
    options = {"weight_norm": weight_norm, "group_starts": starts, "dropout": 0.1}
    layer = make([2, 1, 3], 5, output_units=3, name="rnn", **options)
    zeros = masked(layer)
    for kernel, zero in zip((layer.kernel, layer.recurrent_kernel), zeros, strict=True):
        # Weights from elsewhere may stand where nothing is connected.
        kernel.kernel.assign(np.where(zero, 7.0, np.asarray(kernel.kernel)))
    dense = layer.to_dense()
    x = noise(2, 7, CHANNELS)
    close(dense(x), layer(x))
    assert dense.name == "rnn" and dense.kernel_structure == "dense"
    assert dense.group_starts == starts and dense.groups == (starts and [2, 1, 3])
    changed = dense.get_config()
    assert {n for n, v in layer.get_config().items() if v != changed[n]} <= {
        "kernel_structure",
        "groups",
    }
    gradients = weight_gradients(dense, x)
    kernels = (dense.kernel, dense.recurrent_kernel)
    for kernel, zero in zip(kernels, zeros, strict=True):
        moved = gradients[kernel.kernel.path] != 0
        if weight_norm:
            moved |= gradients[kernel.gain.path] != 0
        assert np.any(moved & zero)
    with pytest.raises(ValueError, match="dense"):
        dense.to_dense()
    assert not TrellisLayer(4, 3, kernel_structure="mixed_group", groups=[4]).to_dense().built


@pytest.mark.slow_elsewhere
def test_to_dense_takes_the_carried_states_along():
    layer = make([2, 2], 4, stateful=True)
    layer.reset_state(batch_size=2)
    x = noise(2, 5, CHANNELS)
    layer(x)
    dense = layer.to_dense()
    close(dense(x), layer(x))


def test_both_layers_have_states_of_their_own():
    """In models that JAX computes with, which gives their arrays away."""
    layer = make([2, 2], 4, stateful=True)
    layer.reset_state(batch_size=2)
    x = noise(2, 5, CHANNELS)
    inputs = keras.Input(batch_shape=x.shape)
    models = [keras.Model(inputs, each(inputs)) for each in (layer, layer.to_dense())]
    first, second = (model.predict(x, batch_size=2, verbose=0) for model in models)
    close(second, first)


def test_mgu_has_the_gradient_of_its_equation(floatx):
    if floatx == "float32":
        pytest.skip("differences need float64")
    layer = make([3], 2, kernel_structure="dense", group_starts=[1], cell="mgu")
    x = noise(1, 4, CHANNELS)
    variables, gradients = layer.trainable_variables, weight_gradients(layer, x)
    direction = [noise(*v.shape, seed=i) for i, v in enumerate(variables)]
    values = [np.asarray(v) for v in variables]

    def loss(step):
        for variable, value, d in zip(variables, values, direction, strict=True):
            variable.assign(value + step * d)
        return float(np.sum(np.square(np.asarray(layer(x)))))

    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    expected = sum(np.sum(gradients[v.path] * d) for v, d in zip(variables, direction, strict=True))
    np.testing.assert_allclose(slope, expected, rtol=1e-7)


def test_a_kernel_of_other_blocks_is_refused():
    with pytest.raises(ValueError, match="filters=7"):
        MixedGroupKernel(2, 7, groups=[1, 2], recurrent=True)
