"""What Theorem 1 does not cover is refused, with the reason, before anything is made."""

import keras
import numpy as np
import pytest
from keras import layers

from tests.support.rnn_stacks import CHANNELS, random_stack
from trellis_keras.layers import StackedRNN, TrellisLayer
from trellis_keras.theorem1 import TruncatedRNN, to_dense, to_rnn, to_trellis


def lstm(units=3, channels=CHANNELS, layer=layers.LSTM, **options):
    layer = layer(units, **({"return_sequences": True} | options))
    layer.build((2, None, channels))
    return layer


def gru(**options):
    return lstm(layer=layers.GRU, **options)


class OwnLSTM(layers.LSTM):
    pass


def bidirectional():
    layer = layers.Bidirectional(layers.LSTM(3, return_sequences=True))
    layer.build((None, None, CHANNELS))
    return layer


def of_minimal_cells():
    class OwnCell(layers.LSTMCell):
        pass

    return layers.RNN(OwnCell(3), return_sequences=True)


def convolutional():
    layer = layers.ConvLSTM1D(2, 2, return_sequences=True)
    layer.build((None, None, 4, CHANNELS))
    return layer


REFUSED = {
    "bidirectional": (bidirectional, "reads the future"),
    "go_backwards": (lambda: lstm(go_backwards=True), "go_backwards=True reads the future"),
    "stateful": (lambda: lstm(stateful=True), "one state for training and validation"),
    "dropout": (lambda: lstm(dropout=0.1), "Dropout within a stack.*'dropout': 0.1"),
    "recurrent_dropout": (lambda: lstm(recurrent_dropout=0.2), "'recurrent_dropout': 0.2"),
    "relu": (lambda: lstm(activation="relu"), "activation='relu'"),
    "linear": (lambda: lstm(layer=layers.SimpleRNN, activation=None), "activation='linear'"),
    "hard_sigmoid": (
        lambda: lstm(recurrent_activation="hard_sigmoid"),
        "recurrent_activation='hard_sigmoid'",
    ),
    "reset_before": (lambda: gru(reset_after=False), r"product U\(r \* h\)"),
    "not_built": (lambda: layers.LSTM(3), "is not built"),
    "own_layer": (lambda: lstm(layer=OwnLSTM), "Received: own_lstm.* \\(OwnLSTM\\)"),
    "own_cell": (lambda: built_cells(of_minimal_cells()), "\\(OwnCell\\)"),
    "convolutional": (convolutional, "\\(ConvLSTM1D\\)"),
    "another_layer": (lambda: layers.Dense(3), "\\(Dense\\)"),
    "no_layer": (lambda: "lstm", "\\(str\\)"),
    "empty": (lambda: [], "an empty stack"),
    "last_step_in_the_middle": (
        lambda: [lstm(return_sequences=False), lstm(channels=3)],
        "return_sequences=False below another",
    ),
    "kinds": (
        lambda: [gru(), lstm(channels=3)],
        r"one kind.*\['GRUCell', 'LSTMCell'\]",
    ),
    "policies": (
        lambda: [lstm(), lstm(channels=3, dtype="mixed_bfloat16")],
        "same dtype policy.*mixed_bfloat16",
    ),
    "order": (
        lambda: [lstm(channels=3), lstm(channels=2)],
        "reads 2 channels, above",
    ),
    "dropout_between": (
        lambda: [lstm(), layers.Dropout(0.25), lstm(channels=3)],
        "Dropout within a stack.*rate=0.25",
    ),
    "stack_in_a_list": (
        lambda: [lstm(), StackedRNN([layers.LSTM(3, return_sequences=True, return_state=True)])],
        "\\(StackedRNN\\)",
    ),
}


def built_cells(layer):
    layer.build((None, None, CHANNELS))
    return layer


@pytest.mark.parametrize("name", REFUSED)
def test_no_rnn_of_equation_4(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        to_trellis(make(), 5)


@pytest.mark.parametrize("truncation", [0, -1, 2.0, None])
def test_truncation(truncation):
    with pytest.raises(ValueError, match="`truncation` must be a positive integer"):
        to_trellis(lstm(), truncation)


CONVERTED = {"kernel_structure": "mixed_group", "groups": [3, 2], "group_starts": [1, 2]}

NO_RNN = {
    "kernel_size": {"kernel_size": 3},
    "dilation_rate": {"dilation_rate": 2},
    "injection_every": {"injection_every": 2},
    "group_starts": {"group_starts": None},
    "output_units": {"output_units": 5},
    "dropout": {"dropout": 0.1},
    "weight_dropout": {"weight_dropout": 0.1},
    "return_aux": {"aux_every": 2, "return_aux": True},
    "output_length": {"output_length": 3},
}


def trellis(**options):
    layer = TrellisLayer(5, 6, **({"output_units": 2} | CONVERTED | options))
    layer.build((None, None, CHANNELS))
    return layer


@pytest.mark.parametrize("name", NO_RNN)
def test_a_trellis_that_is_no_rnn(name):
    with pytest.raises(ValueError, match=f"is an RNN only with {name}="):
        to_rnn(trellis(**NO_RNN[name]))


def test_other_gates_and_what_is_no_trellis():
    with pytest.raises(ValueError, match="no recurrent layer for this gated activation"):
        to_rnn(trellis(cell="mgu"))
    with pytest.raises(ValueError, match="is not built"):
        to_rnn(TrellisLayer(5, 6, output_units=2, **CONVERTED))
    with pytest.raises(ValueError, match="takes a TrellisLayer"):
        to_rnn(lstm())


def test_a_dense_kernel_is_an_rnn_only_where_all_else_is_zero():
    dense = to_dense(to_trellis(random_stack("lstm", [3, 2]), 4))
    assert len(to_rnn(dense)) == 2
    kernel = np.array(dense.recurrent_kernel.kernel)
    kernel[0, 0, 4] = 1e-9  # group 1 -> group 2, in the past
    dense.recurrent_kernel.kernel.assign(kernel)
    with pytest.raises(ValueError, match="Received: 1 weights elsewhere"):
        to_rnn(dense)
    with pytest.raises(ValueError, match="is an RNN only with group_starts"):
        config = dense.get_config() | {"group_starts": [1, 1]}
        layer = TrellisLayer.from_config(config)
        layer.build((None, None, CHANNELS))
        to_rnn(layer)


def test_a_single_dense_layer_without_groups():
    layer = TrellisLayer(4, 6, cell="gru")
    layer.build((None, None, CHANNELS))
    with pytest.raises(ValueError, match="Received: .* weights elsewhere"):
        to_rnn(layer)


@pytest.mark.parametrize(
    "wrong, message",
    [({"kernel_structure": "dense"}, "mixed_group"), ({"group_starts": [1, 1]}, "group_starts")],
)
def test_a_truncated_rnn_has_its_structure(wrong, message):
    with pytest.raises(ValueError, match=message):
        TruncatedRNN(5, 6, **({"output_units": 2} | CONVERTED | wrong))


def test_training_respects_the_structure():
    """After a step of training it is an RNN still, another one."""
    rnn = random_stack("rnn", [3, 2])
    layer = to_trellis(rnn, 4)
    model = keras.Sequential([keras.Input((6, CHANNELS)), layer])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(4, 6, CHANNELS))
    model.fit(x, np.zeros((4, 6, 2)), verbose=0)
    for old, new in zip(rnn, to_rnn(layer), strict=True):
        for a, b in zip(old.get_weights(), new.get_weights(), strict=True):
            assert a.shape == b.shape and not np.allclose(a, b)
