"""Conversion between text and token ids."""

import collections
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from keras_streams.files import atomic_write
from trellis_keras.files import MAX_TEXT, read_json
from trellis_keras.layers.checks import check_choice
from trellis_keras.models.base import check_tokens

EOS = "<eos>"
UNITS = ("word", "character", "byte")
# Characters encoded at a time: intermediate arrays take several times their memory.
_CHUNK = 2**22
# Unknown symbols in an error message.
_MAX_NAMED = 5
_WORDS_AND_ENDS = re.compile(r"\n|\S+")


@keras.saving.register_keras_serializable("trellis_keras")
class Vocabulary:
    """An ordered list of tokens; the position of a token is its id.

    Words are separated by white space, and every line ends with the token `"<eos>"`. In a character
    vocabulary each character is a token, including the newline `"\\n"`. Bytes are those of the
    UTF-8 text. `keras.layers.TextVectorization` reserves the first two ids, and marks no line ends.

    Args:
        tokens: Iterable of distinct strings. Words contain no white space and include `"<eos>"`;
            characters have length 1; bytes are the characters `"\\x00"` to `"\\xff"`.
        unit: `"word"`, `"character"` or `"byte"`. Defaults to `"word"`.
        unknown: String, the token that replaces symbols outside the vocabulary, such as `"<unk>"`.
            Defaults to `None`: such symbols raise an error.

    Attributes:
        tokens, unit, unknown: The arguments, the tokens as a tuple. They do not change.

    Example:

    >>> vocabulary = Vocabulary(["<eos>", "the", "cat"], unit="word")
    >>> vocabulary.encode("the cat")
    array([1, 2, 0], dtype=int32)
    >>> vocabulary.decode([1, 2, 0])
    'the cat\\n'
    """

    def __init__(
        self, tokens: Iterable[str], unit: str = "word", unknown: str | None = None
    ) -> None:
        tokens = tuple(tokens)
        _check_vocabulary(tokens, unit, unknown)
        self.tokens = tokens
        self.unit = unit
        self.unknown = unknown
        self._index = {token: i for i, token in enumerate(tokens)}
        if unit != "word":
            # The id of each code point, followed by -1 for all larger ones.
            codes = [ord(token) for token in tokens]
            self._ids = np.full(max(codes) + 2, -1, dtype="int32")
            self._ids[codes] = np.arange(len(codes))

    @classmethod
    def from_text(
        cls, text: str | bytes, unit: str = "word", unknown: str | None = None
    ) -> "Vocabulary":
        """Builds the vocabulary of a text.

        Words are sorted by decreasing frequency, as an adaptive softmax requires, then
        alphabetically; characters by code point, bytes by value.

        Args:
            text: String, or bytes for a byte vocabulary.
            unit: `"word"`, `"character"` or `"byte"`. Defaults to `"word"`.
            unknown: As in the constructor; the text must contain it.
        """
        check_choice("unit", unit, UNITS)
        read = _as_read(text, unit)
        if unit == "character":
            return cls(sorted(set(read)), unit, unknown)
        if unit == "byte":
            return cls([chr(i) for i in range(256) if bytes([i]) in read], unit, unknown)
        return cls.from_counts(collections.Counter(_split_words(read)), unknown)

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], unknown: str | None = None) -> "Vocabulary":
        """Builds a word vocabulary from {word: count}, in the order of `from_text`."""
        return cls(sorted(counts, key=lambda word: (-counts[word], word)), "word", unknown)

    def __len__(self):
        return len(self.tokens)

    def __eq__(self, other):
        return isinstance(other, Vocabulary) and self.get_config() == other.get_config()

    def __hash__(self):
        return hash((self.tokens, self.unit, self.unknown))

    def encode(self, text: str | bytes, final_eos: bool = True) -> np.ndarray:
        """Encodes text as token ids.

        Args:
            text: String, or bytes for a byte vocabulary.
            final_eos: Boolean, whether to add `"<eos>"` after a last line without a newline, in a
                word vocabulary. Use `False` for a prompt. Defaults to `True`.

        Returns:
            int32 array of shape (tokens,).

        Raises:
            ValueError: If the text has unknown symbols and there is no `unknown` token, or is bytes
                and the vocabulary's unit is not `"byte"`.
        """
        text = _as_read(text, self.unit)
        if self.unit == "word":
            words = _split_words(text, final_eos)
            ids = np.fromiter((self._index.get(word, -1) for word in words), dtype="int32")
        else:
            ids = self._encode_symbols(text)
        missing = np.flatnonzero(ids < 0)
        if missing.size:
            if self.unknown is None:
                raise ValueError(self._describe_missing(text, missing))
            ids[missing] = self._index[self.unknown]
        return ids

    def decode(self, ids: Any) -> str:
        """Decodes token ids to text.

        Args:
            ids: Integers in [0, `len(self)`), of shape (tokens,).

        Returns:
            A string: words joined by spaces, with a newline for each `"<eos>"`; or characters; or
            bytes decoded as UTF-8, with `"\\ufffd"` for invalid bytes.
        """
        ids = np.asarray(ids)
        if ids.ndim != 1:
            raise ValueError(f"`ids` must be rank 1, (tokens,). Received: shape {ids.shape}")
        if ids.size == 0:
            return ""
        check_tokens(ids, len(self))
        symbols = [self.tokens[i] for i in ids]
        if self.unit == "character":
            return "".join(symbols)
        if self.unit == "byte":
            return "".join(symbols).encode("latin-1").decode("utf-8", "replace")
        lines = " ".join("\n" if word == EOS else word for word in symbols)
        return lines.replace(" \n", "\n").replace("\n ", "\n")

    def get_config(self) -> dict:
        """Returns the constructor's arguments as a JSON-serializable dict."""
        return {"tokens": list(self.tokens), "unit": self.unit, "unknown": self.unknown}

    @classmethod
    def from_config(cls, config: dict) -> "Vocabulary":
        """Builds a vocabulary from the result of `get_config`."""
        return cls(**config)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the vocabulary as JSON, atomically."""
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(self.get_config()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Vocabulary":
        """Reads a vocabulary written by `save`."""
        config = read_json(path, "a vocabulary", largest=MAX_TEXT)
        try:
            return cls.from_config(config)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a vocabulary: {error}") from error

    def _encode_symbols(self, symbols):
        ids = np.empty(len(symbols), dtype="int32")
        for start in range(0, len(symbols), _CHUNK):
            codes = _codes(symbols[start : start + _CHUNK])
            ids[start : start + _CHUNK] = self._ids.take(codes, mode="clip")
        return ids

    def _describe_missing(self, text, missing):
        # The items of a memoryview are bytes, not integers.
        symbols = memoryview(text).cast("c") if self.unit == "byte" else text
        symbols = list(_split_words(text)) if self.unit == "word" else symbols
        distinct = list(dict.fromkeys(symbols[i] for i in missing))
        named = ", ".join(map(repr, distinct[:_MAX_NAMED]))
        more = ", ..." if len(distinct) > _MAX_NAMED else ""
        return (
            f"The text has symbols unknown to the vocabulary of {len(self)} {self.unit}s, "
            f"which has no unknown token: {named}{more} "
            f"({len(distinct)} distinct, {len(missing)} in total)."
        )


def _as_read(text, unit):
    """Returns bytes for a byte vocabulary, otherwise a string."""
    if not isinstance(text, str | bytes):
        raise ValueError(f"`text` must be a string or bytes. Received: a {type(text).__name__}")
    if unit == "byte":
        return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    if isinstance(text, bytes):
        raise ValueError(f"`text` must be a string with unit={unit!r}. Received: bytes")
    return text


def _codes(symbols):
    if isinstance(symbols, bytes):
        return np.frombuffer(symbols, dtype="uint8")
    # "surrogatepass", so that a lone surrogate is an unknown symbol like any other.
    return np.frombuffer(symbols.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _split_words(text, final_eos=True):
    """Yields the words of a text, because a list would take many times its memory."""
    line_is_open = False
    for match in _WORDS_AND_ENDS.finditer(text):
        line_is_open = match[0] != "\n"
        yield match[0] if line_is_open else EOS
    if line_is_open and final_eos:
        yield EOS


def _check_vocabulary(tokens, unit, unknown):
    check_choice("unit", unit, UNITS)
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
            raise ValueError(f"Words must not be empty or contain white space. Received: {token!r}")
    repeated = [token for token, n in collections.Counter(tokens).items() if n > 1]
    if repeated:
        raise ValueError(f"Tokens must be distinct. Received twice: {repeated[:_MAX_NAMED]}")
    if unit == "word" and EOS not in tokens:
        raise ValueError(f"A word vocabulary needs the token {EOS!r}, the end of a line.")
    if unknown is not None and unknown not in tokens:
        raise ValueError(f"`unknown` must be one of the tokens. Received: unknown={unknown!r}")
