"""Streaming and text generation of language models.

A model reads the prompt in one forward pass, then goes on token by token with constant work, in a
loop compiled by XLA. The samplers are those of Keras-NLP (Keras-Hub): they ask for the scores of
the token at `index`, `next(prompt, cache, index)`, and may reorder the rows of the cache.
"""

import json

import keras
import numpy as np
from keras import ops

from trellis_keras.layers import streaming
from trellis_keras.tokens import check_tokens


class Generation:
    """What `LanguageModel` adds to stream and to generate.

    The model has `embedding`, `backbone`, `head` and `vocabulary`; the backbone follows the
    protocol of `layers.streaming`.
    """

    def initial_cache(self, batch_size):
        """Returns the backbone's cache before the first token, see `layers.streaming`.

        Raises:
            ValueError: The backbone does not stream, or the model is not built.
        """
        _check_streams(self)
        return self.backbone.initial_cache(batch_size)

    def step(self, tokens, cache):
        """Reads one token per row; its work does not depend on how many came before.

        Not compiled by itself: call it within a `tf.function` or `jax.jit`.

        Args:
            tokens: Integer tensor (batch,).
            cache: What `initial_cache`, `step` or `prefill` returned.

        Returns:
            Log-probabilities (batch, V) of the next token, and the new cache.

        Raises:
            ValueError: The backbone does not stream, the model is not built, or tokens and cache
                do not fit.

        Example:

        >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
        >>> model.build((None, None))
        >>> log_probs, cache = model.step(np.array([1, 5]), model.initial_cache(2))
        >>> tuple(log_probs.shape)
        (2, 7)
        """
        _check_streams(self)
        hidden, cache = self.backbone.step(_embed(self, tokens, (None,)), cache)
        return self.head(hidden), cache

    def prefill(self, tokens, cache=None):
        """Reads a whole prompt by one forward pass.

        Args:
            tokens: Integer tensor (batch, time).
            cache: The cache to go on from. Default: the initial one.

        Returns:
            Log-probabilities (batch, V) of the token after the last, and the cache.

        Raises:
            ValueError: As `step`, or no tokens.
        """
        _check_streams(self)
        embedded = _embed(self, tokens, (None, None))
        if embedded.shape[1] == 0:
            raise ValueError("`prefill` needs at least one token. Received: shape (batch, 0)")
        hidden, cache = self.backbone.prefill(embedded, cache)
        return self.head(hidden[:, -1]), cache

    def generate(self, prompts, max_length, sampler="top_p", *, seed=None, stop_tokens=None):
        """Goes on from prompts, token by token.

        Args:
            prompts: A string or a list of strings (for a model with a vocabulary), or integers
                (batch, time). All of the same number of tokens, at least one.
            max_length: Length of the result in tokens, the prompt included.
            sampler: `"greedy"`, `"top_k"`, `"top_p"`, `"random"` or `"beam"`, with Keras-NLP's
                defaults, or a `keras_nlp.samplers.Sampler`, for instance
                `TopPSampler(p=0.9, temperature=0.8)`.
            seed: Integer; the same one gives the same text. Default: a string's sampler starts
                at random, a sampler object goes on from where it is.
            stop_tokens: Token or list of tokens (ids, or strings of one token each) after which
                a row ends. Default: none.

        Returns:
            Strings if the prompts were strings, else ids (batch, length), the prompt included.
            A row ends with its first stop token; ids of shorter rows are filled up with it.

        Raises:
            ValueError: Prompts of unequal length, unknown tokens, `max_length` not longer than
                the prompt, a sampler that does not exist or needs what the model lacks, or a
                backbone that does not stream.

        Example:

        >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
        >>> model.build((None, None))
        >>> model.generate(np.array([[1, 2], [3, 4]]), max_length=10, sampler="greedy").shape
        (2, 10)
        """
        _check_streams(self)
        ids, is_text = _encode_prompts(self, prompts)
        if max_length <= ids.shape[1]:
            raise ValueError(
                "`max_length` counts the prompt too, so it must be greater than its "
                f"{ids.shape[1]} tokens. Received: max_length={max_length}"
            )
        stop = _stop_ids(self, stop_tokens)
        sampler = _get_sampler(sampler, self.vocabulary_size)
        if seed is not None:
            for state in sampler.variables:
                state.assign(keras.random.SeedGenerator(seed).state)
        generated = _generate(self, ids, max_length, sampler, stop)
        lengths = _lengths(generated, ids.shape[1], stop)
        if not is_text:
            return _fill_up(generated, lengths)
        rows = zip(generated, lengths, strict=True)
        texts = [self.vocabulary.decode(row[:length]) for row, length in rows]
        return texts[0] if isinstance(prompts, str) else texts


