"""Scores the texts of Parquet files under a language model, with many workers.

python examples/batch/score.py runs/text corpus/ scores/ --workers 8
"""

import workers

from trellis_keras import scoring
from trellis_keras.zoo.run import load_best


class Score:
    """Adds the log-probability of each text, in nats, and its number of tokens."""

    def __init__(self, run):
        self.model = load_best(run)

    def __call__(self, batch):
        sums, counts = scoring.score_documents(self.model, batch["text"].tolist())
        return {**batch, "log_probability": sums, "num_tokens": counts}


if __name__ == "__main__":
    workers.run(Score, workers.arguments("Scores the texts of Parquet files."))
