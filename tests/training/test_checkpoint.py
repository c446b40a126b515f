"""Killed and resumed runs end as uninterrupted ones do."""

import itertools
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import keras
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
from tests.support.processes import script_command
from trellis_keras.training import (
    SGD,
    Adam,
    Checkpoint,
    PlateauDecay,
    StepDecay,
    latest,
    restore,
    set_seeds,
)

RUN = (Path(__file__).parents[1] / "support" / "resumable_run.py").read_text(encoding="utf-8")


@pytest.mark.both_backends
@pytest.mark.float64
@pytest.mark.parametrize("optimizer", [Adam, "schedule", "loss_scale"])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path, optimizer):
    def new_optimizer():
        if optimizer == "schedule":
            return SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5), momentum=0.5)
        if optimizer == "loss_scale":
            return keras.optimizers.LossScaleOptimizer(Adam(0.05, clip_norm=0.5))
        return Adam(0.05, l2=1e-3, clip_norm=0.5)

    def train(folder, *stops):
        for epochs in stops:
            decays = []
            if optimizer != "schedule":
                # A falling loss is no good to "max", so that the rule comes into play.
                decays = [PlateauDecay(factor=0.5, rule="best_before", window=1, mode="max")]
            model = make_model(optimizer=new_optimizer())
            checkpoint = Checkpoint(tmp_path / folder, seed=7, callbacks=decays)
            history = fit(model, epochs, *decays, checkpoint).history
        return values(model), history

    whole, history = train("whole", 5)
    resumed, tail = train("resumed", 2, 5)
    assert_same(whole, resumed)
    assert tail["val_loss"] == history["val_loss"][2:]
    if optimizer is Adam:
        assert len(set(history["learning_rate"])) > 1


@pytest.mark.both_backends
def test_step_decay_resumes_with_the_base_rate(tmp_path):
    for epochs in (2, 3):
        decay = StepDecay((1, 2), 0.5)
        model = make_model(optimizer=SGD(0.25))
        fit(model, epochs, decay, Checkpoint(tmp_path, callbacks=[decay]))
    assert float(ops.convert_to_numpy(model.optimizer.learning_rate)) == 0.0625


def start(folder, epochs, seconds, compare):
    backend = keras.backend.backend()
    command, environment = script_command(
        RUN,
        folder,
        epochs,
        seconds,
        int(compare),
        backend=backend,
        # On JAX nothing of the training parts needs TensorFlow.
        block=("tensorflow",) if backend == "jax" else (),
    )
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def kill_and_resume(folder, kills, epochs, seed):
    rng = random.Random(seed)
    begins = []
    for _ in range(kills):
        with start(folder, epochs, 0.02, compare=False) as child:
            lines = [child.stdout.readline() for _ in range(rng.randint(2, 3))]
            if not lines[-1]:
                break  # trained to the end
            begins.append(int(lines[0].split()[1]))
            time.sleep(rng.uniform(0.0, 0.15))  # an epoch takes 0.1 s and more
            child.send_signal(signal.SIGKILL)
    assert begins[0] == 0 and begins == sorted(begins) and begins[-1] > 0
    child = start(folder, epochs, 0.0, compare=True)
    output, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert "variables that differ: []" in output


@pytest.mark.both_backends
def test_killed_run_ends_as_an_uninterrupted_one(tmp_path):
    kill_and_resume(tmp_path / "killed", kills=2, epochs=8, seed=0)


@pytest.mark.both_backends
@pytest.mark.slow
def test_run_killed_many_times_ends_as_an_uninterrupted_one(tmp_path):
    kill_and_resume(tmp_path / "killed", kills=20, epochs=60, seed=time.time_ns())


def other_units():
    return make_model(units=7)


def other_name():
    return make_model(name="projection")


def other_optimizer():
    return make_model(optimizer=SGD(0.1))


def more_layers():
    model = make_model()
    model.add(keras.layers.Dense(1, name="added"))
    model.compile(Adam(0.1), loss="mse")
    return model


def other_dtype():
    return make_model(dtype="bfloat16")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (other_units, r"\(4, 6\).*\(4, 7\)"),
        (other_name, "dense/kernel.*projection/kernel"),
        (other_optimizer, "without a counterpart is '.*moment"),
        (more_layers, "without a counterpart is '.*added/kernel'"),
        (other_dtype, "float32.*bfloat16"),
    ],
)
def test_another_architecture_is_refused_and_nothing_changed(tmp_path, make, named):
    two_epochs(tmp_path)
    model = make()
    model.optimizer.build(model.trainable_variables)
    before = values(model)
    with pytest.raises(ValueError, match=f"(?s){named}.*Nothing was changed"):
        fit(model, 3, Checkpoint(tmp_path))
    assert_same(values(model), before)


def test_layers_numbered_by_keras_are_the_same_model(tmp_path):
    def model(name):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name=name)
        model.compile(Adam(0.1), loss="mse")
        return model

    fit(model("one"), 1, Checkpoint(tmp_path))
    assert len(fit(model("other"), 3, Checkpoint(tmp_path)).history["loss"]) == 2


@pytest.mark.both_backends
def test_complete_training_does_nothing_and_says_so(tmp_path, capsys):
    expected = values(two_epochs(tmp_path))
    model = make_model()
    history = fit(model, 2, Checkpoint(tmp_path), verbose=2)
    assert "training is complete after 2 epochs" in capsys.readouterr().out
    assert history.history == {}
    assert_same(values(model), expected)
    assert len(fit(model, 3, Checkpoint(tmp_path), verbose=2).history["loss"]) == 1
    assert "Resuming after epoch 2" in capsys.readouterr().out
    assert len(fit(model, 2).history["loss"]) == 2, "fit without Checkpoint is left alone"


