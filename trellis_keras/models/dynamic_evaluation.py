"""Dynamic evaluation: a language model that learns from the text it has just scored."""

import itertools
import math
from collections.abc import Iterable

import keras
import numpy as np
from keras import ops

from keras_streams.xla import compile_xla
from trellis_keras.layers.checks import check_choice, check_integer, check_not_negative
from trellis_keras.models import losses
from trellis_keras.models.base import check_tokens, text_rows
from trellis_keras.models.gradients import with_gradient
from trellis_keras.models.language_model import LanguageModel, check_language_model

_RULES = ("rms", "sgd")


class DynamicEvaluation:
    """Evaluates a language model that keeps learning from the text (Krause et al. 2018).

    The text is split into segments. The model scores a segment, then takes one gradient step on
    its mean loss, and scores the next segment with the updated weights. With w_0 the weights of the
    model and g the gradient of a segment's loss, a step is

        sgd:  w <- w - learning_rate * g + decay * (w_0 - w)
        rms:  w <- w - learning_rate * g / (r + epsilon) + min(decay * r / mean(r), 1) * (w_0 - w)

    where r is the root mean square of the gradients of training batches, from
    `collect_statistics`, and mean(r) its mean over all weights.

    The backbone's cache is carried from segment to segment, and dropout is off. The adapted
    weights are separate arrays: the model itself never changes, so nothing needs to be restored,
    even after an interruption. Every evaluation starts from the model's current weights.
    `learning_rate` and `decay` may be set between evaluations without recompilation.

    Reference:

    - [Krause et al., 2018](https://arxiv.org/abs/1709.07432)

    Args:
        model: A built `LanguageModel` whose backbone streams. Only its trainable weights are
            adapted.
        learning_rate: Nonnegative float.
        decay: Float in [0, 1], strength of the decay towards the model's weights. Defaults to `0`.
        epsilon: Positive float, added to r, only for the rule `"rms"`. Defaults to `None`, which
            is 0.001.
        rule: `"rms"` or `"sgd"`. Defaults to `"rms"`.
        segment_length: Positive integer, number of targets between two steps. Defaults to `5`.

    Example:

    >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
    >>> model.build((None, None))
    >>> tokens = np.tile([1, 5, 2], 20)
    >>> dynamic = DynamicEvaluation(model, learning_rate=0.5, rule="sgd")
    >>> static = DynamicEvaluation(model, learning_rate=0.0, rule="sgd")
    >>> dynamic.evaluate(tokens)["loss"] < static.evaluate(tokens)["loss"]
    True
    """

    def __init__(
        self,
        model: LanguageModel,
        learning_rate: float,
        decay: float = 0.0,
        epsilon: float | None = None,
        rule: str = "rms",
        segment_length: int = 5,
    ) -> None:
        check_choice("rule", rule, _RULES)
        check_language_model(model)
        check_not_negative(learning_rate=learning_rate)
        if not 0 <= decay <= 1:
            raise ValueError(f"`decay` must lie in [0, 1]. Received: decay={decay}")
        if epsilon is not None and (rule == "sgd" or not 0 < epsilon < math.inf):
            raise ValueError(
                "`epsilon` must be positive, and is only for rule='rms'. "
                f"Received: epsilon={epsilon}, rule={rule!r}"
            )
        self.model = model
        self.learning_rate = learning_rate
        self.decay = decay
        self.epsilon = 1e-3 if epsilon is None else epsilon
        self.rule = rule
        self.segment_length = check_integer("segment_length", segment_length, 1)
        self._rms: list[np.ndarray] | None = None
        self._gradient = compile_xla(with_gradient(self._loss), [], jit_compile=False)
        self._learn = compile_xla(self._step, [], jit_compile=False)

    def collect_statistics(self, batches: Iterable, steps: int | None = None) -> None:
        """Measures the gradients of training batches, which the rule `"rms"` needs.

        Args:
            batches: Batches (x, y) or (x, y, weight), such as a `data.TokenStream` of the training
                text. Each batch starts with an empty cache.
            steps: Positive integer, number of batches to use. Defaults to `None`, all of them.
        """
        if steps is not None:
            check_integer("steps", steps, 1)
        weights, others = self._weights()
        squares, count = [np.zeros(w.shape, "float64") for w in self.model.trainable_variables], 0
        if isinstance(batches, keras.utils.PyDataset):
            batches = map(batches.__getitem__, range(len(batches)))
        for batch in itertools.islice(batches, steps):
            x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
            for tokens in (x, y):
                check_tokens(np.asarray(tokens), self.model.vocabulary_size)
            x, y = ops.convert_to_tensor(x), ops.convert_to_tensor(y)
            weight = None if weight is None else ops.convert_to_tensor(weight)
            cache = self.model.initial_cache(len(x))
            _, gradients = self._gradient(weights, others, x, y, weight, cache)
            for square, gradient in zip(squares, gradients, strict=True):
                square += ops.convert_to_numpy(gradient).astype("float64") ** 2
            count += 1
        if not count:
            raise ValueError("`collect_statistics` received no batches.")
        self._rms = [np.sqrt(square / count) for square in squares]

    def evaluate(self, tokens: np.ndarray) -> dict[str, float]:
        """Returns `{"loss": ...}`, the mean loss per token in nats.

        Args:
            tokens: Integer array (time,), or (batch, time) for texts that are read in parallel
                and learned from together. N tokens have N - 1 targets.
        """
        return {"loss": float(np.mean(self.token_losses(tokens), dtype="float64"))}

    def token_losses(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the loss of each target in nats, of shape (time - 1,) or (batch, time - 1)."""
        tokens = np.asarray(tokens)
        rows = text_rows(tokens, self.model.vocabulary_size)
        weights, others = self._weights()
        start, rates = weights, self._rates()
        cache = self.model.initial_cache(len(rows))
        scores = []
        for first in range(0, rows.shape[1] - 1, self.segment_length):
            segment = rows[:, first : first + self.segment_length + 1]
            x, y = (ops.convert_to_tensor(part) for part in (segment[:, :-1], segment[:, 1:]))
            nll, cache, weights = self._learn(weights, others, start, rates, x, y, cache)
            scores.append(ops.convert_to_numpy(nll))
        return np.concatenate(scores, axis=1).reshape(*tokens.shape[:-1], -1)

    def _weights(self):
        """Returns the current values of the trainable and of the other variables."""
        model = self.model
        parts = model.trainable_variables, model.non_trainable_variables
        return [[ops.stop_gradient(ops.convert_to_tensor(v.value)) for v in p] for p in parts]

    def _rates(self):
        """Returns the learning rate and decay of each variable, as scalars or per weight."""
        variables = self.model.trainable_variables
        if self.rule == "sgd":
            pairs = [(self.learning_rate, self.decay)] * len(variables)
        elif self._rms is None:
            raise ValueError(
                "The rule 'rms' needs the gradients of training batches: call "
                "`collect_statistics(batches)` first, or set rule='sgd'."
            )
        else:
            mean = sum(r.sum() for r in self._rms) / sum(r.size for r in self._rms)
            pairs = [
                (self.learning_rate / (r + self.epsilon), np.minimum(self.decay * r / mean, 1))
                for r in self._rms
            ]
        return [
            [ops.convert_to_tensor(rate, v.dtype) for rate in pair]
            for v, pair in zip(variables, pairs, strict=True)
        ]

    def _step(self, weights, others, start, rates, x, y, cache):
        """Scores a segment, then learns from it. Returns its losses, the cache and the weights."""
        (nll, cache), gradients = with_gradient(self._loss)(weights, others, x, y, None, cache)
        learned = [
            w - rate * g + decay * (w0 - w)
            for w, g, w0, (rate, decay) in zip(weights, gradients, start, rates, strict=True)
        ]
        return nll, cache, learned

    def _loss(self, weights, others, x, y, weight, cache):
        """Returns the mean loss of the targets, and (the loss of each, the cache after them)."""
        model = self.model
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        mapping = list(zip(variables, [*weights, *others], strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            hidden, cache = model.hidden_prefill(x, cache)
            nll = model.head.loss(hidden[:, -y.shape[1] :], y)
        return losses.weighted_mean(nll, losses.token_weights(weight, nll)), (nll, cache)
