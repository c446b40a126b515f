"""The endpoints of a served model: pure functions of named tensors.

The response to a request depends only on the request and the weights; the cache of a stream is part
of the requests.
"""

import dataclasses
import sys
import warnings
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams import GraphStream
from keras_streams.endpoints import Endpoint, Field, StreamCache, require, step_endpoint
from keras_streams.protocol import without_carried_states
from trellis_keras.data import Vocabulary
from trellis_keras.data.vocabulary import EOS
from trellis_keras.models import LanguageModel, PolyphonicModel, SequenceClassifier
from trellis_keras.models.sequence_model import SequenceModel

if keras.backend.backend() == "tensorflow":  # `export` refuses the other backends
    import tensorflow as tf

# These bound the memory of a request; new tokens and padding count over all its rows.
_MAX_CACHE_ROWS, _MAX_NEW_TOKENS, _MAX_PADDING = 2**12, 2**20, 2**20
_MAX_PADDED = 16  # times the tokens of the texts, if that is more padding

_NO_STEPS = "Each row needs at least one step. Received rows of length:"
_NO_TOKENS = "Each row needs at least one token. Received rows of length:"


@dataclasses.dataclass(frozen=True)
class ServedEndpoint(Endpoint):
    """A request that a served model answers. The docstring of its function describes it."""

    tables: tuple = ()  # lookup tables that it reads

    def served(self, **inputs: Any) -> dict[str, Any]:
        """Checks shapes, which TensorFlow Serving does not, and calls the function."""
        for name, spec in self.input_specs().items():
            # Without a static shape, or TensorFlow would trust the signature and drop the check.
            unknown = tf.compat.v1.placeholder_with_default(inputs[name], None, name)
            inputs[name] = tf.ensure_shape(unknown, spec.shape)
        return self.checked(**inputs)

    def describe(self) -> dict[str, Any]:
        """Returns the endpoint's entry in `signatures.json`."""
        fields = {
            side: {name: {"dtype": f.dtype, "shape": f.shape} for name, f in of.items()}
            for side, of in (("inputs", self.inputs), ("outputs", self.outputs))
        }
        return {"description": " ".join(str(self.function.__doc__).split()), **fields}


def endpoints_of(model: LanguageModel | SequenceModel | GraphStream) -> list[ServedEndpoint]:
    """Returns the endpoints of a model or stream. Warns if it does not stream."""
    if isinstance(model, GraphStream):
        return _graph_endpoints(model)
    make = _language_endpoints if isinstance(model, LanguageModel) else _sequence_endpoints
    return make(model)


def _streams(model):
    """Returns whether a model streams. Warns if it does not."""
    try:
        model.stream()
    except ValueError as error:
        warnings.warn(
            f"{model.name} is exported only for whole sequences, without `step`. {error}",
            stacklevel=6,
        )
        return False
    return True


def _cache_endpoint(model, cache):
    def initial_cache(batch_size):
        """Returns the cache before the first step, for `batch_size` rows."""
        batch_size = require(
            batch_size,
            (batch_size >= 1) & (batch_size <= _MAX_CACHE_ROWS),
            f"`batch_size` must be in [1, {_MAX_CACHE_ROWS}]. Received:",
            batch_size,
        )
        return cache.flatten(model.initial_cache(batch_size))

    return ServedEndpoint(initial_cache, {"batch_size": Field("int32", (), 1)}, cache.fields)


def _graph_endpoints(stream):
    cache, step = StreamCache(stream), step_endpoint(stream)

    def of_sequences(fields, signals, time):
        found = {}
        for (name, field), signal in zip(fields.items(), signals, strict=False):
            sizes = [*signal.shape]
            if signal.has_time:
                sizes.insert(signal.axis - 1, time)
            found[name] = Field(field.dtype, ("batch", *sizes))
        return found

    # The fields of a step end with the cache, which sequences do not have.
    inputs = of_sequences(step.inputs, stream.plan.inputs, "time")
    outputs = of_sequences(step.outputs, stream.output_signals, "steps")

    def serving_default(**tensors):
        """Returns the outputs for whole sequences."""
        signals = stream.plan.inputs
        xs = [ops.cast(tensors[n], s.dtype) for n, s in zip(inputs, signals, strict=True)]
        y = stream.model(keras.tree.pack_sequence_as(stream.inputs, xs), training=False)
        return dict(zip(outputs, keras.tree.flatten(y), strict=True))

    return [
        ServedEndpoint(serving_default, inputs, outputs),
        _cache_endpoint(stream, cache),
        ServedEndpoint(step.function, step.inputs, step.outputs),
    ]


