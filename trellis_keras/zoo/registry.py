"""The models of the zoo by name."""

import fnmatch
import functools
import inspect
import os
import typing
from collections.abc import Callable
from typing import Any

import keras

from trellis_keras.layers import base
from trellis_keras.zoo import results, run
from trellis_keras.zoo.recipe import Entry, Recipe, Training, known_options, suggestion

_ENTRIES: dict[tuple[str, str | None], Entry] = {}
_FUNCTIONS: dict[str, Callable] = {}


def register(
    *,
    data: str,
    metric: str,
    training: Training | Callable[..., Training],
    data_options: dict[str, Any] | None = None,
    data_arguments: tuple[str, ...] = (),
    channels: int | None = None,
    metrics: Callable[[], list] | None = None,
    resolve: Callable[..., dict[str, Any]] | None = None,
    name: str | None = None,
    setting: str | None = None,
    defaults: dict[str, Any] | None = None,
    fixed: dict[str, Any] | None = None,
    doc: str | None = None,
) -> Callable[[Callable], Callable[..., keras.Model]]:
    """Makes a function that returns a model a model of the zoo.

    The function's arguments are the model's hyper-parameters, with the published values as
    defaults; `seed` is one of them. A language model also takes `vocabulary`, the last argument.
    The decorated function builds the model, compiles it and takes `weights`, `dtype_policy` and
    `jit_compile` besides.

    Args:
        data: Name of the data set, see `zoo.datasets.load`.
        metric: Name of the published metric.
        training: How it is trained: a `Training`, or where that depends on the model's arguments a
            function from them to one.
        data_options: Options of the data set.
        data_arguments: Arguments that are options of the data set too, such as `T`.
        channels: Channels of the input. Defaults to None, a language model.
        metrics: Function that returns the metrics of a model of sequences. Defaults to the
            model's own.
        resolve: Function from the arguments to {argument: value} for those that are None because
            they follow from others. It raises `ValueError` where arguments contradict each other.
        name: Name of the model. Defaults to the function's.
        setting: Name of the setting, for a second paper's model of the same name.
        defaults: Defaults that differ from the function's, where it makes several models.
        fixed: Arguments of the function that are not the model's.
        doc: Docstring up to `Args:`, where one function makes several models. Defaults to the
            function's.

    Raises:
        ValueError: There is a model of this name already.

    Example:

    >>> @register(
    ...     data="adding",
    ...     metric="mse",
    ...     channels=2,
    ...     data_arguments=("T",),
    ...     training=Training(optimizer="adam", learning_rate=1e-3, batch_size=32, epochs=10),
    ... )
    ... def my_adding(T: int = 100, units: int = 16, seed: int | None = 0):
    ...     return SequenceRegressor(keras.layers.GRU(units), seed=seed)
    >>> my_adding(units=8).backbone.units
    8
    """

    def decorator(function):
        function = inspect.unwrap(function)  # it may be registered as another model already
        own = {
            key: parameter.default
            for key, parameter in inspect.signature(function).parameters.items()
            if key != "vocabulary" and key not in (fixed or {})
        }
        own |= defaults or {}
        if missing := [key for key, value in own.items() if value is inspect.Parameter.empty]:
            raise ValueError(f"{name or function.__name__}: {missing} need a default.")
        entry = Entry(
            name=name or function.__name__,
            setting=setting,
            function=function,
            defaults=own,
            fixed=fixed or {},
            types=typing.get_type_hints(function),
            data=data,
            data_options=data_options or {},
            data_arguments=data_arguments,
            metric=metric,
            metrics=metrics,
            channels=channels,
            training=training,
            resolve=resolve,
            doc=_docstring(function.__doc__ or "", doc),
        )
        if (entry.name, setting) in _ENTRIES:
            raise ValueError(f"The zoo has a model {entry.name!r} already.")
        _ENTRIES[entry.name, setting] = entry
        build = _function(entry)
        if setting is None:
            _FUNCTIONS[entry.name] = build
        return build

    return decorator


def _docstring(function_doc, doc):
    if doc is None:
        return function_doc
    return doc.rstrip() + "\n\n    " + function_doc[function_doc.find("Args:") :]


def _function(entry):
    """The function that a user calls."""

    @functools.wraps(entry.function)
    def build(*, setting=entry.setting, weights=None, vocabulary=None, **options):
        chosen = _entry(entry.name, setting)
        if vocabulary is not None and not chosen.reads_text:
            raise ValueError(f"{entry.name} reads no text: it takes no `vocabulary`.")
        allowed = {*chosen.defaults, "dtype_policy", "jit_compile"}
        for option in options:
            if option not in allowed and option in known_options(chosen):
                raise ValueError(
                    f"`{option}` is not an argument of the model but of its training: "
                    f"zoo.recipe({entry.name!r}, {option}={options[option]!r}).build()"
                )
        return Recipe.of(chosen, options).build(weights=weights, vocabulary=vocabulary)

    parameters = {**entry.defaults, "weights": None}
    parameters |= {"vocabulary": None} if entry.reads_text else {}
    parameters |= {"dtype_policy": None, "jit_compile": None}
    kind = inspect.Parameter.KEYWORD_ONLY
    build.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind, default=default) for name, default in parameters.items()]
    )
    build.__name__ = build.__qualname__ = entry.name
    build.__doc__ = entry.doc
    return build


