"""Keras models as C, WebAssembly and endpoints: strides, delays, merges, padding."""

import re
import subprocess

import keras
import numpy as np
import pytest
from keras import layers, ops

from keras_streams import to_stream
from keras_streams.c_export import keras_steps, proven_source
from keras_streams.native_stream import ZIG
from tests.export.nets import draw
from tests.export.test_c import GCC
from trellis_keras.export import export, native
from trellis_keras.layers import GridLSTMCell, RHNCell


def test_the_proof_is_longer_than_the_delay():
    x = keras.Input((None, 1))
    y = layers.Conv1D(2, 30, strides=16)(layers.Conv1D(2, 300)(x))
    _, x, expected = proven_source(keras.Model(x, y), "model")
    assert len(x) == 299 + 29 + 20 * 16
    assert np.sum(~np.isnan(expected[:, 0])) == 20


def test_the_header_tells_delay_and_rate(tmp_path):
    x = keras.Input((None, 3))
    down = layers.Conv1D(2, 5, strides=2, padding="same")(x)
    model = keras.Model(x, layers.SimpleRNN(2, return_sequences=True)(down), name="spotter")
    export(model, tmp_path / "net.c")
    header = (tmp_path / "net.h").read_text()
    assert "#define NET_DELAY 3\n#define NET_RATE 2\n" in header
    assert "Functional 'spotter'" in header and "all past inputs" in header


_LONG_MEAN = """
#include "model.h"
#include <stdio.h>
int main(void)
{
    static model_state s;
    float x[1] = {1.0f}, y[1];
    model_reset(&s);
    for (int t = 0; t < 21000000; t++) {
        if (t == 20000000)
            x[0] = 1.05f;
        model_step(&s, x, y);
    }
    printf("%.9g", y[0]);
    return 0;
}
"""


@pytest.mark.parametrize("compiler", [pytest.param(["gcc"], marks=GCC), ZIG], ids=["gcc", "zig"])
def test_a_mean_over_millions_of_steps(compiler, tmp_path):
    """In C, where aggressive optimization must not remove the compensation of rounding errors."""
    if compiler is ZIG:
        pytest.importorskip("ziglang")
    model = keras.Sequential([keras.Input((None, 1)), layers.GlobalAveragePooling1D()])
    export(model, tmp_path / "model.c")
    (tmp_path / "main.c").write_text(_LONG_MEAN)
    for options in (["-O3"], ["-O3", "-ffast-math"]):
        command = [*compiler, "-std=c99", *options, "model.c", "main.c", "-lm", "-o", "mean"]
        built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        if "-ffast-math" in options and built.returncode:
            assert "cannot be compiled with -ffast-math" in built.stderr
            continue
        assert not built.returncode, built.stderr
        run = subprocess.run([tmp_path / "mean"], capture_output=True, text=True)
        assert float(run.stdout) == pytest.approx(1 + 0.05 / 21, abs=2e-7)


def test_inputs_and_outputs_lie_one_after_another():
    a, b = keras.Input((None, 2), name="a"), keras.Input((None, 1), name="b")
    both = layers.Concatenate()([a, layers.Conv1D(1, 3, padding="same")(b)])
    model = keras.Model({"a": a, "b": b}, {"both": both, "last": layers.SimpleRNN(2)(b)})
    stream, step = to_stream(model), native(model)
    x, cache = np.random.default_rng(0).normal(size=(5, 3)).astype("float32"), None
    cache = stream.initial_cache(1)
    for t in range(5):
        y, cache = stream.step({"a": x[t : t + 1, :2], "b": x[t : t + 1, 2:]}, cache)
        wanted = np.concatenate([y["both"][0], y["last"][0]])
        np.testing.assert_allclose(step.step(x[t]), wanted, rtol=1e-5, atol=1e-6)


