"""The registry, the published models' sizes, and where weights come from."""

import inspect
import pydoc

import keras
import numpy as np
import pytest

from trellis_keras import data, zoo
from trellis_keras.zoo import assets

TINY = {"depth": 3, "hidden_units": 4, "embedding_dim": 4}


@pytest.mark.parametrize(
    ("build", "parameters"),
    [(zoo.trellisnet_ptb, 24_175_600), (zoo.trellisnet_char_ptb, 13_464_450)],
)
def test_parameters(build, parameters):
    assert build().count_params() == parameters


def test_list_models():
    assert zoo.list_models("trellisnet_*_ptb") == ["trellisnet_char_ptb"]
    assert zoo.list_models("transformer_*") == []
    # Everything that is registered is handed on by the package, and the other way round.
    assert zoo.list_models() == sorted(
        set(zoo.__all__) - {"Recipe", "get_model", "list_models", "recipe"}
    )


def test_get_model_is_the_function():
    left = zoo.get_model("trellisnet_char", **TINY)
    right = zoo.trellisnet_char(**TINY)
    assert [w.tolist() for w in left.get_weights()] == [w.tolist() for w in right.get_weights()]
    with pytest.raises(ValueError, match="Unknown model 'lstm'. The zoo has: grid_lstm_char_ptb, "):
        zoo.get_model("lstm")


def test_help_shows_arguments_and_defaults():
    parameters = inspect.signature(zoo.trellisnet_ptb).parameters
    assert parameters["depth"].default == 55
    assert parameters["weights"].default is None
    text = pydoc.plain(pydoc.render_doc(zoo.trellisnet_ptb))
    assert "depth=55" in text
    assert "24.2M parameters" in text


def test_unknown_arguments_name_the_known_ones():
    with pytest.raises(ValueError, match="deep.*It takes: weights, vocabulary.*depth"):
        zoo.trellisnet_ptb(deep=8)
    with pytest.raises(ValueError, match="epochs"):
        zoo.trellisnet_ptb(epochs=8)
    with pytest.raises(ValueError, match="`aux_every` must be"):
        zoo.trellisnet_ptb(depth=8, aux_every=9)


def test_the_vocabulary_sets_the_size():
    vocabulary = data.Vocabulary(["a", "b", "c"], unit="character")
    model = zoo.trellisnet_char(vocabulary=vocabulary, **TINY)
    assert model.vocabulary_size == 3
    with pytest.raises(ValueError, match="vocabulary has 3 tokens"):
        zoo.trellisnet_char(vocabulary=vocabulary, vocabulary_size=4, **TINY)


def test_the_metric_is_an_argument():
    model = zoo.trellisnet_char(metric="perplexity", **TINY)
    assert "perplexity" in [metric.name for metric in model.metrics]


def test_no_seed_gives_other_weights_each_time():
    one, other = (zoo.trellisnet_char(seed=None, **TINY).get_weights()[0] for _ in range(2))
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("name", ["tcn_adding", "tcn_jsb", "lstm_adding"])
def test_precision_is_an_argument(name):
    models = [zoo.get_model(name, dtype_policy=p) for p in (None, "mixed_bfloat16", "float64")]
    compute = [model.compute_dtype for model in models]
    backbone = [model.backbone.compute_dtype for model in models]
    kept = [keras.backend.standardize_dtype(model.weights[0].dtype) for model in models]
    assert compute == backbone == ["float32", "bfloat16", "float64"]
    assert kept == ["float32", "float32", "float64"]
    assert keras.config.dtype_policy().name == "float32"


def test_weights_from_a_file(tmp_path):
    trained = zoo.trellisnet_char(seed=5, **TINY)
    trained.save_weights(tmp_path / "a.weights.h5")
    trained.save(tmp_path / "a.keras")
    for name in ("a.weights.h5", "a.keras"):
        model = zoo.trellisnet_char(weights=tmp_path / name, **TINY)
        for ours, theirs in zip(model.get_weights(), trained.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_missing_weights(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="trellisnet_char: `weights` must be .*none at .*nothing"):
        zoo.trellisnet_char(weights=tmp_path / "nothing.weights.h5", **TINY)
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path))
    with pytest.raises(ValueError, match="no pretrained weights of trellisnet_char.*no model yet"):
        zoo.trellisnet_char(weights="pretrained", **TINY)


def test_weights_of_a_file(tmp_path):
    trained = zoo.trellisnet_char(seed=5, **TINY)
    trained.save_weights(tmp_path / "trained.weights.h5")
    model = zoo.trellisnet_char(weights=tmp_path / "trained.weights.h5", **TINY)
    np.testing.assert_array_equal(model.get_weights()[0], trained.get_weights()[0])


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `site/trellis_keras/zoo` without assets."""
    package = tmp_path / "site" / "trellis_keras" / "zoo"
    package.mkdir(parents=True)
    monkeypatch.setattr(assets, "_PACKAGE", package)
    monkeypatch.delenv("TRELLIS_KERAS_ZOO", raising=False)
    return package


def put_assets(folder):
    folder.mkdir(parents=True)
    (folder / "README.md").touch()
    return folder


def test_assets_folder_order(package, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="Set TRELLIS_KERAS_ZOO"):
        zoo.assets.assets_folder()
    wheel = put_assets(package / "_assets")
    assert assets.assets_folder() == wheel
    beside = put_assets(tmp_path / "site" / "zoo")
    assert assets.assets_folder() == wheel  # somebody else's `zoo` in site-packages
    (tmp_path / "site" / "setup.py").touch()
    assert assets.assets_folder() == beside
    named = put_assets(tmp_path / "named")
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(named))
    assert assets.assets_folder() == named


def test_a_wrong_assets_folder_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="TRELLIS_KERAS_ZOO is not a folder"):
        assets.assets_folder()


def test_a_model_of_the_zoo_is_saved_whole(tmp_path):
    model = zoo.trellisnet_ptb(depth=8, hidden_units=4, embedding_dim=4, vocabulary_size=9)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    tokens = np.arange(20).reshape(2, 10) % 9
    np.testing.assert_array_equal(model(tokens), loaded(tokens))
    assert loaded.jit_compile is True
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
