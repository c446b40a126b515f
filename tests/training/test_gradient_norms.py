"""Gradient norms per layer: right, undisturbing, restored, and drawn."""

import json
import math
import sys

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.event_files import read_events
from tests.support.gradients import value_and_gradients
from tests.support.plain_trellis import PlainTrellisLayer
from trellis_keras.layers import LRU, TCN, LRUCell, StackedRNN, TrellisLayer
from trellis_keras.models import CrossEntropy, LanguageModel
from trellis_keras.training import Checkpoint, GradientNorms
from trellis_keras.training.gradient_norms import layers_with_weights, parts_with_weights
from trellis_keras.training.gradients import LossGradient
from trellis_keras.training.heatmap import draw_heatmap
from trellis_keras.training.level_gradients import LevelGradient

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 3)), RNG.normal(size=(8, 2))
HALVES = [(X[:4], Y[:4]), (X[4:], Y[4:])]
TOKENS = RNG.integers(0, 7, (4, 13))


def linear_model(**options):
    """Two layers without activations, whose gradients can be written down."""
    layers = [keras.layers.Dense(4, use_bias=False), keras.layers.Dense(2, use_bias=False)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    for i, variable in enumerate(model.trainable_variables):
        variable.assign(np.random.default_rng(i).normal(size=variable.shape))
    model.compile(keras.optimizers.SGD(0.0), loss="mse", **options)
    return model


def linear_gradients(model, x, y):
    a, b = (ops.convert_to_numpy(v) for v in model.trainable_variables)
    error = 2 * (x @ a @ b - y) / y.size
    return x.T @ error @ b.T, (x @ a).T @ error


def language_model(seed=0):
    backbone = TrellisLayer(
        units=8, depth=3, output_units=4, stateful=True, dropout=0.3, seed=1, name="trellis"
    )
    model = LanguageModel(7, 4, backbone, input_dropout=0.2, output_dropout=0.2, seed=seed)
    model.build((None, None))
    model.compile(keras.optimizers.Adam(0.01), metrics=[CrossEntropy()])
    return model


def fit(model, *callbacks, epochs=1, x=X, y=Y):
    return model.fit(
        x, y, epochs=epochs, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks
    )


@pytest.mark.parametrize("eager", [False, True])
def test_norms_of_a_linear_model(eager, tolerance):
    model = linear_model(run_eagerly=eager)
    norms = GradientNorms(HALVES)
    logs = fit(model, norms).history
    halves = [linear_gradients(model, x, y) for x, y in HALVES]
    mean = [np.mean(parts, axis=0) for parts in zip(*halves, strict=True)]
    expected = [np.linalg.norm(part) for part in mean]
    rows = list(layers_with_weights(model))
    assert list(norms.norms) == ["gradient_norm", *(f"gradient_norm/{row}" for row in rows)]
    measured = [norms.norms[f"gradient_norm/{row}"][0] for row in rows]
    np.testing.assert_allclose(measured, expected, rtol=tolerance("gradient"))
    everything = math.hypot(*expected)
    np.testing.assert_allclose(norms.norms["gradient_norm"], [everything], rtol=1e-5)
    assert {name: logs[name] for name in norms.norms} == norms.norms
    np.testing.assert_array_equal(norms.heatmap(), np.array(measured)[:, None])


@pytest.mark.slow_elsewhere
def test_the_first_steps_of_a_dataset_and_its_weights(tolerance):
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            assert index == 0, "more batches than asked for"
            return X, Y, np.repeat([1.0, 0.0], 4)

    model = linear_model()
    norms = GradientNorms(Data(), steps=1)
    fit(model, norms)
    first = linear_gradients(model, *HALVES[0])
    # Keras divides by the number of rows, also of those that do not count.
    expected = [np.linalg.norm(part) / 2 for part in first]
    np.testing.assert_allclose(norms.heatmap()[:, 0], expected, rtol=tolerance("gradient"))


@pytest.mark.slow_elsewhere
def test_regularizers_are_part_of_the_loss(tolerance):
    dense = keras.layers.Dense(2, use_bias=False, kernel_regularizer=keras.regularizers.L2(0.5))
    model = keras.Sequential([keras.Input((3,)), dense])
    model.compile(keras.optimizers.SGD(0.0), loss="mse")
    norms = GradientNorms([(np.zeros((4, 3)), np.zeros((4, 2)))])
    fit(model, norms)
    weights = np.linalg.norm(ops.convert_to_numpy(dense.kernel))  # the slope of 0.5 w^2 is w
    assert norms.heatmap()[0, 0] == pytest.approx(weights, rel=tolerance("gradient"))


@pytest.mark.slow_elsewhere
def test_a_row_for_each_cell_of_a_stack():
    cells = [keras.layers.GRUCell(3) for _ in range(10)]
    model = LanguageModel(7, 3, keras.layers.RNN(cells, return_sequences=True))
    model.build((None, None))
    rows = layers_with_weights(model)
    assert [[id(v) for v in own] for own in rows.values()] == [
        [id(v) for v in cell.trainable_variables] for cell in cells
    ]
    layers = [keras.layers.LSTM(3, return_sequences=True) for _ in range(2)]
    model = LanguageModel(7, 3, keras.Sequential(layers))
    model.build((None, None))
    assert list(layers_with_weights(model)) == ["1_lstm_cell", "2_lstm_cell"]
    model.backbone.layers[0].trainable = False
    assert list(layers_with_weights(model)) == ["1_lstm_cell"]


@pytest.mark.slow_elsewhere
def test_lattice_layer_and_its_cells_have_the_same_norms(tolerance):
    """The layer has a gradient of its own making; both have a row for each cell."""
    x, y = TOKENS[:, :-1], TOKENS[:, 1:]
    cells = keras.layers.RNN([LRUCell(4) for _ in range(2)], return_sequences=True)
    norms, weights = [], None
    for backbone in (LRU(4, depth=2, return_sequences=True, stateful=True), cells):
        model = LanguageModel(7, 4, backbone)
        model.build((None, None))
        model.compile(keras.optimizers.SGD(0.0))
        weights = model.get_weights() if weights is None else weights
        model.set_weights(weights)
        norms.append(GradientNorms([(x, y)]))
        fit(model, norms[-1], x=x, y=y)
    assert norms[0].heatmap().shape == (2, 1)
    layer, stack = (n.heatmap() for n in norms)
    np.testing.assert_allclose(layer, stack, rtol=10 * tolerance("gradient"))


@pytest.mark.slow_elsewhere
def test_the_parts_that_a_model_is_deep_by():
    cells = [keras.layers.GRUCell(3) for _ in range(2)]
    stack = StackedRNN([keras.layers.LSTM(3, return_sequences=True, return_state=True)] * 1)
    expected = {
        TCN(3, 2, depth=2): ["1_block", "2_block"],
        LRU(3, depth=2, return_sequences=True): ["1_cell", "2_cell"],
        keras.layers.RNN(cells, return_sequences=True): ["1_gru_cell", "2_gru_cell"],
        stack: ["1_lstm_cell"],
    }
    for backbone, names in expected.items():
        model = LanguageModel(7, 3, backbone)
        model.build((None, None))
        rows = parts_with_weights(model)
        assert list(rows) == names
        variables = [id(v) for row in rows.values() for v in row]
        assert variables == [id(v) for v in backbone.trainable_variables]


# Levels, which share their weights


def trellis_model(layer_class):
    layer = layer_class(
        units=6,
        depth=4,
        output_units=4,
        dilation_rate=[1, 2],
        injection_every=2,
        weight_norm=True,
        aux_every=2,
        return_aux=True,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.5, seed=1),
        recurrent_initializer=keras.initializers.RandomNormal(stddev=0.5, seed=2),
    )
    model = LanguageModel(7, 4, layer, aux_weight=0.5, seed=3)
    model.build((None, None))
    model.compile(keras.optimizers.SGD(0.0))
    return model


