"""Samples of text and graphs for TensorBoard."""

import math
import sys
import types

import keras
import numpy as np
import pytest

from tests.support.event_files import read_events
from trellis_keras.data import Vocabulary
from trellis_keras.layers import TrellisLayer
from trellis_keras.models import LanguageModel
from trellis_keras.training import TextSamples

CHARACTERS = "\n abcdé"


def text_model():
    backbone = TrellisLayer(units=8, depth=2, output_units=4, stateful=True, name="trellis")
    vocabulary = Vocabulary(CHARACTERS, "character")
    model = LanguageModel(len(vocabulary), 4, backbone, vocabulary=vocabulary, seed=0)
    model.build((None, None))
    model.compile(keras.optimizers.Adam(0.01), run_eagerly=True)
    return model


def test_text_samples_show_what_the_model_writes(tmp_path):
    from keras_nlp.samplers import RandomSampler

    model = text_model()
    samples = TextSamples("ab é", tmp_path, length=120)
    tokens = np.random.default_rng(0).integers(0, 7, (4, 13))
    model.fit(tokens[:, :-1], tokens[:, 1:], epochs=2, verbose=0, callbacks=[samples])
    assert samples._writer is None  # closed
    values, _ = read_events(tmp_path)
    assert list(values) == ["sample"] and list(values["sample"]) == [0, 1]
    (shown,) = values["sample"][1].string_val
    prompt = model.vocabulary.encode("ab é", final_eos=False)
    (ids,) = model.generate(prompt[None], 124, RandomSampler(temperature=0.8), seed=0)
    before, text = shown.decode().split("\n\nthe model writes\n\n")
    assert before == "After the prompt\n\n    ab é"
    assert all(line.startswith("    ") for line in text.split("\n"))
    assert text.split() == model.vocabulary.decode(ids[4:]).split()


def test_what_text_samples_require(tmp_path, monkeypatch):
    samples = TextSamples("", tmp_path)
    for model, named in ((types.SimpleNamespace(vocabulary=None), "vocab"), (text_model(), "prom")):
        samples.set_model(model)
        with pytest.raises(ValueError, match=named):
            samples.on_train_begin()
    samples.on_epoch_end(0, {"loss": math.nan})
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="length=0"):
        TextSamples("the ", tmp_path, length=0)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match="require TensorFlow"):
        TextSamples("the ", tmp_path)
    monkeypatch.setitem(sys.modules, "keras_nlp", None)
    with pytest.raises(ImportError, match="pip install keras-nlp"):
        TextSamples("the ", tmp_path)
