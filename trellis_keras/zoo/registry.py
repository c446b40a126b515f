"""Which models the zoo has, and the recipe that belongs to each."""

import fnmatch
import functools
import inspect

from trellis_keras.layers.base import default_policy
from trellis_keras.zoo import pretrained

_ENTRIES = {}


def register(recipe):
    """Registers a zoo function, whose name is `recipe.name`, together with its recipe.

    The decorated function takes the recipe's model configuration (and, of a language model, the
    vocabulary) and builds the model. What it becomes takes the configuration's fields and
    `weights` (and `vocabulary`) as keyword arguments.
    """

    def decorator(function):
        @functools.wraps(function)
        def build(*, weights=None, **overrides):
            vocabulary = overrides.pop("vocabulary", None) if reads_text(recipe.model) else None
            path = None
            if weights is not None:
                config = recipe.model_with(**_model_only(recipe, overrides))
                path, published = pretrained.find(recipe, config, weights)
                vocabulary = _the_same(recipe, vocabulary, published)
                _check_size(recipe, overrides, published)
            if vocabulary is not None:
                overrides.setdefault("vocabulary_size", len(vocabulary))
            config = recipe.model_with(**_model_only(recipe, overrides))
            arguments = (config, vocabulary) if reads_text(config) else (config,)
            with default_policy(config.dtype_policy):
                model = function(*arguments)
            return model if path is None else pretrained.load_weights(model, recipe, path)

        build.__signature__ = _signature(recipe.model)
        if function.__name__ != recipe.name:
            raise ValueError(f"{function.__name__} registers a recipe named {recipe.name!r}")
        if recipe.name in _ENTRIES:
            raise ValueError(f"The zoo has a model {recipe.name!r} already.")
        _ENTRIES[recipe.name] = (build, recipe)
        return build

    return decorator


def list_models(pattern="*"):
    """Returns the names of the zoo's models, sorted.

    Args:
        pattern: Shell-style pattern, for example `"trellisnet_*"`.
    """
    return sorted(fnmatch.filter(_ENTRIES, pattern))


def get_model(name, **arguments):
    """Builds the zoo model `name`; the same as calling the function of that name."""
    return _entry(name)[0](**arguments)


def describe(name):
    """Returns what the zoo model `name` is: the first paragraph of its docstring."""
    return " ".join(_entry(name)[0].__doc__.split("\n\n")[0].split())


def recipe(name, **overrides):
    """Returns the `Recipe` of the zoo model `name`.

    Args:
        name: One of `list_models()`.
        **overrides: Fields of the recipe or of its model that differ from the published ones.

    Raises:
        ValueError: Unknown name or field.

    Example:

    >>> recipe("trellisnet_ptb").training.epochs
    500
    """
    return _entry(name)[1].replace(**overrides)


def reads_text(config):
    """Whether a configuration is a language model's."""
    return hasattr(config, "vocabulary_size")


def _the_same(recipe, vocabulary, published):
    """The vocabulary of published weights, which a user's must be."""
    if published is None or vocabulary in (None, published):
        return published or vocabulary
    raise ValueError(
        f"{recipe.name}: the pretrained weights are of another vocabulary, of {len(published)} "
        f"tokens. Leave `vocabulary` out to get it. Received: {vocabulary!r}"
    )


def _check_size(recipe, overrides, published):
    size = overrides.get("vocabulary_size")
    if published is not None and size not in (None, len(published)):
        raise ValueError(
            f"{recipe.name}: the pretrained weights are of a vocabulary of {len(published)} "
            f"tokens. Received: vocabulary_size={size}"
        )


def _entry(name):
    if name not in _ENTRIES:
        raise ValueError(f"Unknown model {name!r}. The zoo has: {', '.join(list_models())}")
    return _ENTRIES[name]


def _model_only(recipe, overrides):
    """Refuses fields of the training, which a model function has no use for."""
    unknown = sorted(set(overrides) - set(vars(recipe.model)))
    if unknown:
        raise ValueError(
            f"{recipe.name}: unknown arguments {unknown}. It takes: "
            f"{', '.join(_arguments(recipe.model))}"
        )
    return overrides


def _arguments(config):
    """The keyword arguments of a model's function with their defaults."""
    vocabulary = {"vocabulary": None} if reads_text(config) else {}
    return {"weights": None, **vocabulary, **vars(config)}


def _signature(config):
    """What help() shows."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=value) for name, value in _arguments(config).items()]
    )
