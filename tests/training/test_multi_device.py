"""Several devices and several processes train as one, and leave an ordinary run."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from tests.support.processes import ROOT, child_environment, run_script
from tests.support.small_runs import options, write_text
from trellis_keras.data import SequenceStream
from trellis_keras.training import RestOfEpoch, latest_checkpoint
from trellis_keras.training.devices import OwnRows
from trellis_keras.zoo import read_recipe, run
from trellis_keras.zoo.evaluation import evaluate

# Gradient descent: Adam does not see a gradient that is twice too large. The last rows of the text
# have fewer targets. Replicas on TensorFlow draw masks of their own: no dropout.
TEXT = {"optimizer": "sgd", "learning_rate": 2.0, "batch_size": 4, "epochs": 2, "data": "text"}
SMALL = {"depth": 2, "filters": 8, "embedding_dim": 8, "dropout": 0.0, "input_dropout": 0.0}
TRELLIS = {"depth": 3, "hidden_units": 8, "embedding_dim": 8, "aux_every": 1, "aux_weight": 0.1}
OVERLAPPING = {"sequence_length": 12, "context_length": 4}
CARRIED = {"sequence_length": 8, "context_length": 0, "stateful": True}
# Of 71 examples the last batch has 3: two rows here, one there.
ADDING = {"T": 8, "depth": 2, "filters": 3, "batch_size": 4, "learning_rate": 0.1, "epochs": 2}
ADDING |= {"optimizer": "sgd", "data_options": {"train": 71, "valid": 8, "test": 8}}
CASES = {
    "trellisnet": ("trellisnet_char", TEXT | TRELLIS | OVERLAPPING),
    "carried history": ("trellisnet_char", TEXT | TRELLIS | CARRIED),
    "tcn": ("tcn_ptb", TEXT | OVERLAPPING | SMALL),
    "adding": ("tcn_adding", ADDING),
}


def words_of(case, folder):
    """The model and its settings, with a text in `folder` where it reads one."""
    model, settings = CASES[case]
    if settings.get("data") == "text":
        path = str(write_text(folder / "text.txt", 1124))
        settings = settings | {"data_options": {"path": path, "split": [0.5, 0.25, 0.25]}}
    return model, settings | {"jit_compile": False}


def weights_of(folder):
    """The weights in the newest checkpoint of a run."""
    with np.load(latest_checkpoint(folder / "checkpoints")) as arrays:
        return [arrays[name] for name in arrays.files if name.startswith("model.")]


def check_same(run, alone):
    ours, theirs = weights_of(run), weights_of(alone)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)


# Two logical CPU devices: a run on one, and one with an epoch on each of some numbers of devices.
DEVICES = """
import json, keras, pathlib
from trellis_keras import zoo

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
model, settings = sys.argv[2], json.loads(sys.argv[3])
devices = json.loads(sys.argv[4])  # of each epoch
recipe = zoo.recipe(model, **settings | {"epochs": len(devices)})
folder = pathlib.Path(sys.argv[1])
norms = 2 * (len(devices) > 1)
zoo.train(recipe, folder / "alone", verbose=0, gradient_norms=norms, devices=1)
for epochs, number in enumerate(devices, start=1):
    part = recipe.replace(epochs=epochs)
    zoo.train(part, folder / "several", verbose=0, gradient_norms=norms, devices=number)
for wrong in ({"devices": 3}, {"devices": 2, "batch_size": 3}):
    devices = wrong.pop("devices")
    try:
        zoo.train(recipe.replace(**wrong), folder / "wrong", verbose=0, devices=devices)
    except ValueError as error:
        print(error)
