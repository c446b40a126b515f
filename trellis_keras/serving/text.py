"""A vocabulary's `encode` and `decode` as graphs: batches of strings in, batches of strings out."""

import sys

import numpy as np

from trellis_keras.data.vocabulary import EOS
from trellis_keras.serving import checks


def has_text(vocabulary):
    """Whether there is a vocabulary, and UTF-8 can write all its tokens."""
    if vocabulary is None:
        return False
    try:
        "".join(vocabulary.tokens).encode()
    except UnicodeEncodeError:  # surrogates
        return False
    return True


def example(vocabulary):
    """Returns a text of one token, as bytes."""
    return vocabulary.tokens[0].encode("latin-1" if vocabulary.unit == "byte" else "utf-8")


class Encoder:
    """`vocabulary.encode(text, final_eos=False)` for a batch of texts.

    Attributes:
        tables: Tuple of the lookup tables that it needs.

    Arguments of the call:
        text: Strings (batch,), in UTF-8.

    Returns:
        int32 ids (batch, longest), filled up with zeros, and int32 lengths (batch,). The request
        fails where there is an unknown symbol but no token for such.
    """

    def __init__(self, vocabulary):
        self._vocabulary = vocabulary
        self._split = _SPLIT[vocabulary.unit]
        words = vocabulary.unit == "word"
        self.tables = (_word_table(vocabulary),) if words else ()
        self._find = self.tables[0].lookup if words else _code_finder(vocabulary)

    def __call__(self, text):
        import tensorflow as tf

        symbols, lengths = self._split(text)
        ids = self._find(symbols)
        read = tf.sequence_mask(lengths, tf.shape(symbols)[1])
        missing = read & (ids < 0)
        unknown = self._vocabulary.unknown
        if unknown is None:
            all_known = checks.that(
                ~missing,
                "The text has symbols unknown to the vocabulary, which has no token for such:",
                _readable(tf.boolean_mask(symbols, missing), self._vocabulary.unit),
            )
            ids = checks.after([all_known], ids)
        instead = 0 if unknown is None else self._vocabulary.tokens.index(unknown)
        ids = tf.where(missing, instead, ids)
        return tf.where(read, ids, 0), lengths


class Decoder:
    """`vocabulary.decode` for a batch of ids.

    Arguments of the call:
        ids: int32 (batch, time).
        lengths: int32 (batch,), how many of each row are read.

    Returns:
        Strings (batch,).
    """

    def __init__(self, vocabulary):
        self._vocabulary = vocabulary

    def __call__(self, ids, lengths):
        import tensorflow as tf

        tokens = list(self._vocabulary.tokens)
        if self._vocabulary.unit == "character":
            codes = tf.gather([ord(token) for token in tokens], ids)
            return tf.strings.unicode_encode(tf.RaggedTensor.from_tensor(codes, lengths), "UTF-8")
        if self._vocabulary.unit == "byte":
            symbols = tf.gather([token.encode("latin-1") for token in tokens], ids)
            joined = _join(symbols, lengths, "")
            return tf.strings.unicode_transcode(joined, "UTF-8", "UTF-8")
        symbols = tf.gather(["\n" if token == EOS else token for token in tokens], ids)
        lines = tf.strings.regex_replace(_join(symbols, lengths, " "), " \n", "\n")
        return tf.strings.regex_replace(lines, "\n ", "\n")


# Each splits texts (batch,) to symbols (batch, longest), filled up, and lengths (batch,).


def _words(text):
    import tensorflow as tf

    # TensorFlow's own splitting knows the white space of ASCII only.
    white = "".join(f"\\x{{{ord(c):x}}}" for c in map(chr, range(sys.maxunicode)) if c.isspace())
    text = tf.strings.regex_replace(text, "\n", f" {EOS} ")
    return _dense(tf.strings.split(tf.strings.regex_replace(text, f"[{white}]+", " ")))


def _characters(text):
    import tensorflow as tf

    return _dense(tf.strings.unicode_decode(text, "UTF-8"))


def _bytes(text):
    import tensorflow as tf

    lengths = tf.strings.length(text)
    longest = tf.maximum(tf.reduce_max(lengths), 1)
    return tf.cast(tf.io.decode_raw(text, tf.uint8, fixed_length=longest), tf.int32), lengths


_SPLIT = {"word": _words, "character": _characters, "byte": _bytes}


def _dense(ragged):
    import tensorflow as tf

    return ragged.to_tensor(), tf.cast(ragged.row_lengths(), tf.int32)


# They make ids of symbols, and -1 of those that are unknown.


def _word_table(vocabulary):
    import tensorflow as tf

    ids = np.arange(len(vocabulary), dtype="int32")
    entries = tf.lookup.KeyValueTensorInitializer(list(vocabulary.tokens), ids)
    return tf.lookup.StaticHashTable(entries, default_value=-1)


def _code_finder(vocabulary):
    import tensorflow as tf

    codes = np.array([ord(token) for token in vocabulary.tokens], "int32")
    order = np.argsort(codes).astype("int32")

    def find(symbols):
        places = tf.searchsorted(codes[order], tf.reshape(symbols, (-1,)))
        ids = tf.gather(order, tf.minimum(places, len(codes) - 1))
        ids = tf.reshape(ids, tf.shape(symbols))
        return tf.where(tf.gather(codes, ids) == symbols, ids, -1)

    return find


def _join(symbols, lengths, separator):
    import tensorflow as tf

    ragged = tf.RaggedTensor.from_tensor(symbols, lengths)
    return tf.strings.reduce_join(ragged, axis=-1, separator=separator)


def _readable(symbols, unit):
    import tensorflow as tf

    return tf.strings.unicode_encode(symbols[:, None], "UTF-8") if unit == "character" else symbols
