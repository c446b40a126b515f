"""Token ids: the check that they pass where they enter."""

import numpy as np


def check_tokens(tokens, size):
    """Refuses what is no array of token ids, because many embeddings take it silently.

    Args:
        tokens: Array of any shape.
        size: Number of tokens in the vocabulary; ids lie in [0, `size`).

    Raises:
        ValueError: If the type is not an integer one or an id lies outside the range.
    """
    tokens = np.asanyarray(tokens)
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"Token ids must be integers in [0, {size}). Received: an array of type {tokens.dtype}"
        )
    if tokens.size == 0:
        return
    for value in (tokens.min(), tokens.max()):
        if not 0 <= value < size:
            raise ValueError(f"Token ids must lie in [0, {size}). Received: {value}")
