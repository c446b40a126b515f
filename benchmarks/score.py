"""Time and memory of scoring a large text file, by default of one gigabyte.

`python -m benchmarks.score` writes a text of random words, scores it with a small character model
(with random weights, which cost the same), and prints the figures as JSON. The text and the scores
are deleted.
"""

import json
import pathlib
import tempfile
import time
from typing import Annotated

import numpy as np
import typer

from benchmarks.results import machine
from tools.process import peak_memory
from trellis_keras import scoring, zoo
from trellis_keras.data import Vocabulary

LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
WORDS = 5000
BLOCK = 1 << 20  # words
SETTINGS = {"depth": 2, "hidden_units": 8, "embedding_dim": 8}


def main(megabytes: Annotated[float, typer.Option(help="Size of the text.")] = 1000):
    """Measure the scoring of a text of random words."""
    vocabulary = Vocabulary(["\n", " ", *LETTERS], unit="character")
    model = zoo.trellisnet_char(vocabulary=vocabulary, **SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        text = pathlib.Path(folder, "text.txt")
        before = peak_memory() / 2**30
        write_text(text, megabytes * 1e6)
        started, started_cpu = time.perf_counter(), time.process_time()
        totals = scoring.score(model, text, text.with_name("scores.csv"), verbose=1)
        seconds, cpu = time.perf_counter() - started, time.process_time() - started_cpu
        megabytes = text.stat().st_size / 1e6
    figures = {"machine": machine(), **SETTINGS} | {
        "parameters": model.count_params(),
        "megabytes": megabytes,
        "lines": totals["lines"],
        "tokens": totals["num_tokens"],
        "seconds": seconds,
        "cpu_seconds": cpu,
        "megabytes_per_s": megabytes / seconds,
        "megabytes_per_cpu_s": megabytes / cpu,
        "peak_gib_before": before,
        "peak_gib": peak_memory() / 2**30,
    }
    typer.echo(json.dumps(figures, indent=2))


def write_text(path, size):
    """Writes at least `size` bytes, in lines of whole words, of log-normal lengths."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list(LETTERS), n)) for n in rng.integers(2, 9, WORDS)]
    words = np.array([*words, "\n"], dtype=object)
    shares = np.cumsum(1 / np.arange(1, WORDS + 1))
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        while file.tell() < size:
            ids = np.searchsorted(shares, rng.random(BLOCK) * shares[-1])
            lengths = rng.lognormal(np.log(15), 1.0, BLOCK).astype("int64") + 1
            ends = np.cumsum(lengths)
            ids[ends[ends < BLOCK]] = WORDS
            text = " ".join(words[ids]).replace(" \n ", "\n")
            file.write(text[: int(size) - file.tell()] + "\n")


if __name__ == "__main__":
    typer.run(main)
