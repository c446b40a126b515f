"""Killed and resumed runs end with the bits of uninterrupted ones; damaged files do no harm."""

import functools
import itertools
import json
import os
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.checkpoints import (
    assert_same,
    data,
    fit,
    make_model,
    truncate,
    two_epochs,
    values,
)
from trellis_keras.data import SequenceStream
from trellis_keras.training import (
    SGD,
    Adam,
    Checkpoint,
    EarlyStopping,
    PlateauDecay,
    RestOfEpoch,
    StepDecay,
    checkpoint_progress,
    latest_checkpoint,
    restore_checkpoint,
    set_seeds,
)
from trellis_keras.training import checkpoint as checkpoint_module
from trellis_keras.training.checkpoint import has_memory
from trellis_keras.training.checkpoint_files import read, write

# Resuming


def callbacks_with_memory():
    """Rules of which each acts within seven epochs, on a value that rises, then falls."""
    plateau = PlateauDecay("turning", factor=0.5, rule="best_before", window=1, mode="max")
    reduce = keras.callbacks.ReduceLROnPlateau("turning", factor=0.8, patience=2, mode="max")
    stopping = EarlyStopping("turning", against="previous", patience=4, mode="max")
    return [Turning(), plateau, reduce, stopping, StepDecay((1, 3))]


class Turning(keras.callbacks.Callback):
    """Logs a value that rises for three epochs, then falls, as one of NumPy's numbers."""

    def on_epoch_end(self, epoch, logs=None):
        logs["turning"] = np.float32(min(epoch, 4 - epoch))


def train(folder, *stops, optimizer, callbacks=list):
    """Trains up to each number of epochs, with a new model each time."""
    for epochs in stops:
        model, rules = make_model(optimizer=optimizer()), callbacks()
        memories = [rule for rule in rules if has_memory(rule)]
        checkpoint = Checkpoint(folder, seed=np.int64(7), callbacks=memories)
        history = fit(model, epochs, *rules, checkpoint)
    return values(model), history.history


@pytest.mark.both_backends(slow=True)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(Adam(0.05, l2=1e-3, clip_norm=0.5))

    options = {"optimizer": optimizer, "callbacks": callbacks_with_memory}
    whole, history = train(tmp_path / "whole", 9, **options)
    assert len(history["loss"]) == 7, "stopped early"
    resumed, tail = train(tmp_path / "resumed", 1, 4, 6, 9, **options)
    assert_same(whole, resumed)
    assert tail["val_loss"] == history["val_loss"][6:]
    steps = np.array(history["learning_rate"][1:]) / history["learning_rate"][:-1]
    np.testing.assert_allclose(steps, [0.1, 1, 0.1, 0.4, 0.5, 0.4], rtol=1e-5)


