"""Endpoints of language models."""

from keras import ops

from trellis_keras.serving import checks, sampling, text
from trellis_keras.serving.endpoint import Endpoint, Field
from trellis_keras.serving.state import State, streams

SCORES = "log_probabilities"
TEMPERATURE = Field("float32", (), "0: always the most probable token; lower is safer.", 1.0)
SEED = Field("int32", (), "The same seed draws the same tokens.")


def endpoints(model):
    """Returns the list of a `LanguageModel`'s endpoints."""
    found = [_serving_default(model)]
    streaming = streams(model.backbone)
    if streaming:
        state = State(model.backbone)
        found += [state.endpoint(), _step(model, state), _prefill(model, state), _generate(model)]
    if text.has_text(model.vocabulary):
        encode = text.Encoder(model.vocabulary)
        found.append(_score_text(model, encode))
        if streaming:
            found.append(_generate_text(model, encode))
    return found


def _serving_default(model):
    def serving_default(tokens):
        return {SCORES: ops.cast(model(tokens, training=False), "float32")}

    return Endpoint(
        "serving_default",
        "Scores every continuation of every beginning of the rows.",
        {"tokens": _tokens("batch", "time")},
        {SCORES: _scores(model, "batch", "time")},
        serving_default,
        _tokens_check(model),
    )


def _step(model, state):
    def step(tokens, **tensors):
        cache = state.cache(tensors, ops.shape(tokens)[0])
        log_p, cache = model.step(tokens, cache)
        return {SCORES: ops.cast(log_p, "float32"), **state.flat(cache)}

    return Endpoint(
        "step",
        "Reads one token of each row and scores the next one.",
        {"tokens": _tokens("batch"), **state.fields},
        {SCORES: _scores(model, "batch"), **state.fields},
        step,
        _tokens_check(model),
    )


def _prefill(model, state):
    def prefill(tokens):
        log_p, cache = model.prefill(tokens)
        return {SCORES: ops.cast(log_p, "float32"), **state.flat(cache)}

    def check(tokens):
        return [
            checks.tokens_in(tokens, model.vocabulary_size),
            checks.at_least_one_token(ops.shape(tokens)[1]),
        ]

    return Endpoint(
        "prefill",
        "Reads rows at once and scores the next token; `step` goes on from its state.",
        {"tokens": _tokens("batch", "time")},
        {SCORES: _scores(model, "batch"), **state.fields},
        prefill,
        check,
    )


def _generate(model):
    def generate(tokens, max_length, temperature, seed):
        batch, time = ops.shape(tokens)[0], ops.shape(tokens)[1]
        lengths = ops.broadcast_to(time, (batch,))
        ids = sampling.generate(model, tokens, lengths, max_length - time, temperature, seed)
        return {"tokens": ids}

    def check(tokens, max_length, temperature, seed):
        return [
            checks.tokens_in(tokens, model.vocabulary_size),
            checks.at_least_one_token(ops.shape(tokens)[1]),
            checks.number_of_new_tokens(max_length - ops.shape(tokens)[1], ops.shape(tokens)[0]),
            checks.temperature(temperature),
        ]

    return Endpoint(
        "generate",
        "Goes on from prompts of the same number of tokens.",
        {
            "tokens": _tokens("batch", "time"),
            "max_length": Field("int32", (), "Length of the result, the prompt included.", 2),
            "temperature": TEMPERATURE,
            "seed": SEED,
        },
        {"tokens": Field("int32", ("batch", "max_length"), "Prompts and continuations.")},
        generate,
        check,
        draws=True,
    )


def _score_text(model, encode):
    def score_text(**inputs):
        ids, lengths = encode(inputs["text"])
        log_p = sampling.log_probability(model, ids, lengths)
        return {"log_probability": log_p, "num_tokens": ops.maximum(lengths - 1, 0)}

    return Endpoint(
        "score_text",
        "Scores texts.",
        {"text": _text(model.vocabulary, "Texts, in UTF-8.")},
        {
            "log_probability": Field(
                "float32", ("batch",), "Sum over the tokens after the first, in nats."
            ),
            "num_tokens": Field("int32", ("batch",), "Number of tokens in the sum."),
        },
        score_text,
        tables=encode.tables,
    )


def _generate_text(model, encode):
    decode = text.Decoder(model.vocabulary)

    def generate_text(max_new_tokens, temperature, seed, **inputs):
        ids, lengths = encode(inputs["text"])
        ids = checks.after([checks.at_least_one_token(lengths)], ids)
        ids = sampling.generate(model, ids, lengths, max_new_tokens, temperature, seed)
        return {"text": decode(ids, lengths + max_new_tokens)}

    def check(max_new_tokens, temperature, **inputs):
        return [
            checks.number_of_new_tokens(max_new_tokens, ops.shape(inputs["text"])[0]),
            checks.temperature(temperature),
        ]

    return Endpoint(
        "generate_text",
        "Goes on from texts.",
        {
            "text": _text(model.vocabulary, "Texts of at least one token each, in UTF-8."),
            "max_new_tokens": Field("int32", (), "How many tokens each row gets.", 1),
            "temperature": TEMPERATURE,
            "seed": SEED,
        },
        {"text": Field("string", ("batch",), "The texts and their continuations.")},
        generate_text,
        check,
        draws=True,
        tables=encode.tables,
    )


def _tokens_check(model):
    return lambda tokens, **_: [checks.tokens_in(tokens, model.vocabulary_size)]


def _tokens(*shape):
    return Field("int32", shape, "Token ids.")


def _scores(model, *shape):
    meaning = "Of each token to be the next one, in nats."
    return Field("float32", (*shape, model.vocabulary_size), meaning)


def _text(vocabulary, meaning):
    return Field("string", ("batch",), meaning, text.example(vocabulary))
