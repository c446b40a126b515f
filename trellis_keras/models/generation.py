"""Text generation: prompts to ids, the compiled loop around a sampler, ids to text.

A language model reads the prompt in one forward pass, then generates token by token with constant
work, in a loop compiled by XLA. The samplers come from Keras-NLP (KerasHub's older name): they
request the scores of the token at `index` with `next(prompt, cache, index)`, and may reorder the
cache's rows.
"""

import codecs
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_streams.protocol import at_least_float32
from keras_streams.xla import compile_xla
from trellis_keras.layers.checks import check_integer
from trellis_keras.models import samplers
from trellis_keras.models.base import check_tokens
from trellis_keras.types import Cache, Tensor

# Marks positions that are still to be generated. It is not a token id.
OPEN = -1

_CACHED_FUNCTIONS = 16  # which take megabytes each
_LOCK = threading.Lock()
# Shortest lengths in tokens for which functions are compiled; longer ones are powers of two.
_SHORTEST_SEGMENT = 32
_LEAST_ROOM = 64


class TextGenerator:
    """Base class of models that read and write text token by token.

    A subclass defines `initial_cache(batch_size)`, `hidden_step(tokens, cache)`,
    `hidden_prefill(tokens, cache)` and `next_log_probs(hidden, cache)`, and has `vocabulary_size`
    and `vocabulary`.
    """

    traced_attributes: tuple[str, ...] = ()  # values that compiled functions contain
    vocabulary_size: int
    vocabulary: Any
    initial_cache: Callable[..., Cache]
    hidden_step: Callable[..., tuple[Tensor, Cache]]
    hidden_prefill: Callable[..., tuple[Tensor, Cache]]
    next_log_probs: Callable[..., Tensor]

    def step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Reads one token per row, with constant work per token.

        Use `keras_streams.compiled_step(model)` for a compiled function.

        Args:
            tokens: Integer tensor (batch,).
            cache: Result of `initial_cache`, `step` or `prefill`.

        Returns:
            Log-probabilities (batch, V) of the next token, and the new cache.

        Example:

        >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
        >>> model.build((None, None))
        >>> log_probs, cache = model.step(np.array([1, 5]), model.initial_cache(2))
        >>> tuple(log_probs.shape)
        (2, 7)
        """
        hidden, cache = self.hidden_step(tokens, cache)
        return self.next_log_probs(hidden, cache), cache

    def prefill(self, tokens: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Reads a whole prompt in one forward pass.

        Args:
            tokens: Integer tensor (batch, time).
            cache: The cache to continue from. Defaults to `None`, the initial cache.

        Returns:
            Log-probabilities (batch, V) of the token after the prompt, and the cache.
        """
        hidden, cache = self.hidden_prefill(tokens, cache)
        return self.next_log_probs(hidden[:, -1], cache), cache

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]] | np.ndarray,
        max_length: int,
        sampler: Any = "top_p",
        *,
        seed: int | None = None,
        stop_tokens: int | str | Sequence[int | str] | None = None,
    ) -> np.ndarray | str | list[str]:
        """Continues prompts, token by token.

        The prompts may differ in length: the length of the shortest is read in one pass, and the
        rest of the longer ones while the other rows are generated. With a deterministic sampler
        each row equals the result for that prompt alone (except for rounding, when two tokens are
        equally good); the other samplers draw for all rows together.

        Different lengths cause few compilations. Prompts are read in segments of 32, 64, 128, ...
        tokens, and their last tokens one at a time; the loop has room for a power of two of tokens.
        Each combination of these sizes, batch size, stop tokens, and sampler settings (each object
        of a custom sampler class counts as new) is compiled once. New prompts, seeds and weights
        cause no compilation. The model keeps the 16 most recently used functions.

        Args:
            prompts: A string or a list of strings (for a model with a vocabulary), or rows of
                token ids, such as integers (batch, time). Each has at least one token.
            max_length: Positive integer, maximum number of tokens in a row of the result, including
                the prompt, so it must be greater than the length of the longest prompt.
            sampler: `"greedy"`, `"random"`, `"top_k"`, `"top_p"`, `"beam"` or `"contrastive"`,
                with Keras-NLP's defaults, or a `keras_nlp.samplers.Sampler`, such as
                `TopPSampler(p=0.9, temperature=0.8)`. Temperature 0 is greedy. Beam search ranks
                texts by the sum of their tokens' log-probabilities up to the first stop token.
                Defaults to `"top_p"`.
            seed: Integer; the same seed gives the same text. Defaults to `None`: a sampler given by
                name starts from a random seed, a sampler object continues from its state.
            stop_tokens: Token or list of tokens (ids, or strings of one token each) after which
                a row ends. Defaults to `None`.

        Returns:
            Strings if the prompts were strings, else ids (batch, length), including the prompt.
            A row ends with its first stop token after the prompt; shorter rows of ids are padded
            with it.

        Example:

        >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
        >>> model.build((None, None))
        >>> model.generate([[1, 2], [3, 4, 5]], max_length=10, sampler="greedy").shape
        (2, 10)
        """
        request = _read_request(self, prompts, max_length, sampler, seed, stop_tokens)
        samplers.set_seed(request.sampler, request.seed)
        ids = _write_all(self, request)
        lengths = _row_lengths(ids, request)
        if not request.is_text:
            # Shorter rows repeat their last token.
            steps = np.minimum(np.arange(lengths.max())[None], lengths[:, None] - 1)
            return np.take_along_axis(ids, steps, axis=1)
        ended = zip(ids, lengths, strict=True)
        texts = [self.vocabulary.decode(row[:length]) for row, length in ended]
        return texts[0] if isinstance(prompts, str) else texts

    def generate_stream(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        max_length: int,
        sampler: Any = "top_p",
        *,
        seed: int | None = None,
        stop_tokens: int | str | Sequence[int | str] | None = None,
    ) -> Iterator:
        """Continues one prompt and yields the result as it is generated.

        Joined, the pieces equal the result of `generate` for the same arguments, starting with
        the prompt. Samplers that choose token by token (greedy, random, top_k, top_p, and
        custom ones with a `get_next_token`) yield each token as soon as it is chosen; beam and
        contrastive search, which compare continuations, yield everything after the prompt at the
        end. The former compile one step, whatever `max_length` is; for the latter see `generate`.

        Args:
            prompt: A string, or token ids (time,).
            max_length, sampler, seed, stop_tokens: As in `generate`.

        Returns:
            An iterator over non-empty pieces of text (never part of a multi-byte character), or
            over integers for token ids. Iteration may stop at any point.

        Example:

        >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
        >>> model.build((None, None))
        >>> len(list(model.generate_stream([1, 2], max_length=5)))
        5
        """
        request = _read_request(self, [prompt], max_length, sampler, seed, stop_tokens)
        tokens = _write_row(self, request)
        return text_pieces(self.vocabulary, tokens) if request.is_text else tokens


