"""Log-probabilities of the lines of a text file, which may be larger than memory."""

import csv
import io
import itertools
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from tqdm import tqdm

from keras_streams.files import annotate_error, atomic_write, check_output
from keras_streams.xla import compile_xla
from trellis_keras._keras_internals import all_layers
from trellis_keras.data.lines import LineReader
from trellis_keras.files import checksum, read_npz
from trellis_keras.jobs import Job, different_settings
from trellis_keras.layers.checks import check_choice, is_integer
from trellis_keras.models import LanguageModel, NeuralCache
from trellis_keras.models.generation import cached_function

METRICS: dict[str, Callable[[Any], Any]] = {
    "perplexity": np.exp,
    "bpc": lambda nats: nats / np.log(2),
    "cross_entropy": lambda nats: nats,
}

# What reading a damaged state raises.
_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
# Lines are scored and written in windows of this many batches, so that similar lengths can share
# a batch.
_WINDOW_BATCHES = 64
# Number of logits in memory at a time: 256 MB in float32, or more if 1024 tokens need more.
_MAX_SCORES = 1 << 26


def score(
    model: LanguageModel | NeuralCache,
    path: str | os.PathLike,
    output: str | os.PathLike,
    *,
    whole: bool = False,
    field: str | None = None,
    start: str | None = None,
    metric: str = "perplexity",
    batch_tokens: int | None = None,
    overwrite: bool = False,
    verbose: int = 0,
) -> dict[str, Any]:
    """Writes the log-probability of each line of a text file.

    Each line is a document, scored independently. With `whole=True` the file is one text: the
    model's context continues across lines, and the rows sum to the log-probability of the file. In
    either case a score equals that of one forward pass over the text, however long: texts longer
    than a batch are split, and the streaming cache is carried across the parts. Memory does not
    grow with the file, nor (without `field`) with the length of a line.

    The output has one row per line, in order: `line` (from 1), `log_probability` (sum in nats),
    `num_tokens` (number of tokens in the sum) and the metric, empty if there are no tokens. The
    first token is not scored unless `start` gives it a context. With a word vocabulary each line
    ends with `"<eos>"`, which is scored; with other vocabularies the end of a line is a token only
    with `whole=True`.

    Until the output is complete, progress is stored in the folder `<output>.unfinished`. The same
    call resumes an interrupted job and writes the same bytes. Lines after the scored part may have
    been corrected in the meantime.

    Args:
        model: Built `LanguageModel` with a vocabulary and a backbone that streams, or a
            `NeuralCache` of one, whose cache is empty at the start of each document.
        path: UTF-8 text file, or any file for a byte vocabulary.
        output: File to write: `.csv`, or `.jsonl` for one JSON object per line.
        whole: Boolean, whether the file is one text. Defaults to `False`.
        field: String, key of the document if each line is a JSON object. Defaults to `None`, plain
            text.
        start: Token that the model reads before each document (or the whole text), such as
            `"<eos>"`. It is not scored. Defaults to `None`.
        metric: `"perplexity"`, `"bpc"` or `"cross_entropy"` (nats), per token. Defaults to
            `"perplexity"`.
        batch_tokens: Power of two, at least 16, number of tokens in a batch, including padding.
            Defaults to `8192`, to less (at least 1024) for vocabularies above 8192 tokens, and to
            1024 for a `NeuralCache`.
        overwrite: Boolean, whether to replace an existing output once the new one is complete.
            Defaults to `False`.
        verbose: 0 or 1. 1 shows a progress bar on a terminal. Defaults to `0`.

    Returns:
        A dict with the totals of the file: `lines`, `num_tokens`, `log_probability` and the metric
        (`None` without tokens).

    Raises:
        ValueError: If an argument is invalid; a line cannot be read, or has symbols unknown to a
            vocabulary without an unknown token; an interrupted job has other arguments, another
            model or another text; or another process uses the job.

    Example:

    >>> from trellis_keras import scoring
    >>> vocabulary = trellis_keras.data.Vocabulary("abc ", unit="character")
    >>> layer = TrellisLayer(units=6, depth=3, output_units=4)
    >>> model = LanguageModel(4, 4, layer, vocabulary=vocabulary)
    >>> model.build((None, None))
    >>> with open("lines.txt", "w") as file:
    ...     _ = file.write("abba\\n\\ncab cab\\n")
    ...
    >>> totals = scoring.score(model, "lines.txt", "scores.csv")
    >>> totals["lines"], totals["num_tokens"]
    (3, 9)
    """
    path, output = pathlib.Path(path).expanduser(), pathlib.Path(output).expanduser()
    _check_model(model, start, batch_tokens)
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    if output.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"`output` must be a .csv or .jsonl file. Received: {output}")
    check_choice("metric", metric, METRICS)
    if whole and field is not None:
        raise ValueError(
            "A file of JSON objects cannot be one text: use only one of `whole` and `field`. "
            f"Received: whole=True, field={field!r}"
        )
    check_output(output, [path], overwrite)
    settings = {
        "whole": whole,
        "field": field,
        "start": start,
        "metric": metric,
        "batch_tokens": int(batch_tokens or _default_batch_tokens(model)),
        "model": _fingerprint(model)[:16],
    }
    progress = _Progress(model, path, output, settings)
    with annotate_error(output, progress.job.folder), progress.job.open():
        check_output(output, [path], overwrite)  # another process may have finished it
        return progress.run(verbose)


