"""A run with one file damaged: each command answers in one sentence that names the file."""

import shutil

import pytest

from tests.support.small_runs import tiny_run
from trellis_keras import zoo
from trellis_keras.zoo import run as runs

# Each file of a run and the commands that read it. `extend` is `train` for more epochs.
READERS = {
    "recipe.json": "train evaluate compare score",
    "paths.json": "train evaluate compare score",
    "best.keras": "evaluate compare generate export score",
    "history.csv": "compare",
    "environment.json": "extend",
    "checkpoints/epoch-0001.npz": "train",
}
# Files that a run can do without.
OPTIONAL = {"paths.json", "environment.json", "checkpoints/epoch-0001.npz"}


def replace_by_an_unreadable_file(path):
    path.unlink()
    path.symlink_to("/proc/self/mem")  # opens, and fails to be read, as on a failing disk


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "of another type": lambda path: path.write_text('["another", {"type": 0}]\n'),
    "unreadable": replace_by_an_unreadable_file,
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A finished run of a language model, `run`."""
    folder = tmp_path_factory.mktemp("damaged")
    tiny_run(folder, epochs=1)
    return folder


@pytest.mark.filterwarnings("ignore:Checkpoint")
@pytest.mark.parametrize(
    ("name", "damage"),
    [(n, d) for n in READERS for d in DAMAGES if d != "missing" or n not in OPTIONAL],
)
def test_a_damaged_file_is_named(places, tmp_path, refused, name, damage):
    own, output = places / "text.txt", tmp_path / "new"
    readers = READERS[name].split()
    for command in readers if damage == "cut" else readers[:1]:
        run = shutil.copytree(places / "run", tmp_path / command)
        DAMAGES[damage](run / name)
        words = {
            "train": ["train", "--output", run],
            "extend": ["train", "--output", run, "--epochs", 2],
            "export": ["export", run, output],
            "score": ["score", run, own, "--output", output.with_suffix(".csv")],
        }
        assert (run / name).name in refused(*words.get(command, [command, run]))
        assert not output.exists()


def test_a_run_does_without_its_optional_files(places, tmp_path):
    run = shutil.copytree(places / "run", tmp_path / "run")
    (run / "checkpoints/epoch-0001.npz").unlink()
    zoo.train(zoo.read_recipe(run), run, verbose=0)
    assert runs.is_finished(run)