def _sequence_endpoints(model):
    model.check_adapted()
    dtype, channels = "int32", ()  # token ids
    if model.embedding is None:
        dtype, channels = "float32", (model.input_spec.axes[-1],)
    output = model.compute_output_shape((None, None, *channels))[1 + model.per_step :]
    name, activation = "predictions", keras.activations.linear
    if isinstance(model, SequenceClassifier):
        name = "probabilities"
        activation = ops.softmax if model.activation is None else activation
    elif isinstance(model, PolyphonicModel):
        name, activation = "probabilities", ops.sigmoid

    def serving_default(inputs):
        """Returns the outputs for whole sequences, at each step or at the last one."""
        if not model.per_step:
            length = tf.shape(inputs)[1]
            inputs = require(inputs, length >= 1, _NO_STEPS, length)
        return {name: activation(model(inputs, training=False))}

    steps = ("batch", "time") if model.per_step else ("batch",)
    inputs = {"inputs": Field(dtype, ("batch", "time", *channels))}
    found = [ServedEndpoint(serving_default, inputs, {name: Field("float32", (*steps, *output))})]
    if not _streams(model):
        return found
    cache = StreamCache(model)

    def step(inputs, **tensors):
        """Reads one step of each row and returns the output as if the sequence ended there."""
        outputs, after = model.step(inputs, cache.pack(tensors))
        return {name: activation(outputs), **cache.flatten(after)}

    inputs = {"inputs": Field(dtype, ("batch", *channels)), **cache.fields}
    outputs = {name: Field("float32", ("batch", *output)), **cache.fields}
    return [*found, _cache_endpoint(model, cache), ServedEndpoint(step, inputs, outputs)]


def _language_endpoints(model):
    size = model.vocabulary_size
    tokens, prompts = Field("int32", ("batch",)), Field("int32", ("batch", "time"))
    next_token = {"log_probabilities": Field("float32", ("batch", size))}
    sampling = {"temperature": Field("float32", (), 1.0), "seed": Field("int32", ())}

    def checked_tokens(tokens):
        # Embeddings index from the end for negative ids, and return zeros for large ids on a GPU.
        message = f"Token ids must be in [0, {size}). Received:"
        return require(tokens, (tokens >= 0) & (tokens < size), message, tokens)

    def checked_prompts(tokens):
        length = tf.shape(tokens)[1]
        return require(checked_tokens(tokens), length >= 1, _NO_TOKENS, length)

    def serving_default(tokens):
        """Returns log-probabilities (in nats) of the token after each prefix of the rows."""
        with without_carried_states(model):
            return {"log_probabilities": model(checked_tokens(tokens), training=False)}

    every_token = {"log_probabilities": Field("float32", ("batch", "time", size))}
    found = [ServedEndpoint(serving_default, {"tokens": prompts}, every_token)]
    streams = _streams(model)
    if streams:
        cache = StreamCache(model)

        def step(tokens, **tensors):
            """Reads one token of each row and scores the next one."""
            log_p, after = model.step(checked_tokens(tokens), cache.pack(tensors))
            return {"log_probabilities": log_p, **cache.flatten(after)}

        def prefill(tokens):
            """Reads whole rows and scores the next token; `step` continues from the cache."""
            log_p, after = model.prefill(checked_prompts(tokens))
            return {"log_probabilities": log_p, **cache.flatten(after)}

        def generate(tokens, max_length, temperature, seed):
            """Continues prompts of equal lengths up to `max_length`, the prompt included.

            A temperature of 0 chooses the most probable token; the same seed draws the same tokens.
            """
            tokens = checked_prompts(tokens)
            rows, time = tf.shape(tokens)[0], tf.shape(tokens)[1]
            lengths = tf.fill([rows], time)
            ids = _generate(model, tokens, lengths, max_length - time, temperature, seed)
            return {"tokens": ids}

        after = {**next_token, **cache.fields}
        found += [
            _cache_endpoint(model, cache),
            ServedEndpoint(step, {"tokens": tokens, **cache.fields}, after),
            ServedEndpoint(prefill, {"tokens": prompts}, after),
            ServedEndpoint(
                generate,
                {"tokens": prompts, "max_length": Field("int32", (), 2), **sampling},
                {"tokens": Field("int32", ("batch", "max_length"))},
            ),
        ]
    if is_utf8_vocabulary(model.vocabulary):
        found += _text_endpoints(model, streams, sampling)
    return found


