"""Runs: what training leaves, resuming, damage, exact evaluation, and runs that are killed."""

import functools
import itertools
import json
import sys

import keras
import numpy as np
import pytest

from tests.support.processes import run_script
from tests.support.run_checks import arrays, assert_same_end, check_killed_run
from tests.support.small_runs import STATEFUL, TINY, options, tiny_recipe, tiny_run, write_text
from trellis_keras import cli, zoo
from trellis_keras.training import TimeLimit
from trellis_keras.training.records import BestModel, HistoryCSV, read_history
from trellis_keras.zoo import runs
from trellis_keras.zoo.failures import explained

# A rate so high that the validation loss rises now and then, which begins the average.
AVERAGING = {
    "optimizer": "asgd",
    "learning_rate": 20.0,
    "decay_rule": "average",
    "decay_window": 1,
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A finished run of two epochs, which no test may change."""
    return tiny_run(tmp_path_factory.mktemp("shared"))


# What a run leaves


def test_files(shared):
    names = {
        "recipe.json",
        "history.csv",
        "best.keras",
        "environment.json",
        "checkpoints",
        "tensorboard",
    }
    assert {path.name for path in shared.iterdir()} == names
    assert [row["epoch"] for row in read_history(shared / "history.csv")] == ["1", "2"]
    columns = {"epoch", "loss", "bpc", "val_loss", "val_bpc", "learning_rate"}
    assert set(read_history(shared / "history.csv")[0]) == columns
    checkpoints = sorted(path.name for path in (shared / "checkpoints").iterdir())
    assert checkpoints == ["epoch-0001", "epoch-0002"]
    assert list((shared / "tensorboard").rglob("events*"))


def test_recipe_is_complete(shared):
    recipe = runs.read_recipe(shared)
    corpus = recipe.load_data()
    assert recipe.model.vocabulary_size == len(corpus.vocabulary)
    assert recipe.training.data_checksum == corpus.checksum
    assert recipe.model.depth == TINY["depth"]


def test_best_model_carries_its_vocabulary(shared):
    vocabulary = runs.load_best(shared).vocabulary
    assert vocabulary == runs.read_recipe(shared).load_data().vocabulary


def test_the_description_names_sizes_and_settings(tmp_path, capsys):
    recipe = tiny_recipe(tmp_path, epochs=1, depth=8, aux_every=4, aux_weight=0.1, segment=20)
    runs.train(recipe, tmp_path / "run", verbose=2)
    shown = capsys.readouterr().out
    assert "levels, 4 hidden + 4 output units, auxiliary losses every 4 levels" in shown
    assert "text: train 1,800, valid 100, test 100 characters, vocabulary 7" in shown
    assert "a uniform guess: bpc 2.807" in shown
    assert "batches of 4 x 20 tokens, history chop, horizon 8" in shown


# Going on


def test_more_epochs(tmp_path):
    split, whole = tmp_path / "split", tmp_path / "whole"
    for folder in (split, whole):
        folder.mkdir()
    tiny_run(split, epochs=1)
    tiny_run(split, epochs=3)
    assert_same_end(split / "run", tiny_run(whole, epochs=3), 3)
    assert runs.read_recipe(split / "run").training.epochs == 3


def test_more_epochs_of_averaged_weights(tmp_path, capsys):
    """The average begins after the third epoch; the fifth takes it up."""
    # What is learnt is wrong for the end of the text: the validation loss rises from the start.
    (tmp_path / "text.txt").write_text("ab" * 900 + "cd" * 100)
    for folder, epochs, begins in (("run", 4, True), ("run", 5, False), ("whole", 5, True)):
        recipe = tiny_recipe(tmp_path, **AVERAGING | {"learning_rate": 1.0, "epochs": epochs})
        runs.train(recipe, tmp_path / folder)
        shown = capsys.readouterr().out
        assert ("Epoch 3: from now on ASGDSwitch averages the weights" in shown) == begins
    assert_same_end(tmp_path / "run", tmp_path / "whole", 5)


def test_a_finished_run_stays_as_it_is(tmp_path, capsys):
    run = tiny_run(tmp_path, epochs=1)
    before = arrays(run, 1)
    capsys.readouterr()
    runs.train(runs.read_recipe(run), run, verbose=2)
    assert "training is complete after 1 epochs" in capsys.readouterr().out
    for name, array in arrays(run, 1).items():
        np.testing.assert_array_equal(array, before[name])


def test_a_run_that_a_time_limit_ends_goes_on(tmp_path, monkeypatch, capsys):
    """To the same end, to the bit, as one without."""
    clock = itertools.count(step=60)  # each look at it takes a minute
    limit = functools.partial(TimeLimit, clock=lambda: next(clock))
    monkeypatch.setattr(runs, "TimeLimit", limit)
    recipe, run = tiny_recipe(tmp_path, **STATEFUL | {"epochs": 4}), tmp_path / "run"
    # Made at 0, begun at 1, and epochs end at 2, 3, 4, ...: the third would be too late.
    runs.train(recipe, run, verbose=2, max_minutes=3)
    assert runs.epochs_done(run) == 2 and not runs.is_finished(run)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("2 of 4 epochs are done")
    assert said.endswith(f"To go on: trellis-keras train --output {run}")
    runs.train(runs.read_recipe(run), run, verbose=0, max_minutes=1000)
    assert runs.is_finished(run)
    runs.train(recipe, tmp_path / "whole", verbose=0)
    assert_same_end(run, tmp_path / "whole", 4)


def test_the_time_limit_of_the_command_line(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    tiny = [*options(TINY | {"jit_compile": "false"}), "--text", write_text(tmp_path / "text.txt")]
    tiny += ["--gradient-norms", 0, "--sample-length", 0]
    for epochs, words in ((1, ["trellisnet_char", *tiny, "--max-minutes", "1e-9"]), (2, [])):
        words = ["trellis-keras", "train", *words, "--output", run]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        assert runs.epochs_done(run) == epochs
        assert ("1 of 2 epochs are done" in capsys.readouterr().out) == (epochs == 1)


def test_a_run_that_a_rule_has_ended_is_finished(tmp_path):
    stopping = {"stop_patience": 1, "stop_min_delta": 100.0, "stop_against": "previous"}
    run = tiny_run(tmp_path, epochs=3, **stopping)
    assert runs.epochs_done(run) == 2 and runs.is_finished(run)


def test_a_time_limit_is_positive(tmp_path):
    with pytest.raises(ValueError, match="`max_minutes` must be positive. Received: 0"):
        runs.train(tiny_recipe(tmp_path), tmp_path / "run", max_minutes=0)
    assert not (tmp_path / "run").exists()


def test_another_precision_goes_on(tmp_path):
    run = tiny_run(tmp_path, epochs=1)
    half = tiny_recipe(tmp_path, epochs=2, dtype_policy="mixed_bfloat16")
    assert runs.train(half, run, verbose=0).compute_dtype == "bfloat16"
    assert runs.read_recipe(run).model.dtype_policy == "mixed_bfloat16"
    runs.train(half.replace(dtype_policy="float32"), run, verbose=0)  # nothing is left to do
    assert runs.read_recipe(run).model.dtype_policy == "float32"
    processes = json.loads((run / "environment.json").read_text())["processes"]
    computed = [(process["from_epoch"], process["dtype_policy"]) for process in processes]
    assert computed == [(1, "float32"), (2, "mixed_bfloat16")]
    assert [row["epoch"] for row in read_history(run / "history.csv")] == ["1", "2"]


def test_a_precision_that_is_refused_leaves_the_run_as_it_was(tmp_path):
    run = tiny_run(tmp_path, epochs=1)
    files = [run / name for name in ("recipe.json", "environment.json")]
    before = [path.read_bytes() for path in files]
    with pytest.raises(ValueError, match="is not a checkpoint of this model.*Nothing was changed"):
        tiny_run(tmp_path, epochs=2, dtype_policy="float64")
    assert [path.read_bytes() for path in files] == before
    runs.train(runs.read_recipe(run).replace(epochs=2), run, verbose=0)
    assert runs.epochs_done(run) == 2


def test_processes_that_compute_alike_are_one(tmp_path):
    for epochs in (1, 2):
        run = tiny_run(tmp_path, epochs=epochs)
    record = json.loads((run / "environment.json").read_text())
    (process,) = record.pop("processes")
    assert process == {"from_epoch": 1, **record, "dtype_policy": "float32"}


def test_another_recipe_is_refused_with_the_difference(shared):
    with pytest.raises(ValueError, match="other settings: depth 3 there, 4 here. Choose another"):
        runs.train(tiny_recipe(shared.parent, depth=4), shared)


def test_the_command_that_goes_on_is_one_for_the_shell(tmp_path, shared):
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / "recipe.json").write_bytes((shared / "recipe.json").read_bytes())
    with pytest.raises(ValueError, match=f"train --output '{folder}'$"):
        runs.train(tiny_recipe(shared.parent, depth=4), folder)
    with pytest.raises(OSError, match=f"train --output '{folder}'$"), explained(folder):
        raise OSError("No space left")


def test_the_home_folder_may_be_abbreviated(shared, monkeypatch):
    monkeypatch.setenv("HOME", str(shared.parent))
    assert runs.read_recipe("~/run") == runs.read_recipe(shared)
    assert runs.is_finished("~/run") and runs.epochs_done("~/run") == 2
    assert runs.evaluate("~/run", "valid") == runs.evaluate(shared, "valid")


def test_another_model_is_refused(tmp_path, shared):
    recipe = json.loads((shared / "recipe.json").read_text())
    (tmp_path / "recipe.json").write_text(json.dumps(recipe | {"name": "trellisnet_char_ptb"}))
    with pytest.raises(ValueError, match="model 'trellisnet_char_ptb' there, 'trellisnet_char'"):
        runs.train(tiny_recipe(shared.parent), tmp_path)


def test_changed_data_are_refused(tmp_path):
    run = tiny_run(tmp_path, epochs=1)
    write_text(tmp_path / "text.txt", length=1990)
    with pytest.raises(ValueError, match="data 'text' have changed since the run began"):
        runs.train(tiny_recipe(tmp_path), run)
    with pytest.raises(ValueError, match="data 'text' have changed"):
        runs.evaluate(run)


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    run = tiny_run(tmp_path, epochs=1)
    (run / ".writing-0123abcd-best.keras").write_bytes(b"half")
    tiny_run(tmp_path, epochs=1)
    assert not list(run.glob(".*"))


# Damage and wrong folders


def test_unwritable_folder(tmp_path):
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(ValueError, match=r"output folder .*text.txt/run cannot be written to"):
        runs.train(recipe, tmp_path / "text.txt" / "run")
    with pytest.raises(ValueError, match=r"output folder .*text.txt cannot be written to"):
        runs.train(recipe, tmp_path / "text.txt")


def test_no_run(tmp_path):
    for use in (runs.read_recipe, runs.load_best, runs.evaluate):
        with pytest.raises(FileNotFoundError, match="holds no run: recipe.json is missing"):
            use(tmp_path)


def test_a_run_without_a_finished_epoch(tmp_path):
    (tmp_path / "recipe.json").write_text(tiny_recipe(tmp_path).to_json())
    with pytest.raises(FileNotFoundError, match="has not finished an epoch yet"):
        runs.load_best(tmp_path)


NAMED = '{"name": "tcn_adding", '


@pytest.mark.parametrize(
    "text",
    [
        *["", '{"name": "trell', "[]", '{"name": 3}', "{}", '{"name": []}', "[" * 100_000],
        *[NAMED + '"model": [], "training": {}}', NAMED + '"model": {"seed": 1e999}}'],
        NAMED + '"model": {"learning_rate": 1' + "0" * 400 + '}, "training": {}}',
        # Twice the dilation with each block.
        NAMED + '"model": {"depth": 9223372036854775808}, "training": {}}',
    ],
)
def test_a_damaged_recipe(tmp_path, text):
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(ValueError, match="recipe.json is not a recipe of this version"):
        runs.read_recipe(tmp_path)


def test_a_truncated_checkpoint_falls_back(tmp_path):
    run = tiny_run(tmp_path, epochs=2)
    before = arrays(run, 2)
    path = run / "checkpoints" / "epoch-0002" / "variables.npz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="epoch-0002 is damaged"):
        tiny_run(tmp_path, epochs=2)
    for name, array in arrays(run, 2).items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_a_truncated_best_model(tmp_path, shared, kept):
    content = (shared / "best.keras").read_bytes()
    (tmp_path / "recipe.json").write_bytes((shared / "recipe.json").read_bytes())
    (tmp_path / "best.keras").write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match="best.keras is damaged"):
        runs.load_best(tmp_path)


def test_a_best_model_with_flipped_bits(tmp_path, shared):
    content = bytearray((shared / "best.keras").read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(8)
    (tmp_path / "recipe.json").write_bytes((shared / "recipe.json").read_bytes())
    (tmp_path / "best.keras").write_bytes(content)
    with pytest.raises(ValueError, match="best.keras is damaged"):
        runs.load_best(tmp_path)


# Evaluation


def nll_of_whole_text(model, tokens, horizon):
    """Mean over all targets, read in one go after `horizon` start tokens."""
    inputs = np.concatenate([np.zeros(horizon, "int32"), tokens[:-1]])
    scores = model.predict(inputs[None], verbose=0)[0, horizon:]
    return -np.mean(scores[np.arange(len(tokens) - 1), tokens[1:]])


@pytest.mark.parametrize("split", ["valid", "test"])
def test_evaluation_counts_every_target_once(shared, split):
    recipe = runs.read_recipe(shared)
    tokens = getattr(recipe.load_data(), split)
    expected = nll_of_whole_text(runs.load_best(shared), tokens, recipe.horizon)
    results = runs.evaluate(shared, split)
    assert results["targets"] == len(tokens) - 1 == 99
    assert results["loss"] == pytest.approx(expected, rel=1e-5)
    assert results["bpc"] == pytest.approx(expected / np.log(2), rel=1e-5)


def nll_of_rows(model, inputs, targets, segment):
    """NLL of every target, the state handed from segment to segment by hand."""
    config = model.backbone.get_config()
    config |= {"stateful": False, "return_state": True, "return_aux": False}
    layer = type(model.backbone).from_config(config)
    layer.build((None, None, model.embedding_dim))
    layer.set_weights(model.backbone.get_weights())
    scores, states = [], None
    for start in range(0, inputs.shape[1], segment):
        x = model.embedding(inputs[:, start : start + segment])
        hidden, *states = layer(x, initial_state=states)
        scores.append(keras.ops.convert_to_numpy(model.head(hidden)))
    scores = np.concatenate(scores, axis=1)
    return -np.take_along_axis(scores, targets[..., None], axis=-1).reshape(-1)


def test_evaluation_with_a_carried_history(tmp_path):
    run = tiny_run(tmp_path, **STATEFUL | {"epochs": 1})
    tokens = runs.read_recipe(run).load_data().test
    # Each row of the batch starts with an empty history and reads its part of the text.
    rows, length = TINY["batch_size"], -(-(len(tokens) - 1) // TINY["batch_size"])
    padded = np.pad(tokens, (0, rows * length + 1 - len(tokens)))
    inputs, targets = padded[:-1].reshape(rows, length), padded[1:].reshape(rows, length)
    nll = nll_of_rows(runs.load_best(run), inputs, targets, TINY["segment"])
    results = runs.evaluate(run)
    assert results["targets"] == len(tokens) - 1
    assert results["loss"] == pytest.approx(np.mean(nll[: len(tokens) - 1]), rel=1e-5)


def test_the_best_epoch_is_the_saved_one(shared):
    history = read_history(shared / "history.csv")
    best = min(float(row["val_loss"]) for row in history)
    assert runs.evaluate(shared, "valid")["loss"] == pytest.approx(best, rel=1e-5)


def test_the_authors_count_fewer_targets(shared):
    exact, authors = (runs.evaluate(shared, target_counting=n) for n in ("all", "original"))
    assert authors["targets"] == 4 * (25 - 1 - 3) < exact["targets"]
    assert authors["loss"] != exact["loss"]


def test_wrong_split_or_target_counting(shared):
    with pytest.raises(ValueError, match="`split` must be one of train, valid, test"):
        runs.evaluate(shared, "validation")
    with pytest.raises(ValueError, match="`target_counting` must be one of all, original"):
        runs.evaluate(shared, target_counting="paper")


@pytest.fixture
def moved(tmp_path):
    """(a run by words, the folder where its text is now)."""
    unit = {"path": tmp_path / "text.txt", "unit": "word"}
    run, folder = tiny_run(tmp_path, epochs=1, data_options=unit), tmp_path / "other"
    folder.mkdir()
    (tmp_path / "text.txt").rename(folder / "text.txt")
    return run, folder


def test_a_text_may_have_moved(moved):
    run, folder = moved
    with pytest.raises(FileNotFoundError, match=r"no file .*text.txt. If it has moved, `data_dir`"):
        runs.evaluate(run)
    with pytest.raises(FileNotFoundError, match=r"text.txt or .*/nowhere/text.txt"):
        runs.evaluate(run, data_dir=folder / "nowhere")
    assert runs.evaluate(run, data_dir=folder)["targets"] > 0
    recipe = runs.read_recipe(run).replace(data_dir=folder, epochs=2)
    runs.train(recipe, run, verbose=0)
    assert runs.is_finished(run)


def test_the_command_line_is_told_where_the_text_is_now(moved, monkeypatch):
    run, folder = moved
    text = folder / "text.txt"
    words = ["trellis-keras", "train", "--output", run, "--text", text, "--epochs", 2]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    options = runs.read_recipe(run).training.data_options
    assert options == {"path": str(text), "unit": "word"} and runs.is_finished(run)
    text.write_text(text.read_text() + "abc")
    with pytest.raises(ValueError, match="data 'text' have changed since the run began"):
        runs.train(runs.read_recipe(run).replace(epochs=3), run, verbose=0)


def test_a_model_that_looks_further_back_than_the_zoos_segment(tmp_path):
    """The segment is the run's business; who builds a model alone gives none."""
    segment = zoo.recipe("trellisnet_char").segment
    small = {"depth": 3, "hidden_units": 4, "embedding_dim": 4, "kernel_size": segment // 2}
    assert zoo.trellisnet_char(**small).backbone.receptive_field > segment
    run = tiny_run(tmp_path, kernel_size=segment // 2, segment=2 * segment, epochs=1)
    assert runs.is_finished(run)
    assert zoo.trellisnet_char_ptb(history="chop", depth=4, hidden_units=4, embedding_dim=4)
    with pytest.raises(ValueError, match="`depth` must be an integer. Received: 'many'"):
        zoo.trellisnet_char(depth="many")


# Records


class Logs(keras.callbacks.Callback):
    """Puts given values into the logs."""

    def __init__(self, *values):
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        logs["val_loss"] = self.values[epoch]


def fit_with(*callbacks, epochs):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    model.fit(np.ones((2, 1)), np.ones((2, 1)), epochs=epochs, callbacks=callbacks, verbose=0)
    return model


def test_best_model_after_a_value_that_is_no_number(tmp_path):
    best = BestModel(tmp_path / "best.keras")
    model = fit_with(Logs(float("nan"), 3.0, float("nan"), 4.0), best, epochs=4)
    assert best.best == 3.0
    saved = keras.saving.load_model(tmp_path / "best.keras")
    assert not np.array_equal(saved.get_weights()[0], model.get_weights()[0])


def test_best_model_without_its_value(tmp_path):
    with pytest.raises(ValueError, match="BestModel watches 'val_loss'.*It has .'loss'."):
        fit_with(BestModel(tmp_path / "best.keras"), epochs=1)


def test_history_with_new_columns(tmp_path):
    path = tmp_path / "history.csv"
    path.write_text("epoch,loss\n1,0.5\n2,0.25\n")
    history = HistoryCSV(path)
    history.on_train_begin()
    history.on_epoch_begin(1)
    history.on_epoch_end(1, {"loss": 0.3, "val_loss": 0.4})
    assert path.read_text() == "epoch,loss,val_loss\n1,0.5,\n2,0.3,0.4\n"


# Killed runs, without TensorFlow


def test_jax_alone(tmp_path):
    """Training, resuming and evaluation where TensorFlow and its libraries are not installed."""
    source = """
import pathlib, sys
from tests.support.small_runs import tiny_recipe
from trellis_keras.zoo import runs
folder = pathlib.Path(sys.argv[1])
runs.train(tiny_recipe(folder, epochs=1, jit_compile=True), folder / "run", verbose=0)
runs.train(tiny_recipe(folder, epochs=2, jit_compile=True), folder / "run", verbose=0)
print(runs.evaluate(folder / "run"))
"""
    output = run_script(
        source,
        tmp_path,
        backend="jax",
        block=("tensorflow", "tensorflow_datasets", "keras_nlp"),
    )
    assert "TensorFlow is not installed: no TensorBoard logs are written." in output
    assert "'targets': 99" in output
    assert not (tmp_path / "run" / "tensorboard").exists()
    # What JAX has trained, TensorFlow reads.
    assert f"'targets': {runs.evaluate(tmp_path / 'run')['targets']}" in output


def check_killed_text_run(tmp_path, backend, settings, epochs, kills):
    text = write_text(tmp_path / "text.txt")
    settings = {name: value for name, value in settings.items() if name != "epochs"}
    words = ["trellisnet_char", "--text", text, *options(settings)]
    check_killed_run(tmp_path, backend, words, epochs, kills)


@pytest.mark.slow  # tests/training/test_checkpoint.py kills smaller ones
@pytest.mark.parametrize(
    ("backend", "settings"),
    # JAX without its compiler computes operation by operation.
    [
        ("tensorflow", STATEFUL),
        ("jax", TINY | {"jit_compile": True, "hidden_dropout": 0.3}),
    ],
    ids=["tensorflow", "jax"],
)
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, backend, settings):
    check_killed_text_run(tmp_path, backend, settings, epochs=8, kills=1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.parametrize(
    "settings", [TINY | {"hidden_dropout": 0.3}, STATEFUL, STATEFUL | AVERAGING]
)
def test_a_run_killed_many_times(tmp_path, backend, settings):
    check_killed_text_run(tmp_path, backend, settings | {"jit_compile": True}, epochs=30, kills=6)