def gradients_of_levels(model, x, y):
    """dL/da^i of a model with a `PlainTrellisLayer`, by tensors of zeros added to all a^i."""
    layer, cell, length = model.backbone, model.backbone.cell, y.shape[1]
    targets = ops.convert_to_tensor(y)

    def loss(*added):
        rest = iter(added)
        vars(layer)["cell"] = lambda a, states: cell(a + next(rest), states)
        vars(layer)["cell"].__dict__.update(state_size=cell.state_size, arrange=cell.arrange)
        raw, aux = layer(model.embedding(x), training=True)
        nll = ops.mean(model.head.loss(raw[:, -length:], targets))
        for i in range(aux.shape[1]):
            nll = nll + 0.5 * ops.mean(model.head.loss(aux[:, i, -length:], targets))
        return nll, None

    zeros = np.zeros((layer.depth, *x.shape, cell.preactivation_size), layer.state_dtype)
    try:
        return [ops.convert_to_numpy(g) for g in value_and_gradients(loss, [], *zeros)[2]]
    finally:
        vars(layer)["cell"] = cell


def test_norms_of_the_levels_of_a_trellisnet(tolerance):
    batches = [(TOKENS[rows, :-1], TOKENS[rows, 5:]) for rows in (slice(2), slice(2, 4))]
    model, plain = trellis_model(TrellisLayer), trellis_model(PlainTrellisLayer)
    plain.set_weights(model.get_weights())
    norms = GradientNorms(batches, by_level=True)
    fit(model, norms, x=batches[0][0], y=batches[0][1])
    expected = [gradients_of_levels(plain, x, y) for x, y in batches]
    squares = [sum(np.sum(np.square(g)) for g in level) for level in zip(*expected, strict=True)]
    assert list(norms.norms)[1:] == [f"gradient_norm/level_{i}" for i in (1, 2, 3, 4)]
    np.testing.assert_allclose(
        norms.heatmap()[:, 0], np.sqrt(squares) / 2, rtol=10 * tolerance("gradient")
    )
    # The gradient of a shared weight is the sum of what the levels add to it.
    bias = [v is model.backbone.bias for v in model.trainable_variables].index(True)
    shared = ops.convert_to_numpy(LossGradient(model)(batches[0])[bias])
    whole = sum(g.sum(axis=(0, 1)) for g in expected[0])
    np.testing.assert_allclose(shared, whole, atol=10 * tolerance("gradient") * abs(whole).max())
    assert type(model.backbone.cell).__name__ == "LSTMGates"
    assert model.backbone.unroll is None


