"""A language model reads tokens: what its head is given, and the cache behind them."""

import keras
from keras import ops

from trellis_keras.layers import base, streaming


def check_streams(model):
    """Refuses a model that cannot stream.

    Raises:
        ValueError: Its backbone does not follow the protocol, or it is not built.
    """
    streaming.check_streams(model.backbone)
    streaming.check_built(model)


def step(model, tokens, cache):
    """Returns the hidden states (batch, channels) of tokens (batch,), and the new cache."""
    return model.backbone.step(_embed(model, tokens, (None,)), cache)


def prefill(model, tokens, cache=None):
    """Returns the hidden states (batch, time, channels) of tokens, and the cache after them."""
    embedded = _embed(model, tokens, (None, None))
    if embedded.shape[1] == 0:
        raise ValueError("`prefill` needs at least one token. Received: shape (batch, 0)")
    return model.backbone.prefill(embedded, cache)


def _embed(model, tokens, shape):
    check_streams(model)
    tokens = ops.convert_to_tensor(tokens)
    if not keras.backend.is_int_dtype(tokens.dtype):
        raise ValueError(f"Tokens must be integers. Received: dtype {tokens.dtype}")
    base.check_shape("tokens", tokens, shape)
    return model.embedding(tokens)
