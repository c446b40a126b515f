"""The models of the zoo by name."""

import dataclasses
import fnmatch
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from trellis_keras.layers import seeds
from trellis_keras.zoo import pretrained, results
from trellis_keras.zoo.datasets.registry import suggestion
from trellis_keras.zoo.recipe import Entry, Recipe
from trellis_keras.zoo.training_settings import Training

_ENTRIES: dict[str, Entry] = {}
_WIDTHS = ("filters", "hidden_units")


def register(
    *,
    data: str,
    metric: str,
    training: Training | Callable[[], Training],
    fast: Training | Callable[[], Training] | None = None,
    fast_arguments: dict[str, Any] | None = None,
    data_options: dict[str, Any] | None = None,
    channels: int | None = None,
    metrics: Callable[[], list] | None = None,
) -> Callable[[Callable], Callable[..., keras.Model]]:
    """Registers a function that returns a model as a model of the zoo.

    The function's arguments are the model's hyper-parameters, including `seed`, with the published
    values as defaults. The decorated function builds and compiles the model, and also takes
    `weights`, `dtype_policy` and `jit_compile`, and, for a language model, `vocabulary`.

    Args:
        data: Name of the data set, see `zoo.datasets.load`.
        metric: Name of the published metric.
        training: `Training` of the published recipe, or a function that returns it: the variables
            of its optimizer are then created when they are needed, not when the model is
            registered.
        fast: The same for `setting="fast"`. Defaults to None, no such setting.
        fast_arguments: {argument: value} of `setting="fast"` where it differs from the function's
            default, such as initial biases. Defaults to None.
        data_options: Published options of the data set. `zoo.recipe` takes them like the
            arguments; an option that is also an argument is passed to both.
        channels: Number of input channels. Defaults to None, a language model.
        metrics: Function that returns the metrics of a sequence model. Defaults to the model's
            default metrics.

    Raises:
        ValueError: A model with this name already exists, an argument has no default, or there is
            no argument `seed`.
    """

    def decorator(function):
        entry = Entry(
            function=function,
            data=data,
            data_options=data_options or {},
            metric=metric,
            metrics=metrics,
            channels=channels,
            training=training,
            fast=fast,
            fast_arguments=fast_arguments or {},
        )
        bad = [k for k, v in entry.arguments.items() if v is inspect.Parameter.empty]
        if bad or "seed" not in entry.arguments:
            raise ValueError(
                f"The arguments of {entry.name} need defaults, and one must be `seed`. Received: "
                f"{inspect.signature(function)}"
            )
        if entry.name in _ENTRIES:
            raise ValueError(f"The zoo already has a model {entry.name!r}.")
        _ENTRIES[entry.name] = entry
        return _function(entry)

    return decorator


def _function(entry):
    """Returns the public function of a model."""

    @functools.wraps(entry.function)
    def build(*, weights=None, vocabulary=None, **options):
        if vocabulary is not None and not entry.reads_text:
            raise ValueError(f"{entry.name} is not a language model: it takes no `vocabulary`.")
        chosen = recipe(entry.name, **options)
        for option in options.keys() - {*entry.arguments, "dtype_policy", "jit_compile"}:
            raise ValueError(
                f"`{option}` is an option of the recipe, not an argument of the model: use "
                f"zoo.recipe({entry.name!r}, {option}={options[option]!r}).build()"
            )
        return chosen.build(weights=weights, vocabulary=vocabulary)

    signature = inspect.signature(entry.function)
    kind = inspect.Parameter.KEYWORD_ONLY
    own = [parameter.replace(kind=kind) for parameter in signature.parameters.values()]
    names = [*(["vocabulary"] * entry.reads_text), "weights", "dtype_policy", "jit_compile"]
    more = [inspect.Parameter(name, kind, default=None) for name in names]
    build.__signature__ = signature.replace(parameters=[*own, *more])
    return build


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


def sub_seed(seed: int | None, offset: int) -> int | None:
    """Returns an independent seed for one part of a model."""
    return seeds.sub_seed(seed, "zoo", offset)


