"""What a case is."""

import dataclasses
from collections.abc import Callable


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
