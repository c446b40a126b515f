"""Causal attention as a stream."""

import keras
import numpy as np
import pytest
from keras import layers
from random_graphs import noise
from streams import assert_equal, check_equal, outputs_of

from keras_streams import to_stream

pytestmark = pytest.mark.both_backends


def model(causal=True, **options):
    x = keras.Input((None, 6))
    y = layers.Conv1D(6, 3, padding="same")(x)
    attention = layers.MultiHeadAttention(2, 3, value_dim=4, dropout=0.1, **options)
    y = layers.LayerNormalization()(y + attention(y, y, use_causal_mask=causal))
    return keras.Model(x, layers.Dense(2)(y))


def test_causal_attention_is_equal_as_long_as_it_keeps_all_steps():
    net, x = model(), noise(2, 20, 6)
    (y,) = outputs_of(to_stream(net, max_context=16), [x])
    assert_equal(y[:, 1:17], net(x)[:, :16])  # the convolution delays them by a step
    assert np.all(np.isnan(y[:, 17:]))


def test_attention_to_a_sliding_window_is_equal_for_ever():
    check_equal(model(sliding_window=4), [noise(2, 20, 6)])


def test_groups_of_queries_share_their_keys():
    x = keras.Input((None, 6))
    layer = layers.GroupQueryAttention(3, 4, 2, sliding_window=4, use_gate=True)
    check_equal(keras.Model(x, layer(x, x, use_causal_mask=True)), [noise(2, 20, 6)])


def test_attention_to_later_or_all_steps_is_refused():
    with pytest.raises(ValueError, match="attention.*attends to all steps.*use_causal_mask=True"):
        to_stream(model(causal=False), max_context=8)
    with pytest.raises(ValueError, match="attention.*all past steps.*max_context=512"):
        to_stream(model())
    x = keras.Input((None, 6))
    y, _ = layers.MultiHeadAttention(2, 3)(x, x, use_causal_mask=True, return_attention_scores=True)
    with pytest.raises(ValueError, match="takes query, .* only. Received: return_attention_scores"):
        to_stream(keras.Model(x, y), max_context=8)


def test_a_mask_beside_the_causal_one():
    x = keras.Input((20, 6))
    near = np.abs(np.arange(20)[:, None] - np.arange(20)) < 4
    y = layers.MultiHeadAttention(2, 3)(x, x, attention_mask=near, use_causal_mask=True)
    check_equal(keras.Model(x, y), [noise(2, 20, 6)])
