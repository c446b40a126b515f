"""Texts of words that are too large for memory: their ids in a file, made once, memory-mapped."""

import collections
import contextlib
import os
import pathlib
import sys

import keras
import numpy as np

from trellis_keras.data.sources import Source, decode
from trellis_keras.data.vocabulary import EOS, Vocabulary
from trellis_keras.files import atomic_write, remove_unfinished

# In bytes; all of it is in memory at a time.
_LONGEST_WORD = 2**24


def word_ids(source, checksum, check):
    """Numbers the words of a text, and maps the file of their ids into memory.

    They are the ids that `Vocabulary.from_text(text)` gives by `encode(text)`. The text is read
    twice, in blocks: memory is taken by the distinct words only. The ids are kept in a folder of
    their own inside `cache_folder()`, and later calls find them there.

    A file of ids is whole or not there, whenever the process ends. Of several processes that
    number the same text at the same time one does the work and the others wait; where that one
    is killed the next begins anew.

    Args:
        source: The `LargeSource` of the text, in UTF-8.
        checksum: sha256 (hexadecimal) of the text. The ids are kept by it.
        check: Called with the numbers of tokens and of distinct words, before any id is written.
            It raises an error where they are not what they should be.

    Returns:
        The ids, a read-only int32 `numpy.memmap` of shape (tokens,), and the list of the distinct
        words, in the order of their ids.

    Raises:
        ValueError: If the file has no words, is not UTF-8 or is not a sound gzip file.
        OSError: If the ids cannot be stored.
    """
    folder = cache_folder() / f"words-{checksum}"
    words_file, ids_file = folder / "words.txt", folder / "ids.npy"
    if not ids_file.exists():
        with _naming_failures(source, folder), _alone(folder):
            if not ids_file.exists():
                _number(source, check, words_file, ids_file)
    words = words_file.read_text(encoding="utf-8").split("\n")
    return np.load(ids_file, mmap_mode="r"), words


def cache_folder():
    """Where ids are kept: in tensorflow-datasets' folder, which need not be installed.

    That is `~/tensorflow_datasets`, or what the environment variable `TFDS_DATA_DIR` names.
    """
    folder = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return pathlib.Path(folder).expanduser() / "trellis_keras"


@contextlib.contextmanager
def _alone(folder):
    """Waits until no other process writes in a folder; the system ends a killed one's claim."""
    from filelock import FileLock

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        remove_unfinished(folder)
        yield


@contextlib.contextmanager
def _naming_failures(source, folder):
    try:
        yield
    except OSError as error:
        raise OSError(
            f"Could not turn {source.label} into token ids in {folder} ({error}). Another folder "
            "is used if the environment variable TFDS_DATA_DIR names it."
        ) from error


def _number(source, check, words_file, ids_file):
    size = source.size
    bar = _progress_bar(source, 2 * size)
    counts = collections.Counter()
    for text in _texts(source, lambda place: bar.update(_megabytes(place))):
        counts.update(text.replace("\n", f" {EOS} ").split())
    tokens = counts.total()
    if not tokens:
        raise ValueError(f"{source.label} has no words")
    check(tokens, len(counts))
    vocabulary = Vocabulary.from_counts(counts)
    with atomic_write(words_file) as temporary:
        temporary.write_text("\n".join(vocabulary.tokens), encoding="utf-8")
    # Last: where the ids are, the words are too.
    with atomic_write(ids_file) as temporary, open(temporary, "wb") as file:
        texts = _texts(source, lambda place: bar.update(_megabytes(size + place)))
        written = _write_ids(file, tokens, (vocabulary.encode(t, final_eos=False) for t in texts))
        if written != tokens:
            raise ValueError(f"{source.label} has changed while it was read")


def _write_ids(file, tokens, blocks):
    """Writes blocks of ids as an array file and returns how many there were.

    Not through a memory map: that ends the process, with no error, where the disk is full.
    """
    descr = np.lib.format.dtype_to_descr(np.dtype("int32"))
    header = {"descr": descr, "fortran_order": False, "shape": (tokens,)}
    np.lib.format.write_array_header_1_0(file, header)
    written = 0
    for ids in blocks:
        file.write(ids)
        written += len(ids)
    return written


def _texts(source, show):
    """Yields the text in pieces that cut no word, its last line ended where it has words."""
    start, line_has_words = 0, False
    for block in _uncut(source, show):
        text = decode(Source(source.label, block), start=start)
        start += len(block)
        _, newline, line = text.rpartition("\n")
        line_has_words = bool(line.strip()) or (line_has_words and not newline)
        yield text
    if line_has_words:
        yield "\n"


def _uncut(source, show):
    """Yields a source's bytes in blocks that end with a space or a newline."""
    rest = b""
    for block, place in source.blocks():
        block = rest + block
        end = max(block.rfind(b" "), block.rfind(b"\n")) + 1
        if len(block) - end > _LONGEST_WORD:
            raise ValueError(
                f"{source.label} is no text of words: it has {_LONGEST_WORD:,} bytes without a "
                "space or a line's end"
            )
        yield block[:end]
        rest = block[end:]
        show(place)
    yield rest


def _progress_bar(source, size):
    """A bar on a terminal, for those who have not turned Keras' messages off."""
    wanted = sys.stdout.isatty() and keras.config.is_interactive_logging_enabled()
    if wanted:
        print(f"Counting and numbering the words of {source.label}, this once (MB, two passes):")
    return keras.utils.Progbar(_megabytes(size), verbose=int(wanted), unit_name="MB")


def _megabytes(size):
    return -(-size // 10**6)
