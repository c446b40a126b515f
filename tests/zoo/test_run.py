"""Runs: what training leaves, resuming, damage, exact evaluation, kills, full disks, outputs."""

import itertools
import json
import os
import shutil

import numpy as np
import pytest

from tests.support.disks import NO_SPACE, fill, read_only, small_disk
from tests.support.processes import run_script
from tests.support.run_checks import assert_same_end, check_killed_run
from tests.support.small_runs import STATEFUL, TINY, options, tiny_recipe, tiny_run, write_text
from trellis_keras import zoo
from trellis_keras.jobs import folder_lock
from trellis_keras.training.checkpoint_files import checkpoint_progress
from trellis_keras.training.history import read_history
from trellis_keras.zoo import datasets, environment, evaluation
from trellis_keras.zoo import run as runs


def evaluate(run, split="test", target_counting="all", data_dir=None):
    recipe = zoo.read_recipe(run)
    recipe = recipe if data_dir is None else recipe.replace(data_dir=data_dir)
    return evaluation.evaluate(recipe, run, split, target_counting=target_counting)


# What a run leaves


def test_files(finished_run):
    files = {"recipe.json", "paths.json", "history.csv", "best.keras", "environment.json"}
    assert {path.name for path in finished_run.iterdir()} == files | {"checkpoints", "tensorboard"}
    assert [row["epoch"] for row in read_history(finished_run / "history.csv")] == ["1", "2"]
    columns = {"epoch", "loss", "bpc", "val_loss", "val_bpc", "learning_rate"}
    assert set(read_history(finished_run / "history.csv")[0]) == columns
    checkpoints = sorted(path.name for path in (finished_run / "checkpoints").iterdir())
    assert checkpoints == ["epoch-0001.npz", "epoch-0002.npz"]
    assert list((finished_run / "tensorboard").rglob("events*"))


def test_what_people_share_names_no_folder_of_the_user(finished_run):
    place = os.fsencode(finished_run.parent)
    told = [
        path for path in finished_run.rglob("*") if path.is_file() and place in path.read_bytes()
    ]
    assert told == [finished_run / "paths.json"]


