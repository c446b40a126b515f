"""Which models the zoo has, and the recipe that belongs to each."""

import fnmatch
import functools
import inspect

_ENTRIES = {}


def register(recipe):
    """Registers a zoo function, whose name is `recipe.name`, together with its recipe.

    The decorated function takes a recipe's model configuration, `weights` and `vocabulary` and
    builds the model. What it becomes takes the configuration's fields as keyword arguments.
    """

    def decorator(function):
        @functools.wraps(function)
        def build(*, weights=None, vocabulary=None, **overrides):
            if vocabulary is not None:
                overrides.setdefault("vocabulary_size", len(vocabulary))
            config = recipe.replace(**_model_only(recipe, overrides)).model
            return function(config, weights, vocabulary)

        build.__signature__ = _signature(recipe.model)
        if function.__name__ != recipe.name:
            raise ValueError(f"{function.__name__} registers a recipe named {recipe.name!r}")
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


def _entry(name):
    if name not in _ENTRIES:
        raise ValueError(f"Unknown model {name!r}. The zoo has: {', '.join(list_models())}")
    return _ENTRIES[name]


def _model_only(recipe, overrides):
    """Refuses fields of the training, which a model function has no use for."""
    known = {field for field in vars(recipe.model)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(
            f"{recipe.name}: unknown arguments {unknown}. It takes: weights, vocabulary, "
            f"{', '.join(sorted(known))}"
        )
    return overrides


def _signature(config):
    """The keyword arguments that the function takes, with their defaults, for help()."""
    defaults = {"weights": None, "vocabulary": None, **vars(config)}
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=value) for name, value in defaults.items()]
    )
