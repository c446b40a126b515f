"""Callbacks that stop training, record it, and show it in TensorBoard."""

import math
import re
import sys
import types

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.checkpoints import assert_same, data, fit, make_model, values
from tests.support.event_files import read_events
from trellis_keras.data import Vocabulary
from trellis_keras.layers import LRU, TCN, StackedRNN, TrellisLayer
from trellis_keras.models import LanguageModel
from trellis_keras.training import (
    BestModel,
    Checkpoint,
    GradientNorms,
    HistoryCSV,
    StopOnNaN,
    TextSamples,
    TimeLimit,
    latest,
    restore,
)
from trellis_keras.training.monitors import (
    BatchProgress,
    LossGradient,
    ProgressBar,
    layer_groups,
    read_history,
    write_graph,
)

# A lost loss


class Batches(keras.utils.PyDataset):
    """Four batches; `spoil(x, y)` changes the third one of the second epoch."""

    def __init__(self, spoil=None):
        super().__init__()
        self.spoil = spoil
        self.epoch = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x, y = (array[8 * index : 8 * index + 8].copy() for array in data())
        if self.spoil and (self.epoch, index) == (1, 2):
            self.spoil(x, y)
        return x, y


def train(folder, spoil=None, validation=None):
    model, batches = make_model(), Batches(spoil)
    best = BestModel(folder / "best.keras")
    counting = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: setattr(batches, "epoch", epoch)
    )
    checkpoint = Checkpoint(folder / "checkpoints", callbacks=[best])
    callbacks = [StopOnNaN(), counting, HistoryCSV(folder / "history.csv"), best, checkpoint]
    model.fit(
        batches,
        validation_data=validation or data(),
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )
    return model


def make_nan(x, y):
    x[5] = np.nan


def cannot_read(x, y):
    raise OSError(5, "Input/output error", "numbers.npy")


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (make_nan, (FloatingPointError, "The loss is nan at step 3 of epoch 2.$")),
        (cannot_read, (Exception, "Input/output error")),  # TensorFlow has its own
    ],
)
def test_a_lost_epoch_leaves_what_the_one_before_has_saved(tmp_path, spoil, error):
    with pytest.raises(error[0], match=error[1]):
        train(tmp_path, spoil)
    assert latest(tmp_path / "checkpoints").name == "epoch-0001.npz"
    assert [row["epoch"] for row in read_history(tmp_path / "history.csv")] == ["1"]
    best, checkpoint = keras.saving.load_model(tmp_path / "best.keras"), make_model()
    restore(checkpoint, tmp_path / "checkpoints")
    assert_same(best.get_weights(), checkpoint.get_weights())
    if spoil is cannot_read:  # resumed, the run ends as one without the error
        assert_same(values(train(tmp_path)), values(train(tmp_path / "whole")))


@pytest.mark.both_backends(slow=True)
def test_a_lost_validation_ends_training_before_anything_is_saved(tmp_path):
    x, y = data()
    with pytest.raises(FloatingPointError, match="The validation loss after epoch 1 is inf.$"):
        train(tmp_path, validation=(x, y + np.inf))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    assert latest(tmp_path / "checkpoints") is None


# A time limit


class Clock(keras.callbacks.Callback):
    """A clock that advances in each epoch by its seconds."""

    def __init__(self, *seconds):
        super().__init__()
        self.now = 100.0
        self.seconds = seconds

    def __call__(self):
        return self.now

    def on_epoch_begin(self, epoch, logs=None):
        self.now += self.seconds[epoch]


def epochs_until_stopped(limit, clock, stopped_by_others_after=None):
    """The number of epochs of a loop without a model."""
    limit.set_params({"epochs": len(clock.seconds)})
    limit.set_model(types.SimpleNamespace(stop_training=False))
    limit.on_train_begin()
    for epoch in range(len(clock.seconds)):
        clock.on_epoch_begin(epoch)
        limit.model.stop_training = epoch + 1 == stopped_by_others_after
        limit.on_epoch_end(epoch)
        if limit.model.stop_training:
            return epoch + 1
    return len(clock.seconds)


@pytest.mark.parametrize(
    ("seconds", "lost_before", "epochs", "expected"),
    [
        (39, 0, [10] * 6, 3),  # the fourth would end at 40
        (40, 0, [10] * 6, 4),  # just in time
        (40, 11, [10] * 6, 2),  # loading data counts
        (44, 0, [20, 5, 5, 5, 5, 5], 5),  # the first, which compiles, does not count
        (39, 0, [20, 5, 5, 5, 5, 5], 1),  # unless there is no other: the second might end at 40
        (44, 0, [5, 20, 5, 5, 5, 5], 2),  # of the others, the longest counts
        (45, 0, [5, 20, 5, 5, 5, 5], 3),
        (1, 50, [10] * 6, 1),  # one is always trained
        (60, 0, [10] * 6, 6),
    ],
)
def test_the_next_epoch_must_fit(seconds, lost_before, epochs, expected):
    clock = Clock(*epochs)
    limit = TimeLimit(seconds, clock=clock)
    clock.now += lost_before
    assert epochs_until_stopped(limit, clock) == expected
    assert limit.stopped == (expected < 6)


