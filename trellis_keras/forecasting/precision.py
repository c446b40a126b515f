"""Checks that float32 is precise enough for a column."""

from collections.abc import Sequence

import numpy as np

_STEPS = 16  # fewest float32 steps between the lowest and the highest value
_ROUNDING = 1e-12  # relative range below which a column is constant


class Float32:
    """Casts columns to float32, block by block, and rejects those that lose their variation.

    In float32, a meter that reads 1,000,000,000 changes by multiples of 64.
    """

    def __init__(self):
        self._low, self._high, self._error = np.inf, -np.inf, 0.0

    def cast(self, values: np.ndarray) -> np.ndarray:
        """Returns numbers (rows, ...) as float32."""
        with np.errstate(over="ignore", invalid="ignore"):  # infinite values are checked elsewhere
            cast = values.astype("float32")
            error = np.where(np.isfinite(cast), np.abs(values - cast), 0.0)
        self._low = np.fmin(self._low, np.fmin.reduce(values, axis=0))
        self._high = np.fmax(self._high, np.fmax.reduce(values, axis=0))
        self._error = np.maximum(self._error, error.max(axis=0))
        return cast

    def check(self, names: Sequence[str]) -> None:
        """Checks the columns that have been cast.

        Args:
            names: The columns' names in the error message.

        Raises:
            ValueError: If the values of a column differ by little more than float32 rounds them.
        """
        bounds = np.broadcast_arrays(self._low, self._high, self._error)
        for name, low, high, error in zip(names, *map(np.ravel, bounds), strict=True):
            is_constant = high - low <= _ROUNDING * max(abs(low), abs(high))
            if not is_constant and high - low < _STEPS * 2 * error:
                raise ValueError(
                    f"{name}: its values are too close to each other for float32. "
                    f"Received: {low:.15g} to {high:.15g}. Subtract a constant from them, such as "
                    "the first one, or take their differences."
                )