def test_states_are_outputs():
    """In the order of Keras; also after strides, and read by other layers."""
    x = keras.Input((None, 3))
    down, outputs = layers.Conv1D(3, 2, strides=2)(x), []
    options = {"return_state": True, "return_sequences": True}
    for layer in (
        layers.LSTM(3, return_state=True),
        layers.RNN([layers.LSTMCell(3), RHNCell(2, 2)], **options),
        layers.RNN(GridLSTMCell(3, 1), **options),
    ):
        y, *states = keras.tree.flatten(layer(down))
        outputs += [states[-1], y, *states, layers.Dense(2)(states[0])]
    model = keras.Model(x, outputs)
    draw(model, np.random.default_rng(0))
    _, _, expected = proven_source(model, "net")
    assert expected.shape[1] == sum(y.shape[-1] for y in outputs)


@pytest.mark.parametrize("times", [1, 2])
def test_a_model_may_return_its_input(times):
    x, z = keras.Input((None, 3)), keras.Input((None, 2))
    for inputs, outputs in (x, [x] * times), ([x, z], [layers.Dense(2)(z), *[x] * times]):
        proven_source(keras.Model(inputs, outputs), "net")


def test_a_step_takes_tokens_beside_floats():
    x, table = keras.Input((None, 3)), layers.Embedding(5, 4)
    for is_token, shape, rest, output in (
        (False, (None,), [], lambda token: [token, table(token)]),
        (False, (None,), [x], lambda token: layers.Concatenate()([table(token), x])),
        (False, (None, 2), [], table),
        (False, (1,), [x], lambda token: layers.Dense(2)(x) + layers.Embedding(5, 2)(token)),
        (True, (None,), [], layers.ReversibleEmbedding(5, 4)),
    ):
        token = keras.Input(shape, dtype="int32")
        source, *_ = proven_source(keras.Model([token, *rest], output(token)), "net")
        assert source.takes_token == is_token


def test_a_step_takes_a_token_of_an_embedding_whose_mask_is_ignored():
    masked = layers.Embedding(5, 4, mask_zero=True)
    rest = layers.LSTM(3, return_sequences=True), layers.Dense(2)
    model = keras.Sequential([keras.Input((None,), dtype="int32"), masked, *rest])
    assert proven_source(to_stream(model, ignore_masks=True), "net")[0].takes_token


def test_steps_of_several_axes():
    """Layers of the last axes treat each row of a step with the same weights."""
    x = keras.Input((None, 2, 3))
    layers_of_rows = [
        layers.Dense(2, activation="softmax"),
        layers.BatchNormalization(),
        layers.LayerNormalization(scale=False, center=False),
        layers.LayerNormalization(axis=[2, 3]),
        layers.RMSNormalization(),
        layers.Normalization(mean=[0.5, 1.0, 2.0], variance=[2.0, 1.0, 3.0]),
        layers.Rescaling([1.0, 2.0, 3.0], -1.0),
        layers.Softmax(),
        layers.TimeDistributed(layers.Softmax(axis=(1, 2))),
        layers.Activation("log_softmax"),
        layers.Activation("relu"),
    ]
    rows = [layer(x) for layer in layers_of_rows]
    joined = [layers.Concatenate(axis=axis)([x, x[..., ::-1]]) for axis in (2, -1)]
    last = layers.Concatenate()([rows[0][:, -1], x[:, -1]])
    model = keras.Model(x, [*rows, *joined, last])
    draw(model, np.random.default_rng(0))
    source, *_ = proven_source(model, "net")
    assert len(re.findall(r"^static const float dense\w*_kernel", source.code, re.M)) == 1


def test_operations_are_activations():
    x = keras.Input((None, 2, 3))
    relu, gelu = keras.activations.relu, keras.activations.gelu
    names = (
        *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "sigmoid", "hard_sigmoid", "gelu"),
        *("log_sigmoid", "tanh", "hard_tanh", "tanh_shrink", "softplus", "softsign", "silu"),
        *("hard_silu", "squareplus", "softmax", "log_softmax"),
    )
    outputs = [
        *(getattr(ops, name)(x) for name in names),
        *(ops.leaky_relu(x, 0.3), ops.elu(x, alpha=0.3), ops.celu(x, alpha=0.3)),
        *(ops.squareplus(x, b=2), gelu(x), gelu(x, approximate=True)),
        *(relu(x), relu(x, negative_slope=0.1, max_value=2.0, threshold=0.5)),
    ]
    outputs.append(ops.softmax(x, axis=2))
    proven_source(keras.Model(x, outputs), "net")