# Scaled losses


@pytest.mark.slow_elsewhere
def test_gradients_too_small_for_half_precision():
    layer = keras.layers.Dense(1, kernel_initializer="zeros", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((3,)), layer])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0))
    model.compile(scaled, loss="mse", run_eagerly=True)
    # 0 in float16: its least positive number is 6e-8.
    kernel, bias = LossGradient(model)((np.ones((4, 3)), np.full((4, 1), 1e-8)))
    for gradient in (kernel, bias):
        np.testing.assert_allclose(ops.convert_to_numpy(gradient), -2e-8, rtol=1e-2)


@pytest.mark.slow_elsewhere
def test_the_scale_of_a_loss_is_not_in_the_norms():
    model, measured = trellis_model(TrellisLayer), []
    for scale in (None, 8.0):
        model.compile(keras.optimizers.SGD(0.0, loss_scale_factor=scale), run_eagerly=True)
        gradient = LevelGradient(model)((TOKENS[:2, :-1], TOKENS[:2, 5:]))
        measured.append([ops.convert_to_numpy(g) for g in gradient])
    for plain, scaled in zip(*measured, strict=True):
        np.testing.assert_allclose(scaled, plain, rtol=1e-4, atol=1e-7)


@pytest.mark.slow_elsewhere
def test_levels_are_those_of_a_trellisnet():
    with pytest.raises(ValueError, match="whose `backbone` is a TrellisLayer"):
        fit(linear_model(), GradientNorms(HALVES, by_level=True))
    with pytest.raises(ValueError, match="leave it or `by_level` out"):
        GradientNorms(HALVES, by_level=True, groups=layers_with_weights)


@pytest.mark.slow_elsewhere
def test_groups_of_the_users_own():
    model = linear_model()
    norms = GradientNorms(HALVES, groups=lambda model: {"all": model.trainable_variables})
    logs = fit(model, norms).history
    assert logs["gradient_norm/all"] == logs["gradient_norm"]


@pytest.mark.slow_elsewhere
def test_training_is_not_disturbed():
    """Dropout, metrics and a carried history are as without the callback."""
    x, y = TOKENS[:, :-1], TOKENS[:, 1:]
    # Another number of rows than the carried states have.
    batches = [(x[:3], y[:3]), (x[:3], y[:3])]
    norms, levels = GradientNorms(batches), GradientNorms(batches, by_level=True, in_logs=False)
    ends = []
    for callbacks in ([], [norms, levels]):
        model = language_model()
        history = fit(model, *callbacks, epochs=2, x=x, y=y).history
        states = [ops.convert_to_numpy(v) for v in model.backbone.state_cache.variables]
        ends.append((history["loss"], history["cross_entropy"], model.get_weights(), states))
    for plain, measured in zip(*ends, strict=True):
        for left, right in zip(plain, measured, strict=True):
            np.testing.assert_array_equal(left, right)
    assert model.backbone.stateful
    assert norms.heatmap().shape == (len(layers_with_weights(model)), 2)
    assert levels.heatmap().shape == (3, 2)
    assert np.all(norms.heatmap() > 0) and np.all(levels.heatmap() > 0)
    np.testing.assert_array_equal(history["gradient_norm"], norms.norms["gradient_norm"])
    assert not any("level" in name for name in history)


