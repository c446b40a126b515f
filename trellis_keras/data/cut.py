"""How a text becomes a training, a validation and a test part."""

import dataclasses
import itertools
import math
import numbers

from trellis_keras.data.sources import SPLITS
from trellis_keras.data.streams import check_integer

# The Lattice Recurrent Unit paper's, of every data set; also the usual one of text8 and enwik8.
SHARES = (0.9, 0.05, 0.05)


@dataclasses.dataclass(frozen=True)
class Cut:
    """The places where a text is cut, in tokens.

    Attributes:
        split: The three parts' shares of the text by position. `None`: the published parts, or
            `SHARES` where there are none or only the text's beginning is taken.
        first: How many tokens of the text are taken, from its beginning and before the split.
            `None`: all.
        train_fraction: How much of the training part is taken, from its beginning; the other
            parts stay as they are.
    """

    split: tuple | None = None
    first: int | None = None
    train_fraction: float = 1.0

    def __post_init__(self):
        if self.split is not None:
            object.__setattr__(self, "split", _checked_split(self.split))
        if self.first is not None:
            object.__setattr__(self, "first", check_integer("first", self.first, 1))
        if not _is_number(self.train_fraction) or not 0 < self.train_fraction <= 1:
            raise ValueError(
                "`train_fraction` must be a number in (0, 1]. "
                f"Received: train_fraction={self.train_fraction!r}"
            )

    def places(self, label, unit, total, published=None):
        """Where the parts of a text lie.

        Args:
            label: What error messages call the text.
            unit: What a token is.
            total: Number of the text's tokens.
            published: The published sizes of its parts, if it has such.

        Returns:
            A dict from split to a slice of the text.

        Raises:
            ValueError: If `first` is more than the text, or a part has less than two tokens.
        """
        if self.first is not None and self.first > total:
            raise ValueError(
                f"`first` must be at most the number of {unit}s of {label}, {total:,}. "
                f"Received: first={self.first}"
            )
        places = self._slices(total, published)
        sizes = [place.stop - place.start for place in places.values()]
        if min(sizes) < 2:
            raise ValueError(
                f"{label} is too short to split: each part needs at least 2 {unit}s, an input "
                f"and a target. Received: {self.first or total} {unit}s, "
                f"split={self._shares(published) or 'published'}, "
                f"train_fraction={self.train_fraction}, which gives {sizes}"
            )
        return places

    def changes(self, total, published=None):
        """Whether the parts are others than without options."""
        return self._slices(total, published) != Cut()._slices(total, published)

    def _shares(self, published):
        """The shares to cut by, or `None` where the published parts remain."""
        if published is not None and self.split is None and self.first is None:
            return None
        return self.split or SHARES

    def _slices(self, total, published):
        length, shares = self.first or total, self._shares(published)
        if shares is None:
            ends = list(itertools.accumulate(published))
        else:
            ends = [round(length * math.fsum(shares[: i + 1])) for i in range(2)] + [length]
        starts = [0, *ends[:-1]]
        ends[0] = round(ends[0] * self.train_fraction)
        return {split: slice(*ends) for split, *ends in zip(SPLITS, starts, ends, strict=True)}


def _checked_split(split):
    shares = tuple(split) if isinstance(split, (list, tuple)) else split
    numeric = isinstance(shares, tuple) and len(shares) == 3 and all(map(_is_number, shares))
    if not numeric or not min(shares) > 0 or not math.isclose(math.fsum(shares), 1, rel_tol=1e-6):
        raise ValueError(
            "`split` must be three positive shares (train, valid, test) that add up to 1. "
            f"Received: split={shares!r}"
        )
    return shares


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
