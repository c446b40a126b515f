"""Norms of the gradient in each layer."""

import math

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.checkpoints import assert_same
from trellis_keras.layers import LRU, TCN, StackedRNN, TrellisLayer
from trellis_keras.models import LanguageModel
from trellis_keras.training import GradientNorms, GrowingDepth
from trellis_keras.training.gradient_norms import LossGradient, layer_groups

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 3)), RNG.normal(size=(8, 2))
HALVES = [(X[:4], Y[:4]), (X[4:], Y[4:])]
TOKENS = RNG.integers(0, 7, (4, 13))


def linear_model(regularizer=None, **options):
    """Two layers without activations, whose gradients can be written down."""
    layers = [
        keras.layers.Dense(units, use_bias=False, kernel_regularizer=regularizer)
        for units in (4, 2)
    ]
    model = keras.Sequential([keras.Input((3,)), *layers])
    for i, variable in enumerate(model.trainable_variables):
        variable.assign(np.random.default_rng(i).normal(size=variable.shape))
    model.compile(keras.optimizers.SGD(0.0), loss="mse", **options)
    return model


def linear_gradients(model, x, y):
    a, b = (ops.convert_to_numpy(v) for v in model.trainable_variables)
    error = 2 * (x @ a @ b - y) / y.size
    return x.T @ error @ b.T, (x @ a).T @ error


def fit_arrays(model, *callbacks, epochs=1, x=X, y=Y):
    return model.fit(
        x, y, epochs=epochs, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks
    )


@pytest.mark.both_backends
@pytest.mark.float64
def test_gradient_norms_of_a_linear_model(tolerance):
    model = linear_model()
    logs = fit_arrays(model, GradientNorms(HALVES)).history
    halves = [linear_gradients(model, x, y) for x, y in HALVES]
    expected = [np.linalg.norm(np.mean(parts, axis=0)) for parts in zip(*halves, strict=True)]
    names = [name for name in logs if "gradient" in name]
    assert names == ["gradient_norm", "gradient_norm/1_dense", "gradient_norm/2_dense"]
    measured = [logs[name][0] for name in names]
    np.testing.assert_allclose(
        measured, [math.hypot(*expected), *expected], rtol=tolerance("gradient")
    )


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_steps_sample_weights_and_regularizers():
    model = linear_model(keras.regularizers.L2(0.5), run_eagerly=True)
    batches = [(X, Y, np.repeat([1.0, 0.0], 4)), (X, Y)]
    logs = fit_arrays(model, GradientNorms(batches, steps=1)).history
    # Keras divides by the number of rows, whatever their weight. The gradient of 0.5 w^2 is w.
    parts = [g / 2 for g in linear_gradients(model, *HALVES[0])]
    parts = [g + w for g, w in zip(parts, model.get_weights(), strict=True)]
    expected = math.hypot(*map(np.linalg.norm, parts))
    np.testing.assert_allclose(logs["gradient_norm"], [expected], rtol=1e-5)


def test_gradients_too_small_for_half_precision():
    layer = keras.layers.Dense(1, kernel_initializer="zeros", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((3,)), layer])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0))
    model.compile(scaled, loss="mse", run_eagerly=True)
    # 0 in float16, whose smallest positive number is 6e-8.
    for gradient in LossGradient(model)((np.ones((4, 3)), np.full((4, 1), 1e-8))):
        np.testing.assert_allclose(ops.convert_to_numpy(gradient), -2e-8, rtol=1e-2)


def cells():
    cells = [keras.layers.GRUCell(3) for _ in range(10)]
    return keras.layers.RNN(cells, return_sequences=True)


def stack():
    return StackedRNN([keras.layers.LSTM(3, return_sequences=True, return_state=True)])


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: TCN(3, 2, depth=2), ["1_block", "2_block"]),
        (lambda: LRU(3, depth=2, return_sequences=True), ["1_cell", "2_cell"]),
        (cells, [f"{i:02}_gru_cell" for i in range(1, 11)]),
        (stack, ["1_lstm_cell"]),
    ],
)
def test_the_groups_that_a_model_is_deep_by(make, names):
    model = LanguageModel(7, 3, make())
    model.build((None, None))
    groups = layer_groups(model)
    assert list(groups) == names
    variables = [id(v) for group in groups.values() for v in group]
    assert variables == [id(v) for v in model.backbone.trainable_variables]


@pytest.mark.slow_elsewhere
@pytest.mark.both_backends
def test_measuring_gradients_does_not_affect_training():
    x, y = TOKENS[:, :-1], TOKENS[:, 1:]
    ends = []
    # Another number of rows than the carried states have.
    for callbacks in ([], [GradientNorms([(x[:3], y[:3])] * 2)]):
        backbone = TrellisLayer(
            units=8, depth=3, output_units=4, stateful=True, dropout=0.3, seed=1, name="trellis"
        )
        model = LanguageModel(7, 4, backbone, input_dropout=0.2, output_dropout=0.2, seed=0)
        model.build((None, None))
        model.compile(keras.optimizers.Adam(0.01), run_eagerly=True)
        history = fit_arrays(model, *callbacks, epochs=2, x=x, y=y).history
        ends.append([history["loss"], *(ops.convert_to_numpy(v) for v in model.variables)])
    assert_same(*ends)
    assert model.backbone.stateful
    assert min(history["gradient_norm/1_trellis"]) > 0


def test_gradient_norms_of_a_growing_net():
    x, y = TOKENS[:, :-1], TOKENS[:, 1:]
    norms = []
    for run_eagerly in (False, True):
        model = LanguageModel(7, 3, TrellisLayer(units=6, depth=3, output_units=3, seed=0), seed=0)
        model.build((None, None))
        model.compile(keras.optimizers.SGD(0.0), run_eagerly=run_eagerly)
        callbacks = [GrowingDepth(depth=1, epochs=1), GradientNorms([(x, y)])]
        norms.append(fit_arrays(model, *callbacks, epochs=2, x=x, y=y).history["gradient_norm"])
    np.testing.assert_allclose(*norms, rtol=1e-5)
    assert norms[0][0] != norms[0][1]


def test_wrong_arguments_of_gradient_norms():
    with pytest.raises(ValueError, match="steps=0"):
        GradientNorms(HALVES, steps=0)
    with pytest.raises(ValueError, match="built and compiled"):
        LossGradient(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
