"""A neural cache: raises the probability of tokens that followed similar hidden states."""

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.protocol import at_least_float32
from keras_streams.xla import compile_xla
from trellis_keras.layers.checks import check_integer, check_not_negative
from trellis_keras.models.base import text_rows
from trellis_keras.models.generation import TextGenerator, cached_function
from trellis_keras.models.language_model import LanguageModel, check_language_model
from trellis_keras.types import Cache, Tensor

# Number of tokens that `log_probabilities` reads at once.
_SEGMENT = 256
# Placeholder for tokens before the start of the text.
_NO_TOKEN = -1


class NeuralCache(TextGenerator, keras.layers.Layer):
    """A trained language model with a cache of its last hidden states (Grave et al. 2017).

    With h_t the model's hidden state after token x_t (the head's input), the next token w has

        p(w) = (1 - mix) * p_model(w) + mix * p_cache(w)

    where p_cache(w) is proportional to the sum over i of exp(theta * h_t . h_i), t - size <= i < t,
    with x_{i+1} = w. A word becomes more likely if it followed a similar state before. Nothing is
    trained. After the first token the cache is empty, and p is p_model.

    It streams like a `LanguageModel`, with constant memory: it has `initial_cache`, `step`,
    `prefill`, `generate` and `generate_stream`, and works with `keras_streams.compiled_step` and
    `scoring.score`. It always uses the model's current weights.

    Reference:

    - [Grave et al., 2017](https://arxiv.org/abs/1612.04426)

    Args:
        model: A built `LanguageModel` whose backbone streams.
        size: Positive integer, number of hidden states in the cache. Defaults to `2000`.
        theta: Nonnegative float, inverse temperature of the similarity. Defaults to `0.3`.
        mix: Float in (0, 1), weight of the cache. Defaults to `0.1`.

    Example:

    >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
    >>> model.build((None, None))
    >>> tokens = np.tile([1, 5, 2], 20)
    >>> likely = NeuralCache(model, size=30, theta=1.0, mix=0.5).evaluate(tokens)["loss"]
    >>> likely < NeuralCache(model, size=30, theta=1.0, mix=0.01).evaluate(tokens)["loss"]
    True
    """

    traced_attributes = ("size", "theta", "mix")

    def __init__(
        self, model: LanguageModel, size: int = 2000, theta: float = 0.3, mix: float = 0.1
    ) -> None:
        check_language_model(model)
        check_not_negative(theta=theta)
        if not 0 < mix < 1:
            raise ValueError(f"`mix` must lie between 0 and 1. Received: mix={mix}")
        super().__init__(name=model.name)
        self.model = model
        self.size = check_integer("size", size, 1)
        self.theta, self.mix = float(theta), float(mix)
        self.vocabulary, self.vocabulary_size = model.vocabulary, model.vocabulary_size
        self.built = True

    @property
    def backbone(self) -> keras.Layer:
        """The model's backbone."""
        return self.model.backbone

    # Streaming and generation

    def stream(self) -> Any:
        """Returns the backbone's stream."""
        return self.model.stream()

    def initial_cache(self, batch_size: int) -> Cache:
        """Returns the cache before the first token of `batch_size` rows.

        It holds the model's cache, the last `size` + 1 tokens, and the hidden states after them.
        """
        cache = self.model.initial_cache(batch_size)
        width = self.model.embedding_dim
        outputs = self.backbone.compute_output_shape((batch_size, None, width))
        channels = (outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs)[-1]
        shape = batch_size, self.size + 1
        return {
            "model": cache,
            "tokens": ops.full(shape, _NO_TOKEN, dtype="int32"),
            "hidden": ops.zeros((*shape, channels), dtype=self._state_dtype),
        }

    @property
    def _state_dtype(self):
        return at_least_float32(self.model.compute_dtype)

    def hidden_step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Returns hidden states (batch, channels) after tokens (batch,), and the new cache."""
        hidden, inner = self.model.hidden_step(tokens, cache["model"])
        read = self._extend(cache, ops.convert_to_tensor(tokens)[:, None], hidden[:, None])
        return hidden, self._kept(inner, *read)

    def hidden_prefill(self, tokens: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Returns hidden states (batch, time, channels) after tokens, and the cache."""
        cache = self.initial_cache(ops.shape(tokens)[0]) if cache is None else cache
        hidden, inner = self.model.hidden_prefill(tokens, cache["model"])
        return hidden, self._kept(inner, *self._extend(cache, tokens, hidden))

    def next_log_probs(self, hidden: Tensor, cache: Cache) -> Tensor:
        """Returns log-probabilities (batch, V) of the next token, as `LanguageModel` does."""
        log_p = self.model.next_log_probs(hidden, cache["model"])
        followers, weights = self._attend(cache["tokens"], cache["hidden"], 1)
        weights = weights[:, 0]
        rows = ops.arange(ops.shape(weights)[0], dtype="int32")[:, None]
        # Tokens before the start of the text have zero weight.
        words = ops.maximum(followers, 0)
        places = ops.stack([ops.broadcast_to(rows, ops.shape(words)), words], axis=-1)
        p_cache = ops.scatter(places, weights, ops.shape(log_p))
        return self._mixed(log_p, self._log_cache(p_cache, weights, log_p))

    # Losses

    def evaluate(self, tokens: np.ndarray) -> dict[str, float]:
        """Returns `{"loss": ...}`, the mean loss per token in nats.

        Args:
            tokens: Integer array (time,), or (batch, time) for texts that are read in parallel,
                each with its own cache. N tokens have N - 1 targets.
        """
        return {"loss": float(np.mean(self.token_losses(tokens), dtype="float64"))}

    def token_losses(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the loss of each target in nats, of shape (time - 1,) or (batch, time - 1)."""
        return -ops.convert_to_numpy(self._mixed(*self.log_probabilities(tokens)))

    def log_probabilities(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns log p_model and log p_cache of each target, to tune `mix`.

        While the cache is empty, log p_cache equals log p_model. After that it is -inf for
        a word that the cache does not contain.
        """
        tokens = np.asarray(tokens)
        rows = text_rows(tokens, self.vocabulary_size)
        cache = self.initial_cache(len(rows))
        read = cached_function(
            self, "segment", lambda: compile_xla(self._segment_log_probs, self.variables)
        )
        parts = []
        for first in range(0, rows.shape[1] - 1, _SEGMENT):
            segment = ops.convert_to_tensor(rows[:, first : first + _SEGMENT + 1])
            *found, cache = read(segment, cache)
            parts.append([ops.convert_to_numpy(log_p) for log_p in found])
        log_p, log_cache = np.concatenate(parts, axis=2)
        shape = *tokens.shape[:-1], -1
        return log_p.reshape(shape), log_cache.reshape(shape)

    def text_loss(self, tokens: Tensor) -> Tensor:
        """Returns the loss of tokens[:, 1:] in nats (batch, time - 1), in one forward pass."""
        hidden = self.model.encode(tokens[:, :-1])["hidden"]
        read = ops.cast(tokens[:, :-1], "int32"), ops.cast(hidden, self._state_dtype)
        return -self._mixed(*self._targets(hidden, *read, tokens[:, 1:]))

    def segment_loss(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Returns the `text_loss` of a segment, and the cache before tokens[:, -1]."""
        *found, cache = self._segment_log_probs(tokens, cache)
        return -self._mixed(*found), cache

    def _segment_log_probs(self, tokens, cache):
        """Returns log p_model and log p_cache of tokens[:, 1:], and the cache."""
        hidden, inner = self.model.hidden_prefill(tokens[:, :-1], cache["model"])
        read = self._extend(cache, tokens[:, :-1], hidden)
        return *self._targets(hidden, *read, tokens[:, 1:]), self._kept(inner, *read)

    def _targets(self, hidden, tokens, states, targets):
        """Returns log p_model and log p_cache of targets (batch, steps).

        `hidden` (batch, steps, channels) is the end of `states`, whose tokens are `tokens`.
        """
        log_p = -self.model.head.loss(hidden, targets)
        followers, weights = self._attend(tokens, states, targets.shape[1])
        hits = followers[:, None] == ops.cast(targets, "int32")[..., None]
        p_cache = ops.sum(ops.where(hits, weights, 0.0), axis=-1)
        return log_p, self._log_cache(p_cache[..., None], weights, log_p[..., None])[..., 0]

    # The equations

    def _attend(self, tokens, states, steps):
        """Returns the token after each state, and its weight at each of the last positions.

        Args:
            tokens: Tensor (batch, time), `_NO_TOKEN` before the start of the text.
            states: Tensor (batch, time, channels), the hidden states after them.
            steps: Number of last positions.

        Returns:
            Tokens (batch, time - 1), and weights (batch, steps, time - 1), each row of which sums
            to 1, or to 0 if nothing comes before it.
        """
        time = tokens.shape[1]
        position, earlier = np.arange(time)[-steps:, None], np.arange(time - 1)
        near = (earlier < position) & (earlier >= position - self.size)
        seen = (tokens[:, None, :-1] != _NO_TOKEN) & near
        products = ops.matmul(states[:, -steps:], ops.swapaxes(states[:, :-1], 1, 2))
        weights = ops.softmax(ops.where(seen, self.theta * products, -1e30), axis=-1)
        return tokens[:, 1:], ops.where(seen, weights, 0.0)

    def _log_cache(self, p_cache, weights, log_p):
        """Returns log p_cache, or log p_model where the cache is empty."""
        is_empty = ops.sum(weights, axis=-1, keepdims=True) == 0
        return ops.where(is_empty, log_p, ops.log(p_cache))

    def _mixed(self, log_p, log_cache):
        return ops.logaddexp(math.log1p(-self.mix) + log_p, math.log(self.mix) + log_cache)

    # The cache

    def _extend(self, cache, tokens, hidden):
        """Returns the tokens of a cache and new ones (batch, time), and their hidden states."""
        tokens, hidden = ops.cast(tokens, "int32"), ops.cast(hidden, self._state_dtype)
        return (
            ops.concatenate([cache["tokens"], tokens], axis=1),
            ops.concatenate([cache["hidden"], hidden], axis=1),
        )

    def _kept(self, inner, tokens, hidden):
        """Returns the cache of the last tokens and their hidden states."""
        kept = self.size + 1
        return {"model": inner, "tokens": tokens[:, -kept:], "hidden": hidden[:, -kept:]}