@pytest.mark.both_backends
def test_seeds_are_a_function_of_seed_and_epoch():
    def seeds(*arguments):
        model = make_model()
        set_seeds(model, *arguments)
        generators = [v for v in model.variables if "seed" in v.path]
        assert len(generators) == 2, "the one in the nested model too"
        return tuple(tuple(ops.convert_to_numpy(g).tolist()) for g in generators)

    # Part of the format: other seeds would change the runs that older checkpoints resume.
    first = np.random.SeedSequence((0, 3, 0)).generate_state(1)[0] >> 1
    assert seeds(0, 3) == seeds(0, 3) and seeds(0, 3)[0] == (first, 0)
    different = {key for at in itertools.product((0, 1), (0, 1, 2)) for key in seeds(*at)}
    assert len(different) == 12
    assert all(counter == 0 and 0 <= key < 2**31 for key, counter in different)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder, model) of a training of two epochs, which no test may change."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, two_epochs(folder)


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of that folder."""
    return shutil.copytree(trained[0], tmp_path / "copied")


def test_completed_training_says_so(trained, copied, capsys):
    model = make_model()
    assert fit(model, 2, Checkpoint(copied), verbose=2).history == {}
    path = copied / "epoch-0002.npz"
    assert f"{path}: training is complete" in capsys.readouterr().out
    assert_same(values(model), values(trained[1]))
    checkpoint = Checkpoint(copied)
    assert len(fit(model, 3, checkpoint, verbose=2).history["loss"]) == 1
    assert f"Resuming after epoch 2 from {path}." in capsys.readouterr().out
    fit(model, 4, checkpoint, verbose=2)
    assert "Resuming" not in capsys.readouterr().out, "the same training goes on"


def test_stopped_training_is_complete(tmp_path, capsys):
    def stop(epoch, logs):
        model.stop_training = epoch == 1

    model = make_model()
    stopping = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    fit(model, 5, stopping, Checkpoint(tmp_path))
    assert latest_checkpoint(tmp_path).name == "epoch-0002.npz"
    model = make_model()
    assert fit(model, 5, Checkpoint(tmp_path), verbose=2).history == {}
    assert "complete after 2 epochs, stopped by a callback." in capsys.readouterr().out
    assert len(fit(model, 6, Checkpoint(tmp_path)).history["loss"]) == 4


def test_the_last_two_checkpoints_are_kept(tmp_path):
    options = {"validation_data": None, "batch_size": 32}
    fit(make_model(), 3, Checkpoint(tmp_path), **options)
    (tmp_path / "epoch-0009.npz").write_bytes(b"damaged")
    (tmp_path / "epoch-0010.npz").mkdir()
    with pytest.warns(UserWarning, match="epoch-0009.npz is not a checkpoint"):
        fit(make_model(), 4, Checkpoint(tmp_path), **options)
    # A newer epoch, of an earlier run, does not count as an older one.
    assert [int(name[6:10]) for name in sorted(os.listdir(tmp_path))] == [3, 4, 9, 10]


# What is refused


def more_layers():
    model = make_model()
    model.add(keras.layers.Dense(1, name="added"))
    model.compile(Adam(0.1), loss="mse")
    return model


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: make_model(units=7), r"shape \(4, 6\).*\(4, 7\)"),
        (lambda: make_model(optimizer=SGD(0.1)), "10 optimizer variables"),
        (more_layers, "added/kernel"),
        (lambda: make_model(dtype="bfloat16"), "dtype bfloat16"),
    ],
)
def test_another_model_is_refused_and_nothing_changed(trained, make, named):
    model = make()
    model.optimizer.build(model.trainable_variables)
    before = values(model)
    with pytest.raises(ValueError, match=f"(?s){named}.*Nothing was changed"):
        fit(model, 3, Checkpoint(trained[0]))
    assert_same(values(model), before)


@pytest.mark.parametrize("optimizer", [Adam, keras.optimizers.Nadam])
def test_layers_and_optimizers_that_keras_numbers_are_the_same_model(tmp_path, optimizer):
    def model(name):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name=name)
        model.compile(optimizer(0.1), loss="mse")
        return model

    fit(model("one"), 1, Checkpoint(tmp_path))
    assert len(fit(model("other"), 3, Checkpoint(tmp_path)).history["loss"]) == 2


def test_another_seed_or_list_of_callbacks_is_refused(trained):
    folder, stopping = trained[0], EarlyStopping(patience=9)
    with pytest.raises(ValueError, match="Received: seed=2"):
        fit(make_model(), 3, Checkpoint(folder, seed=2))
    with pytest.raises(ValueError, match=r"callbacks=\['EarlyStopping'\]"):
        fit(make_model(), 3, stopping, Checkpoint(folder, callbacks=[stopping]))


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("epochs", [1, 3])
def test_callbacks_after_the_checkpoint_are_an_error(tmp_path, epochs):
    decay = PlateauDecay(factor=0.5, rule="worst_of_last", window=1)
    told = "PlateauDecay changed .*epoch-0001.npz.*Put Checkpoint last"
    with pytest.raises(ValueError, match=told):
        fit(make_model(), epochs, Checkpoint(tmp_path, callbacks=[decay]), decay)
    assert latest_checkpoint(tmp_path) is None


def test_averages_in_place_of_the_weights_are_refused(tmp_path):
    def train(**options):
        swap = keras.callbacks.SwapEMAWeights(**options)
        fit(make_model(optimizer=Adam(0.05, use_ema=True)), 3, swap, Checkpoint(tmp_path))

    with pytest.raises(ValueError, match="after epoch-0001.npz .*Pass swap_on_epoch=False"):
        train(swap_on_epoch=True)
    assert latest_checkpoint(tmp_path) is None
    train()
    assert latest_checkpoint(tmp_path).name == "epoch-0003.npz"


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    def spoil(epoch, logs):
        if epoch == 1:
            kernel.assign(np.full(kernel.shape, np.inf))

    model = make_model()
    kernel = model.layers[0].kernel
    spoiling = keras.callbacks.LambdaCallback(on_epoch_end=spoil)
    with pytest.raises(FloatingPointError, match="After epoch 2 the weight .*kernel' is not"):
        fit(model, 3, spoiling, Checkpoint(tmp_path))
    assert os.listdir(tmp_path) == ["epoch-0001.npz"]
    # A constant, such as a mask, may be infinite, but not NaN.
    model = make_model()
    (constant,) = [v for v in model.weights if not v.trainable]
    constant.assign(np.full(constant.shape, np.inf))
    checkpoint_module._collect(model, 1)
    constant.assign(np.full(constant.shape, np.nan))
    with pytest.raises(FloatingPointError, match="carried"):
        checkpoint_module._collect(model, 1)


def test_wrong_arguments(tmp_path):
    stopping = keras.callbacks.EarlyStopping(restore_best_weights=True)
    for wrong, named in (
        ({"seed": -1}, "seed=-1"),
        ({"save_minutes": 0}, "save_minutes"),
        ({"save_minutes": "1"}, "save_minutes"),
        ({"callbacks": keras.callbacks.History()}, "a list of callbacks"),
        ({"callbacks": [keras.callbacks.History()]}, "History"),
        ({"callbacks": [stopping]}, "restore_best_weights"),
    ):
        with pytest.raises(ValueError, match=named):
            Checkpoint(tmp_path / "never", **wrong)
    assert not (tmp_path / "never").exists()


def eight_batches():
    """Eight batches of `data`."""
    return SequenceStream(*data(), batch_size=4)


class Killed(keras.callbacks.Callback):
    """Ends a process in the second epoch, after a batch."""

    def __init__(self, batch):
        super().__init__()
        self.place = 1, batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.place:
            raise InterruptedError


def fit_on(stream, model, epochs, *callbacks):
    return model.fit(stream, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks).history


@pytest.mark.both_backends
@pytest.mark.parametrize("batch", [4, 7])  # the last one, after which validation follows
def test_a_run_killed_within_an_epoch_equals_an_uninterrupted_one(tmp_path, monkeypatch, batch):
    def model():
        model = make_model()
        model.compile(Adam(0.05), loss="mse", metrics=["mae"], run_eagerly=True)
        return model

    whole = model()
    history = fit_on(
        eight_batches(), whole, 3, StepDecay((1,), 0.5), Checkpoint(tmp_path / "whole")
    )
    folder, seconds = tmp_path / "killed", itertools.count(step=30)
    monkeypatch.setattr("trellis_keras.training.checkpoint.monotonic", lambda: next(seconds))

    def callbacks():  # a checkpoint after every second batch
        return StepDecay((1,), 0.5), Checkpoint(folder, save_minutes=1)

    with pytest.raises(InterruptedError):
        fit_on(eight_batches(), model(), 3, *callbacks(), Killed(batch))
    epoch, batches = checkpoint_progress(folder)
    assert epoch == 1 and 0 < batches <= batch
    names = {f"epoch-0001-batch-{batches:08d}.npz", "epoch-0001.npz"}
    assert {path.name for path in folder.iterdir()} == names
    with pytest.raises(ValueError, match=f"remaining {8 - batches}"):
        fit_on(eight_batches(), model(), 3, *callbacks())
    resumed, stream = model(), eight_batches()
    if keras.backend.backend() == "tensorflow":  # JAX makes the metrics before training begins
        with pytest.raises(ValueError, match="Evaluate a batch first"):
            fit_on(RestOfEpoch(stream, batches), resumed, 2, *callbacks())
    resumed.evaluate(stream, steps=1, verbose=0)
    rest = fit_on(RestOfEpoch(stream, batches), resumed, 2, *callbacks())
    assert {k: v[1] for k, v in history.items()} == {k: v[0] for k, v in rest.items()}
    assert stream.epoch, "the rest says when it ends"
    fit_on(eight_batches(), resumed, 3, *callbacks())
    assert_same(values(whole), values(resumed))
    assert not list(folder.glob("*batch*"))


def test_checkpoints_within_an_epoch_need_its_length(tmp_path):
    checkpoint = Checkpoint(tmp_path, save_minutes=1)
    with pytest.raises(ValueError, match="`save_minutes` needs"):
        make_model().fit((data() for _ in itertools.count()), verbose=0, callbacks=[checkpoint])


# Restoring


@pytest.mark.both_backends(slow=True)
def test_restore_for_evaluation(trained):
    folder, trained = trained
    expected = trained.evaluate(*data(), verbose=0)
    for path in (folder, folder / "epoch-0002.npz"):
        model = make_model(optimizer=SGD(0.5))
        state = restore_checkpoint(model, path, weights_only=True)
        assert not model.optimizer.built
        assert state["epoch"] == 2 and set(state["logs"]) == {"loss", "val_loss"}
        assert model.evaluate(*data(), verbose=0) == expected
    whole = make_model()
    restore_checkpoint(whole, folder)
    assert_same(values(whole), values(trained))
    plain = keras.Sequential([layer for layer in make_model().layers])
    plain.build((None, 4))
    restore_checkpoint(plain, folder)
    assert_same(plain.get_weights(), trained.get_weights())


@pytest.mark.both_backends
def test_normalization_computes_with_restored_statistics(tmp_path):
    """Also in functions that were compiled before."""
    x, y = data()

    def make_adapted(scale):
        normalization = keras.layers.Normalization()
        normalization.adapt(scale * x + scale)
        model = keras.Sequential(
            [keras.Input((4,)), normalization, keras.layers.Dense(1, use_bias=False)]
        )
        model.layers[-1].kernel.assign(np.ones((4, 1)))
        model.compile("sgd", "mse")
        return model

    trained, other, resumed = (make_adapted(scale) for scale in (1, 9, 9))
    fit(trained, 1, Checkpoint(tmp_path))
    for model in (other, resumed):
        assert model.evaluate(x, y, verbose=0) != trained.evaluate(x, y, verbose=0)
    restore_checkpoint(other, tmp_path)
    assert other.evaluate(x, y, verbose=0) == trained.evaluate(x, y, verbose=0)
    np.testing.assert_array_equal(other.predict(x, verbose=0), trained.predict(x, verbose=0))
    fit(trained, 2, initial_epoch=1)
    fit(resumed, 2, Checkpoint(tmp_path))
    assert_same(values(trained), values(resumed))


def test_restore_errors(copied, tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in"):
        restore_checkpoint(make_model(), tmp_path)
    with pytest.raises(ValueError, match="Build it first"):
        restore_checkpoint(keras.Sequential([keras.layers.Dense(1)]), copied)
    truncate(copied / "epoch-0002.npz")
    with pytest.raises(ValueError, match="epoch-0002.npz is not a checkpoint"):
        restore_checkpoint(make_model(), copied / "epoch-0002.npz")


@pytest.mark.both_backends(slow=True)
def test_bfloat16_weights_keep_their_bits(tmp_path):
    trained = make_model(dtype="bfloat16")
    fit(trained, 1, Checkpoint(tmp_path))
    model = make_model(dtype="bfloat16")
    restore_checkpoint(model, tmp_path)
    for a, b in zip(values(trained), values(model), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


# Durability


class Crash(BaseException):
    """Stands for the end of the process."""


def crash_at(monkeypatch, number):
    """Ends the "process" at the number-th operation on files."""
    counter = itertools.count()

    def wrap(function):
        def wrapped(*args, **kwargs):
            if next(counter) >= number:
                raise Crash
            return function(*args, **kwargs)

        return wrapped

    for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink"), (np, "savez")):
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))


def test_a_crash_at_any_operation_leaves_a_whole_checkpoint(tmp_path):
    def save(epoch):
        model.layers[0].kernel.assign(np.full((4, 6), epoch))
        callback._save(epoch, {})

    model = make_model()
    model.optimizer.build(model.trainable_variables)
    callback = Checkpoint(tmp_path)
    callback.set_model(model)
    callback.set_params({"epochs": 9})
    save(1)
    save(2)
    crashes = 0
    for number in itertools.count():
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, number)
            try:
                save(3)
                break
            except Crash:
                crashes += 1
        state, arrays = read(latest_checkpoint(tmp_path))
        assert state["epoch"] in (2, 3) and (arrays["model.00000"] == state["epoch"]).all()
    assert crashes >= 6
    fit(make_model(), 3, Checkpoint(tmp_path))  # complete: it only cleans up
    assert sorted(os.listdir(tmp_path)) == ["epoch-0002.npz", "epoch-0003.npz"]


def flip(path):
    """Changes a byte of an array."""
    content = bytearray(path.read_bytes())
    content[content.index(b"model.00001.npy") - 40] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_newest_checkpoint_costs_an_epoch(trained, copied, damage):
    damage(copied / "epoch-0002.npz")
    if (copied / "epoch-0002.npz").exists():
        with pytest.warns(UserWarning, match="epoch-0002.npz is not a checkpoint"):
            assert latest_checkpoint(copied) == copied / "epoch-0001.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        assert_same(values(two_epochs(copied)), values(trained[1]))
    assert latest_checkpoint(copied) == copied / "epoch-0002.npz"


def test_training_does_not_restart_if_all_checkpoints_are_damaged(copied):
    for path in copied.iterdir():
        truncate(path)
    model = make_model()
    before = model.get_weights()
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="epoch-0002.*epoch-0001.*copy"):
        fit(model, 3, Checkpoint(copied))
    assert_same(model.get_weights(), before)


def test_a_disk_that_cannot_be_read_is_not_damage(trained, monkeypatch):
    """Reported damage makes users remove the file."""

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("zipfile.ZipFile.open", fail)
    with pytest.raises(OSError, match="Input/output error"):
        latest_checkpoint(trained[0])


# Files of any origin: matching checksums only say that a file is whole


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(model, arrays, state) of a checkpoint."""
    folder, model = tmp_path_factory.mktemp("checkpoints"), make_model()
    decay = PlateauDecay(factor=0.5, rule="best_before", window=3)
    stopping = keras.callbacks.EarlyStopping(patience=9)
    fit(model, 1, decay, stopping, Checkpoint(folder, callbacks=[decay, stopping]))
    state, arrays = read(folder / "epoch-0001.npz")
    return model, arrays, state


