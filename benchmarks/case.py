"""What a case is."""

import dataclasses
from collections.abc import Callable

# Parts of the names of variants that are not compiled by XLA.
_WITHOUT_XLA = {"graph", "without XLA"}


@dataclasses.dataclass(frozen=True)
class Case:
    """Variants that are compared.

    Attributes:
        about: One line on what a step is.
        variants: {name: function that returns `step() -> amount`}. The amount is the
            floating-point operations of the full computation (0: not counted), or tokens.
        baseline: The variant that the others are divided by, or None.
    """

    about: str
    variants: dict[str, Callable]
    baseline: str | None = None

    def left_out(self, backend):
        """Names of the variants that a backend does not have: those of a graph without XLA.

        On JAX Keras compiles with XLA, or trains one operation after the other, which nobody does.
        """
        if backend != "jax":
            return []
        return [name for name in self.variants if _WITHOUT_XLA & set(name.split(", "))]