"""


def check_devices(case, backend, folder, devices):
    model, settings = words_of(case, folder)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    words = folder, model, json.dumps(settings), json.dumps(devices)
    refused = run_script(DEVICES, *words, backend=backend, XLA_FLAGS=flags).splitlines()
    assert "has 2 devices" in refused[-2] and refused[-2].endswith("devices=3")
    assert "Received: batch_size=3, 2 devices" in refused[-1]
    alone, several = folder / "alone", folder / "several"
    check_same(several, alone)
    ours, theirs = (
        np.genfromtxt(run / "history.csv", delimiter=",", names=True) for run in (several, alone)
    )
    for column in theirs.dtype.names:
        np.testing.assert_allclose(ours[column], theirs[column], rtol=1e-3, atol=1e-4)


@pytest.mark.both_backends
def test_two_devices(tmp_path):
    backend = keras.backend.backend()
    case = {"tensorflow": "trellisnet", "jax": "adding"}[backend]  # which compiles quickly
    check_devices(case, backend, tmp_path, devices=(2,))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
@pytest.mark.parametrize("case", CASES)
def test_the_second_epoch_on_two_devices(case, backend, tmp_path):
    if (case, backend) != ("carried history", "tensorflow"):
        check_devices(case, backend, tmp_path, devices=(1, 2))


# Several processes


def test_own_rows_of_the_rest_of_an_epoch(monkeypatch):
    """Keras announces an epoch to the outer data set only."""
    monkeypatch.setattr("trellis_keras.training.devices.process_count", lambda: 2)
    monkeypatch.setattr("trellis_keras.training.devices.process_index", lambda: 1)
    rows = OwnRows(RestOfEpoch(SequenceStream(np.arange(6), np.arange(6), 2), 1))
    rows.on_epoch_begin()
    assert [rows[i][0].tolist() for i in range(len(rows))] == [[3], [5]]


def start(*words):
    """Starts the command `train` on JAX."""
    return subprocess.Popen(
        [sys.executable, "-m", "trellis_keras", "train", *map(str, words)],
        env=child_environment("jax"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_both(outputs, *words):
    """Two processes on this machine, as on two, each with its own idea of the output folder."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    several = ["--coordinator", address, "--processes", 2]
    return [
        start(*words, "--output", output, *several, "--process", i)
        for i, output in enumerate(outputs)
    ]


def check_ended_well(processes):
    for process in processes:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, f"{out[-3000:]}\n{err[-6000:]}"


def command(case, folder, **changes):
    model, settings = words_of(case, folder)
    settings = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in settings.items()}
    return [model, *options(settings | changes)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes(case, tmp_path):
    alone, together, elsewhere = (tmp_path / name for name in ("alone", "together", "elsewhere"))
    check_ended_well([start(*command(case, tmp_path), "--output", alone)])
    for epochs in (1, 2):  # the second time they resume
        words = command(case, tmp_path, epochs=epochs)
        check_ended_well(start_both([together, elsewhere], *words))
    assert not elsewhere.exists()
    check_same(together, alone)
    found, expected = (evaluate(read_recipe(folder), folder) for folder in (together, alone))
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_all(killed, tmp_path):
    outputs = tmp_path / "run", tmp_path / "other"
    processes = start_both(outputs, *command("trellisnet", tmp_path, epochs=100_000))
    deadline = time.monotonic() + 600
    while latest_checkpoint(outputs[0] / "checkpoints") is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    processes[killed].send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    _, err = processes[1 - killed].communicate(timeout=60)
    assert processes[1 - killed].returncode != 0
    assert time.monotonic() - killed_at < 60
    # JAX may be the first to say so.
    assert "Another process of this run has exited" in err or "another task died" in err
    processes[killed].communicate()
    done = run.epochs_done(outputs[0])
    check_ended_well(start_both(outputs, *command("trellisnet", tmp_path, epochs=done + 1)))
    assert run.epochs_done(outputs[0]) == done + 1


def test_wrong_options(refused):
    words = ["train", "trellisnet_char", "--output", "run"]
    assert "need --coordinator" in refused(*words, "--processes", 2)
    assert "KERAS_BACKEND=jax" in refused(*words, "--coordinator", "auto")