def test_a_run_without_its_paths(finished_run, tmp_path):
    """Someone else's: the folder of the text must be given."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "paths.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"text.txt.*if it has moved, pass .*`data_dir`"):
        evaluate(run)
    assert evaluate(run, data_dir=finished_run.parent) == evaluate(finished_run)


# Going on


def test_an_average_of_weights_goes_on(tmp_path):
    """It begins after the third epoch, by values of earlier ones that another process has seen."""
    write_text(tmp_path / "text.txt", 400)
    options = {"optimizer": "asgd", "learning_rate": 1.0, "schedule": "ASGDSwitch"}
    options |= {"schedule_window": 1, "schedule_monitor": "loss", "schedule_mode": "max"}
    for folder, epochs in (("run", 2), ("run", 4), ("whole", 4)):
        recipe = tiny_recipe(tmp_path, **options, epochs=epochs)
        model = zoo.train(recipe, tmp_path / folder, verbose=0)
        assert model.optimizer.uses_average == (epochs == 4)
    assert_same_end(tmp_path / "run", tmp_path / "whole", 4)


# Eleven sequences do not fill the batches of four.
SMALL_TCN = {"T": 8, "depth": 3, "filters": 4, "batch_size": 4, "dropout": 0.2, "epochs": 2}
SMALL_TCN |= {"jit_compile": False, "data_options": {"train": 11, "valid": 5, "test": 6}}


def load_music(monkeypatch, frames):
    """Makes `datasets.load` return random piano rolls."""
    rng = np.random.RandomState(0)
    rolls = [rng.randint(0, 2, (number, 88)).astype("uint8") for number in frames]
    music = datasets.Dataset("jsb", rolls, rolls, rolls, "0" * 64)
    monkeypatch.setattr(datasets, "load", lambda *arguments, **options: music)


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize(
    ("name", "minutes"),
    [
        pytest.param("stateful", 45, marks=pytest.mark.slow),
        pytest.param("shuffled", 7, marks=pytest.mark.slow),
        pytest.param("augmented", 7, marks=pytest.mark.slow),
        ("unequal", 18),
    ],
)
def test_a_run_that_ends_within_epochs_goes_on(name, minutes, tmp_path, monkeypatch):
    """To the same end, to the bit, as one that was never stopped."""
    if name == "stateful":
        recipe = tiny_recipe(tmp_path, **STATEFUL | {"epochs": 2})
    elif name == "shuffled":
        recipe = zoo.recipe("tcn_adding", **SMALL_TCN)
    elif name == "unequal":  # the last batch of each epoch has another length
        load_music(monkeypatch, frames=range(4, 9))
        small = {"filters": 4, "depth": 1, "epochs": 2, "jit_compile": False}
        recipe = zoo.recipe("tcn_jsb", **small)
    else:
        load_music(monkeypatch, frames=range(4, 24))
        small = {"filters": 4, "depth": 2, "epochs": 2, "batch_size": 2, "jit_compile": False}
        small |= {"warmup_steps": 3, "decay_steps": 20}
        recipe = zoo.recipe("tcn_jsb", setting="fast", **small)
    clock = itertools.count(step=60)  # each look at it takes a minute
    monkeypatch.setattr("trellis_keras.training.stopping.monotonic", lambda: next(clock))
    run, processes = tmp_path / "run", 0
    while not (run.exists() and runs.is_finished(run)):
        zoo.train(recipe, run, verbose=0, max_minutes=minutes)
        processes += 1
    assert processes > 1
    zoo.train(recipe, tmp_path / "whole", verbose=0)
    assert_same_end(run, tmp_path / "whole", 2)


def test_a_run_that_ended_within_an_epoch_may_have_fewer_epochs(tmp_path, monkeypatch):
    clock = itertools.count(step=60)
    monkeypatch.setattr("trellis_keras.training.stopping.monotonic", lambda: next(clock))
    run, batches = tmp_path / "run", 0
    while not batches or not runs.epochs_done(run):
        recipe = tiny_recipe(tmp_path, depth=1, epochs=3)
        zoo.train(recipe, run, verbose=0, max_minutes=60)
        batches = checkpoint_progress(run / "checkpoints")[1]
    epochs = runs.epochs_done(run)
    zoo.train(recipe.replace(epochs=epochs), run, verbose=0)
    assert runs.epochs_done(run) == epochs and runs.is_finished(run)
    zoo.train(recipe.replace(epochs=epochs), run, verbose=0)  # nothing is left to do


def test_every_process_whose_batches_count_is_recorded(tmp_path):
    """Also one that ended within an epoch; not one whose epoch was begun again."""
    path = tmp_path / "environment.json"
    steps = [("float32", 0, 0), ("float16", 0, 0), ("bfloat16", 0, 9), ("float64", 1, 0)]
    for policy, epochs, batches in steps:
        environment.record(path, policy, epochs, batches)
    recorded = environment.read(path)["processes"]
    assert [(process["from_epoch"], process["dtype_policy"]) for process in recorded] == [
        (1, "float16"),
        (1, "bfloat16"),
        (2, "float64"),
    ]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_run_states_the_cores_that_it_may_use_not_those_of_the_machine():
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert environment.environment()["hardware"].startswith("1 core of ")
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.slow
def test_another_precision_goes_on(tmp_path):
    run = tiny_run(tmp_path, epochs=1)
    half = tiny_recipe(tmp_path, epochs=2, dtype_policy="mixed_bfloat16")
    assert zoo.train(half, run, verbose=0).compute_dtype == "bfloat16"
    assert zoo.read_recipe(run).dtype_policy == "mixed_bfloat16"
    zoo.train(half.replace(dtype_policy="float32"), run, verbose=0)  # nothing is left to do
    assert zoo.read_recipe(run).dtype_policy == "mixed_bfloat16"
    processes = json.loads((run / "environment.json").read_text())["processes"]
    computed = [(process["from_epoch"], process["dtype_policy"]) for process in processes]
    assert computed == [(1, "float32"), (2, "mixed_bfloat16")]
    assert [row["epoch"] for row in read_history(run / "history.csv")] == ["1", "2"]


def test_a_finished_run_keeps_its_recipe(finished_run, tmp_path):
    run = shutil.copytree(finished_run, tmp_path / "run")
    before = runs.read_recipe(run)
    zoo.train(before.replace(epochs=1, dtype_policy="mixed_bfloat16"), run, verbose=0)
    assert runs.read_recipe(run) == before


@pytest.mark.parametrize("damage", ["lost", "another"])
def test_a_history_without_losses_is_named(finished_run, tmp_path, damage):
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "history.csv").unlink()
    if damage == "another":
        (run / "history.csv").write_text("epoch,loss\n1,2\n")
    with pytest.raises((FileNotFoundError, ValueError), match="history.csv.*(lost|val_loss)"):
        zoo.train(runs.read_recipe(run), run, verbose=2)


def test_another_model_is_refused(tmp_path, finished_run):
    run = shutil.copytree(finished_run, tmp_path / "run")
    recipe = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps(recipe | {"name": "trellisnet_char_ptb"}))
    with pytest.raises(ValueError, match="model 'trellisnet_char_ptb' there, 'trellisnet_char'"):
        zoo.train(tiny_recipe(finished_run.parent), run)


# Damage and wrong folders


@pytest.mark.parametrize("lost", [(), ("history.csv",), ("history.csv", "recipe.json")])
def test_a_trained_model_without_checkpoints_is_not_replaced(finished_run, tmp_path, lost):
    run, recipe = shutil.copytree(finished_run, tmp_path / "run"), zoo.read_recipe(finished_run)
    shutil.rmtree(run / "checkpoints")
    for name in lost:
        (run / name).unlink()
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with pytest.raises(ValueError, match="cannot be resumed: checkpoints is missing"):
        zoo.train(recipe, run, verbose=0)
    assert {path: path.read_bytes() for path in before} == before


def test_a_text_too_short_to_evaluate_is_refused_before_training(tmp_path):
    options = {"path": write_text(tmp_path / "text.txt"), "split": [0.9, 0.09, 0.01]}
    recipe = tiny_recipe(tmp_path, data_options=options, batch_size=32)
    with pytest.raises(ValueError, match="`batch_size` must be at most .* targets"):
        zoo.train(recipe, tmp_path / "run", verbose=0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "history.csv"])
def test_a_linked_part_is_refused(finished_run, tmp_path, name):
    """Training would remove the other run's checkpoints, or write into its logs."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.json").write_bytes((finished_run / "recipe.json").read_bytes())
    (folder / name).symlink_to(finished_run / name)
    before = sorted(finished_run.rglob("*"))
    with pytest.raises(ValueError, match=f"run/{name} is a symbolic link"):
        zoo.train(zoo.read_recipe(finished_run), folder, verbose=0)
    assert sorted(finished_run.rglob("*")) == before


