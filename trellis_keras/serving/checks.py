"""Assertions on requests, as operations of a graph.

Embeddings take ids below zero from their end and, on a GPU, ids that are too large for zeros,
without a word.
"""

# They bound the work and the memory that one request can ask for.
MOST_NEW_TOKENS = 2**16  # of a row
MOST_IN_ALL = 2**22  # of all rows
MOST_ROWS = 2**12  # of a state


def that(condition, message, *values):
    """Fails, with a message and values, unless all of `condition` holds."""
    import tensorflow as tf

    return tf.debugging.Assert(tf.reduce_all(condition), [message, *values], summarize=8)


def after(assertions, tensor):
    """Returns the tensor, for what must not run beside the assertions: their message counts."""
    import tensorflow as tf

    with tf.control_dependencies(assertions):
        return tf.identity(tensor)


def shaped(tensor, spec):
    """Returns the tensor, whose shape TensorFlow does not always know by itself."""
    import tensorflow as tf

    return tf.ensure_shape(tensor, spec.shape)


def tokens_in(tokens, vocabulary_size):
    """Refuses ids outside the vocabulary."""
    return that(
        (tokens >= 0) & (tokens < vocabulary_size),
        f"Token ids must lie in [0, {vocabulary_size}). Received:",
        tokens,
    )


def at_least_one_token(lengths):
    """Refuses rows of no tokens."""
    return that(lengths >= 1, "Each row needs at least one token. Received rows of:", lengths)


def temperature(value):
    """Refuses a negative temperature, an infinite one, and one that is no number."""
    return that(
        (value >= 0) & (value < float("inf")), "`temperature` must be 0 or more. Received:", value
    )


def same_rows(inputs):
    """Refuses inputs that differ in their number of rows: some layers would repeat a single one."""
    import tensorflow as tf

    rows = tf.stack([tf.shape(value)[0] for value in inputs])
    return that(rows == rows[:1], "All inputs must have the same number of rows. Received:", rows)


def number_of_rows(count):
    """Refuses a state of no rows, or of too many."""
    return that(
        (count >= 1) & (count <= MOST_ROWS),
        f"`batch_size` must be 1 to {MOST_ROWS}. Received:",
        count,
    )


def number_of_new_tokens(count, rows):
    """Refuses no rows, and too few or too many tokens to generate."""
    import tensorflow as tf

    most = tf.minimum(MOST_NEW_TOKENS, MOST_IN_ALL // tf.maximum(rows, 1))
    return that(
        (rows >= 1) & (count >= 1) & (count <= most),
        f"A request asks for 1 to {MOST_NEW_TOKENS} new tokens of each of one row or more, "
        f"{MOST_IN_ALL} in all at most. Received new tokens and rows:",
        count,
        rows,
    )