def list_models(pattern: str = "*", pretrained: bool = False) -> list[str]:
    """Returns the names of the zoo's models, sorted.

    Args:
        pattern: Shell-style pattern, for example `"trellisnet_*"`.
        pretrained: Whether to list only the models with pretrained weights.
    """
    names = fnmatch.filter(_ENTRIES, pattern)
    if pretrained:
        trained = {run.model for run in results.all_runs() if run.has_weights}
        names = [name for name in names if name in trained]
    return sorted(names)


def get_model(name: str, **arguments: Any) -> keras.Model:
    """Builds the model `name`, like calling the function of that name."""
    return _function(_entry(name))(**arguments)


def recipe(name: str, /, **options: Any) -> Recipe:
    """Returns the recipe of a model: its arguments, data and training.

    Args:
        name: One of `list_models()`.
        **options: Values that differ from the published ones: arguments of the model, fields of its
            `Training` and arguments of their objects, options of its data, and `data`,
            `data_options`, `data_dir`, `metric`, `dtype_policy` or `jit_compile`.
            `setting="fast"` trains the same network with this zoo's fast recipe, if it has one,
            instead of the paper's.

    Raises:
        ValueError: An unknown name or option, an invalid value, or inconsistent options.

    Examples:

    >>> recipe("trellisnet_ptb").training.epochs
    500
    >>> recipe("tcn_jsb", setting="fast", epochs=3).training.options()["optimizer"]
    'adamw'
    """
    return Recipe.published(_entry(name)).replace(**options)


def recipe_from_dict(written: dict[str, Any]) -> Recipe:
    """Returns the recipe from the result of `Recipe.to_dict`.

    One of another version raises ValueError, KeyError or TypeError.
    """
    options = {k: v for k, v in written.items() if k not in ("name", "trellis_keras")}
    training = Training.from_config(options.pop("training"))
    found = recipe(written["name"], **options.pop("arguments"), **options)
    return dataclasses.replace(found, training=training)


def run_recipe(name: str, variant: str = "", /, **options: Any) -> Recipe:
    """Returns the recipe of a zoo run: the settings that the zoo's weights were trained with.

    Args:
        name: Name of a model.
        variant: Name of the run's folder below the model's, such as `"T=200"`. Defaults to the run
            of the model's default arguments.
        **options: Values that differ from the run's, as in `recipe`.

    Raises:
        ValueError: There is no such run, or another one has these options.
    """
    _entry(name)
    own = {run.variant: run for run in results.all_runs() if run.model == name}
    if variant not in own:
        there = ", ".join(known or "(default)" for known in own) or "none"
        raise ValueError(
            f"There is no zoo run of {name}{variant and f' ({variant})'}. Its variants: {there}"
        )
    given = {f"{option}={value}" for option, value in options.items()} | {options.get("setting")}
    for other in own:
        if other != variant and other and given.issuperset(other.split(",")):
            raise ValueError(
                f"With these options {name} has its own zoo run: train {name} {other} --repeat"
            )
    return recipe_from_dict(own[variant].recipe).replace(data_checksum=None, **options)


def published_value(recipe: Recipe) -> results.Published | None:
    """Returns the row of published.csv that matches a recipe, or None.

    Row and recipe agree in metric, data, data options, the arguments that affect the outputs of
    trained weights, and all other options named in the model's rows. Three things do not count:
    what the recipe's `setting` changes, such as the dropout of a fast recipe; a width that no row
    names; and `files`, because the LRU paper does not say which files of Penn Treebank it used.
    """
    own = Recipe.published(recipe.entry).replace(setting=recipe.setting)
    rows = [row for row in results.published() if row.model == recipe.name]
    network = {name for name in recipe.arguments if not pretrained.is_of_the_training(name)}
    names = {"metric", "data", *network.difference(_WIDTHS)}.union(
        own.data_options, recipe.data_options, *(row.options for row in rows)
    ) - {"files"}
    theirs, ours = (one.options() | one.data_options for one in (own, recipe))
    for row in rows:
        if all((theirs | row.options).get(name) == ours.get(name) for name in names):
            return row
    return None


def _entry(name):
    if name not in _ENTRIES:
        near = suggestion(name, _ENTRIES)
        raise ValueError(f"Unknown model {name!r}.{near or ' `trellis-keras list` shows them.'}")
    return _ENTRIES[name]
