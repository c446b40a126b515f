"""Scores and continuations of rows of tokens, as graphs of TensorFlow without state."""


def generate(model, ids, lengths, new_tokens, temperature, seed):
    """Goes on from prompts, token by token, with constant work for each.

    What all prompts are long enough for is read by one forward pass; then all rows go on in step,
    those with longer prompts reading these first.

    Args:
        model: A `LanguageModel` that streams.
        ids: int32 (batch, longest), the prompts, filled up at the end with any tokens.
        lengths: int32 (batch,), their lengths, at least 1.
        new_tokens: int32 scalar, at least 1.
        temperature: float32 scalar. 0: the most probable token.
        seed: int32 scalar. With the same one, rows and places get the same draws.

    Returns:
        int32 (batch, longest + new_tokens), in which row i means something up to
        `lengths[i] + new_tokens`.
    """
    import tensorflow as tf

    longest, shortest = tf.shape(ids)[1], tf.reduce_min(lengths)

    def token_at(place, log_p):
        drawn = _draw(log_p, temperature, tf.stack([seed, place]))
        given = ids[:, tf.minimum(place, longest - 1)]
        return tf.where(place < lengths, given, drawn)

    def go_on(place, token, cache, written):
        written = written.write(place - shortest, token)
        log_p, cache = model.step(token, cache)
        return place + 1, token_at(place + 1, log_p), cache, written

    last = longest + new_tokens - 1
    log_p, cache = model.prefill(ids[:, :shortest])
    written = tf.TensorArray(tf.int32, last - shortest + 1, element_shape=ids.shape[:1])
    first = shortest, token_at(shortest, log_p), cache, written
    _, token, _, written = tf.while_loop(lambda place, *_: place < last, go_on, first)
    written = written.write(last - shortest, token)
    return tf.concat([ids[:, :shortest], tf.transpose(written.stack())], axis=1)


def _draw(log_p, temperature, seed):
    """Draws a token of each row: the Gumbel-max trick, which needs no sums."""
    import tensorflow as tf

    uniform = tf.random.stateless_uniform(tf.shape(log_p), seed, dtype=log_p.dtype)
    tiny = log_p.dtype.as_numpy_dtype(1e-20)
    gumbel = -tf.math.log(-tf.math.log(uniform + tiny) + tiny)
    return tf.argmax(log_p + tf.cast(temperature, log_p.dtype) * gumbel, -1, tf.int32)


def log_probability(model, ids, lengths):
    """Sums the log-probabilities of the tokens after the first.

    Args:
        model: A `LanguageModel`.
        ids: int32 (batch, longest), filled up at the end with any tokens.
        lengths: int32 (batch,), how many count.

    Returns:
        float32 (batch,), in nats; 0 where there are fewer than two tokens.
    """
    import tensorflow as tf

    ids = tf.pad(ids, [[0, 0], [0, tf.maximum(2 - tf.shape(ids)[1], 0)]])
    # Not `serving_default`'s scores: of them a head with many words makes no more than it must.
    nll = model.head.loss(model._encode(ids[:, :-1])["raw"], ids[:, 1:])
    counted = tf.range(1, tf.shape(ids)[1]) < lengths[:, None]
    return -tf.cast(tf.reduce_sum(tf.where(counted, nll, 0), axis=1), tf.float32)
