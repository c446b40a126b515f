"""Runs that are killed, compared with runs that are not."""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np

from tests.support.processes import ROOT, child_environment
from trellis_keras.training.history import read_history
from trellis_keras.zoo.run import load_best


def arrays(run, epoch):
    """The variables of a run's checkpoint."""
    with np.load(run / "checkpoints" / f"epoch-{epoch:04d}.npz") as file:
        return {name: file[name] for name in file.files if name != "state"}


def history(run):
    """The rows of a run's history without gradient norms, which may not have been measured."""
    rows = read_history(run / "history.csv")
    return [{k: v for k, v in row.items() if not k.startswith("gradient_norm")} for row in rows]


def assert_same_end(left, right, epochs):
    """The same weights, optimizer, history and best model, to the bit."""
    ours, theirs = arrays(left, epochs), arrays(right, epochs)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    assert history(left) == history(right)
    best = [load_best(run).get_weights() for run in (left, right)]
    for ours, theirs in zip(*best, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def check_killed_run(folder, backend, words, epochs, kills):
    """Trains twice by the command line's `words`, kills one of the runs, compares the ends."""
    rng = random.Random(kills)
    words = [*words, "--epochs", epochs]
    killed, whole = folder / "killed", folder / "whole"
    deaths = 0
    for _ in range(kills):
        deaths += _train_in_a_child(killed, backend, words, rng.uniform(0, 0.3)) != 0
    assert deaths, "no process was alive when it was to be killed"
    for run in (killed, whole):
        status = _train_in_a_child(run, backend, words)
        assert status == 0, _log(run).read_text()[-3000:]
    assert_same_end(killed, whole, epochs)


def _train_in_a_child(run, backend, words, kill_after=None):
    """Trains from the command line and kills it, or returns its status."""
    # What is observed changes nothing (test_tensorboard.py) and takes its time.
    words = [*words, "--gradient-norms", "0", "--sample-length", "0"]
    command = [sys.executable, "-m", "trellis_keras", "train", *words, "--output", run]
    with open(_log(run), "a") as log:
        process = subprocess.Popen(
            list(map(str, command)),
            env=child_environment(backend),
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        if kill_after is not None:
            _wait_for_an_epoch(run, process)
            time.sleep(kill_after)
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
        return process.wait()


def _log(run):
    return run.parent / f"{run.name}.log"


def _wait_for_an_epoch(run, process):
    """Returns when there is one more row in the history."""
    epochs = len(read_history(run / "history.csv"))
    while process.poll() is None and len(read_history(run / "history.csv")) == epochs:
        time.sleep(0.01)