class _Request(NamedTuple):
    """What to generate, checked."""

    is_text: bool  # whether the prompts were strings
    given: np.ndarray  # int32 (batch, max_length): the prompts, followed by `OPEN`
    sampler: Any  # of Keras-NLP; its state is advanced
    seed: int | None
    stop: tuple  # ids after which a row ends


def _read_request(model, prompts, max_length, sampler, seed, stop_tokens):
    model.stream()  # raises if the model does not stream
    rows, is_text = _encode_prompts(model, prompts)
    given = _pad(rows, max_length)
    stop = _stop_ids(model, stop_tokens)
    sampler = samplers.get_sampler(sampler, model.vocabulary_size)
    # A Python integer: Keras takes no NumPy integers.
    seed = None if seed is None else check_integer("seed", seed)
    return _Request(is_text, given, sampler, seed, stop)


def _write_row(model, request):
    """Yields the ids of a single row as they are generated, the prompt first."""
    # Two iterators may share a sampler: its seed is set when the first token is requested.
    samplers.set_seed(request.sampler, request.seed)
    (row,) = request.given
    prompt = row[row != OPEN]
    yield from prompt.tolist()
    if type(request.sampler).__call__ is samplers.library().Sampler.__call__:
        yield from _write_each(model, prompt, len(row), request.sampler, request.stop)
        return
    # This sampler compares whole continuations.
    ids = _write_all(model, request)
    (length,) = _row_lengths(ids, request)
    yield from ids[0, len(prompt) : length].tolist()


