"""Streaming and text generation of language models.

A model reads the prompt in one forward pass, then goes on token by token with constant work, in a
loop compiled by XLA. The samplers are those of Keras-NLP (Keras-Hub): they ask for the scores of
the token at `index`, `next(prompt, cache, index)`, and may reorder the rows of the cache.
"""

from trellis_keras.generation.mixin import Generation

__all__ = ["Generation"]
