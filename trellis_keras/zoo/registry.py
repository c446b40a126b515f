"""The models of the zoo by name, and their recipes: arguments, data and training settings."""

import contextlib
import dataclasses
import fnmatch
import functools
import inspect
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import trellis_keras
from trellis_keras.data import PianoRollStream, SequenceStream, TokenStream, Vocabulary
from trellis_keras.data.streams import PIANO_KEYS
from trellis_keras.layers.checks import check_choice, check_integer
from trellis_keras.models import BitsPerCharacter, CrossEntropy, Perplexity
from trellis_keras.zoo import datasets, pretrained, results
from trellis_keras.zoo.datasets import Dataset
from trellis_keras.zoo.datasets.registry import suggestion
from trellis_keras.zoo.training_settings import Training

TEXT_METRICS = {"perplexity": Perplexity, "bpc": BitsPerCharacter, "cross_entropy": CrossEntropy}
DTYPE_POLICIES = ("float32", "float64", "mixed_bfloat16")
_WIDTHS = ("filters", "hidden_units")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Entry:
    """A registered model.

    Attributes:
        function: The function that returns the model.
        data: Name of the data set, see `zoo.datasets.load`.
        data_options: Published options of the data set. `zoo.recipe` takes them like the
            arguments; an option that is also an argument is passed to both.
        metric: Name of the published metric.
        metrics: Function that returns the metrics of a sequence model. Defaults to `None`, the
            model's default metrics.
        channels: Number of input channels. Defaults to `None`, a language model.
        training: `Training` of the published recipe, or a function that returns it: the variables
            of its optimizer are then created when they are needed, not when the model is
            registered.
        fast: The same for `setting="fast"`. Defaults to `None`, no such setting.
        fast_arguments: {argument: value} of `setting="fast"` where it differs from the function's
            default, such as initial biases.
    """

    function: Callable[..., keras.Model]
    data: str
    data_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    metric: str
    metrics: Callable[[], list] | None = None
    channels: int | None = None
    training: Training | Callable[[], Training]
    fast: Training | Callable[[], Training] | None = None
    fast_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def training_by(self, setting: str | None) -> Training:
        """Returns the `Training` of a setting: None (the paper's) or `"fast"` (this zoo's)."""
        if setting is not None:
            check_choice("setting", setting, ("fast",))
            if self.fast is None:
                raise ValueError(f"{self.name} has no fast recipe. Omit `setting`.")
        training = self.training if setting is None else self.fast
        return _made(training) if callable(training) else training  # type: ignore[return-value]

    def arguments_by(self, setting: str | None) -> dict[str, Any]:
        """Returns {argument: value} of those arguments in which the settings differ."""
        arguments = self.fast_arguments
        return arguments if setting else {name: self.arguments[name] for name in arguments}

    @property
    def name(self) -> str:
        """The model's name, which is its function's name."""
        return self.function.__name__

    @property
    def reads_text(self) -> bool:
        """Whether the model is a language model."""
        return self.channels is None

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """{argument: default} of the function."""
        parameters = inspect.signature(self.function).parameters
        return {name: parameter.default for name, parameter in parameters.items()}

    @functools.cached_property
    def types(self) -> dict[str, Any]:
        """{option: annotation} of the arguments and of the fields of a recipe."""
        return typing.get_type_hints(Recipe) | typing.get_type_hints(self.function)


