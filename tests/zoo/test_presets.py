"""Presets: models as folders, and classifiers on pretrained backbones."""

import json
import os
import shutil
import sys
import types
from unittest import mock

import h5py
import keras
import numpy as np
import pytest
from keras.src.saving import saving_lib

from tests.support.disks import NO_SPACE, small_disk
from tests.support.hostile_hdf5 import LINK, external_link, replace_array
from trellis_keras import zoo
from trellis_keras.data import Vocabulary
from trellis_keras.layers import TCN, TrellisLayer
from trellis_keras.models import LanguageModel, SequenceClassifier, SequenceRegressor

TOKENS = np.array([[0, 3, 1, 2], [2, 2, 1, 0]])
SERIES = np.random.default_rng(0).normal(size=(2, 9, 3)).astype("float32")


def language_model(seed=0):
    backbone = TrellisLayer(6, 3, output_units=4, aux_every=1, return_aux=True)
    vocabulary = Vocabulary("abcd", "character")
    model = LanguageModel(4, 4, backbone, vocabulary=vocabulary, aux_weight=0.1, seed=seed)
    model.build((None, None))
    return model


def regressor():
    backbone = TCN(4, 2, 2, return_sequences=False)
    model = SequenceRegressor(backbone, 2, normalize=True)
    model.adapt(SERIES)
    return model


def text_classifier(seed=0):
    embedding = keras.layers.Embedding(4, 3, mask_zero=True)
    backbone = TCN(4, 2, 2, return_sequences=False)
    model = SequenceClassifier(
        backbone, 2, embedding=embedding, class_names=["bad", "good"], seed=seed
    )
    model.build((None, None))
    return model


@pytest.mark.parametrize(
    ("make", "inputs"), [(language_model, TOKENS), (regressor, SERIES), (text_classifier, TOKENS)]
)
@pytest.mark.both_backends(slow=True)
def test_a_preset_is_the_model(tmp_path, make, inputs):
    model = make()
    model.compile("adam")
    model.save_to_preset(tmp_path / "preset")
    (tmp_path / "preset" / "README.md").write_text("A model card may lie beside it.")
    expected = model(inputs)
    for load in (zoo.from_preset, keras.saving.load_model):
        loaded = load(tmp_path / "preset")
        np.testing.assert_array_equal(loaded(inputs), expected)
        assert type(loaded) is type(model) and loaded.get_config() == model.get_config()
        assert not loaded.compiled


def test_a_preset_replaces_one_of_its_class_as_a_whole(tmp_path, monkeypatch):
    folder = tmp_path / "some" / "preset"
    model = text_classifier()
    model.save_to_preset(folder)
    (folder / "README.md").write_text("a card")

    def fill_disk(self, store):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(keras.layers.Embedding, "save_own_variables", fill_disk)
        with pytest.raises(OSError, match="some/preset could not be written: No space left"):
            text_classifier(seed=1).save_to_preset(folder)
    np.testing.assert_array_equal(zoo.from_preset(folder)(TOKENS), model(TOKENS))
    newer = text_classifier(seed=1)
    newer.save_to_preset(folder)
    np.testing.assert_array_equal(zoo.from_preset(folder)(TOKENS), newer(TOKENS))
    assert (folder / "README.md").read_text() == "a card"
    assert [path.name for path in folder.parent.iterdir()] == ["preset"]


def test_a_full_disk_leaves_no_hdf5_object_open(tmp_path):
    """Those that are open ended the process later."""
    model = SequenceClassifier(TCN(64, 3, 2, return_sequences=False), 2)
    model.build((None, None, 3))
    opened = h5py.h5f.get_obj_count()
    with small_disk(tmp_path / "disk", "64k") as folder:
        with pytest.raises(OSError, match=f"preset {NO_SPACE}$"):
            model.save_to_preset(folder / "preset")
        assert not list(folder.iterdir())
    assert h5py.h5f.get_obj_count() == opened


def test_a_preset_replaces_nothing_else(tmp_path):
    text_classifier().save_to_preset(tmp_path / "preset")
    content = (tmp_path / "preset" / "config.json").read_bytes()
    with pytest.raises(ValueError, match="contains a preset of trellis_keras>SequenceClassifier"):
        language_model().save_to_preset(tmp_path / "preset")
    assert (tmp_path / "preset" / "config.json").read_bytes() == content
    with pytest.raises(ValueError, match="contains files that are not part of a preset: preset"):
        language_model().save_to_preset(tmp_path)
    with pytest.raises(ValueError, match="config.json is a file. A preset is a folder"):
        language_model().save_to_preset(tmp_path / "preset" / "config.json")


def test_models_of_the_zoo_are_presets():
    model = zoo.from_preset("tcn_adding/T=200")
    assert model.compiled
    net = {"kernel_size": 6, "depth": 7, "filters": 27}
    published = zoo.tcn_adding(**net, weights="pretrained")
    np.testing.assert_array_equal(model.get_weights()[-2], published.get_weights()[-2])
    # Without weights of its own, a model has those of a better run.
    model, better = zoo.from_preset("tcn_jsb"), zoo.from_preset("tcn_jsb/fast")
    np.testing.assert_array_equal(model.get_weights()[0], better.get_weights()[0])


@pytest.mark.parametrize("preset", ["tcn_ptb", "nothing/here"])
def test_unknown_presets(preset):
    with pytest.raises(ValueError, match=f"list_models.*Received: '{preset}'"):
        zoo.from_preset(preset)
    with pytest.raises(ValueError, match="Did you mean 'tcn_jsb/fast'"):
        zoo.from_preset("tcn_jsb/fats")


