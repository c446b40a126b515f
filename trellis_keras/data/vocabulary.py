"""From text to token ids and back."""

import collections
import json
import re

import keras
import numpy as np

from trellis_keras.files import atomic_write
from trellis_keras.layers.base import check_tokens

EOS = "<eos>"
UNITS = ("word", "character", "byte")
# Characters encoded at a time: what comes in between takes several times their memory.
_CHUNK = 2**22
# Enough unknown symbols to recognise the cause, few enough to stay readable.
_MAX_NAMED = 5
_WORDS_AND_ENDS = re.compile(r"\n|\S+")


@keras.saving.register_keras_serializable("trellis_keras")
class Vocabulary:
    """An immutable, ordered list of tokens; a token's place is its id.

    In word units the text is split at white space and every line ends with the token
    `"<eos>"`. In character units each character is one token, a line's end being the
    character `"\\n"`. In byte units each byte of the text in UTF-8 is one token.

    Args:
        tokens: Iterable of distinct strings. In word units none holds white space and
            `"<eos>"` is among them; in character units each is one character; in byte units
            each is the character of the byte's number, `"\\x00"` to `"\\xff"`.
        unit: `"word"`, `"character"` or `"byte"`.
        unknown: A token of `tokens` that stands for every symbol the vocabulary does not
            know (for instance `"<unk>"`). `None` makes such symbols an error.

    Raises:
        ValueError: If `unit` is another word, or `tokens` are not as described.

    Example:

    >>> vocabulary = Vocabulary(["<eos>", "the", "cat"], unit="word")
    >>> vocabulary.encode("the cat")
    array([1, 2, 0], dtype=int32)
    >>> vocabulary.decode([1, 2, 0])
    'the cat\\n'
    """

    def __init__(self, tokens, unit="word", unknown=None):
        tokens = tuple(tokens)
        _check_vocabulary(tokens, unit, unknown)
        self._tokens = tokens
        self._unit = unit
        self._unknown = unknown
        self._index = {token: i for i, token in enumerate(tokens)}
        if unit != "word":
            # The id of each code, and at the end -1, for all larger ones too.
            codes = [ord(token) for token in tokens]
            self._ids = np.full(max(codes) + 2, -1, dtype="int32")
            self._ids[codes] = np.arange(len(codes))

    @classmethod
    def from_text(cls, text, unit="word", unknown=None):
        """Builds the vocabulary of a text.

        The order depends on the text only: words by falling frequency (what an adaptive
        softmax wants) and alphabetically where that is equal, characters by code point, bytes
        by number.

        Args:
            text: The text, a string; in byte units also bytes.
            unit: `"word"`, `"character"` or `"byte"`.
            unknown: As in the constructor; the text has to contain it.

        Returns:
            A `Vocabulary`.

        Raises:
            ValueError: If `unit` is another word, or the text does not contain `unknown`.
        """
        check_unit(unit)
        if unit == "character":
            return cls(sorted(set(text)), unit, unknown)
        if unit == "byte":
            content = _utf8(text)
            return cls([chr(i) for i in range(256) if bytes([i]) in content], unit, unknown)
        return cls.from_counts(collections.Counter(_split_words(text)), unknown)

    @classmethod
    def from_counts(cls, counts, unknown=None):
        """Builds the vocabulary of a text from how often each of its words occurs.

        Args:
            counts: Dict from word to its count. The order is that of `from_text`.
            unknown: As in the constructor.

        Returns:
            A `Vocabulary` of words.
        """
        return cls(sorted(counts, key=lambda word: (-counts[word], word)), "word", unknown)

    @property
    def tokens(self):
        """All tokens in the order of their ids, a tuple of strings."""
        return self._tokens

    @property
    def unit(self):
        """`"word"`, `"character"` or `"byte"`."""
        return self._unit

    @property
    def unknown(self):
        """The token that stands for unknown symbols, or `None`."""
        return self._unknown

    def __len__(self):
        return len(self._tokens)

    def __eq__(self, other):
        return isinstance(other, Vocabulary) and self.get_config() == other.get_config()

    def __hash__(self):
        return hash((self._tokens, self._unit, self._unknown))

    def __repr__(self):
        return f"<Vocabulary of {len(self)} tokens, unit={self._unit!r}>"

    def encode(self, text, final_eos=True):
        """Turns text into token ids.

        Args:
            text: A string; in byte units also bytes.
            final_eos: Only for words: whether a last line that has no newline of its own
                gets an `"<eos>"` all the same. Use `False` for a prompt that the model is
                to continue.

        Returns:
            The ids, an int32 array of shape (tokens,).

        Raises:
            ValueError: If the text has symbols that the vocabulary does not know and there
                is no `unknown` token.
        """
        if self._unit == "word":
            words = _split_words(text, final_eos)
            ids = np.fromiter((self._index.get(word, -1) for word in words), dtype="int32")
        else:
            ids = self._encode_symbols(text if self._unit == "character" else _utf8(text))
        missing = np.flatnonzero(ids < 0)
        if missing.size:
            if self._unknown is None:
                raise ValueError(self._describe_missing(self._symbols(text), missing))
            ids[missing] = self._index[self._unknown]
        return ids

    def decode(self, ids):
        """Turns token ids into text.

        Args:
            ids: Integers in [0, `len(self)`), of shape (tokens,).

        Returns:
            A string: words with single spaces between them and a newline for each
            `"<eos>"`, or the characters one after another, or the bytes read as UTF-8, with
            `"\\ufffd"` for those that are none.

        Raises:
            ValueError: If `ids` are not integers or lie outside the vocabulary.
        """
        ids = np.asarray(ids)
        if ids.ndim != 1:
            raise ValueError(f"`ids` must have one axis, (tokens,). Received: shape {ids.shape}")
        if ids.size == 0:
            return ""
        check_tokens(ids, len(self))
        symbols = [self._tokens[i] for i in ids]
        if self._unit == "character":
            return "".join(symbols)
        if self._unit == "byte":
            return "".join(symbols).encode("latin-1").decode("utf-8", "replace")
        lines = " ".join("\n" if word == EOS else word for word in symbols)
        return lines.replace(" \n", "\n").replace("\n ", "\n")

    def get_config(self):
        """The constructor's arguments, ready for JSON."""
        return {"tokens": list(self._tokens), "unit": self._unit, "unknown": self._unknown}

    @classmethod
    def from_config(cls, config):
        """The inverse of `get_config()`."""
        return cls(**config)

    def save(self, path):
        """Writes the vocabulary as JSON; `path` holds the old file or the whole new one."""
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(self.get_config()), encoding="utf-8")

    @classmethod
    def load(cls, path):
        """Reads a vocabulary that `save()` wrote.

        Args:
            path: The JSON file.

        Returns:
            A `Vocabulary`.

        Raises:
            ValueError: If the file does not hold a vocabulary.
        """
        with open(path, encoding="utf-8") as file:
            try:
                config = json.load(file)
                return cls.from_config(config)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"{path} does not hold a vocabulary: {error}") from error

    def _encode_symbols(self, symbols):
        ids = np.empty(len(symbols), dtype="int32")
        for start in range(0, len(symbols), _CHUNK):
            codes = _codes(symbols[start : start + _CHUNK])
            ids[start : start + _CHUNK] = self._ids.take(codes, mode="clip")
        return ids

    def _symbols(self, text):
        """What the text's ids stand for, as a sequence."""
        if self._unit == "word":
            return list(_split_words(text))
        # The items of a memoryview are bytes, not integers.
        return text if self._unit == "character" else memoryview(_utf8(text)).cast("c")

    def _describe_missing(self, symbols, missing):
        distinct = list(dict.fromkeys(symbols[i] for i in missing))
        named = ", ".join(repr(symbol) for symbol in distinct[:_MAX_NAMED])
        more = ", ..." if len(distinct) > _MAX_NAMED else ""
        return (
            f"The text has symbols unknown to the vocabulary of {len(self)} {self._unit}s, "
            f"which has no token for unknown ones: {named}{more} "
            f"({len(distinct)} distinct, {len(missing)} in all)."
        )


