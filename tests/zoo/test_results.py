"""Published values of the papers, and the zoo's runs with their weights."""

import json
import os

import h5py
import numpy as np
import pytest

from trellis_keras import data, zoo
from trellis_keras.zoo import registry, results
from trellis_keras.zoo.results import RESULTS, WEIGHTS, all_runs, assets_folder, published

# Papers


def test_every_published_value_belongs_to_a_recipe():
    for row in published():
        recipe = zoo.recipe(row.model, **row.options)
        assert registry.published_value(recipe) is row, row
        assert recipe.metric == row.metric
    values = [row.value for row in published()]
    # All of the papers' tables: 9 + 9 of TrellisNet, 47 of the TCN paper, 56 of the LRU's.
    assert len(values) == 18 + 47 + 56
    assert sum(row.source.startswith("TCN Table 5") for row in published()) == 9
    # The mean number of epochs of each unit, as TABLES has it.
    epochs = {}
    for row in published():
        if row.source == "LRU Table 1":
            name = row.model.removesuffix("_lru_paper")
            unit = row.options.get("variant", name.removesuffix(f"_{_corpus(name)}"))
            epochs.setdefault(unit, []).append(row.epochs)
    means = {unit: np.mean(values) for unit, values in epochs.items()}
    expected = {"ug": 11.4, "rg": 12.8, "ps": 14.9, "rhn": 20.1, "grid_lstm": 21.0}
    expected |= {"lstm": 21.3, "gru": 25.9}
    assert means == pytest.approx(expected, abs=0.06)


def _corpus(model):
    corpora = ("char_ptb", "war_and_peace", "enwik8", "text8")
    return next(corpus for corpus in corpora if model.endswith(corpus))


@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("trellisnet_ptb", {"epochs": 3, "seed": 2}, 56.97),
        ("trellisnet_ptb", {"setting": "fast"}, 56.97),  # with segments of its own
        ("trellisnet_ptb", {"sequence_length": 275}, None),
        ("trellisnet_ptb", {"injection_every": 5}, 59.75),
        ("trellisnet_ptb", {"injection_every": 5, "hidden_dropout": 0.0}, None),
        ("trellisnet_ptb", {"data": "pydoc"}, None),
        ("tcn_ptb", {"metric": "bpc"}, None),
        ("tcn_adding", {"filters": 30}, None),
        ("tcn_jsb", {"depth": 8}, None),
        ("gru_jsb", {"hidden_units": 500}, 8.43),  # a larger net
        ("tcn_jsb", {"activation": "glu"}, None),
        ("tcn_jsb", {"activation": "glu", "filters": 104}, 8.13),
        ("lru_char_ptb", {}, 0.965),
        ("lru_char_ptb", {"files": "train"}, 0.965),
        ("lru_char_ptb", {"variant": "ps", "hidden_units": 1221}, 0.969),
        ("lru_char_ptb", {"split": None}, None),  # the usual split of PTB
        ("lru_text8", {"data_options": {"train_fraction": 0.2}}, None),
        ("gru_char_ptb", {}, 1.37),
        ("gru_char_ptb_lru_paper", {}, 0.972),
    ],
)
def test_what_is_published_of_a_recipe(name, options, value):
    row = registry.published_value(zoo.recipe(name, **options))
    assert (row and row.value) == value


# Zoo runs


def test_every_zoo_run_is_a_recipe_of_the_zoo():
    runs = all_runs()
    assert len({run.folder for run in runs}) >= 25
    for run_ in runs:
        recipe = registry.recipe_from_dict(run_.recipe)
        written = recipe.to_dict()
        for part in ("arguments", "training"):
            assert written[part].items() >= run_.recipe[part].items(), run_.title
        assert run_.folder.parent.name == recipe.name or run_.folder.name == recipe.name
        again = zoo.run_recipe(recipe.name, run_.variant)
        assert again == recipe.replace(data_checksum=None)


