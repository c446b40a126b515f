"""Small models of every kind, and what Keras makes of requests."""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from trellis_keras.data import Vocabulary
from trellis_keras.layers import (
    LRU,
    TCN,
    AdaptiveSoftmax,
    GridLSTMCell,
    MixtureOfSoftmaxes,
    RHNCell,
    StackedRNN,
    TrellisLayer,
)
from trellis_keras.models import (
    LanguageModel,
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)

CHARACTERS = Vocabulary("\n abcdé", "character")
BYTES = Vocabulary("\n abcd\xc3\xa9", "byte", unknown="a")
WORDS = Vocabulary(["<eos>", "the", "a", "cat", "sat", "bad", "ö", "<unk>"], unknown="<unk>")


def _trellisnet(vocabulary=CHARACTERS, head=None, **options):
    backbone = TrellisLayer(6, 3, output_units=4, dilation_rate=[1, 2], aux_every=1, **options)
    return LanguageModel(len(vocabulary), 4, backbone, head=head, vocabulary=vocabulary)


def _cells():
    states = {"return_sequences": True, "return_state": True}
    lstm = keras.layers.LSTM(4, dropout=0.1, **states)
    cells = keras.layers.RNN([GridLSTMCell(4), RHNCell(4, 2)], **states)
    return LanguageModel(9, 4, StackedRNN([lstm, cells]))


# One model for each kind of backbone, head and output, small enough to export in seconds.
LANGUAGE = {
    "trellisnet": lambda: _trellisnet(stateful=True, weight_norm=True, weight_dropout=0.2),
    "mixture": lambda: _trellisnet(WORDS, MixtureOfSoftmaxes(len(WORDS), 2, latent_units=4)),
    "adaptive": lambda: LanguageModel(
        8, 4, TCN(4, kernel_size=3, depth=2), head=AdaptiveSoftmax(8, (2, 4)), vocabulary=BYTES
    ),
    "lru": lambda: LanguageModel(9, 4, LRU(4, 2, return_sequences=True)),
    "cells": _cells,
}
MODELS = LANGUAGE | {
    "classifier": lambda: SequenceClassifier(
        TrellisLayer(6, 3, dilation_rate=[1, 2], return_sequences=False), 3
    ),
    "tagger": lambda: SequenceClassifier(TCN(3, kernel_size=2, depth=2), 3, per_step=True),
    "regressor": lambda: SequenceRegressor(
        TCN(3, kernel_size=3, depth=2, return_sequences=False), 1
    ),
    "music": lambda: PolyphonicModel(
        StackedRNN([keras.layers.GRU(4, return_sequences=True, return_state=True)]), 2
    ),
}
WITH_TEXT = ["trellisnet", "mixture", "adaptive"]


def small_model(name):
    """Returns a model of `MODELS` whose weights are so large that no two answers are alike."""
    model = MODELS[name]()
    model.build((None, None) if name in LANGUAGE else (None, None, 2))
    for index, weight in enumerate(model.trainable_weights):
        weight.assign(np.random.default_rng(index).normal(size=weight.shape, scale=0.5))
    if getattr(model, "normalize", False):
        model.adapt(np.random.default_rng(0).random((50, 2)))
    return model


def inputs(model, batch, time):
    """Returns the name of the model's input, and an array of this shape."""
    rng = np.random.default_rng(time)
    if isinstance(model, LanguageModel):
        return "tokens", rng.integers(0, model.vocabulary_size, (batch, time)).astype("int32")
    return "inputs", rng.random((batch, time, 2)).astype("float32")


_FORWARD = {}  # compiled forward passes by model


def scores(model, array):
    """Returns what Keras computes of whole rows from empty states, and its name on a server."""
    if id(model) not in _FORWARD:
        # Of unknown shape: compiled once.
        name, example = inputs(model, 1, 1)
        spec = tf.TensorSpec([None, None, *example.shape[2:]], example.dtype, name)
        plain = _without_states(model)
        forward = tf.function(lambda x: plain(x, training=False), [spec], autograph=False)
        _FORWARD[id(model)] = model, forward
    outputs = _FORWARD[id(model)][1](array)
    if isinstance(model, LanguageModel):
        return "log_probabilities", ops.convert_to_numpy(outputs)
    if isinstance(model, SequenceClassifier):
        return "probabilities", ops.convert_to_numpy(ops.softmax(outputs))
    if isinstance(model, PolyphonicModel):
        return "probabilities", ops.convert_to_numpy(ops.sigmoid(outputs))
    return "predictions", ops.convert_to_numpy(outputs)


def _without_states(model):
    if not getattr(model.backbone, "stateful", False):
        return model
    config = model.get_config()
    config["backbone"]["config"]["stateful"] = False
    plain = type(model).from_config(config)
    plain.build((None, None))
    plain.set_weights(model.get_weights())
    return plain


def scores_so_far(model, array, times):
    """Returns the scores (batch, len(times), ...) of rows that end at each of `times`."""
    found = [scores(model, array[:, :time])[1] for time in times]
    return np.stack([f[:, -1] if f.ndim == 3 else f for f in found], axis=1)