def _write_all(model, request):
    """Generates all rows to their end in one compiled loop.

    Returns an int32 array (batch, max_length). Tokens after a row's first new stop token are
    undefined.
    """
    given, sampler, stop = request.given, request.sampler, request.stop
    rows, length = given.shape
    shortest = int((given != OPEN).sum(axis=1).min())
    cache, hidden = _read_prompts(model, given[:, : shortest - 1])
    # The loop ends at the end of the array. All lengths up to a power of two share a compiled
    # loop, because the array is padded at the start with tokens that no step reads.
    room = max(_LEAST_ROOM, 1 << (length - 1).bit_length()) - length
    extended = np.concatenate([np.repeat(given[:, :1], room, axis=1), given], axis=1)
    read = sum(part.shape[1] for part in hidden)
    options = {}
    if isinstance(sampler, samplers.library().ContrastiveSampler):
        # It compares with all tokens before the index.
        last = _read(model, given[:, read : read + 1], cache)[1]
        found = np.concatenate([ops.convert_to_numpy(part) for part in (*hidden, last)], axis=1)
        after = np.zeros((rows, length - found.shape[1], found.shape[2]), found.dtype)
        start = np.repeat(found[:, :1], room, axis=1)
        options["hidden_states"] = ops.convert_to_tensor(np.concatenate([start, found, after], 1))
    loop = _compiled_sampler(_loop, model, sampler, extended.shape, stop)
    index = ops.convert_to_tensor(room + read + 1, "int32")
    ids = loop(ops.convert_to_tensor(extended), cache, index, options)
    return ops.convert_to_numpy(ids)[:, room:]


def _write_each(model, prompt, max_length, sampler, stop):
    """Yields the ids that follow a prompt (time,), each as soon as it is chosen."""
    choice = _compiled_sampler(_choice, model, sampler, 1)
    cache, hidden = _read_prompts(model, prompt[None, :-1])
    read = sum(part.shape[1] for part in hidden)
    for token in prompt[read:-1]:  # as in `_loop`, where the sampler also draws for these
        _, cache = choice(ops.convert_to_tensor(token[None]), cache)
    token = ops.convert_to_tensor(prompt[-1:])
    for _ in range(max_length - len(prompt)):
        token, cache = choice(token, cache)
        chosen = int(ops.convert_to_numpy(token)[0])
        yield chosen
        if chosen in stop:
            return


def _loop(model, sampler, stop):
    def next_scores(ids, cache, index):
        cache, given = cache
        hidden, cache = model.hidden_step(ids[:, index - 1], cache)
        log_probs = _allowed(model.next_log_probs(hidden, cache), ids, given, index, stop)
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
            # On JAX the loop passes the model's variables through.
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


def _allowed(log_probs, ids, given, index, stop):
    """Allows only one token at `index` for rows within their prompt, and for rows that have ended.

    Beam search compares sums of log-probabilities: a given token adds 0 to them and does not split
    a beam.
    """
    # Contrastive search requests one position more than there are.
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
    """Hidden states with a defined cosine similarity, even if ReLUs have set all to zero."""
    dtype = at_least_float32(keras.backend.standardize_dtype(hidden.dtype))
    return ops.cast(hidden, dtype) + 1e-12


def _read_prompts(model, tokens):
    """Reads the start of prompts (batch, time) in segments of decreasing powers of two.

    Prompts of all lengths thus share a few compiled functions. The last tokens, fewer than the
    shortest segment, are left to the samplers' loop.

    Returns:
        The cache after them, and the hidden states of each segment.
    """
    cache, hidden, start = model.initial_cache(len(tokens)), [], 0
    while (rest := tokens.shape[1] - start) >= _SHORTEST_SEGMENT:
        steps = 1 << rest.bit_length() - 1
        cache, states = _read(model, tokens[:, start : start + steps], cache)
        hidden.append(states)
        start += steps
    return cache, hidden


# Compiled functions


def cached_function(model: Any, key: Hashable, make: Callable[[], Any]) -> Any:
    """Returns `make()`, cached on the model, which keeps the 16 most recently used values."""
    # Hidden from Keras' tracking, which would try to save it.
    functions = vars(model).setdefault("_generation_functions", OrderedDict())
    settings = [getattr(model, name) for name in model.traced_attributes]
    # `training.GrowingDepth` changes the depth, and LoRA adds variables.
    depth = getattr(model.backbone, "depth", None)
    key = key, (depth, *settings, *map(id, model.variables))
    with _LOCK:
        if key not in functions:
            functions[key] = make()
        functions.move_to_end(key)
        if len(functions) > _CACHED_FUNCTIONS:
            functions.popitem(last=False)
        return functions[key]