def test_options_of_another_zoo_run_are_refused():
    with pytest.raises(ValueError, match="train tcn_adding T=200 --repeat"):
        zoo.run_recipe("tcn_adding", T=200)
    assert zoo.run_recipe("tcn_adding", "T=200", T=200).training.epochs == 10


def test_the_result_of_a_generated_task_is_the_mean_over_test_sets():
    one = {"test": 1.0, "test_sets": {"mean": 2.0}}
    alone = results.Run(None, "", {**one, "other_seeds": []})
    assert alone.mean == 2.0
    two = results.Run(None, "", {**one, "other_seeds": [{"test": 3.0, "test_sets": {"mean": 4.0}}]})
    assert (two.values, two.mean) == ([2.0, 4.0], 3.0)
    # Of all seeds or none.
    mixed = results.Run(None, "", {**one, "other_seeds": [{"test": 3.0}]})
    assert mixed.values == [1.0, 3.0]


WITH_WEIGHTS = [found for found in all_runs() if found.has_weights]
(JSB,) = (found for found in WITH_WEIGHTS if found.title == "tcn_jsb (fast)")  # the quickest


@pytest.mark.parametrize(
    "zoo_run",
    [
        pytest.param(found, id=found.title, marks=[] if found is JSB else [pytest.mark.slow])
        for found in WITH_WEIGHTS
    ],
)
def test_published_weights_have_their_published_result(zoo_run):
    """On the real data."""
    folder_of_data = os.environ.get("TRELLIS_KERAS_DATA")
    recipe = registry.recipe_from_dict(zoo_run.recipe)
    if recipe.data not in ("adding", "copy_memory", "pydoc") and not folder_of_data:
        pytest.skip(f"no local copy of {recipe.data}: set TRELLIS_KERAS_DATA to its folder")
    recipe = recipe.replace(data_dir=folder_of_data)
    if recipe.data == "pydoc":
        loaded = recipe.replace(data_checksum=None).load_data()
        if loaded.checksum != recipe.data_checksum:
            pytest.skip("another Python's help texts")
    loaded = recipe.load_data()
    model = recipe.build(weights="pretrained")
    logs = model.evaluate(recipe.batches(loaded.test), verbose=0, return_dict=True)
    logs.setdefault(recipe.metric, logs["loss"])
    expected = zoo_run.results
    assert logs[recipe.metric] == pytest.approx(expected["test"], rel=1e-3)
    for name in logs.keys() & expected["test_metrics"].keys():
        assert logs[name] == pytest.approx(expected["test_metrics"][name], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("trellisnet_char", {"depth": 4}, "were trained with depth=10, not 4"),
        ("trellisnet_seq_mnist", {"dilations": [1] * 11}, "with dilations="),
        ("tcn_jsb", {"activation": "glu"}, "activation='relu', not 'glu'"),
        ("tcn_text8", {}, "no pretrained weights for tcn_text8: .* Available: gru_adding"),
    ],
)
def test_weights_of_another_net_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(zoo, name)(weights="pretrained", **options)


def test_dropout_precision_and_state_do_not_matter_to_weights():
    options = {"dropout": 0.1, "dtype_policy": "mixed_bfloat16", "seed": 9}
    model = zoo.tcn_jsb(weights="pretrained", **options)
    with h5py.File(JSB.folder / WEIGHTS) as file:
        np.testing.assert_array_equal(model.head.get_weights()[0], file["head/vars/0"])
    assert zoo.trellisnet_char(weights="pretrained", stateful=True).backbone.stateful


@pytest.mark.both_backends
def test_weights_in_half_precision_become_variables_in_single_precision():
    with h5py.File(JSB.folder / WEIGHTS) as file:
        assert file["head/vars/0"].dtype == JSB.results["weights_dtype"] == "float16"
        stored = file["head/vars/0"][()]
    model = zoo.tcn_jsb(weights="pretrained")
    assert {weight.dtype for weight in model.trainable_weights} == {"float32"}
    np.testing.assert_array_equal(model.head.get_weights()[0], stored.astype("float32"))