@pytest.mark.parametrize(("epochs", "others"), [([10, 10], 1), ([10], None)])
def test_finished_training_is_not_stopped(epochs, others):
    clock = Clock(*epochs)
    limit = TimeLimit(5, clock=clock)
    assert epochs_until_stopped(limit, clock, others) == 1
    assert not limit.stopped


def test_training_resumes_after_the_limit(tmp_path, capsys):
    clock = Clock(*[10] * 4)
    limit = TimeLimit(20, clock=clock, command="train again")
    assert fit(make_model(), 4, clock, Checkpoint(tmp_path), limit, verbose=2).epoch == [0, 1]
    told = "Stopped by the time limit after 2 of 4 epochs. To resume: train again"
    assert capsys.readouterr().out.splitlines()[-1] == told
    assert latest(tmp_path).name == "epoch-0002.npz"
    assert fit(make_model(), 3, Checkpoint(tmp_path), limit, verbose=2).epoch == [2]
    assert not limit.stopped and "train again" not in capsys.readouterr().out
    for seconds in (0, -1, math.nan):
        with pytest.raises(ValueError, match="`seconds` must be positive. Received: seconds="):
            TimeLimit(seconds)


# Records


def test_lines_within_a_long_epoch(capsys):
    times = iter([0, 10, 65, 66, 80, 200, 201])
    progress = BatchProgress(60, clock=lambda: next(times))
    progress.set_params({"epochs": 3, "steps": 1200})
    progress.on_epoch_begin(1)
    for batch, loss in ((0, 3.0), (1, 2.0), (2, 1.5), (1199, 1.0)):
        progress.on_train_batch_end(batch, {"loss": loss})
    assert capsys.readouterr().out.splitlines() == [
        "Epoch 2/3: batch 2/1,200 - loss: 2.0000",
        "Epoch 2/3: batch 1,200/1,200 - loss: 1.0000",
    ]


def test_the_line_of_an_epoch_names_no_single_layers(capsys):
    progress = ProgressBar()
    progress.set_params({"verbose": 2, "epochs": 3, "steps": 2})
    progress.on_epoch_begin(0)
    progress.on_epoch_end(0, {"loss": 3.0, "gradient_norm": 1.5, "gradient_norm/tcn": 0.5})
    line = capsys.readouterr().out.splitlines()[-1]
    assert "gradient_norm: 1.5" in line and "loss: 3" in line and "tcn" not in line


def test_history_and_best_model_in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    history, best = HistoryCSV("~/new/history.csv"), BestModel("~/new/best.keras")
    for callback in (history, best):
        callback.set_model(make_model())
        callback.on_train_begin()
    history.on_epoch_begin(0)
    assert read_history("~/new/history.csv") == []
    for epoch, loss in enumerate([math.nan, 3.0, 4.0]):
        history.on_epoch_end(epoch, {"loss": loss})
        best.on_epoch_end(epoch, {"val_loss": loss})
        assert (tmp_path / "new" / "best.keras").exists() == (epoch > 0)
    assert best.get_state() == {"best": 3.0}
    # The second epoch anew, after a kill before its checkpoint.
    history.on_train_begin()
    history.on_epoch_begin(1)
    history.on_epoch_end(1, {"loss": 2.5, "bpc": 1})
    rows = read_history("~/new/history.csv")
    first, second = dict(epoch="1", loss="nan", bpc=""), dict(epoch="2", loss="2.5", bpc="1")
    assert rows == [first, second]
    with pytest.raises(ValueError, match=r"BestModel monitors 'val_loss'.*\['loss'\]"):
        best.on_epoch_end(3, {"loss": 1.0})


@pytest.mark.parametrize(
    "content",
    [
        b"epoch,loss\n1,a\n",
        b"epoch,loss\n0,1\n",
        b"epoch,loss\n1,2,3\n",
        b"epoch,loss\n1,2\n2,3",
        b"epoch,lo",
        b"",
        b"loss\n1\n",
        b'epoch\n"1\n',
        b"epoch\n" + b"1" * 200_000,
    ],
)
def test_a_damaged_history_is_named(tmp_path, content):
    path = tmp_path / "history.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="history.csv is not a history, or damaged"):
        read_history(path)
    path.write_bytes(b"epoch\n\xff\n")
    with pytest.raises(ValueError, match="history.csv is not text in UTF-8"):
        read_history(path)


# Gradients

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
def test_steps_sample_weights_groups_and_regularizers():
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            assert index == 0, "more batches than asked for"
            return X, Y, np.repeat([1.0, 0.0], 4)

    model = linear_model(keras.regularizers.L2(0.5), run_eagerly=True)
    norms = GradientNorms(Data(), steps=1, groups=lambda model: {"all": model.trainable_variables})
    logs = fit_arrays(model, norms).history
    # Keras divides by the number of rows, whatever their weight. The gradient of 0.5 w^2 is w.
    parts = [g / 2 for g in linear_gradients(model, *HALVES[0])]
    parts = [g + w for g, w in zip(parts, model.get_weights(), strict=True)]
    expected = math.hypot(*map(np.linalg.norm, parts))
    np.testing.assert_allclose(logs["gradient_norm/all"], [expected], rtol=1e-5)
    assert logs["gradient_norm/all"] == logs["gradient_norm"]