def _utf8(text):
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _codes(symbols):
    if isinstance(symbols, bytes):
        return np.frombuffer(symbols, dtype="uint8")
    # "surrogatepass": a lone surrogate is then an unknown symbol like any other.
    return np.frombuffer(symbols.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _split_words(text, final_eos=True):
    """Yields the words of a text one by one: a list of them takes many times its memory."""
    line_is_open = False
    for match in _WORDS_AND_ENDS.finditer(text):
        line_is_open = match[0] != "\n"
        yield match[0] if line_is_open else EOS
    if line_is_open and final_eos:
        yield EOS


def check_unit(unit):
    """Raises a `ValueError` unless it is one of `UNITS`."""
    if unit not in UNITS:
        raise ValueError(f"`unit` must be one of {UNITS}. Received: unit={unit!r}")


def _check_vocabulary(tokens, unit, unknown):
    check_unit(unit)
    if not tokens:
        raise ValueError("A vocabulary needs at least one token. Received: none")
    for token in tokens:
        if not isinstance(token, str):
            raise ValueError(f"Tokens must be strings. Received: {token!r}")
        if unit == "character" and len(token) != 1:
            raise ValueError(f"With unit='character' a token is one character. Received: {token!r}")
        if unit == "byte" and not (len(token) == 1 and ord(token) < 256):
            raise ValueError(
                f"With unit='byte' a token is a character of {chr(0)!r} to {chr(255)!a}. "
                f"Received: {token!r}"
            )
        if unit == "word" and token.split() != [token]:
            raise ValueError(f"A word is not empty and has no white space. Received: {token!r}")
    repeated = [token for token, n in collections.Counter(tokens).items() if n > 1]
    if repeated:
        raise ValueError(f"Tokens must be distinct. Received twice: {repeated[:_MAX_NAMED]}")
    if unit == "word" and EOS not in tokens:
        raise ValueError(f"A word vocabulary needs the token {EOS!r}, the end of a line.")
    if unknown is not None and unknown not in tokens:
        raise ValueError(f"`unknown` must be one of the tokens. Received: unknown={unknown!r}")
