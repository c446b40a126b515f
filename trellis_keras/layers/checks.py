"""Checks of arguments."""

import math
import numbers
from collections.abc import Collection
from typing import Any

import keras
import numpy as np

from trellis_keras.types import Tensor

_LARGEST_REACH = 2**30  # an int32, as are the numbers of steps to pad


def is_integer(value: Any, minimum: float = -math.inf) -> bool:
    """Returns whether a value is an integer of Python or NumPy, and at least `minimum`."""
    is_integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integral and value >= minimum


def is_number(value: Any) -> bool:
    """Returns whether a value is a number of Python or NumPy, perhaps NaN, and not a boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_integer(name: str, value: Any, minimum: float = -math.inf) -> int:
    """Returns an argument as a Python integer (NumPy integers are not JSON serializable)."""
    if not is_integer(value, minimum):
        wanted = "an integer" if minimum == -math.inf else f"an integer >= {minimum}"
        wanted = "a positive integer" if minimum == 1 else wanted
        raise ValueError(f"`{name}` must be {wanted}. Received: {name}={value!r}")
    return int(value)


def check_positive(**arguments: Any) -> tuple[int, ...]:
    """Returns the arguments as Python integers."""
    return tuple(check_integer(name, value, minimum=1) for name, value in arguments.items())


def check_choice(name: str, value: Any, choices: Collection) -> None:
    """Raises ValueError unless the value is one of the choices."""
    if value not in tuple(choices):  # the value may have no hash
        words = ", ".join(sorted(map(str, choices)))
        raise ValueError(f"`{name}` must be one of {words}. Received: {value!r}")


def check_not_negative(**arguments: float) -> None:
    """Raises ValueError unless the arguments are finite numbers >= 0."""
    for name, value in arguments.items():
        if not isinstance(value, numbers.Real) or not 0 <= value < math.inf:
            raise ValueError(f"`{name}` must be a number >= 0. Received: {name}={value!r}")


def check_rates(**rates: float) -> None:
    """Raises ValueError for dropout rates outside [0, 1)."""
    for name, rate in rates.items():
        if not isinstance(rate, numbers.Real) or not 0 <= rate < 1:
            raise ValueError(f"`{name}` must be in [0, 1). Received: {name}={rate!r}")


def largest_dilation(kernel_size: int) -> int:
    """Returns the largest dilation rate whose convolution pads a number of steps in range."""
    return _LARGEST_REACH // max(kernel_size - 1, 1)


def check_dilations(name: str, dilations: Any, kernel_size: int) -> list[int]:
    """Returns the dilation rates of convolutions as a list of Python integers."""
    if np.ndim(dilations) != 1 or len(dilations) == 0:
        raise ValueError(
            f"`{name}` must be a list of at least one integer. Received: {name}={dilations!r}"
        )
    dilations = [check_integer(name, dilation, minimum=1) for dilation in dilations]
    largest = largest_dilation(kernel_size)
    if max(dilations) > largest:
        raise ValueError(
            f"With kernel_size={kernel_size}, `{name}` must be at most {largest}. "
            f"Received: {name}={max(dilations)}"
        )
    return dilations


def check_has_steps(layer: keras.Layer, inputs: Tensor) -> None:
    """Raises ValueError for inputs (batch, 0, channels)."""
    if inputs.shape[1] == 0:
        raise ValueError(
            f"{layer.name} needs at least one time step. Received: shape {tuple(inputs.shape)}"
        )
