"""Language models with carried states: built by their first batch, and reset by hand."""

import keras
import numpy as np
import pytest

from trellis_keras.layers import LRU, StackedRNN, TrellisLayer
from trellis_keras.models import LanguageModel

pytestmark = pytest.mark.both_backends

V = 11
# Without compilation JAX is slow.
COMPILED = {"jit_compile": keras.backend.backend() == "jax"}


def simple_rnn():
    layer = keras.layers.SimpleRNN(6, return_sequences=True, return_state=True)
    return StackedRNN([layer], stateful=True)


def trellis():
    return TrellisLayer(6, 2, stateful=True)


def lattice():
    return LRU(6, return_sequences=True, stateful=True)


def tokens(*shape):
    return np.random.default_rng(0).integers(0, V, shape)


@pytest.mark.parametrize(
    ("backbone", "method"), [(simple_rnn, "fit"), (trellis, "evaluate"), (lattice, "predict")]
)
def test_the_first_batch_builds_the_model(backbone, method):
    model = LanguageModel(V, 6, backbone())
    model.compile("sgd", **COMPILED)
    x = tokens(4, 5)
    getattr(model, method)(x, **({} if method == "predict" else {"y": x}), batch_size=2, verbose=0)
    carried = model.backbone.state_cache.state_variables(training=method == "fit")
    assert carried and all(state.shape[0] == 2 and np.any(state) for state in carried)


def test_states_that_were_reset_by_hand_are_those_that_training_carries():
    model = LanguageModel(V, 6, simple_rnn())
    model.compile("sgd", **COMPILED)
    model.fit(tokens(4, 5), tokens(4, 5), verbose=0)
    for sizes in ([3, 4], [3]):  # other variables of the same size, and of another
        for rows in sizes:
            model.backbone.reset_state(batch_size=rows, training=True)
        model.fit(tokens(rows, 5), tokens(rows, 5), verbose=0)
        (state,) = model.backbone.state_cache.state_variables(training=True)
        assert state.shape == (rows, 6) and np.any(state)


class Arrays(keras.utils.PyDataset):
    """Items without targets, which Keras takes for `predict`."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return tokens(3, 8)


def test_a_dataset_of_plain_arrays():
    model = LanguageModel(V, 6, trellis())
    model.compile("sgd", **COMPILED)
    assert model.predict(Arrays(), verbose=0).shape == (6, 8, V)
