"""A tiny model to serve, for the tests of the clients and of the test doubles."""

import importlib.util

import numpy as np

from trellis_keras import zoo
from trellis_keras.data import Vocabulary

NAME = "tiny"
CHARACTERS = "\n abcdé"
HAS_GRPC = importlib.util.find_spec("tensorflow_serving") is not None


def make_model(seed):
    model = zoo.trellisnet_char(
        vocabulary=Vocabulary(CHARACTERS, "character"), depth=2, hidden_units=3, embedding_dim=3
    )
    rng = np.random.default_rng(seed)
    for weight in model.trainable_weights:
        weight.assign(rng.normal(size=weight.shape, scale=0.7))
    return model
