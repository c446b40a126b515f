"""The zoo's models, read from its source: the arguments, data and training of each model.

The command line uses it to list models and show recipes without importing Keras. `registry` has the
models themselves.
"""

import ast
import contextlib
import difflib
import fnmatch
import functools
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from trellis_keras.zoo import results

_FOLDER = pathlib.Path(__file__).parent
_FILES = ("trellisnet", "tcn", "lru", "series")
# Options of `zoo.recipe` for every model, besides the fields of its training.
_OPTIONS = ("setting", "data", "data_options", "data_dir", "metric", "dtype_policy", "jit_compile")


class _Fields(dict[str, Any]):
    """The keyword arguments of a call, for `Training(...)`, its `replace`, and `register(...)`."""

    def replace(self, **fields):
        return _Fields(self | fields)


class _Names(dict[str, Any]):
    """The constants of a module. Anything else that it imports or defines is None."""

    def __missing__(self, name):
        return None


@functools.cache
def models() -> dict[str, dict[str, Any]]:
    """Returns {name: recipe} of the zoo's models, sorted by name.

    A recipe has `data`, `metric`, `training` and perhaps `data_options`, as in `register`, and
    `arguments`, {argument: default} of the model's function.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in _FILES:
        found |= dict(_read(_parse(name)))
    return dict(sorted(found.items()))


def recipe(name: str) -> dict[str, Any]:
    """Returns a model's published recipe, as JSON values."""
    known = models()[name]
    parts = ("arguments", "training", "data", "data_options", "metric")
    return {"name": name, **{part: known[part] for part in parts if part in known}}


def check(name: str, options: Iterable[str]) -> None:
    """Raises ValueError if the zoo has no model of this name, or an option is misspelled."""
    if name not in models():
        near = suggestion(name, models()) or " `trellis-keras list` shows them."
        raise ValueError(f"Unknown model {name!r}.{near}")
    own = models()[name]
    known = [*own["arguments"], *own.get("data_options", ()), *_training_fields(), *_OPTIONS]
    for option in options:
        near = suggestion(option, known)
        # `zoo.recipe` rejects others, with a more specific message.
        if option not in known and near:
            raise ValueError(f"{name} has no option {option!r}.{near}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" if a known name is close, else an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def rows(pattern: str = "*", pretrained: bool = False) -> Iterator[list[str]]:
    """Yields the rows of `trellis-keras list`: one per model and published run.

    Args:
        pattern: Shell-style pattern of the models' names.
        pretrained: Boolean, whether to list only entries with weights.
    """
    runs: dict[str, list[results.Run]] = {}
    for run in results.all_runs():
        runs.setdefault(run.model, []).append(run)
    costs = results.read_costs()["models"]
    for name in fnmatch.filter(models(), pattern):
        own = {run.setting: run for run in runs.get(name, [])}
        for setting in dict.fromkeys(["", *own]):
            row = _row(name, setting, own.get(setting), costs.get(name, {}))
            if row[-1] == "yes" or not pretrained:
                yield row


def _row(name, setting, run, costs):
    known = models()[name]
    parameters = run.results["parameters"] if run else costs.get("parameters")
    own = {"data_options": {}, **recipe(name)}
    if run and run.recipe.get("setting"):
        arguments = own["arguments"] | known.get("fast_arguments", {})
        own |= {"arguments": arguments, "training": known["fast"]}
    published = published_value(run.recipe if run else own, own)
    return [
        f"{name} {setting}".strip(),
        known["data"],
        "-" if parameters is None else f"{parameters:,}",
        known["metric"],
        "-" if published is None else f"{published.value:.4g}",
        f"{run.mean:.4g}" if run else "-",
        "yes" if run and run.has_weights else "-",
    ]


def published_value(recipe: dict[str, Any], own: dict[str, Any]) -> results.Published | None:
    """Returns the row of published.csv that matches a recipe, or None.

    Its setting and the recipe agree in metric, data, data options, and all other options named in
    the settings of the model's rows. `files` does not count: the LRU paper does not say which files
    of Penn Treebank it used.

    Args:
        recipe: A recipe, as `Recipe.to_dict` returns it.
        own: The recipe of the model and setting without changes, to which the rows add theirs.
    """
    rows = [row for row in results.published() if row.model == recipe["name"]]
    names = {"metric", "data"}.union(
        own["data_options"], recipe["data_options"], *(row.setting for row in rows)
    ) - {"files"}
    own, ours = _flat(own), _flat(recipe)
    for row in rows:
        theirs = own | row.setting
        if all(theirs.get(name) == ours.get(name) for name in names):
            return row
    return None


def _flat(recipe):
    nested = ("arguments", "training", "data_options")
    flat = {key: value for key, value in recipe.items() if key not in nested}
    for part in nested:
        flat |= recipe.get(part, {})
    return flat


# The source


def _parse(name):
    return ast.parse((_FOLDER / f"{name}.py").read_text(encoding="utf-8"))


def _read(module):
    """Yields (name, keywords of its `register` and `arguments`) of a file's models."""
    names = _Names(Training=lambda **fields: _Fields(fields), register=_Fields)
    for node in module.body:
        # Values computed from the module's imports are unknown here.
        with contextlib.suppress(AttributeError, TypeError):
            if isinstance(node, ast.ImportFrom):
                names |= _imported(node)
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                names |= _assigned(node, names)
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                known = _value(node.decorator_list[0], names)
                if isinstance(known, _Fields):
                    yield node.name, {**known, "arguments": _arguments(node.args, names)}


def _imported(node):
    """Returns the constants that a node imports from the package, {name: value}."""
    wanted = {name.name for name in node.names if name.name.isupper()}
    package, *path = node.module.split(".")
    name = "/".join(["..", *path])
    found: dict[str, Any] = {}
    if wanted and package == "trellis_keras" and (_FOLDER / f"{name}.py").is_file():
        for statement in _parse(name).body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                with contextlib.suppress(AttributeError, TypeError):
                    found |= _assigned(statement, _Names())
    return {name: found[name] for name in wanted & found.keys()}


def _assigned(node, names):
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return {ast.unparse(target): _value(node.value, names)}


def _arguments(args, names):
    defaults = [_value(node, names) for node in args.defaults]
    parameters = [parameter.arg for parameter in args.args[-len(defaults) :]]
    pairs = zip(parameters, defaults, strict=True)
    return dict(pairs)


def _value(node, names):
    """Evaluates an expression of constants, from this package's own (trusted) source."""
    code = compile(ast.Expression(node), "<zoo>", "eval")
    return eval(code, {"__builtins__": {}}, names)


def _training_fields():
    (training,) = (
        node
        for node in _parse("recipe").body
        if isinstance(node, ast.ClassDef) and node.name == "Training"
    )
    return [node.target.id for node in training.body if isinstance(node, ast.AnnAssign)]