def test_a_layer_that_is_called_twice_has_its_weights_once():
    x, dense = keras.Input((None, 3)), layers.Dense(3)
    model = keras.Model(x, dense(dense(x)))
    draw(model, np.random.default_rng(0))
    source, *_ = proven_source(model, "net")
    assert source.weight_bytes == 4 * (9 + 3)


class Weighted(layers.Layer):
    """A layer with two inputs."""

    def call(self, a, b):
        return a + 2 * b


def head_of_queries(x):
    """Products of variables: attention over the rows of a step."""
    scores = ops.softmax(ops.matmul(x, ops.swapaxes(x, -1, -2)) / 2.0)
    return ops.einsum("btij,btjk->btik", scores, layers.Dense(4)(x))


class SharedKeys(layers.Layer):
    """Attention of four heads of queries to two of keys and values."""

    def call(self, x):
        return ops.dot_product_attention(x, x[:, :, :2], x[:, :, 2:])

    def compute_output_shape(self, input_shape):
        return input_shape


def test_heads_of_queries_share_keys():
    x = keras.Input((4, 5, 4, 2))
    proven_source(keras.Model(x, layers.TimeDistributed(SharedKeys())(x)), "net")


def test_a_step_may_be_any_operations():
    x = keras.Input((4, 3, 3))
    outputs = [
        Weighted()(x, x[..., ::-1]),
        head_of_queries(x),
        layers.Softmax()(x, mask=np.arange(9).reshape(1, 1, 3, 3) != 1),
        layers.Softmax(axis=2)(x),
        layers.BatchNormalization(axis=2)(x),
        layers.Rescaling(np.arange(3.0).reshape(3, 1))(x),
        ops.cumsum(x, axis=-1),
        layers.PReLU(shared_axes=[1])(x),
        ops.pad(x, [[0, 0], [0, 0], [1, 0], [0, 2]], constant_values=1.5),
        ops.repeat(x, 2, axis=-1),
        ops.where(ops.logical_and(x > 0.1, x < 0.5), ops.sin(x), -x),
        ops.cast(ops.argmax(x, axis=-1), "float32"),
        ops.one_hot(ops.argmax(x, axis=-1), 4, axis=2),
        ops.log10(ops.abs(x) + 0.1) - ops.log2(ops.abs(x) + 0.1),
        ops.power(ops.abs(x) + 0.1, 1.5) - ops.floor(x) + ops.mod(x, 0.7),
        ops.sqrt(ops.var(x, axis=-1)) + ops.mean(x, axis=-1),
        layers.TimeDistributed(layers.Conv1D(4, 2, padding="same"))(x),
        layers.TimeDistributed(layers.AveragePooling1D(2, padding="same"))(x),
        layers.TimeDistributed(layers.Conv1DTranspose(2, 3, strides=2, padding="same"))(x),
        layers.UnitNormalization()(x),
        layers.Discretization([-0.5, 0.5], output_mode="one_hot")(x),
    ]
    model = keras.Model(x, outputs)
    draw(model, np.random.default_rng(0))
    proven_source(model, "net")


@pytest.mark.both_backends
def test_categories_of_missing_values_and_of_fractions_are_those_of_keras():
    x = keras.Input((None,))
    bins = layers.Discretization([-0.5, 0.5], output_mode="one_hot")(x)
    categories = layers.CategoryEncoding(4, output_mode="one_hot")(x)
    for y, rows in ((bins, [np.nan, -1, -0.5, 0, 0.5]), (categories, [0, 1.5, 2.9, -0.5])):
        model, rows = keras.Model(x, y), np.array(rows, "float32")[:, None]
        stream = native(model)
        np.testing.assert_array_equal([stream.step(row) for row in rows], keras_steps(model, rows))
    np.testing.assert_array_equal(stream.step([np.nan]), np.zeros(4))  # undefined in TensorFlow
