"""Full disks, folders that cannot be written to, and folders in which another process writes."""

import pytest

from tests.support.disks import NO_SPACE, fill, read_only, small_disk
from tests.support.run_checks import assert_same_end
from tests.support.small_runs import TINY, options, tiny_recipe, tiny_run, write_text
from trellis_keras import zoo
from trellis_keras.jobs import folder_lock
from trellis_keras.zoo import run as runs

# Disks


@pytest.mark.slow
def test_a_run_on_a_full_disk_resumes_when_there_is_room(tmp_path):
    tiny_run(tmp_path)  # two epochs
    with small_disk(tmp_path / "disk", "4m") as folder:
        recipe = tiny_recipe(tmp_path)
        run = folder / "run"
        runs.train(recipe.replace(epochs=1), run, verbose=0)
        # Enough for the records of an epoch, not for its checkpoint.
        fill(folder, leave=(run / "checkpoints/epoch-0001.npz").stat().st_size)
        with pytest.raises(OSError) as error:
            runs.train(recipe.replace(epochs=2), run, verbose=0)
        told = str(error.value)
        assert (
            NO_SPACE in told and f"The last good state is {run}/checkpoints/epoch-0001.npz." in told
        )
        assert told.endswith(f"resume with: trellis-keras train --output {run}")
        (folder / "filler").unlink()
        runs.train(zoo.read_recipe(run), run, verbose=0)
        assert_same_end(run, tmp_path / "run", 2)
        assert not list(run.rglob(".*"))
        with read_only(run, tmp_path / "read_only") as view:
            assert runs.evaluate(zoo.read_recipe(view), view)["targets"] == 99
            with pytest.raises(ValueError, match="The folder .* cannot be written to.*Read-only"):
                runs.train(recipe, view)


def test_diverging_from_the_command_line(tmp_path, refused):
    text = write_text(tmp_path / "text.txt")
    settings = TINY | {"learning_rate": 1e38, "optimizer": "sgd", "clip_norm": "none"}
    run = tmp_path / "run"
    error = refused("train", "trellisnet_char", "--text", text, *options(settings), "--output", run)
    assert error.startswith("The loss is "), error
    assert " of epoch 1. Nothing was saved. Train with a smaller learning rate" in error
    assert not run.exists()


def test_a_first_step_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("out of memory")

    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr("trellis_keras.models.LanguageModel.compute_loss", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            runs.train(tiny_recipe(tmp_path), run, verbose=0)
    assert [path.name for path in run.iterdir()] == ["notes.txt"]
    assert not runs.has_run(run)
    runs.train(tiny_recipe(tmp_path, depth=4, epochs=1), run, verbose=0)
    assert runs.has_run(run)


# One process at a time


def test_a_folder_belongs_to_one_process(tmp_path, refused):
    with folder_lock(tmp_path):
        (tmp_path / ".writing-0123abcd-best.keras").write_text("the other process writes this")
        error = refused("train", "trellisnet_char", "--output", tmp_path)
        assert f"{tmp_path} is in use" in error
        assert (tmp_path / ".writing-0123abcd-best.keras").exists()