def _read(model, tokens, cache):
    """Returns the cache after a segment, and its hidden states, compiled for its shape."""

    def read(tokens, cache):
        hidden, cache = model.hidden_prefill(tokens, cache)
        return cache, _comparable(hidden)

    key = "read", *tokens.shape
    compiled = cached_function(model, key, lambda: compile_xla(read, model.variables))
    return compiled(ops.convert_to_tensor(tokens), cache)


def _compiled_sampler(make, model, sampler, shape, *settings):
    """Returns the compiled `make(model, sampler, *settings)`, which advances the sampler's state.

    Each shape of the arguments has its own function, so that unused ones can be evicted.
    """
    is_own = samplers.is_custom(sampler)

    def build():
        # A copy, because the user may change the attributes of the original.
        copy = sampler if is_own else samplers.inference_copy(sampler)
        function = make(model, copy, *settings)
        compiled = compile_xla(function, model.variables, copy.variables)
        return compiled, copy, threading.Lock()

    # The config of a custom sampler may be incomplete, so each object has a key of its own.
    which = (id(sampler),) if is_own else ()
    key = make.__name__, type(sampler), *which, samplers.settings_of(sampler), shape
    function, copy, lock = cached_function(model, (*key, *settings), build)

    def call(*tensors):
        with lock:
            samplers.copy_state(sampler, copy)
            result = function(*tensors)
            samplers.copy_state(copy, sampler)
        return result

    return call


# Text


def _encode_prompts(model, prompts):
    """Returns a list of int32 arrays (time,) and whether the prompts were text."""
    if isinstance(prompts, str) or not hasattr(prompts, "__len__"):
        prompts = [prompts]
    is_text = len(prompts) > 0 and all(isinstance(prompt, str) for prompt in prompts)
    rows = [_encode(model, prompt) if is_text else np.asarray(prompt) for prompt in prompts]
    lengths = [len(row) if row.ndim == 1 else None for row in rows]
    if not lengths or not all(lengths):
        raise ValueError(
            "`prompts` (--prompt) must be non-empty strings or rows of token ids. "
            f"Received: {list(prompts)[:5]!r}"
        )
    for row in rows:
        check_tokens(row, model.vocabulary_size)
    return [row.astype("int32") for row in rows], is_text


def _encode(model, text):
    if model.vocabulary is None:
        raise ValueError(
            "The model has no vocabulary to encode text: pass prompts and stop tokens as "
            f"token ids. Received: {text!r}"
        )
    return model.vocabulary.encode(text, final_eos=False)


def _pad(rows, max_length):
    """Returns int32 (batch, max_length): the rows, followed by `OPEN`."""
    longest = max(len(row) for row in rows)
    max_length = check_integer("max_length", max_length)
    if max_length <= longest:
        raise ValueError(
            "`max_length` includes the prompt, so it must be greater than the length of the "
            f"longest prompt, {longest} tokens. Received: max_length={max_length}"
        )
    given = np.full((len(rows), max_length), OPEN, "int32")
    for i, row in enumerate(rows):
        given[i, : len(row)] = row
    return given


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


def _row_lengths(ids, request):
    """Returns the length of each row up to and including its first new stop token."""
    is_stop = np.isin(ids, request.stop) & (request.given == OPEN)
    return np.where(is_stop.any(axis=1), is_stop.argmax(axis=1) + 1, ids.shape[1])


def text_pieces(vocabulary: Any, tokens: Iterator[int]) -> Iterator[str]:
    """Yields the text of tokens as they come; joined, it is `vocabulary.decode(tokens)`."""
    pieces = _pieces_of_bytes if vocabulary.unit == "byte" else _pieces_of_symbols
    return filter(None, pieces(vocabulary, tokens))


def _pieces_of_bytes(vocabulary, tokens):
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield decoder.decode(vocabulary.tokens[token].encode("latin-1"))
    yield decoder.decode(b"", final=True)


def _pieces_of_symbols(vocabulary, tokens):
    # Whether a space comes before a word depends only on the previous token.
    before = []
    for token in tokens:
        yield vocabulary.decode([*before, token]).removeprefix(vocabulary.decode(before))
        before = [token]
