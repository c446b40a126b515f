"""Checks of Keras-NLP's samplers, and copies that draw faster."""

import functools
import json
import numbers
import sys
from types import ModuleType
from typing import Any

import keras
from keras import ops

from trellis_keras.layers.checks import is_integer

_NAMES = ("beam", "contrastive", "greedy", "random", "top_k", "top_p")
# Below, a sampler is greedy: quotients of log-probabilities exceed float32.
_LEAST_TEMPERATURE = 1e-30


def library() -> ModuleType:
    """Returns `keras_nlp.samplers`.

    Raises:
        ImportError: If Keras-NLP is not installed.
    """
    try:
        import keras_nlp
    except ImportError as error:
        raise ImportError(
            "`generate` takes its samplers from Keras-NLP. Install it with `pip install keras-nlp`."
        ) from error
    return keras_nlp.samplers


def get_sampler(sampler: Any, vocabulary_size: int) -> Any:
    """Returns a Keras-NLP sampler, given as a name or an instance, after checking it."""
    samplers = library()
    speculative = getattr(samplers, "SpeculativeSampler", ())  # not in every version
    if sampler == "speculative" or isinstance(sampler, speculative):
        raise ValueError(
            "The speculative sampler needs a draft model and a cache that can return to an earlier "
            "token, which a streaming cache cannot."
        )
    if isinstance(sampler, str) and sampler in _NAMES:
        sampler = samplers.get(sampler)
    if not isinstance(sampler, samplers.Sampler):
        raise ValueError(
            f"`sampler` must be one of {_NAMES} or a `keras_nlp.samplers.Sampler`. "
            f"Received: sampler={sampler!r}"
        )
    if getattr(sampler, "return_all_beams", False):
        raise ValueError("`generate` returns the best beam: `return_all_beams` must be False.")
    _check_settings(sampler, vocabulary_size)
    if getattr(sampler, "temperature", 1.0) >= _LEAST_TEMPERATURE:
        return sampler
    if is_custom(sampler) or isinstance(sampler, samplers.ContrastiveSampler):
        raise ValueError(
            f"A {type(sampler).__name__} needs a `temperature` of {_LEAST_TEMPERATURE} or more. "
            f"Received: temperature={sampler.temperature}"
        )
    return samplers.GreedySampler()


def _check_settings(sampler, vocabulary_size):
    samplers = library()

    def is_count(k):
        return is_integer(k, minimum=1) and k <= vocabulary_size

    def is_within(number, largest=1.0):
        return isinstance(number, numbers.Real) and 0 <= number <= largest

    count = f"an integer in [1, {vocabulary_size}], the size of the vocabulary"
    highest = sys.float_info.max
    for kind, name, needed, is_valid in (
        (samplers.Sampler, "temperature", "finite and >= 0", lambda t: is_within(t, highest)),
        (samplers.TopKSampler, "k", count, is_count),
        (samplers.TopPSampler, "k", count, lambda k: k is None or is_count(k)),
        (samplers.TopPSampler, "p", "in [0, 1]", is_within),
        (samplers.ContrastiveSampler, "k", count, is_count),
        (samplers.ContrastiveSampler, "alpha", "in [0, 1]", is_within),
        (samplers.BeamSampler, "num_beams", "a positive integer", lambda n: is_integer(n, 1)),
    ):
        if not isinstance(sampler, kind):
            continue
        value = getattr(sampler, name)
        if not is_valid(value):
            raise ValueError(f"`{name}` of a sampler must be {needed}. Received: {name}={value!r}")


def is_custom(sampler: Any) -> bool:
    """Returns whether a sampler is of a class that is not Keras-NLP's."""
    return type(sampler) not in vars(library()).values()


def inference_copy(sampler: Any) -> Any:
    """Returns a copy of a Keras-NLP sampler that takes low temperatures and draws fast.

    The original draws one number per token of the vocabulary, which may take longer than the rest
    of a step; the copy draws one per row.
    """
    copy = sampler.from_config(sampler.get_config())
    copy.compute_probabilities = functools.partial(_probabilities, float(sampler.temperature))
    if type(sampler) is library().RandomSampler:
        copy.get_next_token = functools.partial(_draw, seed_generator=copy.seed_generator)
    elif type(sampler) is library().TopPSampler:
        copy.get_next_token = functools.partial(_draw_likely_token, copy)
    return copy


def _probabilities(temperature, log_probs):
    """Returns the probabilities at a temperature; the most probable token keeps exactly exp(0).

    Divided by a low temperature first, log-probabilities are so large that the softmax may round
    all of its terms to 0.
    """
    log_probs = ops.cast(log_probs, "float32")
    best = ops.max(log_probs, axis=-1, keepdims=True)
    return ops.softmax((log_probs - best) / temperature)


def _draw_likely_token(sampler, probabilities):
    """Draws one of the likeliest tokens, before which the sum of probabilities is at most p."""
    size = probabilities.shape[-1] if sampler.k is None else sampler.k
    likely, tokens = ops.top_k(probabilities, size)
    before = ops.cumsum(likely, axis=-1) - likely
    index = _draw(ops.where(before <= sampler.p, likely, 0.0), sampler.seed_generator)
    return ops.take_along_axis(tokens, index[:, None], axis=-1)[:, 0]


def _draw(weights, seed_generator):
    """Draws an index per row, with probabilities in proportion to its weights (rows, choices)."""
    sums = ops.cumsum(weights, axis=-1)
    number = keras.random.uniform((weights.shape[0], 1), dtype=sums.dtype, seed=seed_generator)
    return ops.sum(ops.cast(sums <= number * sums[:, -1:], "int32"), axis=-1)


def settings_of(sampler: Any) -> str:
    """Returns a sampler's config without the seed, as JSON. (It may contain NumPy numbers.)"""
    config = {k: v for k, v in sampler.get_config().items() if k != "seed"}
    return json.dumps(config, sort_keys=True, default=repr)


def copy_state(source: Any, target: Any) -> None:
    """Copies the state of a sampler's random numbers to another sampler."""
    for a, b in zip(source.variables, target.variables, strict=True):
        b.assign(a.value)


def set_seed(sampler: Any, seed: int | None) -> None:
    """Starts a sampler from a seed, or from its state for None."""
    if seed is not None:
        for state in sampler.variables:
            state.assign(keras.random.SeedGenerator(seed % 2**32).state)