@functools.cache
def _made(make: Callable[[], Training]) -> Training:
    """Returns what a function makes, once: a `Training` never changes."""
    return make()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model of the zoo with its arguments, data and training, created by `zoo.recipe`.

    Recipes are immutable: `replace` returns a new one. A run's folder contains its recipe as JSON.

    Attributes:
        entry: `Entry` of the model.
        arguments: Arguments of the model's function.
        training: `Training`.
        setting: None for the paper's training, `"fast"` for this zoo's fast recipe. `training` may
            differ from it.
        data: Name of the data set, see `zoo.datasets.load`.
        data_options: Its options.
        data_dir: Folder of local copies of the data, or None.
        data_checksum: Checksum of the data that a run was started with, or None.
        metric: Name of the published metric.
        dtype_policy: Keras' dtype policy of all layers, or None for
            `keras.config.dtype_policy()`.
        jit_compile: Boolean, whether to compile training with XLA. Defaults to `None`, an automatic
            choice.
    """

    entry: Entry = dataclasses.field(repr=False)
    arguments: dict[str, Any]
    training: Training
    setting: str | None = None
    data: str
    data_options: dict[str, Any]
    data_dir: str | None = None
    data_checksum: str | None = None
    metric: str
    dtype_policy: str | None = None
    jit_compile: bool | None = None

    def __post_init__(self) -> None:
        if self.seed is not None:
            check_integer("seed", self.seed, 0)
        if unknown := self.training.stream.keys() - {*self._batch_options(self.data)}:
            raise ValueError(f"{self.name} has no option {min(unknown)!r}.")
        if self.dtype_policy is not None:
            check_choice("dtype_policy", self.dtype_policy, DTYPE_POLICIES)
        if not self.reads_text and self.metric != self.entry.metric:
            raise ValueError(f"`metric` must be {self.entry.metric!r}. Received: {self.metric!r}")
        # The batches check their other options; here, because loading the data takes time.
        batch_size, options = self.training.batch_size, self.training.stream
        if self.reads_text:
            check_choice("metric", self.metric, TEXT_METRICS)
            if len(options) < 2:
                raise ValueError("Text data need `sequence_length` and `context_length`.")
            TokenStream(np.broadcast_to(np.int32(0), batch_size + 1), batch_size, **options)
            if self.stateful and options["context_length"]:
                raise ValueError(
                    "`context_length` must be 0 with stateful=True: the state is the context. "
                    f"Received: context_length={options['context_length']}"
                )
        elif "shift" in self._batch_options(self.data):
            check_integer("shift", options.get("shift", 0), 0)
            if (flip := options.get("flip", 0.0)) > 1:
                raise ValueError(f"`flip` must be in [0, 1]. Received: flip={flip}")
        elif options:
            PianoRollStream([np.zeros((2, PIANO_KEYS))], batch_size, **options)

    def replace(self, **options: Any) -> "Recipe":
        """Returns a recipe with some options replaced, see `zoo.recipe`.

        An option applies wherever it is known, to the model, its training and its data. A different
        `setting` replaces the whole training, and the arguments that it sets.
        `stateful=True` sets `context_length=0`, because the state is the context.

        Raises:
            ValueError: If an option is unknown, a value invalid, or options are inconsistent.
        """
        if not options:
            return self
        entry = self.entry
        options = {k: _checked(k, v, entry.types.get(k, Any)) for k, v in options.items()}
        data = options.get("data", self.data)
        setting = options.get("setting", self.setting)
        training, arguments = self.training, self.arguments
        if setting != self.setting:
            training = entry.training_by(setting)
            arguments = arguments | entry.arguments_by(setting)
        # An option of the data set that is also an argument belongs to the model.
        of_data = [
            name
            for name in datasets.info(data).options
            if name in entry.data_options or name not in arguments
        ]
        of_batches, of_training = self._batch_options(data), training.option_names(options)
        self._check_known(options, [*of_data, *arguments, *of_batches, *_FIELDS, *of_training])
        data_options = self._data_options(options, of_data)
        both = {name: data_options[name] for name in entry.data_options if name in data_options}
        kept = self.data_options if data == self.data else {}
        options = both | options | {"data_options": kept | data_options}
        if options.get("data_dir") is not None:
            options["data_dir"] = _absolute(options["data_dir"])
        if options.get("stateful"):
            options.setdefault("context_length", 0)
        elif options.get("stateful") is False and arguments.get("stateful"):
            own = entry.training_by(setting).stream
            options.setdefault("context_length", own.get("context_length", 0))
        stream = {name: options.get(name, training.stream.get(name)) for name in of_batches}
        stream = {name: value for name, value in stream.items() if value is not None}
        return dataclasses.replace(
            self,
            arguments={name: options.get(name, value) for name, value in arguments.items()},
            training=training.replace(
                **{name: options[name] for name in of_training if name in options}, stream=stream
            ),
            **{name: value for name, value in options.items() if name in _FIELDS},
        )

    def _batch_options(self, data):
        """Returns the names of the options of the batches of a data set."""
        if self.reads_text:
            return ("sequence_length", "context_length")
        return datasets.info(data).batch_options

    def _check_known(self, options, known):
        for name in options:
            if name not in known:
                near = suggestion(name, known) or f" It has: {', '.join(known)}"
                raise ValueError(f"{self.name} has no option {name!r}.{near}")

    def _data_options(self, options, known):
        """Returns the options of the data set, given by their names or as `data_options`."""
        given = options.get("data_options", {})
        for name in known:
            if name in options and given.setdefault(name, options[name]) != options[name]:
                raise ValueError(
                    f"`{name}` is given twice. Received: {name}={options[name]!r} and "
                    f"data_options={given!r}"
                )
        given = _checked("data_options", given, dict)
        # Absolute paths: a run is evaluated from other working directories.
        if isinstance(given.get("path"), str):
            given["path"] = _absolute(given["path"])
        return given

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.entry.name

    @property
    def reads_text(self) -> bool:
        """Whether the model is a language model."""
        return self.entry.reads_text

    @property
    def stateful(self) -> bool:
        """Whether the model carries its states from batch to batch."""
        return self.arguments.get("stateful", False)

    @property
    def seed(self) -> int | None:
        """Seed of the initial weights, the dropouts and the order of the examples."""
        return self.arguments["seed"]

    def build(
        self,
        *,
        weights: str | os.PathLike | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> keras.Model:
        """Returns the compiled model.

        Args:
            weights: `"pretrained"`, or path of a weights file. Defaults to `None`, initial weights.
            vocabulary: `Vocabulary` to save with a language model. It sets `vocabulary_size`.
        """
        path = None
        if weights is not None:
            path, stored = pretrained.find(self.to_dict(), weights)
            if stored is not None and vocabulary not in (None, stored):
                raise ValueError(
                    f"{self.name}: the pretrained weights have a vocabulary of {len(stored)} "
                    f"tokens. Omit `vocabulary` to use it. Received: {vocabulary!r}"
                )
            vocabulary = stored or vocabulary
        arguments = dict(self.arguments)
        if vocabulary is not None:
            size = arguments["vocabulary_size"]
            if size not in (self.entry.arguments["vocabulary_size"], len(vocabulary)):
                raise ValueError(
                    f"The vocabulary has {len(vocabulary)} tokens, but vocabulary_size={size}"
                )
            arguments["vocabulary_size"] = len(vocabulary)
        with _default_policy(self.dtype_policy):
            model = self.entry.function(**arguments)
            if vocabulary is not None:
                model.vocabulary = vocabulary
            channels = () if self.reads_text else (self.entry.channels,)
            model.build((None, None, *channels))
        self.compile(model)
        return model if path is None else pretrained.load_weights(model, self.name, path)

    def compile(self, model: keras.Model) -> None:
        """Compiles a model with the recipe's optimizer and metrics."""
        metrics: dict[str, Any] = {}
        if self.reads_text:
            metrics["metrics"] = [TEXT_METRICS[self.metric]()]
        elif self.entry.metrics is not None:
            metrics["weighted_metrics"] = self.entry.metrics()
        model.compile(
            optimizer=self.training.make_optimizer(),
            jit_compile="auto" if self.jit_compile is None else self.jit_compile,
            **metrics,
        )

    def load_data(self) -> Dataset:
        """Loads the data set, a `Dataset`.

        Raises:
            ValueError: If the data have the wrong kind, or a checksum other than `data_checksum`.
            FileNotFoundError: If a file is missing.
        """
        loaded = datasets.load(self.data, self.data_dir, **self.data_options)
        if (loaded.vocabulary is not None) != self.reads_text or not loaded.sizes["train"]:
            text = 'text, such as data="text", data_options={"path": ...}'
            raise ValueError(
                f"{self.name} needs {text if self.reads_text else 'separate sequences'}. Received: "
                f"the data set {self.data!r}"
            )
        if self.data_checksum not in (None, loaded.checksum):
            raise ValueError(
                f"The data {self.data!r} have changed since the run started: their checksum is "
                f"{loaded.checksum[:12]}..., not {self.data_checksum[:12]}... Restore the original "
                "data, or train in another folder."
            )
        return loaded

    def with_data(self, loaded: Dataset) -> "Recipe":
        """Returns the recipe with the checksum and the arguments derived from loaded data."""
        follow = {"vocabulary_size": len(loaded.vocabulary)} if loaded.vocabulary else {}
        return self.replace(data_checksum=loaded.checksum, **follow)

    def batches(
        self, part: Any, target_counting: str = "all", shuffle: bool = False
    ) -> keras.utils.PyDataset:
        """Returns batches of a data split, for `fit` or `evaluate`.

        Args:
            part: `train`, `valid` or `test` of the result of `load_data`. The tokens of a text must
                belong to its vocabulary.
            target_counting: For text: `"all"`, or `"original"` to follow the authors' code,
                see `data.TokenStream`.
            shuffle: Boolean, whether to read separate sequences in a new order in each epoch, which
                needs the callback `data.EpochOrder`, and to augment them by `training.stream`. Text
                is always read in order.
        """
        batch_size, options = self.training.batch_size, self.training.stream
        if self.reads_text:
            return TokenStream(part, batch_size, target_counting=target_counting, **options)
        if target_counting != "all":
            raise ValueError(f"`target_counting` is for text. Received: {target_counting!r}")
        order: dict[str, Any] = {"seed": self.seed or 0, "shuffle": shuffle}
        stream: keras.utils.PyDataset
        if isinstance(part, list):
            stream = PianoRollStream(part, batch_size, **order, **options if shuffle else {})
        else:
            x, y = part
            if shuffle and options:
                order["augment"] = functools.partial(datasets.augment_images, self.data, **options)
            stream = SequenceStream(x, y, batch_size, **order)
        channels = stream[0][0].shape[-1]
        if channels != self.entry.channels:
            raise ValueError(
                f"The data set {self.data!r} has {channels} channels, but {self.name} reads "
                f"{self.entry.channels}."
            )
        return stream

    def to_dict(self) -> dict[str, Any]:
        """Returns the recipe as a dict of JSON values, from which `recipe_from_dict` reads it."""
        written = {
            "name": self.name,
            "trellis_keras": trellis_keras.__version__,
            "arguments": self.arguments,
            "training": self.training.get_config(),
            **{name: getattr(self, name) for name in _FIELDS},
        }
        return json.loads(json.dumps(written))

    def without_folders(self) -> dict[str, Any]:
        """Returns the recipe as a dict with the name of a user's file, but without its folder."""
        written = self.to_dict()
        if isinstance(path := written["data_options"].get("path"), str):
            written["data_options"]["path"] = os.path.basename(path)
        return written | {"data_dir": None}

    def options(self) -> dict[str, Any]:
        """Returns {option: value} of the whole recipe, as `zoo.recipe` takes them.

        Arguments of the optimizer and the other objects are left out where they have their default
        values, and so are the folders of the user's files.
        """
        return {**self._own_options(), **self.training.options()}

    def changes(self) -> dict[str, Any]:
        """Returns the options with which `zoo.recipe` returns this recipe.

        They exclude arguments that a run takes from its data, and the folders of the data.
        """
        setting = {} if self.setting is None else {"setting": self.setting}
        base = recipe(self.name, **setting)
        theirs = base._own_options()
        own = self.training.changes(base.training)
        own |= {k: v for k, v in self._own_options().items() if v != theirs.get(k)}
        left_out = ("data_checksum", "vocabulary_size")
        return setting | {name: value for name, value in own.items() if name not in left_out}

    def _own_options(self):
        written = self.without_folders()
        fields = {name: written[name] for name in _FIELDS}
        others = fields["data_options"]
        known = {name: others.pop(name) for name in self.entry.data_options if name in others}
        return {**known, **written["arguments"], **fields}

    def to_json(self) -> str:
        """Returns the recipe as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


# The attributes of a recipe that are options, besides those of the model and its training.
_OTHERS = {"entry", "arguments", "training"}
_FIELDS = [field.name for field in dataclasses.fields(Recipe) if field.name not in _OTHERS]
_ENTRIES: dict[str, Entry] = {}


def register(**fields: Any) -> Callable[[Callable], Callable[..., keras.Model]]:
    """Registers a function as a model of the zoo.

    The function's arguments are the model's hyper-parameters, including `seed`, with the published
    values as defaults. The decorated function builds and compiles the model, and also takes
    `weights`, `dtype_policy` and `jit_compile`, and, for a language model, `vocabulary`.

    Args:
        **fields: The attributes of `Entry` besides `function`.

    Raises:
        ValueError: If a model with this name already exists, an argument has no default, or there
            is no argument `seed`.
    """

    def decorator(function):
        entry = Entry(function=function, **fields)
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


def list_models(pattern: str = "*", pretrained: bool = False) -> list[str]:
    """Returns the names of the zoo's models, sorted.

    Args:
        pattern: Shell-style pattern, for example `"trellisnet_*"`.
        pretrained: Boolean, whether to list only the models with pretrained weights.
    """
    names = fnmatch.filter(_ENTRIES, pattern)
    if pretrained:
        trained = {run.model for run in results.all_runs() if run.has_weights}
        names = [name for name in names if name in trained]
    return sorted(names)


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
        ValueError: If a name or option is unknown, a value invalid, or options are inconsistent.

    Examples:

    >>> recipe("trellisnet_ptb").training.epochs
    500
    >>> recipe("tcn_jsb", setting="fast", epochs=3).training.options()["optimizer"]
    'adamw'
    """
    entry = _entry(name)
    published = Recipe(
        entry=entry,
        arguments=entry.arguments,
        training=entry.training_by(None),
        data=entry.data,
        data_options=entry.data_options,
        metric=entry.metric,
    )
    return published.replace(**options)


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
        ValueError: If there is no such run, or another one has these options.
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


