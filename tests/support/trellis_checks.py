"""`TrellisLayer` against the plain one of `reference.py`: outputs and gradients, for any arguments.

Weights are equal, dropout masks are fixed, and everything that depends on weights, inputs and
states is compared. The `loops` fixture (layers/conftest.py) makes loops out of few levels.
"""

import keras
import numpy as np
from hypothesis import HealthCheck
from hypothesis import strategies as st
from keras import ops

from tests.support.gradients import value_and_gradients
from tests.support.plain_trellis import PlainTrellisLayer
from trellis_keras.layers import GatedActivation, TrellisLayer
from trellis_keras.layers.base import tanh

TENSORFLOW = keras.backend.backend() == "tensorflow"
# JAX takes seconds to run hundreds of operations one by one.
FASTEST = "eager" if TENSORFLOW else "graph"
BATCH, CHANNELS, UNITS = 3, 2, 4


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


def make(options, unroll, time, history=False):
    """Returns the layer under test and the plain one, same weights, masks fixed."""
    options = {"output_units": 3, "weight_dropout": 0.3, "dropout": 0.4, "seed": 1, **options}
    options["cell"] = ScaledGate(UNITS) if options.get("cell") == "user" else options.get("cell")
    options = {k: v for k, v in options.items() if v is not None}
    random = keras.initializers.RandomNormal(stddev=0.3, seed=3)
    names = ("kernel_initializer", "recurrent_initializer", "bias_initializer")
    options |= dict.fromkeys(names, random)
    layers = [TrellisLayer(UNITS, unroll=unroll, **options), PlainTrellisLayer(UNITS, **options)]
    for layer in layers:
        layer.build((BATCH, time, CHANNELS))
        layer.hidden_dropout.draw = fixed_mask(layer.hidden_dropout.compute_dtype, 5)
        for kernel, seed in ((layer.kernel, 6), (layer.recurrent_kernel, 7)):
            kernel.drop_connect.draw = fixed_mask(kernel.drop_connect.compute_dtype, seed)
    layers[1].set_weights(layers[0].get_weights())
    return layers


def fixed_mask(dtype, seed):
    # Drawn for the test's batch, whatever (unknown) batch the layer asks for.
    def draw(shape):
        shape = tuple(n if isinstance(n, int) else BATCH for n in shape)
        kept = np.random.default_rng(seed).random(shape) >= 0.3
        return ops.convert_to_tensor(kept / 0.7, dtype)

    return draw


def inputs_of(layer, time, history, masked):
    random = np.random.default_rng(2)
    floatx = keras.config.floatx()
    x = random.standard_normal((BATCH, time, CHANNELS)).astype(floatx)
    sizes = layer.cell.state_size if history else []
    states = [random.standard_normal((BATCH, n)).astype(floatx) for n in sizes]
    mask = None
    if masked:
        mask = random.random((BATCH, time)) > 0.3
        mask[0] = False
    return x, states, mask


def compute(layer, x, states, mask, training=True, how="eager", **call):
    """All outputs, and the gradients of their sum with respect to weights, x and states."""

    def loss(x, *states):
        found = layer(x, initial_state=list(states) or None, mask=mask, training=training, **call)
        found = keras.tree.flatten(found)
        # Weights that differ from output to output, so that no mistake cancels.
        total = sum(
            ops.sum(ops.sin(ops.cast(y, layer.state_dtype) * (3 + i))) for i, y in enumerate(found)
        )
        return total, found

    def everything(x, *states):
        return value_and_gradients(loss, layer.trainable_variables, x, *states)

    if TENSORFLOW and how != "eager":
        import tensorflow as tf

        signature = [tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in (x, *states)]
        everything = tf.function(everything, input_signature=signature, jit_compile=how == "xla")
    elif how != "eager":
        import jax

        everything = jax.jit(everything)
    (_, outputs), by_weight, by_input = everything(x, *states)
    return [np.asarray(a) for a in (*outputs, *by_weight, *by_input)]


def assert_same(actual, reference, floatx, float32_bound=2e-6):
    assert len(actual) == len(reference)
    for i, (a, b) in enumerate(zip(actual, reference, strict=True)):
        assert a.dtype == b.dtype == floatx and a.shape == b.shape, i
        error = np.max(np.abs(a - b), initial=0) / (np.max(np.abs(b), initial=0) or 1)
        assert error <= (1e-12 if floatx == "float64" else float32_bound), (i, error)


def check(
    options, time, unrolls, floatx, kept=None, history=False, masked=False, how="eager", **bound
):
    """Compares layers with these values of `unroll` to the plain one."""
    reference = None
    for unroll in unrolls:
        layer, plain = make(options, unroll, time)
        arguments = inputs_of(layer, time, history, masked)
        if reference is None:
            reference = compute(plain, *arguments, how=FASTEST, output_length=kept)
        found = compute(layer, *arguments, how=how, output_length=kept)
        assert_same(found, reference, floatx, **bound)


@st.composite
def calls(draw):
    dilations = draw(st.sampled_from([1, 2, [1, 2], [1, 1, 2, 4], [3, 1, 2]]))
    time = draw(st.integers(4, 20))
    depth = draw(st.integers(1, 9))
    aux_every = draw(st.none() | st.integers(1, depth))
    options = {
        "depth": depth,
        "dilation_rate": dilations,
        "kernel_size": draw(st.integers(1, 3)),
        "cell": draw(st.sampled_from(["lstm", "lstm", "gru", "mgu", "rnn", "user"])),
        "injection_every": draw(st.sampled_from([1, 1, 2, 3])),
        "weight_norm": draw(st.booleans()),
        "aux_every": aux_every,
        "return_aux": aux_every is not None,
        "return_state": draw(st.booleans()),
    }
    kept = draw(st.integers(1, time))
    unroll = draw(st.sampled_from([None, False]))
    return options, time, unroll, kept, draw(st.booleans()), draw(st.booleans())


def check_random(call, floatx, **bound):
    options, time, unroll, kept, history, masked = call
    check(options, time, [unroll], floatx, kept, history, masked, how=FASTEST, **bound)


QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