def test_a_start_that_fails_leaves_no_folder(tmp_path):
    recipe = tiny_recipe(tmp_path)
    (tmp_path / "text.txt").unlink()
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        with pytest.raises(FileNotFoundError):
            zoo.train(recipe, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_run_without_a_finished_epoch(tmp_path):
    (tmp_path / "recipe.json").write_text(tiny_recipe(tmp_path).to_json())
    with pytest.raises(FileNotFoundError, match="has not finished an epoch yet"):
        runs.load_best(tmp_path)


NAMED = '{"name": "tcn_adding", "training": {}, "arguments": '


@pytest.mark.parametrize(
    "text", ['{"name": "trell', "[]", '{"name": []}', "[" * 100_000, NAMED + '{"seed": 1e999}}']
)
def test_a_damaged_recipe(tmp_path, text):
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(ValueError, match="recipe.json is not a recipe of this version"):
        zoo.read_recipe(tmp_path)


# Evaluation


def nll_of_whole_text(model, tokens, horizon):
    """Mean over all targets, read in one go after `horizon` start tokens."""
    inputs = np.concatenate([np.zeros(horizon, "int32"), tokens[:-1]])
    scores = model.predict(inputs[None], verbose=0)[0, horizon:]
    return -np.mean(scores[np.arange(len(tokens) - 1), tokens[1:]])


@pytest.mark.parametrize("split", ["valid", "test"])
def test_evaluation_counts_every_target_once(finished_run, split):
    recipe = zoo.read_recipe(finished_run)
    tokens = getattr(recipe.load_data(), split)
    context_length = recipe.training.stream["context_length"]
    expected = nll_of_whole_text(runs.load_best(finished_run), tokens, context_length)
    results = evaluate(finished_run, split)
    assert results["targets"] == len(tokens) - 1 == 99
    assert results["loss"] == pytest.approx(expected, rel=1e-5)
    assert results["bpc"] == pytest.approx(expected / np.log(2), rel=1e-5)


def test_representative_data_are_from_all_of_a_text(finished_run):
    recipe = zoo.read_recipe(finished_run)
    stream = recipe.batches(recipe.load_data().train)
    sampled = evaluation.representative_data(recipe)
    places = np.linspace(0, len(stream) - 1, len(sampled)).astype(int)
    for i, (row, place) in enumerate(zip(sampled, places, strict=True)):
        np.testing.assert_array_equal(row, stream[int(place)][0][i % 4])


def test_the_authors_count_fewer_targets(finished_run):
    exact, authors = (evaluate(finished_run, target_counting=n) for n in ("all", "original"))
    assert authors["targets"] == 4 * (25 - 1 - 3) < exact["targets"]
    assert authors["loss"] != exact["loss"]


@pytest.mark.slow
def test_the_command_line_is_told_where_the_text_is_now(tmp_path, command):
    unit = {"path": tmp_path / "text.txt", "unit": "word"}
    run, text = tiny_run(tmp_path, epochs=1, data_options=unit), tmp_path / "other.txt"
    (tmp_path / "text.txt").rename(text)
    with pytest.raises(FileNotFoundError, match=r"no file .*text.txt.*if it has moved"):
        evaluate(run)
    status, _, err = command("train", "--output", run, "--text", text, "--epochs", 2)
    assert status == 0, err
    options = zoo.read_recipe(run).data_options
    assert options == {"path": str(text), "unit": "word"} and runs.is_finished(run)
    text.write_text(text.read_text() + "abc")
    with pytest.raises(ValueError, match="data 'text' have changed since the run started"):
        zoo.train(zoo.read_recipe(run).replace(epochs=3), run, verbose=0)


# Without TensorFlow


@pytest.mark.slow
def test_jax_alone(tmp_path):
    """Training, resuming and evaluation where TensorFlow and its libraries are not installed."""
    source = """
import pathlib, sys
from tests.support.small_runs import tiny_recipe
from trellis_keras import training, zoo
from trellis_keras.zoo import evaluation
folder = pathlib.Path(sys.argv[1])
zoo.train(tiny_recipe(folder, epochs=1, jit_compile=True), folder / "run", verbose=0)
zoo.train(tiny_recipe(folder, epochs=2, jit_compile=True), folder / "run", verbose=0)
print(evaluation.evaluate(zoo.read_recipe(folder / "run"), folder / "run"))
"""
    output = run_script(
        source, tmp_path, backend="jax", block=("tensorflow", "tensorflow_datasets", "keras_nlp")
    )
    assert "TensorFlow is not installed: no TensorBoard logs are written." in output
    assert "'targets': 99" in output
    assert not (tmp_path / "run" / "tensorboard").exists()
    # What JAX has trained, TensorFlow reads.
    assert f"'targets': {evaluate(tmp_path / 'run')['targets']}" in output


# Killed again and again

COMPILED = {"jit_compile": True, "stopping_patience": 1000}


def language_model(folder):
    text = write_text(folder / "text.txt")
    settings = {name: value for name, value in STATEFUL.items() if name != "epochs"}
    return ["trellisnet_char", "--text", text, *options(settings | COMPILED)]


def lattice(folder):
    text = write_text(folder / "text.txt")
    settings = {"hidden_units": 5, "batch_size": 4, "sequence_length": 12}
    return ["lru_char_ptb", "--text", text, *options(settings | COMPILED)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "make", "kills"),
    [
        ("tensorflow", language_model, 10),
        ("tensorflow", lattice, 10),
        ("jax", language_model, 4),
        ("jax", lattice, 3),
    ],
)
def test_a_run_killed_many_times(tmp_path, backend, make, kills):
    check_killed_run(tmp_path, backend, make(tmp_path), epochs=3 * kills, kills=kills)


