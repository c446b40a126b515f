"""Log-probabilities of token ids under a language model, in batches of few static shapes."""

import numpy as np
from keras import ops

from trellis_keras.generation.kept import kept
from trellis_keras.layers.streaming import compile_xla

_SHORTEST = 16
# Documents longer than this are cut where there are many of them: a recurrent layer would take
# their steps one after the other in few rows.
_SEGMENT = 512


class Scorer:
    """A language model's log-probabilities of each token after those before it.

    All batches have `batch_tokens` tokens, as `batch_tokens // steps` rows of `steps`, a power of
    two, padded at the end, which a causal model does not see. So few functions are compiled.

    Args:
        model: `LanguageModel` without a carried history, whose backbone streams.
        batch_tokens: A power of two.
        start: int32 ids that are read before each document, (0,) or (1,).
    """

    def __init__(self, model, batch_tokens, start):
        self.model, self.batch_tokens, self.start = model, batch_tokens, start

        def forward(tokens):
            outputs = model.backbone(model.embedding(tokens[:, :-1]), training=False)
            hidden = outputs[0] if isinstance(outputs, (list, tuple)) else outputs
            return model.head.loss(hidden, tokens[:, 1:])

        def carried(tokens, cache):
            hidden, cache = model.backbone.prefill(model.embedding(tokens[:, :-1]), cache)
            return model.head.loss(hidden, tokens[:, 1:]), cache

        def compiled():
            return [compile_xla(function, model.variables) for function in (forward, carried)]

        self._forward, self._carried = kept(model, "score", compiled)

    def carry(self, tokens, cache):
        """Scores a segment of rows that go on, from the cache after the one before it.

        Args:
            tokens: int32 (rows, steps + 1); the first ones of the rows are read only.
            cache: What the last call returned, or None.

        Returns:
            Log-probabilities (rows, steps), float64, and the cache.
        """
        cache = self.model.initial_cache(len(tokens)) if cache is None else cache
        nll, cache = self._carried(ops.convert_to_tensor(tokens), cache)
        return _log_probabilities(nll), cache

    def documents(self, documents):
        """Scores documents of different lengths, similar ones together.

        Args:
            documents: List of int32 arrays, each of any length.

        Yields:
            (numbers, sums, counts) for a part of the work: indices of distinct documents, int64,
            the sums of log-probabilities of some of their tokens, float64, and their numbers.
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
        """Steps of the batch that begins with the first of these lengths, which fall."""
        longest = lengths[0]
        alike = int(np.count_nonzero(lengths > longest // 2))
        share = self.batch_tokens // _power_of_two(alike)
        steps = max(_SHORTEST, _power_of_two(longest))
        return min(steps, max(_SEGMENT, share), self.batch_tokens)

    def _batch(self, documents, steps):
        """Yields the sums and counts of each segment of documents that fit into a batch."""
        lengths = np.array([len(ids) - 1 for ids in documents])
        cut = lengths.max() > steps or not _forward_takes(self.model.backbone, steps)
        cache = None
        for start in range(0, lengths.max(), steps):
            tokens = np.zeros((self.batch_tokens // steps, steps + 1), "int32")
            for row, ids in zip(tokens, documents, strict=False):
                part = ids[start : start + steps + 1]
                row[: len(part)] = part
            if cut:
                log_p, cache = self.carry(tokens, cache)
            else:
                log_p = _log_probabilities(self._forward(ops.convert_to_tensor(tokens)))
            counts = np.clip(lengths - start, 0, steps)
            counted = np.arange(steps) < counts[:, None]
            # What does not count leaves no trace, not even if it is infinite.
            yield np.where(counted, log_p[: len(documents)], 0.0).sum(axis=1), counts


class LongText:
    """Scores one text of any length, which comes in parts; `Scorer.documents` needs it whole.

    Attributes:
        ids: int32: the last token that has been read by the model, and those not yet scored.
        rows: int64: the output row of each of them.
        cache: The model's, after the tokens before `ids`, or None.
    """

    def __init__(self, scorer):
        self._scorer = scorer
        self.clear()

    def clear(self):
        """Ends the text: what comes next is the begin of another one."""
        self.ids, self.rows = np.zeros(0, "int32"), np.zeros(0, "int64")
        self.cache = None

    @property
    def begun(self):
        """Whether a text goes on."""
        return len(self.ids) > 0

    def feed(self, ids, rows):
        """Reads on. Yields (rows, sums, counts), as `Scorer.documents` does, of whole segments."""
        if not self.begun and len(ids):
            ids = np.concatenate([self._scorer.start, ids])
            rows = np.concatenate([rows[: len(self._scorer.start)], rows])
        self.ids, self.rows = np.concatenate([self.ids, ids]), np.concatenate([self.rows, rows])
        while len(self.ids) > self._scorer.batch_tokens:
            yield self._segment()

    def finish(self):
        """Ends the text. Yields the rest of it."""
        if len(self.ids) > 1:
            yield self._segment()
        self.clear()

    def _segment(self):
        steps = self._scorer.batch_tokens
        tokens = np.zeros((1, steps + 1), "int32")
        part, rows = self.ids[: steps + 1], self.rows[1 : steps + 1]
        tokens[0, : len(part)] = part
        log_p, self.cache = self._scorer.carry(tokens, self.cache)
        self.ids, self.rows = self.ids[steps:], self.rows[steps:]
        first, counts = rows[0], np.bincount(rows - rows[0])
        sums = np.bincount(rows - first, log_p[0, : len(rows)])
        return first + np.arange(len(counts)), sums, counts


def _forward_takes(layer, steps):
    """Whether the call, which is faster than `prefill`, takes so few steps."""
    # A TrellisLayer refuses sequences in which some level would see padding only.
    return steps >= max(getattr(layer, "dilations", [1]))


def _log_probabilities(nll):
    return -ops.convert_to_numpy(nll).astype("float64")


def _power_of_two(number):
    """The smallest one that is not smaller."""
    return 1 << (int(number) - 1).bit_length()
