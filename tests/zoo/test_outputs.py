"""What no command may replace: its input, a file of a run, and what exists, unless told to."""

import os

import pytest

from trellis_keras.zoo.run import check_output


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder with `own.csv`, `other.csv`, links, and the run `run`."""
    monkeypatch.chdir(tmp_path)
    for name in ("own.csv", "other.csv", "run/recipe.json", "run/best.keras", "run/new.csv"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(name)
    (tmp_path / "link.csv").symlink_to("own.csv")
    (tmp_path / "model").symlink_to("run/best.keras")
    (tmp_path / "runs").symlink_to("run")
    os.mkfifo(tmp_path / "pipe.csv")


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("link.csv", "link.csv is an input file"),
        ("run/Best.keras", "is a file of the run in .*run. Choose another name"),
        ("runs/tensorboard/train/events", "is a file of the run"),
        ("run", "run is not a regular file"),
        ("pipe.csv", "pipe.csv is not a regular file"),
        ("no/new.csv", "There is no folder no for new.csv"),
    ],
)
def test_outputs_that_are_refused(places, path, message):
    os.makedirs("run/tensorboard/train")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check_output(path, ["own.csv"], overwrite=True)


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
def test_outputs_that_exist_are_replaced_on_demand_only(places):
    assert str(check_output("new.csv", ["own.csv"])) == "new.csv"
    assert check_output("run/picture.png").parent.name == "run"
    for path in ("other.csv", "run/new.csv"):
        with pytest.raises(ValueError, match=f"{path} already exists. .*with --overwrite"):
            check_output(path, ["own.csv"])
        check_output(path, ["own.csv"], overwrite=True)