# Disks


@pytest.mark.slow
def test_a_run_on_a_full_disk_resumes_when_there_is_room(tmp_path):
    tiny_run(tmp_path)  # two epochs
    with small_disk(tmp_path / "disk", "4m") as folder:
        recipe = tiny_recipe(tmp_path)
        run = folder / "run"
        zoo.train(recipe.replace(epochs=1), run, verbose=0)
        # Enough for the records of an epoch, not for its checkpoint.
        fill(folder, leave=(run / "checkpoints/epoch-0001.npz").stat().st_size)
        with pytest.raises(OSError) as error:
            zoo.train(recipe.replace(epochs=2), run, verbose=0)
        told = str(error.value)
        assert (
            NO_SPACE in told and f"The last good state is {run}/checkpoints/epoch-0001.npz." in told
        )
        assert told.endswith(f"resume with: trellis-keras train --output {run}")
        (folder / "filler").unlink()
        zoo.train(zoo.read_recipe(run), run, verbose=0)
        assert_same_end(run, tmp_path / "run", 2)
        assert not list(run.rglob(".*"))
        with read_only(run, tmp_path / "read_only") as view:
            assert evaluation.evaluate(zoo.read_recipe(view), view)["targets"] == 99
            with pytest.raises(ValueError, match="The folder .* cannot be written to.*Read-only"):
                zoo.train(recipe, view)


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
            zoo.train(tiny_recipe(tmp_path), run, verbose=0)
    assert [path.name for path in run.iterdir()] == ["notes.txt"]
    assert runs.saved_state(run) is None
    zoo.train(tiny_recipe(tmp_path, depth=4, epochs=1), run, verbose=0)
    assert runs.saved_state(run)


# One process at a time


def test_a_folder_belongs_to_one_process(tmp_path, refused):
    with folder_lock(tmp_path):
        (tmp_path / ".writing-0123abcd-best.keras").write_text("the other process writes this")
        error = refused("train", "trellisnet_char", "--output", tmp_path)
        assert f"{tmp_path} is in use" in error
        assert (tmp_path / ".writing-0123abcd-best.keras").exists()


# Outputs of commands


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
        runs.check_output(path, ["own.csv"], overwrite=True)


@pytest.mark.skipif(os.name != "posix", reason="links and pipes")
def test_outputs_that_exist_are_replaced_on_demand_only(places):
    assert str(runs.check_output("new.csv", ["own.csv"])) == "new.csv"
    assert runs.check_output("run/picture.png").parent.name == "run"
    for path in ("other.csv", "run/new.csv"):
        with pytest.raises(ValueError, match=f"{path} already exists. .*with --overwrite"):
            runs.check_output(path, ["own.csv"])
        runs.check_output(path, ["own.csv"], overwrite=True)
