"""Scoring a file: read, score, write, and go on where an interrupted process has stopped."""

import hashlib
import json
import pathlib

import keras
import numpy as np
from keras import ops

from trellis_keras.layers import streaming
from trellis_keras.models import LanguageModel
from trellis_keras.scoring.output import Rows, Table, Unfinished, figures
from trellis_keras.scoring.progress import Progress
from trellis_keras.scoring.reader import Reader, token_id
from trellis_keras.scoring.scorer import LongText, Scorer
from trellis_keras.serving import without_history

# Between two states on the disk, in batches. Documents of a similar length are looked for there.
_BATCHES = 64
# What a line costs beside its tokens, in tokens: a file may hold nothing but empty lines.
_LINE = 16
# Log-probabilities that exist at a time: 256 MB in float32, or those of 1024 tokens.
_SCORES = 1 << 26


def score(
    model,
    path,
    output,
    *,
    whole=False,
    field=None,
    start=None,
    metric="perplexity",
    batch_tokens=None,
    verbose=0,
):
    """Writes the log-probability of each line of a text file of any size.

    A line is a document of its own, scored without what came before it, or with `whole=True` a
    part of the one text that the file is: the model then reads on from line to line, and the rows
    add up to the log-probability of the file. Either way the result is that of one forward pass
    over the text, however long it is: what is too long for a batch is cut, and the cache carried.

    Rows are written in the order of the lines: `line` (from 1), `log_probability` (a sum, in
    nats), `num_tokens` (how many were summed) and the metric, empty without tokens. There is no
    probability of the first token, unless `start` says what it follows. In word units `"<eos>"`
    ends a line and is its last token; in the others the line's end is a token of a whole text only.

    While it works, a folder `<output>.unfinished` holds what is done. If it is interrupted, the
    same call goes on there, with the same result; the file may have been changed (a line that
    could not be read put right) behind what has been scored.

    Memory does not grow with the file, nor with a line of it, unless `field` is used.

    Args:
        model: Built `LanguageModel` with a vocabulary, whose backbone streams.
        path: Text file, in UTF-8 (for a vocabulary of bytes: any).
        output: The file to write, `.csv` or `.jsonl` (a JSON object per line).
        whole: Whether the file is one text.
        field: Each line is a JSON object that holds the document under this name.
        start: A token of the vocabulary that is read before each document (before the whole text),
            such as `"<eos>"` or, of characters, a newline. It is not scored.
        metric: `"perplexity"`, `"bpc"` or `"cross_entropy"` (in nats), per token.
        batch_tokens: Tokens in a batch, padding included, a power of two from 16 on. Default:
            8192, fewer (1024 at least) for more than 8192 words. More take more memory.
        verbose: 1 shows a line of progress, 2 ten lines in all, on the standard error stream.

    Returns:
        A dict of the whole file's `lines`, `num_tokens`, `log_probability` and the metric (None
        without tokens).

    Raises:
        ValueError: Wrong arguments; a line that is no UTF-8, has symbols unknown to a vocabulary
            without a token for such, or no text in its `field`; an interrupted job of other
            arguments, another model or another text; or one that another process works at.
        OSError: The files cannot be read or written.

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
    table = Table(output, metric)
    _check(model, path, whole, field, batch_tokens)
    model = without_history(model)
    batch_tokens = batch_tokens or _batch_tokens(model.vocabulary_size)
    settings = {"whole": whole, "field": field, "start": start, "metric": metric}
    settings |= {"batch_tokens": batch_tokens, "model": _fingerprint(model)}
    scorer = Scorer(model, batch_tokens, token_id(model.vocabulary, start))
    reader = Reader(path, model.vocabulary, whole, field)
    unfinished = Unfinished(output)
    with unfinished.alone():
        return _Job(scorer, reader, table, settings).run(unfinished, verbose)


class _Job:
    def __init__(self, scorer, reader, table, settings):
        self.scorer, self.reader, self.table, self.settings = scorer, reader, table, settings
        self.whole = settings["whole"]
        self.text, self.rows = LongText(scorer), Rows()
        self.window = []  # (ids, line) that have been read, but not scored
        self.log_probability, self.num_tokens = 0.0, 0
        # Of tokens, since the last save; `read` counts lines too.
        self.read, self.scored = 0, 0

    def run(self, unfinished, verbose):
        going_on = self._load(unfinished)
        self.saved = self.reader.offset
        self.progress = Progress(self.reader.size, self.saved, verbose)
        with open(unfinished.rows, "ab" if going_on else "wb") as file:
            if not going_on:
                file.write(self.table.header.encode())
            self._read(lambda: self._save(unfinished, file))
        self.progress.update(self.reader.size, last=True)
        unfinished.finish()
        return self._totals()

    def _read(self, save):
        for ids, line, ends in self.reader:
            if self.whole or (ends and not self.text.begun):
                self.window.append((ids, line))
            else:  # a part of a line that is too long for a batch
                self._score_window()
                self._feed([(ids, line)])
                if ends:
                    self._add(self.text.finish())
            self.read += len(ids) + _LINE
            if self.read >= _BATCHES * self.scorer.batch_tokens:
                save()
        self._score_window()
        self._add(self.text.finish())
        save()

    def _score_window(self):
        window, self.window = self.window, []
        if self.whole:
            self._feed(window)
        elif window:
            documents, lines = zip(*window, strict=True)
            lines = np.array(lines)
            scored = self.scorer.documents(documents)
            self._add((lines[numbers], sums, counts) for numbers, sums, counts in scored)

    def _feed(self, parts):
        if parts:
            ids, lines = zip(*parts, strict=True)
            rows = np.repeat(np.array(lines, "int64"), [len(part) for part in ids])
            self._add(self.text.feed(np.concatenate(ids), rows))

    def _add(self, scored):
        # The line that goes on may have tokens already.
        self.rows.reserve(self.reader.line + 1)
        for rows, sums, counts in scored:
            self.rows.add(rows, sums, counts)
            self.scored += int(counts.sum())
            share = min(1.0, self.scored / max(1, self.read))
            self.progress.update(self.saved + share * (self.reader.offset - self.saved))

    # What is on the disk

    def _save(self, unfinished, file):
        self._score_window()
        reader, text = self.reader, self.text
        waiting = text.rows[1] if len(text.rows) > 1 else reader.line
        first, sums, counts = self.rows.take(int(waiting))
        self.log_probability += float(sums.sum())
        self.num_tokens += int(counts.sum())
        progress = {
            "settings": self.settings,
            "offset": reader.offset,
            "line": reader.line,
            "goes_on": reader.goes_on,
            "digest": reader.digest.hexdigest(),
            "first": self.rows.first,
            "log_probability": self.log_probability,
            "num_tokens": self.num_tokens,
        }
        arrays = {"sums": self.rows.sums, "counts": self.rows.counts}
        arrays |= {"ids": text.ids, "rows": text.rows}
        arrays |= {f"cache_{i}": leaf for i, leaf in enumerate(_leaves(text.cache))}
        unfinished.save(file, self.table.rows(first, sums, counts), progress, arrays)
        self.saved, self.read, self.scored = reader.offset, 0, 0
        self.progress.update(self.saved)

    def _load(self, unfinished):
        """Takes over what an interrupted process has left; returns whether there was anything."""
        found = unfinished.load()
        if found is None:
            return False
        progress, arrays = found
        with unfinished.whole():
            there = dict(progress["settings"])
            at = {name: progress[name] for name in ("offset", "line", "goes_on", "digest")}
            self.rows = Rows(progress["first"], arrays.pop("sums"), arrays.pop("counts"))
            self.log_probability = progress["log_probability"]
            self.num_tokens = progress["num_tokens"]
            self.text.ids, self.text.rows = arrays.pop("ids"), arrays.pop("rows")
        _check_settings(unfinished, there, self.settings)
        if arrays:
            with unfinished.whole():
                self.text.cache = _cache(self.scorer.model, arrays)
        try:
            self.reader.skip(**at)
        except ValueError as error:
            raise ValueError(f"{error}. {unfinished.afresh}") from error
        return True

    def _totals(self):
        metric = self.settings["metric"]
        (value,) = figures(np.array([self.log_probability]), np.array([self.num_tokens]), metric)
        return {
            "lines": self.reader.line,
            "num_tokens": self.num_tokens,
            "log_probability": self.log_probability,
            metric: value if self.num_tokens else None,
        }


def _leaves(cache):
    if cache is None:
        return []
    # float64 holds them all; NumPy's files know no bfloat16.
    return [ops.convert_to_numpy(leaf).astype("float64") for leaf in keras.tree.flatten(cache)]


def _cache(model, arrays):
    like = model.initial_cache(1)
    leaves = [
        ops.convert_to_tensor(arrays[f"cache_{i}"], leaf.dtype)
        for i, leaf in enumerate(keras.tree.flatten(like))
    ]
    return keras.tree.pack_sequence_as(like, leaves)


def _batch_tokens(vocabulary_size):
    fewer = 1 << (_SCORES // vocabulary_size).bit_length() - 1
    return max(1024, min(8192, fewer))


def _fingerprint(model):
    """SHA-256 of the model: its settings, its vocabulary and its weights."""
    config = json.dumps(keras.saving.serialize_keras_object(model)["config"])
    # Keras counts what has been made in this process in the names that it gives.
    config = json.loads(config, object_hook=lambda d: {k: d[k] for k in d if k != "name"})
    # A policy is nothing but its name.
    policies = [layer.dtype_policy.name for layer in model._flatten_layers()]
    digest = hashlib.sha256(json.dumps([config, policies], sort_keys=True).encode())
    for weight in model.weights:
        digest.update(np.ascontiguousarray(ops.convert_to_numpy(weight)).tobytes())
    return digest.hexdigest()


def _check(model, path, whole, field, batch_tokens):
    if not isinstance(model, LanguageModel):
        raise ValueError(f"Scoring is for a LanguageModel. Received: {type(model).__name__}")
    if model.vocabulary is None:
        raise ValueError("Scoring needs a model with a vocabulary, to read the text with.")
    streaming.check_streams(model.backbone)
    streaming.check_built(model)
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    if whole and field is not None:
        raise ValueError(
            "A file of JSON objects holds documents and cannot be one text: whole=True and `field` "
            f"exclude each other. Received: field={field!r}"
        )
    if batch_tokens is not None and (batch_tokens < 16 or batch_tokens & (batch_tokens - 1)):
        raise ValueError(
            f"`batch_tokens` must be a power of two from 16 on. Received: {batch_tokens}"
        )


def _check_settings(unfinished, there, here):
    different = [
        name if name == "model" else f"{name} {there.get(name)!r} there, {value!r} here"
        for name, value in here.items()
        if there.get(name) != value
    ]
    if different:
        raise ValueError(
            f"{unfinished.folder} is of an interrupted job with another {'; '.join(different)}. "
            f"{unfinished.afresh}"
        )
