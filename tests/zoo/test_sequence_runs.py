"""Runs on separate sequences: what is measured, resuming, and runs that are killed."""

import json

import numpy as np
import pytest

from tests.support.processes import run_script
from tests.support.run_checks import assert_same_end, check_killed_run
from trellis_keras import data, zoo
from trellis_keras.training.records import read_history
from trellis_keras.zoo import runs

# Eleven sequences do not fill the batches of four.
SIZES = {"train": 11, "valid": 5, "test": 6}
TINY = {"T": 8, "depth": 3, "filters": 4, "batch_size": 4, "dropout": 0.2}


def tiny_run(folder, name="tcn_adding", **overrides):
    overrides = TINY | {"epochs": 2, "jit_compile": False, "data_options": SIZES} | overrides
    runs.train(zoo.recipe(name, **overrides), folder, verbose=0)
    return folder


@pytest.fixture(scope="module")
def copying(tmp_path_factory):
    """A finished run of copy memory, which no test may change."""
    return tiny_run(tmp_path_factory.mktemp("copying") / "run", "tcn_copy_memory")


def test_evaluation_of_the_adding_problem(tmp_path):
    run = tiny_run(tmp_path / "run", epochs=1)
    x, y = runs.read_recipe(run).load_data().test
    predicted = runs.load_best(run).predict(x, verbose=0)
    results = runs.evaluate(run)
    assert results["mse"] == pytest.approx(np.mean((predicted - y) ** 2), rel=1e-5)
    assert results["sequences"] == 6


def test_evaluation_of_copy_memory(copying):
    x, y = runs.read_recipe(copying).load_data().valid
    logits = runs.load_best(copying).predict(x, verbose=0)
    nll = np.log(np.exp(logits).sum(axis=-1)) - np.take_along_axis(logits, y[..., None], -1)[..., 0]
    results = runs.evaluate(copying, "valid")
    assert results["cross_entropy"] == pytest.approx(nll.mean(), rel=1e-5)
    right = logits.argmax(axis=-1) == y
    assert results["accuracy"] == pytest.approx(right.mean(), rel=1e-5)
    assert results["recalled"] == pytest.approx(right[:, -10:].all(axis=1).mean())
    assert results["sequences"] == 5
    # The best epoch is the saved one.
    best = min(float(row["val_loss"]) for row in read_history(copying / "history.csv"))
    assert results["loss"] == pytest.approx(best, rel=1e-5)


def test_the_recipe_of_a_run_is_complete(copying):
    written = json.loads((copying / "recipe.json").read_text())
    assert written["model"]["T"] == 8
    assert written["derived"] == {"receptive_field": 99}
    recipe = runs.read_recipe(copying)
    assert recipe.training.data_checksum == recipe.load_data().checksum
    assert recipe.training.published is None


def test_another_T_is_refused(copying):
    recipe = runs.read_recipe(copying)
    with pytest.raises(ValueError, match="other settings: T 8 there, 9 here"):
        runs.train(recipe.replace(T=9, depth=3, filters=4, kernel_size=8), copying)


def test_target_counting_is_for_texts(copying):
    with pytest.raises(ValueError, match="for texts. Received: 'original'"):
        runs.evaluate(copying, target_counting="original")


def test_frames_of_music_are_counted(tmp_path, monkeypatch):
    rng = np.random.RandomState(0)
    rolls = [rng.randint(0, 2, (frames, 88)).astype("uint8") for frames in (4, 9, 5)]
    splits = data.Dataset("jsb", rolls, rolls, rolls, "0" * 64, data.PianoRollStream)
    monkeypatch.setattr(data, "load", lambda *arguments, **options: splits)
    recipe = zoo.recipe("tcn_jsb", filters=4, depth=2, epochs=1, jit_compile=False)
    runs.train(recipe, tmp_path / "run", verbose=0)
    results = runs.evaluate(tmp_path / "run")
    assert results["frames"] == 3 + 8 + 4
    model = runs.load_best(tmp_path / "run")
    nll = 0.0
    for roll in rolls:
        logits = model.predict(roll[None, :-1].astype("float32"), verbose=0)[0]
        nll += np.logaddexp(0, (1 - 2.0 * roll[1:]) * logits).sum()
    assert results["frame_nll"] == pytest.approx(nll / 15, rel=1e-5)


# Going on


def test_more_epochs(tmp_path):
    tiny_run(tmp_path / "split", epochs=1)
    tiny_run(tmp_path / "split", epochs=3)
    assert_same_end(tmp_path / "split", tiny_run(tmp_path / "whole", epochs=3), 3)


def test_each_epoch_has_its_own_order(tmp_path):
    recipe = zoo.recipe("tcn_adding", **TINY, data_options=SIZES)
    stream = recipe.stream(recipe.load_data().train, shuffle=True)
    first = [batch[1].tolist() for batch in stream]
    stream.epoch = 1
    assert [batch[1].tolist() for batch in stream] != first
    other = recipe.replace(seed=1).stream(recipe.load_data().train, shuffle=True)
    assert [batch[1].tolist() for batch in other] != first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("tensorflow", ["tcn_copy_memory", "--depth=3", "--filters=4", "--dropout=0.2"]),
        ("jax", ["lstm_adding", "--hidden-units=4", "--dropout=0.2"]),
    ],
    ids=["tensorflow", "jax"],
)
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, backend, words):
    words += ["--T=8", "--batch-size=4", "--data-options", json.dumps(SIZES)]
    if backend == "tensorflow":
        words += ["--jit-compile=false"]
    check_killed_run(tmp_path, backend, words, epochs=8, kills=1)


def test_jax_alone(tmp_path):
    """Where TensorFlow and its libraries are not installed."""
    source = """
import pathlib, sys
from tests.zoo.test_sequence_runs import tiny_run
from trellis_keras.zoo import runs
print(runs.evaluate(tiny_run(pathlib.Path(sys.argv[1]) / "run", "tcn_copy_memory")))
"""
    blocked = ("tensorflow", "tensorflow_datasets", "keras_nlp")
    output = run_script(source, tmp_path, backend="jax", block=blocked)
    assert "'recalled'" in output
    # What JAX has trained, TensorFlow reads.
    assert f"'sequences': {runs.evaluate(tmp_path / 'run')['sequences']}" in output
