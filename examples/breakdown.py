"""Break down a language model's perplexity by word frequency and by position in a segment.

    python examples/breakdown.py RUN FOLDER [--split test]

Writes `frequency.csv` and `position.csv` with their plots. The buckets of `frequency` are powers of
ten of a token's count in the training text and cover the whole split. `position` numbers the tokens
of a segment from 1. The targets at the first `context_length` positions are scored in the previous
segment; their rows (`counted` False) show the loss with less context.
"""

import argparse
import csv
import math
from pathlib import Path

import keras
import numpy as np

METRICS = {
    "perplexity": np.exp,
    "bpc": lambda nats: nats / math.log(2),
    "cross_entropy": lambda nats: nats,
}


def measure(model, stream, train_tokens, metric="perplexity"):
    """Breaks down the loss of a language model.

    Args:
        model: `LanguageModel`.
        stream: `data.TokenStream` of the split.
        train_tokens: Integer array (N,), the training text.
        metric: `"perplexity"`, `"bpc"` or `"cross_entropy"`.

    Returns:
        {"frequency": rows, "position": rows}. Each row is a dict with `tokens`, the number of
        targets, their mean `cross_entropy` in nats and the metric; None if there are no targets.
    """
    counts = np.bincount(train_tokens, minlength=model.vocabulary_size)
    buckets = [(0, 0)] + [(10**i, 10 ** (i + 1) - 1) for i in range(len(str(counts.max())))]
    bucket_of = np.searchsorted([last for _, last in buckets], counts)
    positions = np.arange(stream.sequence_length)
    by_frequency, by_position = Means(len(buckets)), Means(len(positions))
    for index, (targets, nll, counted) in enumerate(score(model, stream)):
        by_frequency.add(bucket_of[targets], nll, counted)
        # From the row's first target on, and only before scored targets.
        seen = index * stream.output_length + positions >= stream.context_length
        first = counted[:, stream.context_length : stream.context_length + 1]
        repeated = seen & (positions < stream.context_length) & (first > 0)
        by_position.add(np.broadcast_to(positions, nll.shape), nll, counted + repeated)
    words = np.bincount(bucket_of, minlength=len(buckets))
    return {
        "frequency": [
            {"count_from": first, "count_to": last, "words": int(words[i])}
            | by_frequency.row(i, metric)
            for i, (first, last) in enumerate(buckets)
        ],
        "position": [
            {"position": i + 1, "counted": bool(i >= stream.context_length)}
            | by_position.row(i, metric)
            for i in positions
        ],
    }


def score(model, stream):
    """Yields targets, their negative log-likelihoods and weights, (rows, positions) each."""
    if getattr(model.backbone, "stateful", False):
        model.backbone.reset_state(stream.batch_size, training=False)
    scorer = TokenNLL(model)
    for x, y, weight in (stream[i] for i in range(len(stream))):
        # At positions without a scored target, the next token is the next input.
        targets = np.concatenate([x[:, 1 : stream.context_length + 1], y], axis=1)
        nll = scorer.predict_on_batch({"tokens": x, "targets": targets})
        weight = np.pad(weight, ((0, 0), (stream.context_length, 0)))
        yield targets, np.asarray(nll, "float64"), weight


class TokenNLL(keras.Model):
    """The negative log-likelihood of each token, without the logits of the whole vocabulary."""

    def __init__(self, model):
        # A mixed policy would narrow the head's weights: `loss` decides for itself.
        super().__init__(dtype=model.variable_dtype)
        self.model = model

    def call(self, batch):
        hidden = self.model.encode(batch["tokens"])["hidden"]
        return self.model.head.loss(hidden, batch["targets"])


class Means:
    """Weighted means of negative log-likelihoods in groups."""

    def __init__(self, groups):
        self.nll, self.weight = np.zeros((2, groups))

    def add(self, group, nll, weight):
        nll = np.where(weight > 0, nll, 0.0) * weight  # 0 * inf would be NaN
        self.nll += np.bincount(group.ravel(), nll.ravel(), len(self.nll))
        self.weight += np.bincount(group.ravel(), weight.ravel(), len(self.weight))

    def row(self, group, metric):
        tokens = int(self.weight[group])
        if not tokens:
            return {"tokens": 0, "cross_entropy": None, metric: None}
        mean = float(self.nll[group] / self.weight[group])
        return {"tokens": tokens, "cross_entropy": mean, metric: float(METRICS[metric](mean))}


def write(parts, metric, folder):
    """Writes tables and plots."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (("frequency", draw_frequency), ("position", draw_position)):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, parts[name][0])
            writer.writeheader()
            writer.writerows(parts[name])
        plot([row for row in parts[name] if row["tokens"]], metric, draw, folder / f"{name}.png")


def plot(rows, metric, draw, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    draw(rows, metric, axes)
    axes.set_ylabel(metric.replace("_", " "))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def draw_frequency(rows, metric, axes):
    """Draws a bar for each bucket, labeled with its share of the targets."""
    total = sum(row["tokens"] for row in rows)
    names = [
        f"{row['count_from']:,} to\n{row['count_to']:,}\n{100 * row['tokens'] / total:.2g} %"
        for row in rows
    ]
    axes.bar(names, [row[metric] for row in rows])
    if metric == "perplexity":
        axes.set_yscale("log")
    axes.set_xlabel("occurrences in the training text; share of the targets")


def draw_position(rows, metric, axes):
    """Draws the metric at each position, with unscored positions in another color."""
    for counted, label, color in ((False, "not counted", "C1"), (True, "counted", "C0")):
        part = [row for row in rows if row["counted"] == counted]
        values = [row[metric] for row in part]
        axes.plot([row["position"] for row in part], values, ".-", color=color, label=label)
    axes.set_xlabel("position in the segment")
    axes.legend(frameon=False)


def main(arguments=None):
    from trellis_keras import zoo
    from trellis_keras.zoo.run import load_best

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", help="folder of a run of a language model")
    parser.add_argument("folder", help="where tables and plots go")
    parser.add_argument("--split", default="test", choices=["train", "valid", "test"])
    options = parser.parse_args(arguments)
    recipe, model = zoo.read_recipe(options.run), load_best(options.run)
    splits = recipe.load_data()
    stream = recipe.batches(getattr(splits, options.split))
    parts = measure(model, stream, splits.train, recipe.metric)
    write(parts, recipe.metric, options.folder)


if __name__ == "__main__":
    main()