def _check_streams(model):
    streaming.check_streams(model.backbone)
    streaming.check_built(model)


def _embed(model, tokens, shape):
    tokens = ops.convert_to_tensor(tokens)
    if not keras.backend.is_int_dtype(tokens.dtype):
        raise ValueError(f"Tokens must be integers. Received: dtype {tokens.dtype}")
    streaming.check_shape("tokens", tokens, shape)
    return model.embedding(tokens)


def _encode_prompts(model, prompts):
    """Returns ids (batch, time) and whether the prompts were text."""
    texts = [prompts] if isinstance(prompts, str) else prompts
    is_text = len(texts) > 0 and all(isinstance(text, str) for text in texts)
    if is_text:
        rows = [_encode(model, text) for text in texts]
    else:
        rows = [np.asarray(row) for row in texts]
    lengths = [len(row) if row.ndim == 1 else None for row in rows]
    if not lengths or lengths[0] in (0, None) or len(set(lengths)) > 1:
        raise ValueError(
            "`prompts` must be strings or rows of token ids, at least one, all of the same "
            f"number of tokens and none empty. Received: prompts of {lengths} tokens"
        )
    ids = np.stack(rows)
    check_tokens(ids, model.vocabulary_size)
    return ids.astype("int32"), is_text


def _encode(model, text):
    if model.vocabulary is None:
        raise ValueError(
            "The model has no vocabulary to read text with: give `prompts` and `stop_tokens` as "
            f"token ids. Received: {text!r}"
        )
    return model.vocabulary.encode(text, final_eos=False)


def _stop_ids(model, stop_tokens):
    """Returns a tuple of ids."""
    if stop_tokens is None:
        return ()
    several = isinstance(stop_tokens, (list, tuple, np.ndarray))
    ids = []
    for token in stop_tokens if several else [stop_tokens]:
        found = _encode(model, token) if isinstance(token, str) else np.asarray([token])
        if len(found) != 1:
            raise ValueError(
                f"`stop_tokens` must be single tokens. Received: {token!r}, {len(found)} tokens"
            )
        check_tokens(found, model.vocabulary_size)
        ids.append(int(found[0]))
    return tuple(ids)


def _lengths(ids, prompt_length, stop):
    """Length of every row up to and including its first new stop token."""
    is_stop = np.isin(ids, stop)
    is_stop[:, :prompt_length] = False
    return np.where(is_stop.any(axis=1), is_stop.argmax(axis=1) + 1, ids.shape[1])


def _fill_up(ids, lengths):
    """Cuts to the longest row; shorter ones repeat their last token."""
    steps = np.minimum(np.arange(lengths.max())[None], lengths[:, None] - 1)
    return np.take_along_axis(ids, steps, axis=1)


# Samplers


def _samplers():
    try:
        import keras_nlp
    except ImportError as error:
        raise ImportError(
            "`generate` takes its samplers from Keras-NLP. Install it with `pip install keras-nlp`."
        ) from error
    return keras_nlp.samplers


def _get_sampler(sampler, vocabulary_size):
    """Returns a Keras-NLP sampler that the model can feed.

    Raises:
        ValueError: It does not exist, or needs what the model lacks.
    """
    samplers = _samplers()
    lacking = {
        "contrastive": (samplers.ContrastiveSampler, "the hidden states of all past tokens"),
        "speculative": (samplers.SpeculativeSampler, "a second, smaller model"),
    }
    for name, (kind, needs) in lacking.items():
        if sampler == name or isinstance(sampler, kind):
            raise ValueError(f"The {name} sampler needs {needs}, which a language model lacks.")
    by_name = {
        "beam": samplers.BeamSampler,
        "greedy": samplers.GreedySampler,
        "random": samplers.RandomSampler,
        "top_k": samplers.TopKSampler,
        "top_p": samplers.TopPSampler,
    }
    if isinstance(sampler, str) and sampler in by_name:
        sampler = by_name[sampler]()
    if not isinstance(sampler, samplers.Sampler):
        raise ValueError(
            f"`sampler` must be one of {sorted(by_name)} or a `keras_nlp.samplers.Sampler`. "
            f"Received: sampler={sampler!r}"
        )
    if getattr(sampler, "return_all_beams", False):
        raise ValueError("`generate` returns the best beam: `return_all_beams` must be False.")
    k = getattr(sampler, "k", None)
    if k is not None and k > vocabulary_size:
        raise ValueError(
            f"The sampler chooses among k={k} tokens, but the vocabulary has {vocabulary_size}."
        )
    return sampler