def test_hugging_face(tmp_path, monkeypatch):
    """Keras uploads; what is downloaded is checked like any folder."""
    hub = tmp_path / "hub"
    api = mock.Mock(
        create_repo=lambda name, exist_ok: types.SimpleNamespace(repo_id=name),
        upload_folder=lambda repo_id, folder_path, **_: shutil.copytree(folder_path, hub / repo_id),
    )

    def download(repository, allow_patterns):
        assert {"config.json", "model.weights.h5"} <= set(allow_patterns)
        return str(hub / repository)

    module = types.SimpleNamespace(HfApi=lambda **_: api, snapshot_download=download)
    monkeypatch.setattr(saving_lib, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    model = text_classifier()
    model.save_to_preset("hf://someone/reviews")
    np.testing.assert_array_equal(zoo.from_preset("hf://someone/reviews")(TOKENS), model(TOKENS))
    (hub / "someone/reviews/model.weights.h5").unlink()
    with pytest.raises(ValueError, match="it holds no file model.weights.h5"):
        zoo.from_preset("hf://someone/reviews")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="pip install huggingface-hub"):
        zoo.from_preset("hf://someone/reviews")


# Files from elsewhere


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    text_classifier().save_to_preset(folder)
    return folder


@pytest.fixture
def altered(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "altered")


def test_sizes_in_a_folder_are_checked_before_anything_is_made(altered):
    config = json.loads((altered / "config.json").read_text())
    for value, message in ((10**12, "is too large"), (5_000, "would have .* weights, but it")):
        config["config"]["backbone"]["config"]["filters"] = value
        (altered / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"altered is damaged, .*{message}"):
            zoo.from_preset(altered)


def test_weights_in_a_folder_lead_nowhere(altered, tmp_path, monkeypatch):
    path = altered / "model.weights.h5"
    replace_array(path, "embedding/vars/0", external_link, tmp_path / "secret.h5")
    monkeypatch.setattr(keras.saving, "load_model", None)
    with pytest.raises(ValueError, match=f"altered .*{LINK}"):
        zoo.from_preset(altered)


def test_a_pipe_is_not_opened(altered):
    (altered / "config.json").unlink()
    os.mkfifo(altered / "config.json")
    with pytest.raises(ValueError, match="it holds no file config.json"):
        zoo.from_preset(altered)


# Classifiers


def test_a_classifier_on_a_language_model(tmp_path):
    model = language_model(seed=1)
    model.backbone.trainable = False
    model.save_to_preset(tmp_path)
    classifier = zoo.from_preset(tmp_path, num_classes=2, class_names=["no", "yes"])
    assert not classifier.backbone.trainable and classifier.embedding.trainable
    np.testing.assert_allclose(
        classifier.backbone(classifier.embedding(TOKENS)),
        model.encode(TOKENS)["hidden"][:, -1],
        rtol=1e-5,
        atol=1e-7,
    )
    assert classifier.class_names == ["no", "yes"]


def test_a_classifier_on_a_normalized_series(tmp_path):
    model = regressor()
    model.save_to_preset(tmp_path)
    classifier = zoo.from_preset(tmp_path, num_classes=5)
    assert classifier(SERIES).shape == (2, 5)
    classifier.check_adapted()
    np.testing.assert_array_equal(
        classifier.input_normalization.mean, model.input_normalization.mean
    )


def test_what_no_classifier_is_made_of(tmp_path):
    model = SequenceRegressor(
        keras.Sequential([TCN(2, 2, 1, return_sequences=False), keras.layers.Dense(2)])
    )
    model.build((None, None, 1))
    model.save_to_preset(tmp_path)
    with pytest.raises(ValueError, match="the argument `return_sequences`. Received: .*Sequential"):
        zoo.from_preset(tmp_path, num_classes=2)
    with pytest.raises(ValueError, match=r"\['class_names'\] are for a classifier"):
        zoo.from_preset(tmp_path, class_names=["a", "b"])


@pytest.mark.both_backends(slow=True)
def test_token_ids_of_a_classifier():
    model = text_classifier()
    model.compile("adam", jit_compile=False, run_eagerly=True)
    for x in (TOKENS + 1, TOKENS[..., None], TOKENS + 0.5):
        with pytest.raises(ValueError, match="Token ids|axes|integers"):
            model.fit(x, np.array([0, 1]), verbose=0)
    assert np.isnan(model(np.array([[1, 4]]))).all()
    with pytest.raises(ValueError, match=r"it takes token ids \(batch, time\)"):
        text = SequenceClassifier(TCN(2, 2, 1), 2, embedding=keras.layers.Embedding(4, 3))
        text.build((None, None, 3))
    with pytest.raises(ValueError, match="`embedding` needs normalize=False"):
        SequenceClassifier(TCN(2, 2, 1), 2, embedding=text.embedding, normalize=True)
    assert model.fit(TOKENS, np.array(["good", "bad"]), verbose=0).history["loss"][0] > 0
    # Id 0 is padding.
    padded = np.array([[2, 1, 0, 0]])
    np.testing.assert_allclose(model(padded), model(padded[:, :2]), rtol=1e-5, atol=1e-7)
    model.embedding.mask_zero = False  # a stream has no padding
    cache = model.initial_cache(2)
    for tokens in TOKENS.T + 1 - TOKENS.T // 3:
        logits, cache = model.step(tokens, cache)
    np.testing.assert_allclose(model(TOKENS + 1 - TOKENS // 3), logits, rtol=1e-5, atol=1e-7)
