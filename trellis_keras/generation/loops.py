"""The loop that writes tokens: compiled as a whole, or a step at a time."""

import keras
import numpy as np
from keras import ops

from trellis_keras.generation import reading, samplers
from trellis_keras.generation.kept import kept
from trellis_keras.generation.text import OPEN
from trellis_keras.layers.streaming import compile_xla


def sample(model, given, sampler, stop):
    """Writes all rows to their end in one compiled loop.

    Args:
        model: Language model.
        given: int32 array (batch, max_length): the prompts, and `OPEN` behind them.
        sampler: Keras-NLP sampler; its state is advanced.
        stop: Tuple of the ids after which a row ends.

    Returns:
        int32 array (batch, max_length). What follows a row's first new stop token means nothing.
    """
    shortest = int((given != OPEN).sum(axis=1).min())
    shared = given[:, :shortest]
    options = {}
    if samplers.compares_hidden_states(sampler):
        hidden = _hidden_states(model, shared)
        rest = given.shape[1] - shortest
        options["hidden_states"] = ops.pad(hidden, [[0, 0], [0, rest], [0, 0]])
    loop = _compiled(_loop, model, sampler, given.shape, stop)
    index = ops.convert_to_tensor(shortest, "int32")
    ids = loop(ops.convert_to_tensor(given), _cache_before_last(model, shared), index, options)
    return ops.convert_to_numpy(ids)


def stream(model, prompt, max_length, sampler, stop):
    """Yields the ids that follow a prompt (time,), each as soon as it is chosen."""
    choice = _compiled(_choice, model, sampler, 1)
    cache = _cache_before_last(model, prompt[None])
    token = ops.convert_to_tensor(prompt[-1:])
    for _ in range(max_length - len(prompt)):
        token, cache = choice(token, cache)
        chosen = int(ops.convert_to_numpy(token)[0])
        yield chosen
        if chosen in stop:
            return


def _cache_before_last(model, tokens):
    """The samplers' first step reads the last token, so it stays out of the cache."""
    if tokens.shape[1] == 1:
        return model.initial_cache(len(tokens))
    return _read(model, tokens[:, :-1], "cache", lambda x: reading.prefill(model, x)[1])


def _hidden_states(model, tokens):
    return _read(model, tokens, "hidden", lambda x: _comparable(reading.prefill(model, x)[0]))


def _read(model, tokens, name, function):
    key = name, *tokens.shape
    compiled = kept(model, key, lambda: compile_xla(function, model.variables))
    return compiled(ops.convert_to_tensor(tokens))


def _compiled(make, model, sampler, shape, *settings):
    """Returns `make(model, sampler, *settings)` compiled; it advances the sampler's state.

    Each shape of the arguments has one of its own, so that those no longer used can go.
    """

    def build():
        # One of our own: the user may change the attributes of theirs.
        known = samplers.from_library(sampler)
        own = sampler.from_config(sampler.get_config()) if known else sampler
        return compile_xla(make(model, own, *settings), model.variables, own.variables), own

    key = (make.__name__, *samplers.key(sampler), shape, *settings)
    function, own = kept(model, key, build)

    def call(*tensors):
        _copy_state(sampler, own)
        result = function(*tensors)
        _copy_state(own, sampler)
        return result

    return call


def _copy_state(source, target):
    for a, b in zip(source.variables, target.variables, strict=True):
        b.assign(a.value)


# What is compiled


def _loop(model, sampler, stop):
    def next_scores(ids, cache, index):
        cache, given = cache
        hidden, cache = reading.step(model, ids[:, index - 1], cache)
        log_probs = _possible(model.head(hidden), ids, given, index, stop)
        return log_probs, _comparable(hidden), (cache, given)

    def loop(given, cache, index, options):
        # The prompts travel with the cache, so that each of a row's beams has them too.
        return sampler(
            next_scores,
            given,
            (cache, given),
            index,
            mask=given != OPEN,
            stop_token_ids=list(stop) or None,
            # On JAX the loop hands the model's variables through.
            model=model,
            **options,
        )

    return loop


def _choice(model, sampler):
    def choice(token, cache):
        log_probs, cache = model.step(token, cache)
        chosen = sampler.get_next_token(sampler.compute_probabilities(log_probs))
        return ops.cast(chosen, token.dtype), cache

    return choice


def _possible(log_probs, ids, given, index, stop):
    """Leaves the rows that are within their prompt, or have ended, one token at `index`.

    A beam search compares sums: a token that is not chosen must not add to them, and must not
    make several beams of one.
    """
    # Contrastive search asks for one more place than there is.
    only = given[:, ops.minimum(index, given.shape[1] - 1)]
    if stop:
        is_stop = ops.any(ids[:, :, None] == np.array(stop, "int32"), axis=-1)
        ended = ops.any(is_stop & (given == OPEN), axis=1)
        only = ops.where(ended, ids[:, index - 1], only)
    only = only[:, None]
    impossible = (only != OPEN) & (ops.arange(log_probs.shape[1]) != only)
    certain = ops.where(only == OPEN, log_probs, 0.0)
    return ops.where(impossible, -np.inf, certain)


def _comparable(hidden):
    """Hidden states between which there is an angle, be it that ReLUs made all of one zero."""
    return ops.cast(hidden, keras.backend.result_type(hidden.dtype, "float32")) + 1e-12