def test_training_that_was_stopped_early_is_complete(tmp_path, capsys):
    def stop(epoch, logs):
        model.stop_training = epoch == 1

    model = make_model()
    fit(model, 5, keras.callbacks.LambdaCallback(on_epoch_end=stop), Checkpoint(tmp_path))
    model = make_model()
    assert fit(model, 5, Checkpoint(tmp_path), verbose=2).history == {}
    assert "complete after 2 epochs, when a callback stopped it" in capsys.readouterr().out
    assert len(fit(model, 6, Checkpoint(tmp_path)).history["loss"]) == 4


@pytest.mark.both_backends
def test_callbacks_after_the_checkpoint_are_an_error(tmp_path):
    decay = PlateauDecay(factor=0.5, window=1)
    with pytest.raises(ValueError, match="PlateauDecay.*Put Checkpoint last"):
        fit(make_model(), 3, Checkpoint(tmp_path, callbacks=[decay]), decay)
    assert latest(tmp_path) is None


def test_other_seed_or_callbacks_are_refused(tmp_path):
    decay = StepDecay((9,))
    two_epochs(tmp_path, seed=1)
    with pytest.raises(ValueError, match="seed=1.*seed=2"):
        fit(make_model(), 3, Checkpoint(tmp_path, seed=2))
    with pytest.raises(ValueError, match=r"\[\].*\['StepDecay'\]"):
        fit(make_model(), 3, decay, Checkpoint(tmp_path, seed=1, callbacks=[decay]))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": None}, "seed"),
        ({"keep": 0}, "keep"),
        ({"save_freq": 0}, "save_freq"),
        ({"save_freq": "batch"}, "save_freq"),
        ({"callbacks": [keras.callbacks.EarlyStopping()]}, "EarlyStopping.*get_state"),
    ],
)
def test_wrong_arguments(tmp_path, wrong, named):
    with pytest.raises(ValueError, match=named):
        Checkpoint(tmp_path / "never", **wrong)
    assert not (tmp_path / "never").exists()


def test_keep_and_save_freq(tmp_path):
    fit(make_model(), 7, Checkpoint(tmp_path / "a", save_freq=2, keep=3))
    assert sorted(os.listdir(tmp_path / "a")) == ["epoch-0004", "epoch-0006", "epoch-0007"]
    fit(make_model(), 3, Checkpoint(tmp_path / "b", keep=1))
    assert os.listdir(tmp_path / "b") == ["epoch-0003"]


@pytest.mark.both_backends
def test_seeds_are_a_function_of_seed_and_epoch():
    def seeds(*arguments):
        model = make_model()
        set_seeds(model, *arguments)
        generators = [v for v in model.variables if "seed" in v.path]
        assert len(generators) == 2, "the one in the nested model too"
        return tuple(tuple(ops.convert_to_numpy(g).tolist()) for g in generators)

    assert seeds(0, 3) == seeds(0, 3)
    different = {key for at in itertools.product((0, 1), (0, 1, 2)) for key in seeds(*at)}
    assert len(different) == 12


@pytest.mark.both_backends
def test_restore_for_evaluation(tmp_path):
    trained = two_epochs(tmp_path)
    expected = trained.evaluate(*data(), verbose=0)
    for path in (tmp_path, tmp_path / "epoch-0002"):
        model = make_model(optimizer=SGD(0.5))
        state = restore(model, path, weights_only=True)
        assert state["epoch"] == 2 and set(state["logs"]) == {"loss", "val_loss"}
        assert model.evaluate(*data(), verbose=0) == expected
    whole = make_model()
    restore(whole, tmp_path)
    assert_same(values(whole), values(trained))
    plain = keras.Sequential([layer for layer in make_model().layers])
    plain.build((None, 4))
    restore(plain, tmp_path)
    assert_same(plain.get_weights(), trained.get_weights())


def test_restore_from_nothing_or_a_damaged_folder(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint in"):
        restore(make_model(), tmp_path)
    two_epochs(tmp_path)
    truncate(tmp_path / "epoch-0002" / "variables.npz")
    with pytest.raises(ValueError, match="damaged: variables.npz"):
        restore(make_model(), tmp_path / "epoch-0002")


def test_unbuilt_model_is_an_error(tmp_path):
    two_epochs(tmp_path)
    with pytest.raises(ValueError, match="Build it first"):
        restore(keras.Sequential([keras.layers.Dense(1)]), tmp_path)


@pytest.mark.both_backends
def test_bfloat16_weights_keep_their_bits(tmp_path):
    trained = make_model(dtype="bfloat16")
    fit(trained, 1, Checkpoint(tmp_path))
    model = make_model(dtype="bfloat16")
    restore(model, tmp_path)
    for a, b in zip(values(trained), values(model), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_the_state_file_is_plain_json(tmp_path):
    decay = PlateauDecay(factor=0.5, window=3)
    fit(make_model(), 2, decay, Checkpoint(tmp_path, seed=5, callbacks=[decay]))
    state = json.loads((tmp_path / "epoch-0002" / "state.json").read_text())
    assert (state["epoch"], state["seed"], state["stopped"]) == (2, 5, False)
    assert len(state["callbacks"][0]["state"]["values"]) == 2
    kernel = state["variables"]["model"][0]
    assert kernel["path"].endswith("dense/kernel") and kernel["dtype"] == "float32"