DELETED = object()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["format"], 1),
        (["epoch"], "1"),
        (["stopped"], 1),
        (["callbacks", 0, "state"], []),
        (["variables", "model"], DELETED),
        (["variables", "model", 0], {}),
        (["variables", "model", 0, "dtype"], "f4,f4"),
    ],
)
def test_a_wrong_state_is_refused(tmp_path, written, place, value):
    model, arrays, state = written
    state = json.loads(json.dumps(state))
    *holders, last = place
    holder = functools.reduce(lambda holder, key: holder[key], holders, state)
    if value is DELETED:
        del holder[last]
    else:
        holder[last] = value
    np.savez(tmp_path / "epoch-0001.npz", state=json.dumps(state), **arrays)
    check_refused(tmp_path, model)


def check_refused(folder, model):
    before = values(model)
    with pytest.raises(ValueError, match="epoch-0001.npz is not a checkpoint of"):
        restore_checkpoint(model, folder / "epoch-0001.npz")
    assert_same(values(model), before)


def test_wrong_arrays_are_refused(tmp_path, written):
    model, arrays, state = written
    path, first = tmp_path / "epoch-0001.npz", arrays.pop("model.00000")
    for array in (None, first.astype(str), first.astype("float64")):
        write(path, arrays if array is None else arrays | {"model.00000": array}, state)
        check_refused(tmp_path, model)
    arrays["model.00000"] = first
    for text in ("", "[]", "[" * 100_000, '{"format": 3}'):
        np.savez(path, **arrays, state=text)
        check_refused(tmp_path, model)
    np.savez(path, **arrays)
    check_refused(tmp_path, model)


@pytest.mark.parametrize(
    ("index", "state", "named"),
    [
        (0, {}, "PlateauDecay"),
        (1, {"best": "low", "best_epoch": 0, "wait": 0}, "EarlyStopping: .*best"),
    ],
)
def test_a_wrong_memory_of_a_callback_is_refused(tmp_path, written, index, state, named):
    _, arrays, whole = written
    whole = json.loads(json.dumps(whole))
    whole["callbacks"][index]["state"] = state
    write(tmp_path / "epoch-0001.npz", arrays, whole)
    decay = PlateauDecay(factor=0.5, rule="best_before", window=3)
    callbacks = [decay, keras.callbacks.EarlyStopping(patience=9)]
    with pytest.raises(ValueError, match=f"epoch-0001.npz has no state of {named}"):
        fit(make_model(), 2, *callbacks, Checkpoint(tmp_path, callbacks=callbacks))
