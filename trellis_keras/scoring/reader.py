"""A text file of any size, line by line, as token ids."""

import codecs
import hashlib
import json

import numpy as np

# Longer lines are handed out in parts.
PIECE = 1 << 20  # bytes
_BLANKS = (b" ", b"\t", b"\r")


class Reader:
    """Yields `(ids, line, ends)`: token ids, the number of their line, from 0, and whether they
    are the last ones of it.

    In word units a line ends with `"<eos>"`, in the others with nothing, or in a `whole` text with
    the line's end as it stands in the file, which is `\\n` or `\\r\\n`.

    Args:
        path: The file, in UTF-8 (in byte units: any).
        vocabulary: `data.Vocabulary`.
        whole: Whether the lines are one text.
        field: The file holds a JSON object per line, with the document under this name.

    Attributes:
        offset: Bytes of the file that have been handed out.
        line: Number of the line that comes next, or goes on.
        goes_on: Whether parts of that line have been handed out.
        digest: SHA-256 of the bytes that have been handed out.
    """

    def __init__(self, path, vocabulary, whole=False, field=None):
        self.path, self.size = path, path.stat().st_size
        self._vocabulary = vocabulary
        self._whole, self._field = whole, field
        self.offset, self.line, self.goes_on = 0, 0, False
        self.digest = hashlib.sha256()

    def skip(self, offset, line, goes_on, digest):
        """Goes on where another reader has stopped.

        Raises:
            ValueError: The file does not begin with what that one has read.
        """
        with open(self.path, "rb") as file:
            while left := offset - self.offset:
                block = file.read(min(PIECE, left))
                if not block:
                    break
                self._advance(block)
        if self.digest.hexdigest() != digest:
            raise ValueError(
                f"{self.path} has changed in the part that has been scored already, its first "
                f"{offset:,} bytes"
            )
        self.line, self.goes_on = line, goes_on

    def __iter__(self):
        limit = PIECE if self._field is None else -1
        rest = b""
        with open(self.path, "rb") as file:
            if self.offset == 0 and self._has_byte_order_mark(file):
                self._advance(codecs.BOM_UTF8)
            file.seek(self.offset)
            while True:
                read = file.readline(limit)
                ends = read.endswith(b"\n") or len(read) != limit
                content = rest + read
                if not content and not self.goes_on:
                    return
                ids, used = self._encode(content, ends)
                rest = content[used:]
                self._advance(content[:used])
                line = self.line
                self.line, self.goes_on = line + ends, not ends
                yield ids, line, ends

    def _has_byte_order_mark(self, file):
        """Whether the file begins with a mark that is no part of its text."""
        reads_bytes = self._vocabulary.unit == "byte" and self._field is None
        return not reads_bytes and file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8

    def _advance(self, content):
        self.digest.update(content)
        self.offset += len(content)

    def _encode(self, content, ends):
        """Returns ids, and how many of the bytes they are of: a symbol may be cut at the end."""
        unit = self._vocabulary.unit
        used = len(content) if ends else self._whole_symbols(content)
        text = content[:used]
        if unit != "byte" or self._field is not None:
            text, used = self._decode(text, ends)
        if self._field is not None:
            text = self._document(text)
        elif ends and unit == "word":
            text = text.removesuffix("\n") + "\n"
        elif ends and not self._whole:
            text = _without_end(text)
        try:
            return self._vocabulary.encode(text, final_eos=self._field is not None), used
        except ValueError as error:
            raise ValueError(f"{self._place}: {error}") from error

    def _decode(self, content, ends):
        try:
            return codecs.utf_8_decode(content, "strict", ends)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._place} is not UTF-8 text: the byte {content[error.start]:#04x} at offset "
                f"{self.offset + error.start} of the file cannot be decoded"
            ) from error

    def _whole_symbols(self, content):
        """How many bytes of a part of a line surely cut no word and no line's end."""
        if self._vocabulary.unit == "word":
            return self._last_blank(content)
        cut = not self._whole and content.endswith(b"\r")
        return len(content) - cut

    def _last_blank(self, content):
        end = max(content.rfind(blank) for blank in _BLANKS) + 1
        if not end:
            raise ValueError(
                f"{self._place} has no blank in {len(content):,} bytes: this is no text of words"
            )
        return end

    def _document(self, line):
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self._place} is not JSON: {error}") from error
        text = document.get(self._field) if isinstance(document, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{self._place} is no JSON object with a text named {self._field!r}")
        return text

    @property
    def _place(self):
        return f"{self.path}, line {self.line + 1:,}"


def _without_end(line):
    both, newline = ("\r\n", "\n") if isinstance(line, str) else (b"\r\n", b"\n")
    return line.removesuffix(both).removesuffix(newline)


def token_id(vocabulary, token):
    """Returns the id of a token, as an array (1,), or for None an empty one.

    Raises:
        ValueError: The vocabulary has no such token.
    """
    if token is None:
        return np.zeros(0, "int32")
    if token not in vocabulary.tokens:
        raise ValueError(
            f"`start` must be a token of the vocabulary, or None. Received: start={token!r}"
        )
    return np.array([vocabulary.tokens.index(token)], "int32")
