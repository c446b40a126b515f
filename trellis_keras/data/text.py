"""Splits of a text for training, validation and test."""

import dataclasses
import itertools
import math
import numbers
from collections.abc import Sequence
from typing import Any

from trellis_keras.layers.checks import check_integer

# Train, valid and test fractions of a text without a published split.
DEFAULT_SHARES = (0.9, 0.05, 0.05)
Shares = Sequence[float] | None
PARTS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True)
class Cut:
    """The split of a text.

    Args:
        split: Three fractions of the text for training, validation and test, in this order.
            Defaults to the published split if there is one, else to `(0.9, 0.05, 0.05)`.
        first: Integer, number of tokens to use from the start of the text. Defaults to all.
        train_fraction: Float, fraction of the training split to use, from its start. Defaults to 1.

    Raises:
        ValueError: If an argument is out of range.
    """

    split: Shares = None
    first: int | None = None
    train_fraction: float = 1.0

    def __post_init__(self):
        if self.split is not None:
            object.__setattr__(self, "split", check_shares("split", self.split))
        if self.first is not None:
            object.__setattr__(self, "first", check_integer("first", self.first, 1))
        if not _is_number(self.train_fraction) or not 0 < self.train_fraction <= 1:
            raise ValueError(
                "`train_fraction` must be a number in (0, 1]. "
                f"Received: train_fraction={self.train_fraction!r}"
            )

    def parts(self, total, published):
        """Returns {part: slice of the text} for `total` tokens; `published` sizes or ()."""
        length = self.first or total
        if not published or self.split is not None or self.first is not None:
            shares = self.split or DEFAULT_SHARES
            ends = [round(length * math.fsum(shares[: i + 1])) for i in range(2)] + [length]
        else:
            ends = list(itertools.accumulate(published))
        starts = [0, *ends[:-1]]
        ends[0] = round(ends[0] * self.train_fraction)
        return {name: slice(*part) for name, *part in zip(PARTS, starts, ends, strict=True)}


def check_shares(name: str, shares: Any) -> tuple[float, float, float]:
    """Returns three fractions as a tuple. Raises ValueError unless they are positive with sum 1."""
    shares = tuple(shares) if isinstance(shares, (list, tuple)) else shares
    if not (
        isinstance(shares, tuple)
        and len(shares) == 3
        and all(map(_is_number, shares))
        and min(shares) > 0
        and math.isclose(math.fsum(shares), 1, rel_tol=1e-6)
    ):
        raise ValueError(
            f"`{name}` must be three positive fractions (train, valid, test) that sum to 1. "
            f"Received: {name}={shares!r}"
        )
    return shares


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