def published_value(ours: Recipe) -> results.Published | None:
    """Returns the row of published.csv that matches a recipe, or None.

    Row and recipe agree in metric, data, data options, the arguments that affect the outputs of
    trained weights, and all other options named in the model's rows. Three things do not count:
    what the recipe's `setting` changes, such as the dropout of a fast recipe; a width that no row
    names; and `files`, because the LRU paper does not say which files of Penn Treebank it used.
    """
    default = recipe(ours.name, setting=ours.setting)
    rows = [row for row in results.published() if row.model == ours.name]
    network = {name for name in ours.arguments if not pretrained.is_of_the_training(name)}
    names = {"metric", "data", *network.difference(_WIDTHS)}.union(
        default.data_options, ours.data_options, *(row.options for row in rows)
    ) - {"files"}
    theirs, own = (one.options() | one.data_options for one in (default, ours))
    for row in rows:
        if all((theirs | row.options).get(name) == own.get(name) for name in names):
            return row
    return None


def _entry(name):
    if name not in _ENTRIES:
        near = suggestion(name, _ENTRIES)
        raise ValueError(f"Unknown model {name!r}.{near or ' `trellis-keras list` shows them.'}")
    return _ENTRIES[name]


_WORDING = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    dict: "a mapping",
    tuple: "a list such as [2, 3]",
    types.NoneType: "none",
}