def sub_seed(seed: int | None, offset: int) -> int | None:
    """Returns the seed of a part of a model: no two parts draw the same numbers."""
    return base.sub_seed(seed, "zoo", offset)


def list_models(pattern: str = "*", pretrained: bool = False) -> list[str]:
    """Returns the names of the zoo's models, sorted.

    Args:
        pattern: Shell-style pattern, for example `"trellisnet_*"`.
        pretrained: Whether to list only the models with published weights.
    """
    names = fnmatch.filter(_FUNCTIONS, pattern)
    if pretrained:
        trained = {run.model for run in results.all_runs() if run.has_weights}
        names = [name for name in names if name in trained]
    return sorted(names)


def list_settings() -> list[tuple[str, str | None]]:
    """Returns (name, setting) of every model in every paper's setting, sorted."""
    return sorted(_ENTRIES, key=lambda key: (key[0], key[1] or ""))


def get_model(name: str, **arguments: Any) -> keras.Model:
    """Builds the model `name`: the same as calling the function of that name."""
    _entry(name, None)
    return _FUNCTIONS[name](**arguments)


def describe(name: str, setting: str | None = None) -> str:
    """Returns what a model is: the first paragraph of its docstring."""
    return " ".join(_entry(name, setting).doc.split("\n\n")[0].split())


def recipe(name: str, *, setting: str | None = None, **options: Any) -> Recipe:
    """Returns the recipe of a model: its arguments, data and training.

    Args:
        name: One of `list_models()`.
        setting: Where two papers have a model of this name, `"lru_paper"` for the second one.
        **options: Arguments of the model, fields of its `Training`, and `data`, `data_options`,
            `data_dir`, `metric`, `dtype_policy` or `jit_compile`, where they are to differ from the
            published ones.

    Raises:
        ValueError: An unknown name or option, a wrong value, or options that contradict each other.

    Example:

    >>> recipe("trellisnet_ptb").training.epochs
    500
    """
    return Recipe.of(_entry(name, setting), options)


def recipe_from_dict(written: dict[str, Any]) -> Recipe:
    """Returns the recipe that `Recipe.to_dict` wrote.

    Raises:
        ValueError, KeyError or TypeError: It is not a recipe of this version.
    """
    options = {k: v for k, v in written.items() if k not in ("name", "setting", "trellis_keras")}
    options |= options.pop("arguments") | options.pop("training")
    return recipe(written["name"], setting=written.get("setting"), **options)


def read_recipe(folder: str | os.PathLike) -> Recipe:
    """Returns the recipe of the run in a folder.

    Raises:
        FileNotFoundError: There is no run.
        ValueError: Its recipe cannot be read.
    """
    settings, paths = run.read_settings(folder), run.read_paths(folder)
    try:
        if "path" in paths:
            settings["data_options"]["path"] = paths["path"]
        if "data_dir" in paths:
            settings["data_dir"] = paths["data_dir"]
        return recipe_from_dict(settings)
    # Whatever a damaged file leads to: a missing key, a list for a dict, a number without bounds.
    except (
        OverflowError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:
        path = run.recipe_path(folder)
        raise ValueError(f"{path} is not a recipe of this version: {error}") from error


def published_recipe(name: str, setting: str = "") -> Recipe:
    """Returns the recipe of a published run: the settings that the zoo's weights were trained with.

    Args:
        name: Name of a model.
        setting: Name of the run's folder below the model's, such as `"T=200"`. Defaults to the run
            of the model's default arguments.

    Raises:
        ValueError: There is no such run.
    """
    _entry(name, None)
    own = {run.setting: run for run in results.all_runs() if run.model == name}
    if setting not in own:
        there = ", ".join(known or "(default)" for known in own) or "none"
        raise ValueError(
            f"There is no published run of {name}{setting and f' ({setting})'}. Published settings "
            f"of {name}: {there}"
        )
    return recipe_from_dict(own[setting].recipe).replace(data_checksum=None)


def published_value(recipe: Recipe) -> results.Published | None:
    """Returns what is published of a recipe's model, data and metric, or None.

    A row of published.csv holds for a recipe if all arguments that any row of the model names are
    those of the row's own recipe.
    """
    entry = recipe.entry
    if (recipe.data, recipe.data_options, recipe.metric) != (
        entry.data,
        entry.data_options,
        entry.metric,
    ):
        return None
    rows = _rows(recipe.name, recipe.setting)
    names = {name for row in rows for name in row.setting} - {"setting"}
    for row in rows:
        theirs = _row_recipe(row).arguments
        if all(theirs[name] == recipe.arguments[name] for name in names):
            return row
    return None


def _rows(name, setting):
    return [
        row
        for row in results.published()
        if row.model == name and row.setting.get("setting") == setting
    ]


def _row_recipe(row):
    return recipe(row.model, **row.setting)


def _entry(name, setting):
    if (name, None) not in _ENTRIES:
        near = suggestion(name, _FUNCTIONS)
        raise ValueError(f"Unknown model {name!r}.{near or ' See `zoo.list_models()`.'}")
    if (name, setting) not in _ENTRIES:
        known = [other for model, other in _ENTRIES if model == name]
        raise ValueError(
            f"{name}: `setting` must be one of {', '.join(map(str, known))}. Received: {setting!r}"
        )
    return _ENTRIES[name, setting]
