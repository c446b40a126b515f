"""The lines of a text file, which may be larger than memory, as token ids."""

import codecs
import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from trellis_keras.data.vocabulary import Vocabulary
from trellis_keras.files import open_file

# Symbols of a piece; longer lines are read in several.
_PIECE = 1 << 20
# Memory overhead of a line, in tokens.
_LINE_TOKENS = 16


class Piece(NamedTuple):
    """Token ids of a line or of a part of it, and whether the line starts and ends here."""

    ids: np.ndarray
    line: int
    starts: bool
    ends: bool


class LineReader:
    """Reads a file of any size as pieces of token ids.

    With a word vocabulary a line ends with `"<eos>"`. With others its newline is dropped, or, with
    `whole`, kept as in the file, `\\n` or `\\r\\n`.

    Args:
        path: UTF-8 text file, or any file for a byte vocabulary.
        vocabulary: The `Vocabulary`.
        whole: Boolean, whether the file is one text. Defaults to `False`.
        field: String, key of the text if each line is a JSON object. Defaults to `None`.

    Attributes:
        size: Number of bytes of the file.
        offset: Number of bytes read so far.
        line: Index, from 0, of the current or next line.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        vocabulary: Vocabulary,
        whole: bool = False,
        field: str | None = None,
    ) -> None:
        self.path = path
        self.size = os.stat(path).st_size
        self.offset = 0
        self.line = 0
        self._vocabulary = vocabulary
        self._whole = whole
        self._field = field
        is_text = vocabulary.unit != "byte" or field is not None
        self._encoding = "utf-8" if is_text else "latin-1"  # in which each byte is a character
        self._pieces = 0
        self._digest = hashlib.sha256()
        self._texts = self._read()

    def position(self) -> dict[str, Any]:
        """Returns the arguments of `resume`."""
        return {"pieces": self._pieces, "digest": self._digest.hexdigest()}

    def resume(self, pieces: int, digest: str) -> None:
        """Continues from the `position` of another reader.

        Raises:
            ValueError: If the file has changed before that position.
        """
        for text, _, ends in itertools.islice(self._texts, pieces):
            self._advance(text.encode(self._encoding, "surrogateescape"), ends)
        if self._digest.hexdigest() != digest:
            raise ValueError(f"{self.path} has changed in its first {self.offset:,} bytes")

    def windows(self, size: int) -> Iterator[list[Piece]]:
        """Yields lists of pieces, each of about `size` tokens."""
        window, tokens = [], 0
        for piece in self:
            window.append(piece)
            tokens += len(piece.ids) + _LINE_TOKENS
            if tokens >= size:
                yield window
                window, tokens = [], 0
        if window:
            yield window

    def __iter__(self) -> Iterator[Piece]:
        for text, starts, ends in self._texts:
            try:
                content = text.encode(self._encoding)
            except UnicodeEncodeError as error:
                byte = ord(text[error.start]) - 0xDC00  # as "surrogateescape" decodes it
                offset = self.offset + len(text[: error.start].encode())
                raise ValueError(
                    f"{self._place} is not UTF-8: cannot decode the byte {byte:#04x} at offset "
                    f"{offset}"
                ) from None
            piece = Piece(self._encode(text, ends), self.line, starts, ends)
            self._advance(content, ends)
            yield piece

    def _read(self):
        """Yields (text, whether a line starts there, whether it ends there)."""
        limit = _PIECE if self._field is None else -1
        with open_file(self.path) as file:
            if self._encoding == "utf-8" and file.peek(3)[:3] == codecs.BOM_UTF8:
                self.offset = len(file.read(3))
            lines = io.TextIOWrapper(file, self._encoding, "surrogateescape", newline="\n")
            rest, starts = "", True
            while True:
                read = lines.readline(limit)
                text, ends = rest + read, read.endswith("\n") or len(read) != limit
                if not text and starts:
                    return
                cut = len(text) if ends else self._last_cut(text)
                yield text[:cut], starts, ends
                rest, starts = text[cut:], ends

    def _last_cut(self, text):
        """The last position in a part of a line that splits neither a word nor a newline."""
        if self._vocabulary.unit != "word":
            return len(text) - (not self._whole and text.endswith("\r"))
        cut = max(text.rfind(blank) for blank in " \t\r") + 1
        if not cut:
            raise ValueError(
                f"{self._place} has no white space in {len(text):,} characters. Words must be "
                f"shorter than {_PIECE:,} characters"
            )
        return cut

    def _encode(self, text, ends):
        if self._field is not None:
            text = self._document(text)
        elif ends and self._vocabulary.unit == "word":
            text = text.removesuffix("\n") + "\n"
        elif ends and not self._whole:
            text = text.removesuffix("\r\n").removesuffix("\n")
        symbols = text.encode("latin-1") if self._encoding == "latin-1" else text
        try:
            return self._vocabulary.encode(symbols, final_eos=self._field is not None)
        except ValueError as error:
            raise ValueError(f"{self._place}: {error}") from error

    def _document(self, line):
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self._place} is not JSON: {error}") from error
        text = document.get(self._field) if isinstance(document, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{self._place} must be a JSON object with a string {self._field!r}")
        return text

    def _advance(self, content, ends):
        self._digest.update(content)
        self.offset += len(content)
        self._pieces += 1
        self.line += ends

    @property
    def _place(self):
        return f"{self.path}, line {self.line + 1:,}"
