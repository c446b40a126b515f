"""Models of a paper's table that differ in values only."""

import inspect
from collections.abc import Callable
from typing import Any

import keras

from trellis_keras.layers import seeds


def with_defaults(
    builder: Callable[..., keras.Model],
    name: str,
    doc: str | None,
    fixed: dict[str, Any] | None = None,
    **defaults: Any,
) -> Callable[..., keras.Model]:
    """Returns a function with a builder's arguments and other defaults: a row of a paper's table.

    Args:
        builder: Function with the arguments of a family, or the model of the zoo that it is
            registered as.
        name, doc: Name and docstring of the function.
        fixed: {argument: value} of the builder's arguments that the function does not take.
        **defaults: Defaults that differ from the builder's.
    """
    builder, fixed = inspect.unwrap(builder), fixed or {}
    signature = inspect.signature(builder)
    parameters = [
        parameter.replace(default=defaults.get(parameter.name, parameter.default))
        for parameter in signature.parameters.values()
        if parameter.name not in fixed
    ]

    def function(**arguments):
        return builder(**fixed, **defaults | arguments)

    function.__name__ = function.__qualname__ = name
    function.__module__, function.__doc__ = builder.__module__, doc
    function.__annotations__ = {k: v for k, v in builder.__annotations__.items() if k not in fixed}
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def like(
    builder: Callable, fixed: dict[str, Any] | None = None, **defaults: Any
) -> Callable[[Callable], Callable[..., keras.Model]]:
    """Returns a decorator that makes a row of an empty function, see `with_defaults`."""
    return lambda row: with_defaults(builder, row.__name__, row.__doc__, fixed, **defaults)


def torch_uniform(seed: int | None) -> keras.initializers.Initializer:
    """Returns PyTorch's default for a head: uniform in +-1 / sqrt(channels)."""
    return keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform", seed=sub_seed(seed, 5))


def sub_seed(seed: int | None, offset: int) -> int | None:
    """Returns an independent seed for one part of a model."""
    return seeds.sub_seed(seed, "zoo", offset)
