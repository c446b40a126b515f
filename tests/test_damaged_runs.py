"""A run with one file damaged: each command answers in one sentence that names the file."""

import os
import shutil

import pytest

from tests.support.disks import NO_SPACE, fill, small_disk
from tests.support.small_runs import tiny_run
from tests.zoo.test_series import SMALL, write
from trellis_keras import zoo
from trellis_keras.zoo import forecasts
from trellis_keras.zoo import run as runs

# Each file of a run and the commands that read it. Two of them are `train`: `extend` for more
# epochs, `finish` of a forecaster.
READERS = {
    "recipe.json": "train evaluate compare generate export score forecast finish",
    "paths.json": "train evaluate generate export score forecast finish",
    "best.keras": "evaluate compare generate export score forecast finish",
    "history.csv": "compare",
    "environment.json": "extend",
    "report.json": "forecast finish",
    "checkpoints/epoch-0001.npz": "train finish",
}
# Files that a run can do without.
OPTIONAL = {"paths.json", "environment.json", "report.json", "checkpoints/epoch-0001.npz"}


def replace_by_an_unreadable_file(path):
    path.unlink()
    path.symlink_to("/proc/self/mem")  # opens, and fails to be read, as on a failing disk


def replace_by_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "of another type": lambda path: path.write_text('["another", {"type": 0}]\n'),
    "unreadable": replace_by_an_unreadable_file,
    "a pipe": replace_by_a_pipe,
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Finished runs: `run` of a language model, and `forecaster`."""
    folder = tmp_path_factory.mktemp("damaged")
    tiny_run(folder, epochs=1)
    columns = {"path": write(folder / "load.csv", 300), "targets": ["load"], "time": "time"}
    recipe = zoo.recipe("tcn_forecaster", **SMALL, data_options=columns)
    runs.train(recipe, folder / "forecaster", verbose=0)
    forecasts.finish(folder / "forecaster")
    return folder


@pytest.mark.filterwarnings("ignore:Checkpoint")
@pytest.mark.parametrize(
    ("name", "damage"),
    [(n, d) for n in READERS for d in DAMAGES if d != "missing" or n not in OPTIONAL],
)
def test_a_damaged_file_is_named(places, tmp_path, refused, name, damage):
    own, output = {"run": places / "text.txt", "forecaster": places / "load.csv"}, tmp_path / "new"
    for command in READERS[name].split():
        kind = "forecaster" if command in ("forecast", "finish") else "run"
        run = shutil.copytree(places / kind, tmp_path / command)
        DAMAGES[damage](run / name)
        words = {
            "train": ["train", "--output", run],
            "extend": ["train", "--output", run, "--epochs", 2],
            "finish": ["train", "--output", run],
            "export": ["export", run, output],
            "score": ["score", run, own[kind], "--output", output.with_suffix(".csv")],
            "forecast": ["forecast", run, own[kind], "--output", output],
        }
        assert (run / name).name in refused(*words.get(command, [command, run]))
        assert not output.exists()


@pytest.mark.slow
def test_a_run_does_without_its_optional_files(places, tmp_path):
    for name in ("report.json", "checkpoints/epoch-0001.npz"):
        run = shutil.copytree(places / "forecaster", tmp_path / name)
        (run / name).unlink()
        runs.train(zoo.read_recipe(run), run, verbose=0)
        assert forecasts.finish(run)["targets"]["load"]["values"] > 0


def test_a_history_without_validation(places, tmp_path, refused):
    run = shutil.copytree(places / "run", tmp_path / "run")
    (run / "history.csv").write_text("epoch,loss\n1,2.0\n")
    assert "history.csv has no column val_loss" in refused("compare", run)


def test_a_full_disk_is_named(places, tmp_path, refused, monkeypatch):
    with small_disk(tmp_path / "disk", "64k") as folder:
        fill(folder, leave=0)
        words = ["forecast", places / "forecaster", places / "load.csv", "--output"]
        assert f"{folder}/new.csv {NO_SPACE}" in refused(*words, folder / "new.csv")
        monkeypatch.setattr("tempfile.tempdir", str(folder))  # where the values of a CSV file go
        assert f"{folder} {NO_SPACE}" in refused(*words, tmp_path / "new.csv")


def test_memory_that_runs_out_is_one_line(places, monkeypatch, refused):
    def fail(*arguments):
        raise MemoryError("Unable to allocate 3 TiB")

    monkeypatch.setattr(runs, "evaluate", fail)
    message = refused("evaluate", places / "run")
    assert message == "There is not enough memory. Unable to allocate 3 TiB"