def _text_endpoints(model, streams, sampling):
    codec = TextCodec(model.vocabulary)
    texts = Field("string", ("batch",), model.vocabulary.tokens[0].encode(codec.encoding))

    def score_text(text):
        """Sums the log-probabilities of the tokens after the first, in nats, and counts them."""
        ids, lengths = codec.encode(text)
        return {
            "log_probability": _log_probability(model, ids, lengths),
            "num_tokens": tf.maximum(lengths - 1, 0),
        }

    def generate_text(text, max_new_tokens, temperature, seed):
        """Continues texts by `max_new_tokens` tokens; see `generate`."""
        ids, lengths = codec.encode(text)
        lengths = require(lengths, lengths >= 1, _NO_TOKENS, lengths)
        ids = _generate(model, ids, lengths, max_new_tokens, temperature, seed)
        return {"text": codec.decode(ids, lengths + max_new_tokens)}

    scores = {
        "log_probability": Field("float32", ("batch",)),
        "num_tokens": Field("int32", ("batch",)),
    }
    tables = (codec.table,)
    found = [ServedEndpoint(score_text, {"text": texts}, scores, tables=tables)]
    if streams:
        inputs = {"text": texts, "max_new_tokens": Field("int32", (), 1), **sampling}
        found.append(ServedEndpoint(generate_text, inputs, {"text": texts}, tables=tables))
    return found