def _sampler_key(sampler):
    """Samplers of the library with the same key sample alike, but for their seed."""
    kind = type(sampler)
    if kind not in vars(_samplers()).values():
        # A user's sampler need not describe itself by its config.
        return kind, id(sampler)
    config = {k: v for k, v in sampler.get_config().items() if k != "seed"}
    return kind, json.dumps(config, sort_keys=True)


# Compiled functions


def _generate(model, prompt, max_length, sampler, stop):
    """Returns ids (batch, max_length) as a NumPy array; advances the sampler's state."""
    batch, length = prompt.shape
    # The sampler's first step reads the last token of the prompt, so it stays out of the cache.
    if length > 1:
        cache = _prefill_function(model)(ops.convert_to_tensor(prompt[:, :-1]))
    else:
        cache = model.initial_cache(batch)
    # The samplers look for stop tokens in all places, so what is not written yet is no token.
    padded = np.pad(prompt, [[0, 0], [0, max_length - length]], constant_values=-1)
    padded = ops.convert_to_tensor(padded)
    function, compiled_sampler = _sample_function(model, sampler, stop)
    _copy_state(sampler, compiled_sampler)
    ids = function(padded, cache, ops.convert_to_tensor(length, "int32"))
    _copy_state(compiled_sampler, sampler)
    return ops.convert_to_numpy(ids)


def _copy_state(source, target):
    for a, b in zip(source.variables, target.variables, strict=True):
        b.assign(a.value)


def _prefill_function(model):
    functions = _functions(model)
    if "prefill" not in functions:
        functions["prefill"] = _compile(lambda tokens: model.prefill(tokens)[1], model.variables)
    return functions["prefill"]


def _sample_function(model, sampler, stop):
    """Returns the compiled loop, and the sampler whose state it reads and advances."""
    functions = _functions(model)
    key = (*_sampler_key(sampler), stop)
    if key not in functions:
        if not isinstance(key[1], int):
            # One of our own: the user may change the attributes of theirs.
            sampler = sampler.from_config(sampler.get_config())

        def next_scores(prompt, cache, index):
            log_probs, cache = model.step(prompt[:, index - 1], cache)
            return log_probs, None, cache

        def sample(prompt, cache, index):
            # A stop token within the prompt ends nothing.
            read = ops.arange(prompt.shape[1]) < index
            return sampler(
                next_scores,
                prompt,
                cache,
                index,
                mask=ops.broadcast_to(read, prompt.shape),
                stop_token_ids=list(stop) or None,
                # On JAX the loop hands the model's variables through.
                model=model,
            )

        functions[key] = _compile(sample, model.variables, sampler.variables), sampler
    return functions[key]


def _functions(model):
    """The compiled functions of a model. Each compiles once per shape of its arguments."""
    if "_generation_functions" not in vars(model):
        # A plain attribute: Keras' tracking would try to save it.
        object.__setattr__(model, "_generation_functions", {})
    return model._generation_functions


def _compile(function, variables, updated=()):
    """Compiles a function of tensors that reads `variables` and updates `updated`."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True, autograph=False)
    if keras.backend.backend() == "jax":
        return _compile_jax(function, [*variables, *updated], updated)
    return function


def _compile_jax(function, variables, updated):
    import jax

    @jax.jit
    def pure(values, *arguments):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            result = function(*arguments)
        return result, [scope.get_current_value(variable) for variable in updated]

    def call(*arguments):
        result, values = pure([variable.value for variable in variables], *arguments)
        for variable, value in zip(updated, values, strict=True):
            variable.assign(value)
        return result

    return call