def score_documents(
    model: LanguageModel | NeuralCache,
    documents: Sequence[str] | str,
    *,
    start: str | None = None,
    batch_tokens: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probability of each document, a sum in nats, and its number of tokens.

    This is `score` for documents in memory.

    Args:
        model, start, batch_tokens: As in `score`.
        documents: Sequence of strings, or a string, encoded unchanged: with a word vocabulary,
            `"<eos>"` is read after each line.

    Example:

    >>> from trellis_keras import scoring
    >>> vocabulary = trellis_keras.data.Vocabulary("abc ", unit="character")
    >>> model = LanguageModel(4, 4, TrellisLayer(6, 3, output_units=4), vocabulary=vocabulary)
    >>> model.build((None, None))
    >>> log_probabilities, num_tokens = scoring.score_documents(model, ["abba", "", "cab"])
    >>> num_tokens.tolist()
    [3, 0, 2]
    """
    _check_model(model, start, batch_tokens)
    documents = [documents] if isinstance(documents, str) else list(documents)
    wrong = next((one for one in documents if not isinstance(one, str)), None)
    if wrong is not None:
        raise ValueError(f"`documents` must be strings. Received: {wrong!r}")
    scorer = _Scorer(model, batch_tokens or _default_batch_tokens(model), _start(model, start))
    ids = [model.vocabulary.encode(document) for document in documents]
    sums, counts = np.zeros(len(ids)), np.zeros(len(ids), "int64")
    for numbers, some_sums, some_counts in scorer.documents(ids):
        sums[numbers] += some_sums
        counts[numbers] += some_counts
    return sums, counts


def _default_batch_tokens(model):
    if isinstance(model, NeuralCache):  # each row of a batch has its own cache
        return 1024
    tokens = _power_of_two(_MAX_SCORES // model.vocabulary_size + 1) // 2  # rounded down
    return max(1024, min(8192, tokens))


def _start(model, start):
    """The token ids to read before each document."""
    tokens = [] if start is None else [start]
    return np.array([model.vocabulary.tokens.index(token) for token in tokens], "int32")


def _check_model(model, start, batch_tokens):
    if not isinstance(model, (LanguageModel, NeuralCache)):
        raise ValueError(
            f"`model` must be a LanguageModel or a NeuralCache. Received: {type(model).__name__}"
        )
    if model.vocabulary is None:
        raise ValueError("`model` must have a vocabulary to encode the text.")
    model.stream()  # raises if the model does not stream
    if start is not None and start not in model.vocabulary.tokens:
        raise ValueError(f"`start` must be a token of the vocabulary. Received: {start!r}")
    if batch_tokens is not None and not (
        is_integer(batch_tokens, 16) and batch_tokens & (batch_tokens - 1) == 0
    ):
        raise ValueError(
            f"`batch_tokens` must be a power of two and at least 16. Received: {batch_tokens!r}"
        )


def _fingerprint(model):
    """SHA-256 of the model's configuration, vocabulary, dtype policies and weights."""
    if isinstance(model, NeuralCache):
        parts = [_fingerprint(model.model), model.size, model.theta, model.mix]
        return checksum([json.dumps(parts).encode()])
    config = json.dumps(keras.saving.serialize_keras_object(model)["config"])
    # Keras numbers the layers of this process in their names.
    config = json.loads(config, object_hook=lambda d: {k: d[k] for k in d if k != "name"})
    policies = [layer.dtype_policy.name for layer in all_layers(model)]
    settings = json.dumps([config, policies], sort_keys=True).encode()
    weights = (np.ascontiguousarray(ops.convert_to_numpy(weight)) for weight in model.weights)
    return checksum(itertools.chain([settings], (weight.tobytes() for weight in weights)))


# The windows of lines, and the progress on the disk


class _Progress:
    """Reads, scores and writes a file window by window.

    After each window, the rows of all completed lines are appended to `rows`, and `state.npz` is
    replaced: it records the valid bytes of `rows` and of the text, and the model's position. It is
    written after the rows, so it is consistent whenever the process ends.
    """

    def __init__(self, model, path, output, settings):
        folder = output.with_name(f"{output.name}.unfinished")
        self.model = model
        self.output = output
        self.settings = settings
        self.whole = settings["whole"]
        self.rows = folder / "rows"
        self.state = folder / "state.npz"
        self.job = Job(folder, ["rows", "state.npz"], self.exists)
        self.reader = LineReader(path, model.vocabulary, self.whole, settings["field"])
        self.scorer = _Scorer(model, settings["batch_tokens"], _start(model, settings["start"]))
        self.text = _LongText(self.scorer)
        self.columns = ["line", "log_probability", "num_tokens", settings["metric"]]
        self.next_line = 0
        self.log_probability = 0.0
        self.num_tokens = 0
        # (sum, count) of each line from `next_line` on that has been read.
        self.pending = np.zeros((0, 2))

    def exists(self):
        return self.rows.exists() and self.state.exists()

    def run(self, verbose):
        resumed = self.exists()
        if resumed:
            self.load()
        with (
            open(self.rows, "ab" if resumed else "wb") as file,
            tqdm(
                total=self.reader.size,
                initial=self.reader.offset,
                unit="B",
                unit_scale=True,
                disable=None if verbose else True,  # None: shown on a terminal only
            ) as bar,
        ):
            if not resumed and self.output.suffix == ".csv":
                file.write((",".join(self.columns) + "\n").encode())
            for window in self.reader.windows(_WINDOW_BATCHES * self.scorer.batch_tokens):
                self._score(window)
                self._write(file)
                bar.update(self.reader.offset - bar.n)
            self._add(self.text.finish())
            self._write(file)
        self.job.finish(self.rows, self.output)
        totals = np.array([self.log_probability]), np.array([self.num_tokens])
        return {
            "lines": self.reader.line,
            "num_tokens": self.num_tokens,
            "log_probability": self.log_probability,
            self.columns[-1]: _metric(self.columns[-1], *totals)[0],
        }

    def _score(self, window):
        documents, parts = [], []
        read = self.reader.line + 1 - self.next_line
        self.pending = np.pad(self.pending, [(0, read - len(self.pending)), (0, 0)])
        for piece in window:
            if piece.starts and piece.ends and not self.whole:
                documents.append(piece)
                continue
            parts.append(piece)
            if piece.ends and not self.whole:
                self._add(self.text.read(parts))
                self._add(self.text.finish())
                parts = []
        self._add(self.text.read(parts))
        lines = np.array([piece.line for piece in documents], "int64")
        scored = self.scorer.documents([piece.ids for piece in documents])
        self._add((lines[numbers], sums, counts) for numbers, sums, counts in scored)

    def _add(self, scored):
        for lines, sums, counts in scored:
            np.add.at(self.pending, lines - self.next_line, np.stack([sums, counts], axis=1))

    def _write(self, file):
        lines = range(self.next_line, min(self.reader.line, self.text.line))
        scores, self.pending = np.split(self.pending, [len(lines)])
        sums, counts = scores.T
        self.next_line += len(lines)
        self.log_probability += float(sums.sum())
        self.num_tokens += int(counts.sum())
        rows = zip(
            range(lines.start + 1, lines.stop + 1),
            np.round(sums, 6).tolist(),
            counts.astype("int64").tolist(),
            _metric(self.columns[-1], sums, counts),
            strict=True,
        )
        file.write(_format(rows, self.columns, self.output.suffix).encode())
        file.flush()
        os.fsync(file.fileno())
        self.save(file.tell())

    def save(self, written):
        """Records that the first `written` bytes of the rows are valid."""
        progress = {
            "settings": self.settings,
            "written": written,
            "reader": self.reader.position(),
            "next_line": self.next_line,
            "log_probability": self.log_probability,
            "num_tokens": self.num_tokens,
        }
        arrays = {"pending": self.pending, "ids": self.text.ids, "lines": self.text.lines}
        cache = () if self.text.cache is None else self.text.cache
        for i, leaf in enumerate(keras.tree.flatten(cache)):
            # As float64, because NumPy files do not support bfloat16.
            arrays[f"cache_{i}"] = ops.convert_to_numpy(leaf).astype("float64")
        with atomic_write(self.state) as temporary, open(temporary, "wb") as file:
            np.savez(file, progress=json.dumps(progress), **arrays)

    def load(self):
        """Loads the progress of an interrupted job, unless the settings or the text differ."""
        try:
            arrays = read_npz(self.state)
            progress = json.loads(str(arrays.pop("progress")))
            if different := different_settings(progress["settings"], self.settings):
                raise ValueError(f"it has other settings: {different}")
            self.reader.resume(**progress["reader"])
            if self.rows.stat().st_size < progress["written"]:
                raise ValueError(f"{self.rows} has fewer than {progress['written']:,} bytes")
            self.pending = arrays.pop("pending").reshape(-1, 2)
            for name in ("next_line", "log_probability", "num_tokens"):
                setattr(self, name, progress[name])
            self.text.ids, self.text.lines = arrays.pop("ids"), arrays.pop("lines")
            self.text.cache = _cache_like(self.model.initial_cache(1), arrays) if arrays else None
            os.truncate(self.rows, progress["written"])
        except _DAMAGE as error:
            raise ValueError(
                f"{self.job.folder} cannot be resumed: {error}. To start over, remove it."
            ) from error


def _cache_like(cache, arrays):
    leaves = [
        ops.cast(ops.convert_to_tensor(arrays[f"cache_{i}"]), leaf.dtype)
        for i, leaf in enumerate(keras.tree.flatten(cache))
    ]
    return keras.tree.pack_sequence_as(cache, leaves)


def _metric(name, sums, counts):
    """Returns the metric of each row as a list, with None for rows without tokens."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        values = np.round(METRICS[name](-sums / counts), 6).tolist()
    return [value if count else None for value, count in zip(values, counts, strict=True)]


def _json_number(value):
    """Returns a value as JSON has it, which knows neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _format(rows, columns, suffix):
    if suffix == ".csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()
    found = (dict(zip(columns, map(_json_number, row), strict=True)) for row in rows)
    return "".join(json.dumps(row) + "\n" for row in found)


# From token ids to log-probabilities


class _Scorer:
    """Scores token ids in batches of a few static shapes, each of which is compiled once.

    A batch has `batch_tokens` tokens: `batch_tokens // steps` rows of `steps`, a power of two. Rows
    are padded at the end, which does not affect a causal model.
    """

    min_steps = 16
    # Longer documents are split if there are many of them: a recurrent layer would otherwise run
    # many sequential steps for a few rows.
    max_parallel_steps = 512

    def __init__(self, model, batch_tokens, start):
        self.model = model
        self.batch_tokens = batch_tokens
        self.start = start
        functions = model.text_loss, model.segment_loss
        self._forward, self._prefill = cached_function(
            model, "score", lambda: [compile_xla(f, model.variables) for f in functions]
        )

    def continue_rows(self, tokens, cache):
        """Scores tokens[:, 1:] after the cache of what comes before tokens[:, 0].

        Returns:
            Log-probabilities (rows, steps) in float64, and the cache before tokens[:, -1].
        """
        cache = self.model.initial_cache(len(tokens)) if cache is None else cache
        nll, cache = self._prefill(ops.convert_to_tensor(tokens), cache)
        return _log_probabilities(nll), cache

    def documents(self, documents):
        """Scores documents of different lengths; similar ones share a batch.

        Yields:
            (numbers, sums, counts): indices of documents, the sums of log-probabilities of some of
            their tokens, and how many.
        """
        documents = [np.concatenate([self.start, ids]) for ids in documents]
        lengths = np.array([len(ids) - 1 for ids in documents], "int64")
        order = np.argsort(-lengths, kind="stable")
        order = order[lengths[order] > 0]
        while len(order):
            steps = self._steps(lengths[order])
            numbers, order = np.split(order, [self.batch_tokens // steps])
            for sums, counts in self._batch([documents[i] for i in numbers], steps):
                yield numbers, sums, counts

    def _steps(self, lengths):
        """Number of steps of the next batch, for documents of decreasing lengths."""
        similar = int(np.count_nonzero(lengths > lengths[0] // 2))
        share = self.batch_tokens // _power_of_two(similar)
        steps = max(self.min_steps, _power_of_two(lengths[0]))
        return min(steps, max(self.max_parallel_steps, share), self.batch_tokens)

    def _batch(self, documents, steps):
        lengths = np.array([len(ids) - 1 for ids in documents])
        # The forward pass is faster, but carries no cache and takes no less than a dilation.
        at_once = (
            lengths.max() <= steps
            and steps >= max(getattr(self.model.backbone, "dilations", [1]))
            and not getattr(self.model.backbone, "stateful", False)
        )
        cache = None
        for first in range(0, lengths.max(), steps):
            tokens = np.zeros((self.batch_tokens // steps, steps + 1), "int32")
            for row, ids in zip(tokens, documents, strict=False):
                part = ids[first : first + steps + 1]
                row[: len(part)] = part
            if at_once:
                log_p = _log_probabilities(self._forward(ops.convert_to_tensor(tokens)))
            else:
                log_p, cache = self.continue_rows(tokens, cache)
            counts = np.clip(lengths - first, 0, steps)
            counted = np.arange(steps) < counts[:, None]
            # Padding may have the log-probability -inf.
            yield np.where(counted, log_p[: len(documents)], 0.0).sum(axis=1), counts


class _LongText:
    """Scores one text of any length that arrives in pieces.

    Attributes:
        ids: The last token that the model has read, then the tokens waiting for a full batch.
        lines: The line of each token.
        cache: The model's cache before `ids[0]`, or None at the start of a text.
    """

    def __init__(self, scorer):
        self._scorer = scorer
        self._clear()

    def _clear(self):
        self.ids = np.zeros(0, "int32")
        self.lines = np.zeros(0, "int64")
        self.cache = None

    @property
    def line(self):
        """The first line without complete scores."""
        return int(self.lines[1]) if len(self.lines) > 1 else sys.maxsize

    def read(self, pieces):
        """Yields (lines, sums, counts) of all full batches."""
        if not pieces:
            return
        ids = np.concatenate([piece.ids for piece in pieces])
        lines = np.repeat([piece.line for piece in pieces], [len(piece.ids) for piece in pieces])
        if not len(self.ids) and len(ids):
            start = self._scorer.start
            self.ids, self.lines = start, np.full(len(start), lines[0])
        self.ids = np.concatenate([self.ids, ids])
        self.lines = np.concatenate([self.lines, lines])
        while len(self.ids) > self._scorer.batch_tokens:
            yield self._batch()

    def finish(self):
        """Ends the text, and yields its remaining scores."""
        if len(self.ids) > 1:
            yield self._batch()
        self._clear()

    def _batch(self):
        steps = self._scorer.batch_tokens
        tokens = np.zeros((1, steps + 1), "int32")
        part, lines = self.ids[: steps + 1], self.lines[1 : steps + 1]
        tokens[0, : len(part)] = part
        log_p, self.cache = self._scorer.continue_rows(tokens, self.cache)
        self.ids, self.lines = self.ids[steps:], self.lines[steps:]
        counts = np.bincount(lines - lines[0])
        sums = np.bincount(lines - lines[0], log_p[0, : len(lines)])
        return lines[0] + np.arange(len(counts)), sums, counts


def _log_probabilities(nll):
    return -ops.convert_to_numpy(nll).astype("float64")


def _power_of_two(number):
    """The smallest power of two that is not smaller."""
    return 1 << (int(number) - 1).bit_length()
