"""Lines of text files: pieces that split no symbol, of any encoding and line end."""

import numpy as np
import pytest

from trellis_keras.data import Vocabulary
from trellis_keras.data import lines as text_lines
from trellis_keras.data.lines import LineReader

CHARACTERS = Vocabulary("abcé ", unit="character")
WORDS = Vocabulary(["<eos>", "<unk>", "a", "b", "cat"], unknown="<unk>")
BYTES = Vocabulary(["\x00", "a", "b", "\xff"], unit="byte")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(text_lines, "_PIECE", 64)


def write(folder, content):
    path = folder / "text.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def documents(path, vocabulary, **options):
    """The texts of the lines that a reader yields."""
    found, reader = {}, LineReader(path, vocabulary, **options)
    for piece in reader:
        found[piece.line] = found.get(piece.line, "") + vocabulary.decode(piece.ids)
    assert reader.offset == path.stat().st_size
    return list(found.values())


def test_bytes_need_not_be_utf8(tmp_path):
    content = b"ab\xff\x00" * 20 + b"\na\xff"
    pieces = list(LineReader(write(tmp_path, content), BYTES))
    assert [(len(piece.ids), piece.starts, piece.ends) for piece in pieces] == [
        (64, True, False),
        (16, False, True),
        (2, True, True),
    ]
    np.testing.assert_array_equal(pieces[-1].ids, [1, 3])


def test_a_byte_order_mark_is_skipped(tmp_path):
    mark = b"\xef\xbb\xbf"
    assert documents(write(tmp_path, mark + b"a cat\r\na cat\r\n"), WORDS) == ["a cat\n"] * 2
    assert documents(write(tmp_path, mark + b"ab\n"), CHARACTERS) == ["ab"]
    assert documents(write(tmp_path, mark), CHARACTERS) == []
    assert documents(write(tmp_path, mark + b'{"x": "ab"}\n'), CHARACTERS, field="x") == ["ab"]
    with pytest.raises(ValueError, match="line 2.*ufeff"):
        documents(write(tmp_path, b"ab\n" + mark), CHARACTERS)


@pytest.mark.parametrize("unit", ["character", "byte"])
def test_lines_that_end_as_on_windows(unit, tmp_path):
    """A piece may end between the two characters."""
    lines = ["", *("ab" * 100)[:5], "ab" * 31, "ab" * 31 + "a", "ab" * 32, "ab" * 63 + "a", "b"]
    for end in ("\r\n", "\n"):
        path = write(tmp_path, end.join(lines))
        assert documents(path, Vocabulary("ab", unit=unit)) == lines
    # Anywhere else a carriage return is a symbol.
    lines = ["a\rb", "a" * 63 + "\rb", "b\r"]
    path = write(tmp_path, "\r\n".join(lines))
    assert documents(path, Vocabulary("\rab", unit=unit)) == lines
    whole = documents(path, Vocabulary("\r\nab", unit=unit), whole=True)
    assert "".join(whole) == "\r\n".join(lines)


def test_windows_are_never_empty(tmp_path):
    path = write(tmp_path, "a cat\n" * 6)
    windows = list(LineReader(path, WORDS).windows(2 * (3 + text_lines._LINE_TOKENS)))
    assert [len(window) for window in windows] == [2, 2, 2]
    assert not list(LineReader(write(tmp_path, ""), WORDS).windows(10))


def test_resumes_after_any_piece(tmp_path):
    """A piece may have been the last one of a file that has become longer."""
    path = write(tmp_path, "a cat\n" * 3 + "a " * 100 + "\n\nb")
    whole = [piece.ids.tolist() for piece in LineReader(path, WORDS)]
    for done in range(len(whole) + 1):
        first, second = LineReader(path, WORDS), LineReader(path, WORDS)
        for _, _ in zip(range(done), first, strict=False):
            pass
        second.resume(**first.position())
        assert (second.line, second.offset) == (first.line, first.offset)
        assert [piece.ids.tolist() for piece in second] == whole[done:]
    longer = LineReader(write(tmp_path, path.read_text() + "b\n"), WORDS)
    with pytest.raises(ValueError, match="text.txt has changed in its first"):
        longer.resume(**second.position())