def _generate(model, ids, lengths, new_tokens, temperature, seed):
    """Continues prompts token by token.

    One forward pass reads as many tokens as the shortest prompt has. From there all rows advance
    together: a longer prompt still reads its own tokens before it samples.

    Args:
        ids: int32 (batch, longest), prompts padded at the end.
        lengths: int32 (batch,), lengths of the prompts.

    Returns:
        int32 (batch, longest + new_tokens), valid up to `lengths + new_tokens`.
    """
    rows, longest = tf.shape(ids)[0], tf.shape(ids)[1]
    new_tokens = require(
        new_tokens,
        (rows >= 1) & (new_tokens >= 1) & (new_tokens <= _MAX_NEW_TOKENS // tf.maximum(rows, 1)),
        f"A request can generate 1 to {_MAX_NEW_TOKENS} tokens over all its rows. "
        "Received new tokens and rows:",
        new_tokens,
        rows,
    )
    temperature = require(
        temperature,
        (temperature >= 0) & (temperature < np.inf),
        "`temperature` must be finite and non-negative. Received:",
        temperature,
    )
    with tf.control_dependencies([new_tokens]):  # before an operation that fails without rows
        ids = tf.identity(ids)
    shortest, last = tf.reduce_min(lengths), longest + new_tokens - 1

    def token_at(place, log_p):
        drawn = _sample(log_p, temperature, tf.stack([seed, place]))
        given = ids[:, tf.minimum(place, longest - 1)]
        return tf.where(place < lengths, given, drawn)

    def advance(place, token, cache, written):
        written = written.write(place - shortest, token)
        log_p, cache = model.step(token, cache)
        return place + 1, token_at(place + 1, log_p), cache, written

    log_p, cache = model.prefill(ids[:, :shortest])
    written = tf.TensorArray(tf.int32, last - shortest + 1, element_shape=ids.shape[:1])
    first = shortest, token_at(shortest, log_p), cache, written
    _, token, _, written = tf.while_loop(lambda place, *_: place < last, advance, first)
    written = written.write(last - shortest, token)
    return tf.concat([ids[:, :shortest], tf.transpose(written.stack())], axis=1)


def _sample(log_p, temperature, seed):
    """Draws a token for each row with the Gumbel-max trick."""
    uniform = tf.random.stateless_uniform(tf.shape(log_p), seed, dtype=log_p.dtype)
    tiny = log_p.dtype.as_numpy_dtype(1e-20)
    gumbel = -tf.math.log(-tf.math.log(uniform + tiny) + tiny)
    return tf.argmax(log_p + tf.cast(temperature, log_p.dtype) * gumbel, -1, tf.int32)


def _log_probability(model, ids, lengths):
    """Sums the log-probabilities of the tokens after the first of each row, (batch,)."""
    ids = tf.pad(ids, [[0, 0], [0, tf.maximum(2 - tf.shape(ids)[1], 0)]])
    # For large vocabularies, the head's loss computes fewer logits than `serving_default`.
    with without_carried_states(model):
        nll = model.text_loss(ids)
    counted = tf.range(1, tf.shape(ids)[1]) < lengths[:, None]
    return -tf.reduce_sum(tf.where(counted, nll, 0), axis=1)


# Vocabularies as TensorFlow operations


def is_utf8_vocabulary(vocabulary):
    """Returns whether there is a vocabulary, and UTF-8 can encode it (no surrogates)."""
    if vocabulary is None:
        return False
    try:
        "".join(vocabulary.tokens).encode()
    except UnicodeEncodeError:
        return False
    return True


class TextCodec:
    """`Vocabulary.encode(text, final_eos=False)` and `Vocabulary.decode` for batches of strings."""

    def __init__(self, vocabulary: Vocabulary):
        self.unit = vocabulary.unit
        self.unknown = vocabulary.unknown
        self.encoding = "latin-1" if self.unit == "byte" else "utf-8"
        tokens = [token.encode(self.encoding) for token in vocabulary.tokens]
        default = -1 if self.unknown is None else vocabulary.tokens.index(self.unknown)
        entries = tf.lookup.KeyValueTensorInitializer(tokens, np.arange(len(tokens), dtype="int32"))
        self.table = tf.lookup.StaticHashTable(entries, default)
        self._symbols = [b"\n" if token == EOS.encode() else token for token in tokens]
        # `tf.strings.split` only splits at ASCII white space.
        white = "".join(c for c in map(chr, range(sys.maxunicode)) if c.isspace())
        self._white = f"[{white}]+"

    def encode(self, texts):
        """Returns int32 ids (batch, longest), padded with zeros, and lengths (batch,)."""
        if self.unit == "word":
            texts = tf.strings.regex_replace(texts, "\n", f" {EOS} ")
            symbols = tf.strings.split(tf.strings.regex_replace(texts, self._white, " "))
        elif self.unit == "character":
            symbols = tf.strings.unicode_split(texts, "UTF-8")
        else:
            symbols = tf.strings.bytes_split(texts)
        ids = self.table.lookup(symbols.values)
        if self.unknown is None:
            message = "The vocabulary has no unknown token. The text has unknown symbols:"
            ids = require(ids, ids >= 0, message, tf.boolean_mask(symbols.values, ids < 0))
        lengths = symbols.row_lengths()
        padding = tf.reduce_sum(tf.reduce_max(lengths) - lengths)
        most = tf.maximum(tf.reduce_sum(lengths) * _MAX_PADDED, _MAX_PADDING)
        message = (
            "Texts of very different lengths need too much padding: send long ones separately. "
            "Padding tokens:"
        )
        ids = require(ids, padding <= most, message, padding)
        lengths = tf.cast(lengths, tf.int32)
        return symbols.with_values(ids).to_tensor(), lengths

    def decode(self, ids, lengths):
        """Returns strings (batch,) of the first `lengths` ids of each row (batch, time)."""
        symbols = tf.RaggedTensor.from_tensor(tf.gather(self._symbols, ids), lengths)
        separator = " " if self.unit == "word" else ""
        texts = tf.strings.reduce_join(symbols, axis=-1, separator=separator)
        if self.unit == "byte":
            return tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8")
        if self.unit == "word":
            texts = tf.strings.regex_replace(texts, " \n", "\n")
            return tf.strings.regex_replace(texts, "\n ", "\n")
        return texts
