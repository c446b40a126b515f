"""Several devices give the losses of one, by the scripts of examples/multi_device."""

import importlib
import json
import re
import shlex
import socket
import subprocess
import sys
import types

import numpy as np
import pytest

from tests.support.processes import ROOT, child_environment
from tests.support.small_runs import write_text
from trellis_keras import zoo

EXAMPLES = ROOT / "examples" / "multi_device"
PAGE = (ROOT / "docs" / "multi_device.md").read_text(encoding="utf-8")
STEPS = 20

# Gradient descent: Adam does not see a gradient that is twice too large. The text ends in the
# 18th step, with rows of 5, 5, 5 and 2 targets.
TEXT = {"optimizer": "sgd", "learning_rate": 2.0, "batch_size": 4}
TEXT |= {"sequence_length": 12, "context_length": 4}
TRELLIS = {"depth": 3, "hidden_units": 8, "embedding_dim": 8, "aux_every": 1, "aux_weight": 0.1}
# Of 71 examples the last batch has 3: two rows here, one there.
ADDING = {"T": 8, "depth": 2, "filters": 3, "batch_size": 4, "learning_rate": 0.1}
CASES = {
    "trellisnet": ("trellisnet_char", TEXT | TRELLIS),
    "carried history": (
        "trellisnet_char",
        TEXT | TRELLIS | {"stateful": True, "sequence_length": 8, "context_length": 0},
    ),
    "tcn": ("tcn_ptb", TEXT | {"depth": 2, "filters": 8, "embedding_dim": 8}),
    "adding": (
        "tcn_adding",
        ADDING | {"optimizer": "sgd", "data_options": {"train": 71, "valid": 8, "test": 8}},
    ),
}


def words_of(case, folder):
    """The model, and its settings with a text in `folder`, as words of the command line."""
    model, settings = CASES[case]
    if "sequence_length" in settings:
        options = {"path": str(write_text(folder / "text.txt", 1124)), "split": [0.5, 0.25, 0.25]}
        settings = settings | {"data": "text", "data_options": options}
    return [model, "--settings", json.dumps(settings), "--checkpoints", str(folder / "checkpoints")]


def start(script, *words, **environment):
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / script), *map(str, words)],
        env=child_environment(**environment),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs(processes):
    """The standard outputs of processes that must all end well."""
    ends = [process.communicate(timeout=600) for process in processes]
    for process, (out, err) in zip(processes, ends, strict=True):
        assert process.returncode == 0, f"{out[-3000:]}\n{err[-6000:]}"
    return [out for out, _ in ends]


def start_both(*words):
    """Two processes on this machine, as on two."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    several = ["--address", address, "--processes", 2]
    return [start("processes.py", *words, *several, "--process", i) for i in range(2)]


def check_same(alone, together):
    alone, together = (json.loads(out.splitlines()[-1]) for out in (alone, together))
    assert len(alone) == len(together) == STEPS
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-4)
    assert len(set(alone)) == STEPS


def test_what_a_script_needs_wins_over_the_settings(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    task = importlib.import_module("task")
    settings = ADDING | {"jit_compile": True, "data_options": {"train": 9, "valid": 9, "test": 9}}
    options = types.SimpleNamespace(model="tcn_adding", settings=settings, check=None)
    recipe, _ = task.load(options, jit_compile=False)
    assert recipe.jit_compile is False and recipe.arguments["filters"] == ADDING["filters"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["trellisnet", "tcn", "adding"])
def test_two_replicas(case, tmp_path):
    words = [*words_of(case, tmp_path), "--check", STEPS, "--cpus", 2]
    alone = start("replicas.py", *words, "--replicas", 1)
    check_same(*outputs([alone, start("replicas.py", *words)]))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_processes(case, tmp_path):
    words = [*words_of(case, tmp_path), "--check", STEPS]
    alone, together, _ = outputs([start("processes.py", *words), *start_both(*words)])
    check_same(alone, together)


@pytest.mark.slow
def test_one_process_of_two_devices(tmp_path):
    words = [*words_of("carried history", tmp_path), "--check", STEPS]
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    alone = start("processes.py", *words)
    check_same(*outputs([alone, start("processes.py", *words, **two)]))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replicas", "processes"])
def test_training_goes_on(how, tmp_path):
    model, _, settings, *rest = words_of("trellisnet", tmp_path)
    for epochs in (1, 3):
        words = [model, "--settings", json.dumps({**json.loads(settings), "epochs": epochs}), *rest]
        replicas = [start("replicas.py", *words, "--cpus", 2)] if how == "replicas" else None
        outputs(replicas or start_both(*words))
    ends = sorted((tmp_path / "checkpoints").rglob("variables.npz"))
    names = [str(path.parent.relative_to(tmp_path / "checkpoints")) for path in ends]
    if how == "replicas":
        assert names == ["epoch-0002", "epoch-0003"]
        return
    epochs = ("epoch-0002", "epoch-0003")
    assert names == [f"process-{i}/{epoch}" for i in range(2) for epoch in epochs]
    with np.load(ends[1]) as ours, np.load(ends[3]) as theirs:
        assert ours.files == theirs.files
        for name in ours.files:
            np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.slow
def test_what_cannot_be_shared(tmp_path):
    words = words_of("trellisnet", tmp_path)
    wrong = {
        "--replicas must lie in 1 to 2": start("replicas.py", *words, "--cpus", 2, "--replicas", 3),
        "batch_size=4 cannot be shared by 3": start("replicas.py", *words, "--cpus", 3),
        "--process must lie in 0 to": start("processes.py", *words, "--process", 2),
        "A stateful backbone cannot be trained": start(
            "replicas.py", *words_of("carried history", tmp_path), "--cpus", 2
        ),
    }
    for message, process in wrong.items():
        assert message in process.communicate(timeout=600)[1]
        assert process.returncode


def test_the_page_has_commands_that_exist():
    commands = re.findall(r"^(?:\w+=\S+ )*python (examples/\S+) (.+)$", PAGE, flags=re.MULTILINE)
    assert {script for script, _ in commands} == {
        f"examples/multi_device/{name}.py" for name in ("replicas", "processes")
    }
    for script, rest in commands:
        source = "".join(
            (EXAMPLES / name).read_text() for name in (script.split("/")[-1], "task.py")
        )
        words = shlex.split(rest, comments=True)
        assert words[0] in zoo.list_models()
        for word in words:
            assert not word.startswith("--") or f'"{word}"' in source, word
    names = set(re.findall(r"`(trellis_keras/\S+?\.py|examples/\S+?\.py)`", PAGE))
    assert all((ROOT / name).is_file() for name in names)
