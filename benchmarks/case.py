"""The definition of a benchmark case."""

import dataclasses
from collections.abc import Callable

# Name parts of variants that XLA does not compile.
_WITHOUT_XLA = {"graph", "without XLA"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A set of variants to compare.

    Attributes:
        about: One-line description of a step.
        variants: {name: function that returns `step() -> amount`}. The amount is in floating-point
            operations of the full computation (0 if not counted), or in tokens.
        baseline: The variant that the others are compared with, or None.
    """

    about: str
    variants: dict[str, Callable]
    baseline: str | None = None

    def left_out(self, backend):
        """Returns the names of variants that a backend lacks: those with a graph but without XLA.

        On JAX, Keras compiles with XLA or runs eagerly, which is too slow to be of interest.
        """
        if backend != "jax":
            return []
        return [name for name in self.variants if _WITHOUT_XLA & set(name.split(", "))]