def test_gradients_too_small_for_half_precision():
    layer = keras.layers.Dense(1, kernel_initializer="zeros", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((3,)), layer])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0))
    model.compile(scaled, loss="mse", run_eagerly=True)
    # 0 in float16, whose smallest positive number is 6e-8.
    for gradient in LossGradient(model)((np.ones((4, 3)), np.full((4, 1), 1e-8))):
        np.testing.assert_allclose(ops.convert_to_numpy(gradient), -2e-8, rtol=1e-2)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: TCN(3, 2, depth=2), ["1_block", "2_block"]),
        (lambda: LRU(3, depth=2, return_sequences=True), ["1_cell", "2_cell"]),
        (
            lambda: keras.layers.RNN(
                [keras.layers.GRUCell(3) for _ in range(10)], return_sequences=True
            ),
            [f"{i:02}_gru_cell" for i in range(1, 11)],
        ),
        (
            lambda: StackedRNN([keras.layers.LSTM(3, return_sequences=True, return_state=True)]),
            ["1_lstm_cell"],
        ),
        (lambda: TrellisLayer(4, 2, output_units=3, name="trellis"), ["1_trellis"]),
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


def test_wrong_arguments_of_gradient_norms():
    with pytest.raises(ValueError, match="`steps` must be positive or None. Received: steps=0"):
        GradientNorms(HALVES, steps=0)
    with pytest.raises(ValueError, match="received no batches"):
        fit_arrays(linear_model(), GradientNorms([]))
    strange = keras.Variable(np.zeros(2), name="strange")
    for variables, named in (([], r"'a': \[\]"), ([strange], r"'a': \['strange'\]")):
        norms = GradientNorms(HALVES, groups=lambda model, v=variables: {"a": v})
        with pytest.raises(ValueError, match=named):
            fit_arrays(linear_model(), norms)
    with pytest.raises(ValueError, match="built and compiled"):
        LossGradient(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))


# TensorBoard

CHARACTERS = "\n abcdé"


def text_model():
    backbone = TrellisLayer(units=8, depth=2, output_units=4, stateful=True, name="trellis")
    vocabulary = Vocabulary(CHARACTERS, "character")
    model = LanguageModel(len(vocabulary), 4, backbone, vocabulary=vocabulary, seed=0)
    model.build((None, None))
    model.compile(keras.optimizers.Adam(0.01), run_eagerly=True)
    return model


def test_text_samples_show_what_the_model_writes(tmp_path):
    from keras_nlp.samplers import RandomSampler

    model = text_model()
    samples = TextSamples("ab é", tmp_path, length=120, seed=3)
    fit_arrays(model, samples, epochs=2, x=TOKENS[:, :-1], y=TOKENS[:, 1:])
    values, _ = read_events(tmp_path)
    assert list(values) == ["sample"] and list(values["sample"]) == [0, 1]
    (shown,) = values["sample"][1].string_val
    prompt = model.vocabulary.encode("ab é", final_eos=False)
    (ids,) = model.generate(prompt[None], 124, RandomSampler(temperature=0.8), seed=3)
    before, text = shown.decode().split("\n\nthe model writes\n\n")
    assert before == "After the prompt\n\n    ab é"
    lines = text.split("\n")
    assert all(line.startswith("    ") and len(line) <= 84 for line in lines)
    expected = model.vocabulary.decode(ids[4:])
    assert [line[4:].split() for line in lines if line.strip()] == [
        part.split() for line in expected.splitlines() for part in re.findall(".{1,80}", line)
        if part.strip()
    ]  # fmt: skip


def test_what_tensorboard_requires(tmp_path, monkeypatch):
    samples = TextSamples("the ", tmp_path)
    samples.set_model(types.SimpleNamespace(vocabulary=None))
    with pytest.raises(ValueError, match="requires a language model with a vocabulary"):
        samples.on_train_begin()
    samples.on_epoch_end(0, {"loss": math.nan})
    assert not list(tmp_path.iterdir())
    samples = TextSamples("", tmp_path)
    samples.set_model(text_model())
    with pytest.raises(ValueError, match="`prompt` must not be empty. Received: prompt=''"):
        samples.on_train_begin()
    for wrong in ({"length": 0}, {"temperature": 0}):
        with pytest.raises(ValueError, match="`length` and `temperature` must be positive"):
            TextSamples("the ", tmp_path, **wrong)
    monkeypatch.setattr("keras.backend.backend", lambda: "jax")
    with pytest.raises(ValueError, match="Graphs require .*Received: backend='jax'"):
        write_graph(None, (), tmp_path)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ValueError, match="require TensorFlow, which is not installed"):
        TextSamples("the ", tmp_path)
    monkeypatch.setitem(sys.modules, "keras_nlp", None)
    with pytest.raises(ImportError, match="pip install keras-nlp"):
        TextSamples("the ", tmp_path)
