"""From prompts to padded ids, and from ids to rows and pieces of text."""

import codecs

import numpy as np

from trellis_keras.layers.base import check_tokens

# In place of tokens that are still to be written: no token, so that it stops nothing.
OPEN = -1


def encode_prompts(model, prompts):
    """Returns a list of int32 arrays (time,) and whether the prompts were text.

    Raises:
        ValueError: There is no prompt, or one is empty or not made of the model's tokens.
    """
    prompts = [prompts] if isinstance(prompts, str) else prompts
    is_text = len(prompts) > 0 and all(isinstance(prompt, str) for prompt in prompts)
    if is_text:
        rows = [_encode(model, prompt) for prompt in prompts]
    else:
        rows = [np.asarray(prompt) for prompt in prompts]
    lengths = [len(row) if row.ndim == 1 else None for row in rows]
    if not lengths or not all(lengths):
        raise ValueError(
            "`prompts` must be strings or rows of token ids, at least one, and none empty. "
            f"Received: prompts of {lengths} tokens"
        )
    for row in rows:
        check_tokens(row, model.vocabulary_size)
    return [row.astype("int32") for row in rows], is_text


def _encode(model, text):
    if model.vocabulary is None:
        raise ValueError(
            "The model has no vocabulary to read text with: give prompts and stop tokens as "
            f"token ids. Received: {text!r}"
        )
    return model.vocabulary.encode(text, final_eos=False)


def pad(rows, max_length):
    """Returns int32 (batch, max_length): the rows, and `OPEN` where tokens are to be written.

    Raises:
        ValueError: Nothing would be written behind the longest row.
    """
    longest = max(len(row) for row in rows)
    if max_length <= longest:
        raise ValueError(
            "`max_length` counts the prompt too, so it must be greater than its "
            f"{longest} tokens. Received: max_length={max_length}"
        )
    given = np.full((len(rows), max_length), OPEN, "int32")
    for i, row in enumerate(rows):
        given[i, : len(row)] = row
    return given


def stop_ids(model, stop_tokens):
    """Returns a tuple of ids.

    Raises:
        ValueError: One is not a single token of the model.
    """
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


def lengths(ids, given, stop):
    """Returns the length of each row up to and including its first new stop token."""
    is_stop = np.isin(ids, stop) & (given == OPEN)
    return np.where(is_stop.any(axis=1), is_stop.argmax(axis=1) + 1, ids.shape[1])


def fill_up(ids, lengths):
    """Cuts to the longest row; shorter ones repeat their last token."""
    steps = np.minimum(np.arange(lengths.max())[None], lengths[:, None] - 1)
    return np.take_along_axis(ids, steps, axis=1)


def pieces(vocabulary, tokens):
    """Yields the text of tokens as they come: joined, it is `vocabulary.decode(tokens)`."""
    texts = _of_bytes if vocabulary.unit == "byte" else _of_symbols
    return filter(None, texts(vocabulary, tokens))


def _of_bytes(vocabulary, tokens):
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield decoder.decode(vocabulary.tokens[token].encode("latin-1"))
    yield decoder.decode(b"", final=True)


def _of_symbols(vocabulary, tokens):
    # Whether a space comes before a word depends on the token before it, and on no other.
    before = []
    for token in tokens:
        yield vocabulary.decode([*before, token]).removeprefix(vocabulary.decode(before))
        before = [token]