def _checked(name, value, annotation):
    """Returns a value in the type of an annotation such as `int | None`, or raises ValueError."""
    if annotation is Any:
        return value.item() if isinstance(value, np.generic) else value
    value = json.loads(json.dumps(value, default=_plain))  # as it is read back from JSON
    is_union = isinstance(annotation, types.UnionType)
    kinds = typing.get_args(annotation) if is_union else (annotation,)
    kinds = [typing.get_origin(kind) or kind for kind in kinds]
    for kind in kinds:
        accepted = {float: (int, float), tuple: list}.get(kind, kind)
        # In Python, True and False are also integers.
        if isinstance(value, accepted) and isinstance(value, bool) == (kind is bool):
            if kind is not float or math.isfinite(value):
                return None if value is None else kind(value)
    wording = " or ".join(_WORDING[kind] for kind in kinds)
    raise ValueError(f"`{name}` must be {wording}. Received: {value!r}")


def _plain(value):
    return value.item() if isinstance(value, np.generic) else os.fspath(value)


def _absolute(path):
    return os.path.abspath(os.path.expanduser(path))


@contextlib.contextmanager
def _default_policy(name: str | None) -> Iterator[None]:
    """Context in which layers get the dtype policy `name`. None changes nothing."""
    before = keras.config.dtype_policy()
    if name is not None:
        keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
