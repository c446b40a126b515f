"""Time and memory of encoding a text of WikiText-103's size.

`python -m benchmarks.wikitext103_ids` writes a text of random words with about as many tokens,
distinct words and words per line, encodes it as token ids in a new process, and prints the figures
as JSON. The text and the ids, 1 GB in all, are deleted.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Annotated

import numpy as np
import typer

from tools.process import peak_memory

# Only the measured process imports the package, so that this one's memory does not count.

LINE = 57  # tokens per line, including its end
LETTERS = "etaoinshrdlcumwfgypbvkjxqz"


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the text.")] = 100_000_000,
    words: Annotated[int, typer.Option(help="Number of distinct words.")] = 267_734,
    seed: Annotated[int, typer.Option(help="Of the text.")] = 0,
    folder: Annotated[str | None, typer.Option(help="Folder of the text and the ids.")] = None,
):
    """Measure the encoding of a text of random words."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        text = pathlib.Path(temporary, "text.tokens")
        write_text(text, tokens, words, seed)
        figures = {"megabytes": text.stat().st_size / 1e6}
        command = [sys.executable, "-m", "benchmarks.wikitext103_ids", "measure", str(text)]
        environment = os.environ | {"KERAS_HOME": temporary}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        print(json.dumps(figures | json.loads(done.stdout), indent=2))


def write_text(path, tokens, words, seed):
    """Writes lines of words drawn with probability 1 / rank."""
    rng = np.random.default_rng(seed)
    vocabulary = np.array([_word(rank) for rank in range(words)] + ["\n"], dtype=object)
    shares = np.cumsum(1 / np.arange(1, words + 1))
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        while tokens > 0:
            size = min(tokens, 10_000 * LINE)
            ids = np.searchsorted(shares, rng.random(size) * shares[-1])
            ids[LINE - 1 :: LINE] = words
            ids[-1] = words
            file.write(" " + " ".join(vocabulary[ids]))
            tokens -= size


def measure(path):
    """Encodes a text and prints the figures of this process."""
    import hashlib

    import keras  # noqa: F401  (its memory is part of any process that reads data)

    from trellis_keras.zoo.datasets.sources import read_blocks
    from trellis_keras.zoo.datasets.texts import word_ids

    path = pathlib.Path(path)
    before = peak_memory() / 2**30
    started = time.perf_counter()
    digest = hashlib.sha256()
    for block in read_blocks(path, "verifying"):
        digest.update(block)
    hashed, hashed_cpu = time.perf_counter(), time.process_time()
    ids, words = word_ids(path, digest.hexdigest())
    ended, ended_cpu = time.perf_counter(), time.process_time()
    figures = {
        "tokens": len(ids),
        "distinct_words": len(words),
        "checksum_s": hashed - started,
        "numbering_s": ended - hashed,
        "numbering_cpu_s": ended_cpu - hashed_cpu,
        "tokens_per_s": len(ids) / (ended - hashed),
        "peak_gib_before": before,
        "peak_gib": peak_memory() / 2**30,
    }
    print(json.dumps(figures))


def _word(rank):
    """Returns a word of at least three letters; frequent words are shorter."""
    word = LETTERS[rank % 26]
    while rank := rank // 26:
        word += LETTERS[rank % 26]
    return f"{word}{LETTERS[len(word)]}e"


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2])
    else:
        typer.run(main)