def test_published_weights_come_with_their_vocabulary():
    model = zoo.trellisnet_char(weights="pretrained")
    assert len(model.vocabulary) == model.vocabulary_size == 103
    assert zoo.trellisnet_char(weights="pretrained", vocabulary=model.vocabulary)
    other = data.Vocabulary("abcdefg", unit="character")
    with pytest.raises(ValueError, match="weights have a vocabulary of 103 tokens"):
        zoo.trellisnet_char(weights="pretrained", vocabulary=other)
    with pytest.raises(ValueError, match="vocabulary has 103 tokens, but vocabulary_size=9"):
        zoo.trellisnet_char(weights="pretrained", vocabulary_size=9)


# Files

TINY = {"depth": 3, "hidden_units": 4, "embedding_dim": 4}


def test_weights_from_a_file(tmp_path):
    trained = zoo.trellisnet_char(seed=5, **TINY)
    trained.save_weights(tmp_path / "a.weights.h5")
    trained.save(tmp_path / "a.keras")
    for name in ("a.weights.h5", "a.keras"):
        model = zoo.trellisnet_char(weights=tmp_path / name, **TINY)
        for ours, theirs in zip(model.get_weights(), trained.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="`weights` must be .*nothing.*, which does not exist"):
        zoo.trellisnet_char(weights=tmp_path / "nothing.weights.h5", **TINY)


RECIPE = '{"recipe": {"name": "tcn_adding", "arguments": '


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 100_000, "holds no results of a model"),
        ('{"recipe": {"name": 3, "arguments": {}}}', "holds no results of a model"),
        ('{"recipe": {"name": "tcn_adding"}}', "holds no results of a model"),
        (RECIPE + "{}}}", "holds no results of a model.*'other_seeds'"),
        (RECIPE + '{}}, "other_seeds": [], "test": null}', "test is not a number: None"),
        (RECIPE + '{}}, "other_seeds": {}, "test": 1}', "other_seeds is not a list: {}"),
        (
            RECIPE + '{}}, "other_seeds": [], "test": 1, "parameters": 1}',
            "were trained with kernel_size=None, not 8",
        ),
    ],
)
def test_damaged_results(tmp_path, monkeypatch, content, message):
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path))
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / RESULTS).write_text(content)
    (tmp_path / "some" / WEIGHTS).write_bytes(b"no weights")
    with pytest.raises(ValueError, match=message):
        zoo.tcn_adding(weights="pretrained")


def test_weights_that_are_not_the_published_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path))
    with pytest.raises(ValueError, match="no pretrained weights for tcn_jsb.*none"):
        zoo.tcn_jsb(weights="pretrained")
    (tmp_path / "tcn_jsb").mkdir()
    recipe = zoo.recipe("tcn_jsb").to_dict()
    figures = {"test": 8.1, "parameters": 3, "other_seeds": []}
    content = json.dumps({"recipe": recipe, **figures, "weights_sha256": "0"})
    (tmp_path / "tcn_jsb" / RESULTS).write_text(content)
    (tmp_path / "tcn_jsb" / WEIGHTS).write_bytes(b"others")
    with pytest.raises(ValueError, match="not the zoo's file"):
        zoo.tcn_jsb(weights="pretrained")


def test_assets_folder(tmp_path, monkeypatch):
    package = tmp_path / "site" / "trellis_keras" / "zoo"
    package.mkdir(parents=True)
    monkeypatch.setattr(results, "_PACKAGE", package)
    monkeypatch.delenv("TRELLIS_KERAS_ZOO", raising=False)

    def put(folder):
        folder.mkdir(parents=True)
        (folder / "README.md").touch()
        return folder

    with pytest.raises(FileNotFoundError, match="Set TRELLIS_KERAS_ZOO"):
        assets_folder()
    wheel = put(package / "_assets")
    assert assets_folder() == wheel
    beside = put(tmp_path / "site" / "zoo")
    assert assets_folder() == wheel  # somebody else's `zoo` in site-packages
    (tmp_path / "site" / "setup.py").touch()
    assert assets_folder() == beside
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="TRELLIS_KERAS_ZOO is not a folder"):
        assets_folder()
