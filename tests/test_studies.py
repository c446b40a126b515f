"""The study scripts refuse what they must, fit nets to a size, and resume."""

import csv
import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from tests.support.processes import ROOT, child_environment

STUDIES = ROOT / "examples" / "studies"
sys.path.insert(0, str(STUDIES))

import convergence  # noqa: E402
import memory_horizon  # noqa: E402
from study import cli, nets, tasks, training  # noqa: E402
from study.table import Study  # noqa: E402

SETTINGS = {"quick": True, "train": 64}
COLUMNS = ["net", "seed", "value"]


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Unknown task 'nothing'.*seq_mnist"):
        convergence.run(tmp_path, SETTINGS, ["nothing"], ["tcn"], [0])
    with pytest.raises(ValueError, match="recurrent nets read numbers"):
        convergence.run(tmp_path, SETTINGS, ["ptb"], ["tcn"], [0])
    with pytest.raises(ValueError, match="Unknown net 'nothing'"):
        nets.build("nothing", tasks.get("adding_30"))
    with pytest.raises(ValueError, match="No width comes near to 10 parameters"):
        nets.build("lstm", tasks.get("adding_30"), size=10)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"try.json": '{"quick": true, "train": 65}'}, "train=65 there, 64 now"),
        ({"try.json": "{"}, "damaged"),
        ({"try.csv": "net,seed\n"}, "no settings beside it"),
        ({"try.csv": "net,seed\n", "try.json": json.dumps(SETTINGS)}, "no whole table"),
    ],
)
def test_what_is_not_this_study_is_refused(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        Study("try", tmp_path, SETTINGS, COLUMNS)


def test_a_finished_cell_is_not_measured_again(tmp_path):
    measured = []

    def measure(work):
        measured.append(work)
        return [{"value": 0.5}]

    for seed in (0, 1, 0):
        study = Study("try", tmp_path, SETTINGS, COLUMNS)
        study.run({"net": "tcn", "seed": seed}, measure)
    assert len(measured) == 2
    assert [(row["seed"], row["value"]) for row in study.rows()] == [(0, 0.5), (1, 0.5)]


def test_one_process_at_a_time_measures_in_a_folder(tmp_path):
    study = Study("try", tmp_path, SETTINGS, COLUMNS)

    def measure(work):
        unfinished = tmp_path / ".writing-something"
        unfinished.touch()
        with pytest.raises(ValueError, match="in use by another process"):
            Study("try", tmp_path, SETTINGS, COLUMNS).run({"net": "gru", "seed": 0}, measure)
        assert unfinished.exists()
        return [{"value": 0.5}]

    assert study.run({"net": "tcn", "seed": 0}, measure)
    assert [row["net"] for row in study.rows()] == ["tcn"]


@pytest.mark.slow
# Hidden sizes, computed by hand from the layers' formulas, that meet the paper's sizes.
@pytest.mark.parametrize(
    ("task", "net", "size", "width"),
    [
        ("adding_600", "lstm", None, 131),
        ("adding_600", "gru", None, 151),
        ("permuted_mnist", "lstm", None, 130),
        ("copy_memory_2000", "rnn", None, 55),
        ("copy_memory_100", "rnn", 10_000, 94),
    ],
)
def test_recurrent_nets_have_the_published_size(task, net, size, width):
    model = nets.build(net, tasks.get(task), size=size)
    backbone = model.backbone
    layers = getattr(backbone, "layers", None) or [backbone]
    assert {layer.units for layer in layers} == {width}


@pytest.mark.parametrize(("steps", "blocks"), [(15, 1), (16, 2), (43, 2), (44, 3)])
def test_depth_is_the_smallest_that_sees_all_steps(steps, blocks):
    assert nets.depth(steps, kernel_size=8) == blocks


TASK = dataclasses.replace(
    tasks.get("adding_8"), kernel_size=3, depth=2, filters=4, batch_size=8, dropout=0.2
)
PIECE = 3  # steps; an epoch of 40 sequences has 5: pieces and epochs do not coincide


def curve(folder, stop=None):
    """Records of a TCN trained for four epochs on 40 sequences."""
    model = nets.build("tcn", TASK, seed=1)
    splits = tasks.load(TASK, 40)
    records = training.train(model, TASK, splits, folder, seed=1, epochs=4, records=7, stop=stop)
    return [{**record, "seconds": None} for record in records]


@pytest.fixture
def handed_out(monkeypatch):
    """Dict from a step to all the batches that `Pieces` gave out for it."""
    batches = {}

    class Watched(training.Pieces):
        def __getitem__(self, index):
            batch = super().__getitem__(index)
            batches.setdefault(self.piece * len(self) + index, []).append(batch[0])
            return batch

    monkeypatch.setattr(training, "Pieces", Watched)
    return batches


@pytest.mark.slow
def test_an_interrupted_cell_ends_with_the_same_records(tmp_path, monkeypatch, handed_out):
    """And every step has its batch, though Keras fetches batches ahead."""
    stream = TASK.stream(tasks.load(TASK, 40), "train", 1)

    def interrupt(record):
        if record["step"] == 3 * PIECE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        curve(tmp_path / "resumed", interrupt)
    resumed = curve(tmp_path / "resumed")
    assert sorted(handed_out) == list(range(7 * PIECE))
    for step, batches in handed_out.items():
        stream.epoch, index = divmod(step, len(stream))
        for batch in batches:
            np.testing.assert_array_equal(batch, stream[index][0])
    assert resumed == curve(tmp_path / "whole")
    assert [record["step"] for record in resumed] == [3, 6, 9, 12, 15, 18, 21]


def test_one_cell_from_command_to_files(tmp_path):
    settings = {"quick": True, "size": 1000, "epochs": 1, "train": 64, "records": 1}
    study = memory_horizon.run(tmp_path, settings, [2], [3], ["gru"])
    (row,) = study.rows()
    assert (row["net"], row["T"], row["seed"]) == ("gru", 2, 3)
    assert 0 <= row["recall_accuracy"] <= 1 and abs(row["parameters"] - 1000) < 250
    assert (tmp_path / "memory_horizon.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), "130", "resumes from here"),
        (FloatingPointError("diverged"), "2", "Error: diverged"),
    ],
)
def test_how_a_script_ends(monkeypatch, capsys, error, status, words):
    def fail(*given):
        raise error

    monkeypatch.setattr(memory_horizon, "run", fail)
    monkeypatch.setattr(sys, "argv", ["memory_horizon.py"])
    with pytest.raises(SystemExit, match=status):
        cli.run(memory_horizon.main)
    assert words in capsys.readouterr().err


NAMES = ["memory_horizon", "convergence", "ablation", "gating", "cost", "lattice_comparison"]
NAMES += ["statistical_efficiency", "epochs_to_converge", "gradient_norms", "recipe_levers"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_quick_runs(tmp_path, name):
    command = [sys.executable, STUDIES / f"{name}.py", "--quick", "--output", tmp_path]
    for _ in range(2):
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "done before" in done.stdout
    with open(tmp_path / f"{name}.csv", newline="") as file:
        assert {row["seed"] for row in csv.DictReader(file)} == {"0"}
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