@pytest.mark.slow_elsewhere
def test_a_restarted_run_goes_on_with_the_norms(tmp_path):
    whole = GradientNorms(HALVES)
    model = linear_model()
    model.optimizer.learning_rate = 0.1
    fit(model, whole, Checkpoint(tmp_path / "whole", callbacks=[whole]), epochs=3)
    for epochs in (1, 3):
        model = linear_model()
        model.optimizer.learning_rate = 0.1
        split = GradientNorms(HALVES)
        fit(model, split, Checkpoint(tmp_path / "split", callbacks=[split]), epochs=epochs)
    assert split.norms == whole.norms
    assert json.loads(json.dumps(whole.get_state())) == {"norms": whole.norms}
    other = GradientNorms(HALVES, groups=lambda model: {"all": model.trainable_variables})
    other.set_state(whole.get_state())
    with pytest.raises(ValueError, match="other rows. There were .*dense"):
        fit(linear_model(), other)


@pytest.mark.slow_elsewhere
def test_a_table_takes_the_place_of_the_state(tmp_path):
    table = tmp_path / "new" / "norms.csv"
    whole = GradientNorms(HALVES)
    fit(linear_model(), whole, epochs=4)
    for epoch, callbacks in enumerate([[GradientNorms(HALVES, table=table)], []]):
        fit_from(epoch, *callbacks)
    last = GradientNorms(HALVES, table=table)
    fit_from(2, last)
    fit_from(2, last)  # as after a kill between the table and the checkpoint
    measured = np.array(list(last.norms.values()))
    # The second epoch was trained without.
    np.testing.assert_array_equal(np.isnan(measured[0]), [False, True, False])
    np.testing.assert_array_equal(measured[:, [0, 2]], np.array(list(whole.norms.values()))[:, :2])


def fit_from(epoch, *callbacks):
    linear_model().fit(
        X, Y, initial_epoch=epoch, epochs=epoch + 1, batch_size=4, verbose=0, callbacks=callbacks
    )


@pytest.mark.slow_elsewhere
def test_curves_and_heatmaps_for_tensorboard(tmp_path):
    fit(linear_model(), GradientNorms(HALVES, directory=tmp_path), epochs=2)
    values, _ = read_events(tmp_path)
    norms, rows = "gradient_norm", ("1_dense", "2_dense")
    assert sorted(values) == [norms, *(f"{norms}/{row}" for row in rows), "gradient_norms"]
    assert all(list(steps) == [0, 1] for steps in values.values())
    width, height, picture = values["gradient_norms"][1].string_val
    assert min(int(width), int(height)) > 100 and picture.startswith(b"\x89PNG")


@pytest.mark.slow_elsewhere
def test_the_heatmap_as_an_image():
    """A square has its norm's colour; what is no positive number is white."""
    norms = np.array([[1.0, 100.0], [np.nan, 1.0]])
    picture = draw_heatmap(norms, ["low", "high"], "norms")
    height, width, _ = picture.shape
    left, right, top, bottom = width // 3, 2 * width // 3, height // 3, 2 * height // 3
    low, high = picture[bottom, left].tolist(), picture[bottom, right].tolist()
    assert low != high
    assert picture[top, right].tolist() == low
    assert picture[top, left].tolist() == [255, 255, 255] not in (low, high)


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize("norms", [np.zeros((1, 1)), np.full((2, 1), np.nan), np.ones((40, 1))])
def test_heatmaps_without_a_range(norms):
    assert draw_heatmap(norms, list(map(str, norms)), "norms").max() == 255


@pytest.mark.slow_elsewhere
def test_without_tensorflow_the_logs_are_left(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ValueError, match="with TensorFlow, which is not installed"):
        GradientNorms(HALVES, directory=tmp_path)
    GradientNorms(HALVES)


@pytest.mark.slow_elsewhere
def test_wrong_arguments():
    with pytest.raises(ValueError, match="`steps` must be 1 or more"):
        GradientNorms(HALVES, steps=0)
    with pytest.raises(ValueError, match="found no batches"):
        fit(linear_model(), GradientNorms([]))
    strange = keras.Variable(np.zeros(2), name="strange")
    for groups, named in (({}, "no rows"), ({"a": []}, "none"), ({"a": [strange]}, "strange")):
        with pytest.raises(ValueError, match=named):
            fit(linear_model(), GradientNorms(HALVES, groups=lambda model, g=groups: g))
