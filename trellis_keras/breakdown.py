"""Where a language model loses: its perplexity by word frequency and by position in a segment."""

import csv
import dataclasses
import math
import pathlib

import keras
import numpy as np

from trellis_keras.data.streams import TokenStream
from trellis_keras.files import atomic_write
from trellis_keras.layers.base import check_tokens
from trellis_keras.models import LanguageModel

# From a mean negative log-likelihood in nats.
METRICS = {
    "perplexity": np.exp,
    "bpc": lambda nats: nats / math.log(2),
    "cross_entropy": lambda nats: nats,
}
_BLOCK = 1 << 22  # tokens


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """The figure of a split in parts; those of `frequency` together are the whole split's.

    Attributes:
        metric: `"perplexity"`, `"bpc"` or `"cross_entropy"`.
        mean: The whole split's cross-entropy, in nats.
        frequency: A dict for each power of ten of a word's count in the training text, and one
            for words that do not occur there: `count_from`, `count_to`, `words` (how many of the
            vocabulary), `tokens` (how many targets), `cross_entropy` (in nats) and the metric.
        position: A dict for each position of a segment: `position` (counted from 1: so many of
            the segment's tokens have been read), `counted` (whether its targets enter the split's
            figure), `tokens`, `cross_entropy` and the metric. At a position that does not count
            (`context_length`) these are the figures that targets would have there which an
            earlier segment has counted, with the full context before them.

    Figures of parts without any token are None.
    """

    metric: str
    mean: float
    frequency: list
    position: list

    @property
    def value(self):
        """The whole split's figure in the metric."""
        return float(METRICS[self.metric](self.mean))

    def write(self, folder):
        """Writes `frequency.csv`, `position.csv` and their plots, `.png`, into a folder."""
        folder = pathlib.Path(folder).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in (("frequency", _draw_frequency), ("position", _draw_position)):
            rows = getattr(self, name)
            with atomic_write(folder / f"{name}.csv") as path, open(path, "w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
            with atomic_write(folder / f"{name}.png") as path:
                _plot(self, draw, path)


def measure(model, stream, train_tokens, metric="perplexity", verbose=0):
    """Breaks a language model's perplexity down by word frequency and by position.

    The buckets are powers of ten of a word's count in the training text. Works batch by batch with
    the head's negative log-likelihood of each token: the scores of a large vocabulary are never
    kept. A stateful model starts with an empty history.

    Args:
        model: `LanguageModel`.
        stream: `data.TokenStream` of the split.
        train_tokens: The training text, an integer array (N,), which may be a memory-mapped file.
        metric: `"perplexity"`, `"bpc"` or `"cross_entropy"` (in nats).
        verbose: 1 shows a progress bar.

    Returns:
        A `Breakdown`.

    Raises:
        ValueError: No language model, no `TokenStream`, tokens outside the vocabulary, or an
            unknown metric.

    Example:

    >>> from trellis_keras import breakdown
    >>> tokens = np.random.default_rng(0).integers(0, 50, 600)
    >>> model = LanguageModel(50, 8, TrellisLayer(units=12, depth=3, output_units=8))
    >>> stream = trellis_keras.data.TokenStream(tokens, 4, sequence_length=9, context_length=3)
    >>> parts = breakdown.measure(model, stream, train_tokens=tokens)
    >>> [(part["count_from"], part["count_to"]) for part in parts.frequency]
    [(0, 0), (1, 9), (10, 99)]
    >>> [part["counted"] for part in parts.position[:4]]
    [False, False, False, True]
    """
    _check(model, stream, metric)
    counts = _count(train_tokens, model.vocabulary_size)
    buckets = _decades(counts)
    bucket_of = np.searchsorted([last for _, last in buckets], counts)
    by_frequency, by_position = _Means(len(buckets)), _Means(stream.sequence_length)
    positions = np.arange(stream.sequence_length)
    for targets, nll, counted, uncounted in _scored(model, stream, verbose):
        by_frequency.add(bucket_of[targets], nll, counted)
        by_position.add(np.broadcast_to(positions, nll.shape), nll, counted + uncounted)
    words = np.bincount(bucket_of, minlength=len(buckets))
    frequency = [
        {"count_from": first, "count_to": last, "words": int(words[i])}
        | by_frequency.figures(i, metric)
        for i, (first, last) in enumerate(buckets)
    ]
    position = [
        {"position": i + 1, "counted": i >= stream.context_length} | by_position.figures(i, metric)
        for i in range(stream.sequence_length)
    ]
    mean = by_frequency.nll.sum() / by_frequency.weight.sum()
    return Breakdown(metric, float(mean), frequency, position)


def _count(tokens, vocabulary_size):
    """Returns how often each token occurs, (vocabulary_size,)."""
    if np.ndim(tokens) != 1 or not len(tokens):
        raise ValueError(
            f"`train_tokens` must be a text, (N,). Received: an array of shape {np.shape(tokens)}"
        )
    counts = np.zeros(vocabulary_size, "int64")
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        check_tokens(block, vocabulary_size)
        counts += np.bincount(block, minlength=vocabulary_size)
    return counts


class _TokenNLL(keras.Model):
    """The negative log-likelihood of each token that a language model reads."""

    def __init__(self, model):
        # Of no mixed policy, which would narrow the head's weights: `loss` decides itself.
        super().__init__(name="token_nll", dtype=model.variable_dtype)
        self.model = model
        self.jit_compile = model.jit_compile

    def call(self, batch):
        outputs = self.model.backbone(self.model.embedding(batch["tokens"]), training=False)
        hidden = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
        return self.model.head.loss(hidden, batch["targets"])


class _Means:
    """Weighted means of negative log-likelihoods in groups."""

    def __init__(self, groups):
        self.nll, self.weight = np.zeros((2, groups))

    def add(self, group, nll, weight):
        group, weight = group.ravel(), weight.ravel()
        # What does not count leaves no trace, not even if it is infinite.
        nll = np.where(weight, nll.ravel(), 0.0) * weight
        self.nll += np.bincount(group, nll, len(self.nll))
        self.weight += np.bincount(group, weight, len(self.weight))

    def figures(self, group, metric):
        if not self.weight[group]:
            return {"tokens": 0, "cross_entropy": None, metric: None}
        mean = self.nll[group] / self.weight[group]
        with np.errstate(over="ignore"):  # exp of a diverged model's is infinite
            value = METRICS[metric](mean)
        tokens = int(self.weight[group])
        return {"tokens": tokens, "cross_entropy": float(mean), metric: float(value)}


def _scored(model, stream, verbose):
    """Yields targets, their NLL and two weights of each batch, all (rows, segment)."""
    if not model.built:
        model.build((stream.batch_size, stream.sequence_length))
    if getattr(model.backbone, "stateful", False):
        model.allocate_history(stream, None, training=False)
    scorer = _TokenNLL(model)
    bar = keras.utils.Progbar(len(stream), verbose=verbose)
    for index in range(len(stream)):
        x, y, weight = stream[index]
        # At a position that does not count, the next token is the next input.
        targets = np.concatenate([x[:, 1 : stream.context_length + 1], y], axis=1)
        nll = scorer.predict_on_batch({"tokens": x, "targets": targets})
        counted = np.pad(weight, ((0, 0), (stream.context_length, 0)))
        yield targets, np.asarray(nll, "float64"), counted, _uncounted(stream, index, weight)
        bar.update(index + 1)


def _uncounted(stream, index, weight):
    """Weights (rows, segment) of the positions whose targets an earlier segment has counted."""
    positions = np.arange(stream.sequence_length)
    # From the row's first counted target on, and only before others that count.
    earlier = index * stream.output_length + positions >= stream.context_length
    return (earlier & (positions < stream.context_length) & (weight[:, :1] > 0)).astype("float64")


def _decades(counts):
    """(0, 0), (1, 9), (10, 99), ... up to the largest count."""
    return [(0, 0)] + [(10**i, 10 ** (i + 1) - 1) for i in range(len(str(counts.max())))]


def _check(model, stream, metric):
    if not isinstance(model, LanguageModel):
        raise ValueError(f"A breakdown is for a LanguageModel. Received: {type(model).__name__}")
    if not isinstance(stream, TokenStream):
        raise ValueError(
            "A breakdown needs a text, as a data.TokenStream, whose segments have positions. "
            f"Received: {type(stream).__name__}"
        )
    if metric not in METRICS:
        raise ValueError(f"`metric` must be one of {sorted(METRICS)}. Received: {metric!r}")
    check_tokens(np.array(stream.token_range), model.vocabulary_size)


def _plot(breakdown, draw, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylabel(breakdown.metric.replace("_", " "))
    draw(breakdown, axes)
    axes.axhline(breakdown.value, color="0.5", lw=1, ls="--", label="whole split")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, format="png")


def _draw_frequency(breakdown, axes):
    """A bar for each bucket, named with its share of the targets."""
    rows = [row for row in breakdown.frequency if row["tokens"]]
    whole = sum(row["tokens"] for row in rows)
    names = [
        f"{row['count_from']:,} to\n{row['count_to']:,}\n{100 * row['tokens'] / whole:.2g} %"
        for row in rows
    ]
    axes.bar(names, [row[breakdown.metric] for row in rows])
    if breakdown.metric == "perplexity":
        axes.set_yscale("log")
    axes.set_xlabel("occurrences in the training text; share of the targets")


def _draw_position(breakdown, axes):
    """The figure at each position, those that do not count in another colour."""
    rows = [row for row in breakdown.position if row["tokens"]]
    for counted, label, colour in ((False, "not counted", "C1"), (True, "counted", "C0")):
        part = [row for row in rows if row["counted"] == counted]
        if part:
            positions = [row["position"] for row in part]
            values = [row[breakdown.metric] for row in part]
            axes.plot(positions, values, ".-", color=colour, lw=1, label=label)
    axes.set_xlabel("position in the segment")
