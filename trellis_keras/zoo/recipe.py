"""A recipe: a model with its arguments, its data, and its training settings."""

import dataclasses
import functools
import inspect
import json
import math
import numbers
import os
import typing
from collections.abc import Callable, Collection
from typing import Any

import keras

import trellis_keras
from trellis_keras.data import PianoRollStream, SequenceStream, TokenStream, Vocabulary
from trellis_keras.layers.precision import default_policy
from trellis_keras.models import BitsPerCharacter, CrossEntropy, Perplexity
from trellis_keras.training import (
    ASGD,
    SGD,
    Adam,
    ASGDSwitch,
    EarlyStopping,
    ExponentialDecay,
    GrowingDepth,
    PlateauDecay,
    RMSprop,
    StepDecay,
)
from trellis_keras.zoo import datasets, pretrained
from trellis_keras.zoo.datasets import Dataset
from trellis_keras.zoo.datasets.registry import suggestion
from trellis_keras.zoo.run import FILE_OPTIONS

OPTIMIZERS = {
    "sgd": SGD,
    "asgd": ASGD,
    "adam": Adam,
    "adamw": keras.optimizers.AdamW,
    "rmsprop": RMSprop,
}
TEXT_METRICS = {"perplexity": Perplexity, "bpc": BitsPerCharacter, "cross_entropy": CrossEntropy}
DTYPE_POLICIES = ("float32", "float64", "mixed_bfloat16")

_PLATEAU = ("best_before", "worst_of_last")
# The fields of each learning-rate schedule: the required and the optional ones.
_SCHEDULES = {
    None: ((), ()),
    "best_before": (("decay_factor", "decay_window"), ("decay_strict", "min_learning_rate")),
    "worst_of_last": (("decay_factor", "decay_window"), ("decay_strict", "min_learning_rate")),
    "patience": (("decay_factor", "decay_window"), ("min_learning_rate",)),
    "steps": (("decay_factor", "decay_epochs"), ()),
    "exponential": (("decay_factor",), ()),
    "average": (("decay_window",), ()),
    "cosine": ((), ("decay_steps", "warmup_steps")),
}
_SCHEDULE_FIELDS = (
    "decay_factor",
    "decay_window",
    "decay_strict",
    "decay_epochs",
    "min_learning_rate",
    "decay_steps",
    "warmup_steps",
)
_TEXT_FIELDS = ("sequence_length", "context_length")
_DEPTH_FIELDS = ("shallow_depth", "shallow_epochs")
_MUSIC_FIELDS = ("transpose", "note_dropout")
_IMAGE_FIELDS = ("shift",)
_IMAGES = ("seq_mnist", "permuted_mnist", "seq_cifar10")
# Arguments of models that a run takes from its data.
_FROM_DATA = ("vocabulary_size",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained: optimizer, batches, learning-rate schedule and early stopping.

    The fields are plain values: they are saved in a run's folder and are options of
    `trellis-keras train`. Fields that the schedule does not use must be None.

    Args:
        optimizer: `"sgd"`, `"adam"`, `"rmsprop"`, `"adamw"` (`keras.optimizers.AdamW`), or
            `"asgd"`, which is SGD until `schedule="average"` starts averaging the weights.
        learning_rate: Positive float, initial learning rate.
        clip_norm: Positive float, global norm to clip gradients to. Defaults to None, no clipping.
        l2: Float, weight decay added to the gradient. Defaults to 0.
        weight_decay: Float, decoupled decay of the kernels (biases and gains do not decay). Only
            for `"adamw"`.
        batch_size: Positive integer, number of rows per batch.
        epochs: Positive integer, maximum number of epochs.
        sequence_length: Positive integer, number of tokens per row of a batch. Language models
            only.
        context_length: Integer, number of these tokens that are read but not scored. Language
            models only.
        transpose: Float, probability of transposing a piece by -6 to 5 semitones. Music only.
        note_dropout: Float in [0, 1), fraction of notes dropped from the input but still predicted.
            Music only.
        shift: Positive integer, maximum shift of an image in pixels. Images only.
        shallow_depth: Positive integer, number of levels in the first `shallow_epochs` epochs, see
            `training.GrowingDepth`. Language models of TrellisNets only.
        shallow_epochs: Positive integer, less than `epochs`.
        schedule: Learning-rate schedule: `"best_before"` or `"worst_of_last"` (the rules of
            `training.PlateauDecay`), `"patience"` (`keras.callbacks.ReduceLROnPlateau`),
            `"steps"` (`training.StepDecay`), `"exponential"`
            (`training.ExponentialDecay`), `"average"` (`training.ASGDSwitch`), or `"cosine"`
            (`keras.optimizers.schedules.CosineDecay`). Defaults to None, a constant rate.
        decay_factor: Float in (0, 1), factor of the learning rate.
        decay_window: Positive integer, number of past epochs in a plateau rule or `"average"`.
        decay_strict: Boolean, whether an equal value does not count as a plateau. Defaults to
            the rule in the authors' programs.
        decay_epochs: Increasing integers, the epochs after which `"steps"` decays.
        min_learning_rate: Float, lower limit of a plateau rule.
        warmup_steps: Positive integer, number of steps in which `"cosine"` raises the rate from 0
            to `learning_rate`. Defaults to None, no warm-up.
        decay_steps: Positive integer, number of steps after warm-up in which the rate falls to 0.
            Defaults to None: it falls once per epoch, over all `epochs`.
        stop_patience: Positive integer, number of consecutive epochs without a lower validation
            loss after which training stops (`training.EarlyStopping`). Defaults to None, no early
            stopping.
        stop_min_delta: Float, minimum decrease that counts as an improvement. Defaults to 0.
        stop_against: `"best"` or `"previous"`, the epoch to compare with. Defaults to `"best"`.
    """

    optimizer: str
    learning_rate: float
    clip_norm: float | None = None
    l2: float = 0.0
    weight_decay: float | None = None
    batch_size: int
    epochs: int
    sequence_length: int | None = None
    context_length: int | None = None
    transpose: float | None = None
    note_dropout: float | None = None
    shift: int | None = None
    shallow_depth: int | None = None
    shallow_epochs: int | None = None
    schedule: str | None = None
    decay_factor: float | None = None
    decay_window: int | None = None
    decay_strict: bool | None = None
    decay_epochs: tuple[int, ...] | None = None
    min_learning_rate: float | None = None
    warmup_steps: int | None = None
    decay_steps: int | None = None
    stop_patience: int | None = None
    stop_min_delta: float | None = None
    stop_against: str | None = None

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        for name in ("learning_rate", "clip_norm"):
            _check(name, getattr(self, name), lambda value: 0 < value < math.inf, "positive")
        amounts = ("l2", "weight_decay", "context_length", "min_learning_rate")
        for name in (*amounts, "stop_min_delta"):
            _check(name, getattr(self, name), lambda value: 0 <= value < math.inf, "0 or more")
        counts = ("epochs", "batch_size", "sequence_length", "decay_window", "stop_patience")
        for name in (*counts, *_DEPTH_FIELDS, "shift", "warmup_steps", "decay_steps"):
            _check(name, getattr(self, name), lambda value: value >= 1, "1 or more")
        _check("decay_factor", self.decay_factor, lambda value: 0 < value < 1, "between 0 and 1")
        _check("transpose", self.transpose, lambda value: 0 <= value <= 1, "between 0 and 1")
        _check("note_dropout", self.note_dropout, lambda value: 0 <= value < 1, "in [0, 1)")
        self._check_optimizer()
        self._check_schedule()
        if (self.shallow_depth is None) != (self.shallow_epochs is None):
            raise ValueError("`shallow_depth` and `shallow_epochs` need each other.")
        self._check_stopping()
        if (self.context_length or 0) >= (self.sequence_length or math.inf):
            raise ValueError(
                "`context_length` must be smaller than `sequence_length`, or no token is scored. "
                f"Received: context_length={self.context_length}, "
                f"sequence_length={self.sequence_length}"
            )

    def _check_optimizer(self):
        is_adamw = self.optimizer == "adamw"
        for name, has_effect in (("weight_decay", is_adamw), ("l2", not is_adamw)):
            if getattr(self, name) and not has_effect:
                raise ValueError(f"`{name}` has no effect with optimizer={self.optimizer!r}.")
        if is_adamw and self.weight_decay is None:
            raise ValueError("optimizer='adamw' needs `weight_decay`.")

    def _check_schedule(self):
        if self.schedule is not None:
            check_choice("schedule", self.schedule, [name for name in _SCHEDULES if name])
        needed, optional = _SCHEDULES[self.schedule]
        for name in _SCHEDULE_FIELDS:
            given = getattr(self, name) is not None
            if given and name not in needed + optional:
                raise ValueError(f"`{name}` has no effect with schedule={self.schedule!r}.")
            if not given and name in needed:
                raise ValueError(f"schedule={self.schedule!r} needs `{name}`.")
        if self.schedule == "average" and self.optimizer != "asgd":
            raise ValueError(
                f'schedule="average" needs optimizer="asgd". Received: optimizer={self.optimizer!r}'
            )
        if self.warmup_steps is not None and self.decay_steps is None:
            raise ValueError("`warmup_steps` has no effect without `decay_steps`.")
        epochs = self.decay_epochs
        if epochs is not None and not (
            epochs and epochs[0] >= 1 and list(epochs) == sorted(set(epochs))
        ):
            raise ValueError(
                "`decay_epochs` must be increasing integers >= 1, such as [2, 3]. "
                f"Received: {list(epochs)}"
            )

    def _check_stopping(self):
        for name in ("stop_min_delta", "stop_against"):
            if self.stop_patience is None and getattr(self, name) is not None:
                raise ValueError(f"`{name}` has no effect without `stop_patience`.")
        if self.stop_against is not None:
            check_choice("stop_against", self.stop_against, ("best", "previous"))

    def replace(self, **fields: Any) -> "Training":
        """Returns a copy with some fields replaced.

        A new `optimizer` or `schedule` drops fields that only the old one used.
        """
        check_choice("schedule", fields.get("schedule", self.schedule), _SCHEDULES)
        unused = _unused({**dataclasses.asdict(self), **fields})
        defaults = {f.name: f.default for f in dataclasses.fields(self) if f.name in unused}
        return dataclasses.replace(self, **{**defaults, **fields})

    def make_optimizer(self) -> keras.optimizers.Optimizer:
        """Returns a new optimizer."""
        if self.optimizer == "adamw":
            optimizer = keras.optimizers.AdamW(
                self._rate(), weight_decay=self.weight_decay, global_clipnorm=self.clip_norm
            )
            optimizer.exclude_from_weight_decay(var_names=[_NO_KERNEL])
            return optimizer
        return OPTIMIZERS[self.optimizer](self._rate(), clip_norm=self.clip_norm, l2=self.l2)

    def _rate(self):
        """Returns the learning rate, or its schedule by steps."""
        if self.decay_steps is None:
            return self.learning_rate
        cosine = keras.optimizers.schedules.CosineDecay
        if self.warmup_steps is None:
            return cosine(self.learning_rate, self.decay_steps)
        return cosine(
            0.0,
            self.decay_steps,
            warmup_target=self.learning_rate,
            warmup_steps=self.warmup_steps,
        )

    def _cosine(self, epoch, _):
        """Returns the learning rate of an epoch, counted from 0."""
        return float(keras.optimizers.schedules.CosineDecay(self.learning_rate, self.epochs)(epoch))

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """Returns the growing depth, the schedule and the stopping rule as callbacks for `fit`."""
        growth = []
        if self.shallow_depth is not None and self.shallow_epochs is not None:
            growth = [GrowingDepth(self.shallow_depth, self.shallow_epochs)]
        return [*growth, *self._schedule(), *self._stopping()]

    def _schedule(self):
        if self.schedule == "steps":
            return [StepDecay(self.decay_epochs, self.decay_factor)]
        if self.schedule == "exponential":
            return [ExponentialDecay(self.decay_factor)]
        if self.schedule == "cosine" and self.decay_steps is None:
            return [keras.callbacks.LearningRateScheduler(self._cosine)]
        if self.schedule == "average":
            return [ASGDSwitch(self.decay_window, verbose=1)]
        if self.schedule == "patience":
            decay = keras.callbacks.ReduceLROnPlateau(
                factor=self.decay_factor,
                patience=self.decay_window,
                min_delta=0,
                min_lr=self.min_learning_rate or 0.0,
                verbose=1,
            )
            return [decay]
        if self.schedule in _PLATEAU:
            decay = PlateauDecay(
                factor=self.decay_factor,
                rule=self.schedule,
                window=self.decay_window,
                strict=self.decay_strict,
                min_lr=self.min_learning_rate or 0.0,
                verbose=1,
            )
            return [decay]
        return []

    def _stopping(self):
        if self.stop_patience is None:
            return []
        stopping = EarlyStopping(
            patience=self.stop_patience,
            min_delta=self.stop_min_delta or 0.0,
            against=self.stop_against or "best",
            verbose=1,
        )
        return [stopping]


# Matches names without "kernel".
_NO_KERNEL = "^(?!.*kernel)"


def _unused(fields):
    """Returns the fields that the optimizer, schedule and stopping rule do not use."""
    used = sum(_SCHEDULES[fields["schedule"]], ())
    decay = ("l2",) if fields["optimizer"] == "adamw" else ("weight_decay",)
    stopping = () if fields["stop_patience"] else ("stop_min_delta", "stop_against")
    return [*(name for name in _SCHEDULE_FIELDS if name not in used), *decay, *stopping]


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A registered model, see `zoo.register`.

    Attributes:
        function: Function that returns the uncompiled model.
        data, data_options: Name and options of the data set.
        metric: Name of the published metric.
        metrics: Function that returns the metrics of a sequence model, or None for its defaults.
        channels: Number of input channels, or None for a language model.
        training: `Training` of the paper.
        fast: `Training` of this zoo's fast recipe, or None.
        fast_arguments: {argument: value} of the fast recipe where it differs from the default.
    """

    function: Callable[..., keras.Model]
    data: str
    data_options: dict[str, Any]
    metric: str
    metrics: Callable[[], list] | None
    channels: int | None
    training: Training
    fast: Training | None
    fast_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def training_by(self, setting: str | None) -> Training:
        """Returns the `Training` of a setting: None (the paper's) or `"fast"` (this zoo's).

        Raises:
            ValueError: The model has no such setting.
        """
        if setting is None:
            return self.training
        check_choice("setting", setting, ("fast",))
        if self.fast is None:
            raise ValueError(f"{self.name} has no fast recipe. Omit `setting`.")
        return self.fast

    def arguments_by(self, setting: str | None) -> dict[str, Any]:
        """Returns {argument: value} of those arguments in which the settings differ."""
        return (
            self.fast_arguments if setting else {k: self.arguments[k] for k in self.fast_arguments}
        )

    @property
    def name(self) -> str:
        """The model's name, which is its function's name."""
        return self.function.__name__

    @property
    def reads_text(self) -> bool:
        """Whether the model is a language model."""
        return self.channels is None

    @property
    def foreign_fields(self) -> tuple[str, ...]:
        """The fields of `Training` that are for other kinds of models."""
        own = (
            (_TEXT_FIELDS, self.reads_text),
            (_DEPTH_FIELDS, "aux_every" in self.arguments),
            (_MUSIC_FIELDS, self.metric == "frame_nll"),
            (_IMAGE_FIELDS, self.data in _IMAGES),
        )
        return sum((fields for fields, are_own in own if not are_own), ())

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """{argument: default} of the function."""
        parameters = inspect.signature(self.function).parameters
        return {name: parameter.default for name, parameter in parameters.items()}

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """{name: type} of all options that `zoo.recipe` takes for the model."""
        types = typing.get_type_hints(self.function)
        training = typing.get_type_hints(Training)
        training = {k: v for k, v in training.items() if k not in self.foreign_fields}
        data: dict[str, Any] = dict.fromkeys(self.data_options, Any)  # the data set checks them
        return {**data, **{name: types[name] for name in self.arguments}, **training, **_FIELDS}


_FIELDS: dict[str, Any] = {
    "setting": str | None,
    "data": str,
    "data_options": dict,
    "data_dir": str | None,
    "data_checksum": str | None,
    "metric": str,
    "dtype_policy": str | None,
    "jit_compile": bool | None,
}


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
        jit_compile: Whether to compile training with XLA. Defaults to None, an automatic choice.
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

    @classmethod
    def published(cls, entry: Entry) -> "Recipe":
        """Returns a model's recipe with the published values."""
        return cls(
            entry=entry,
            arguments=entry.arguments,
            training=entry.training,
            data=entry.data,
            data_options=entry.data_options,
            metric=entry.metric,
        )

    def __post_init__(self) -> None:
        check_choice("data", self.data, datasets.list_datasets())
        _check("seed", self.seed, lambda value: value >= 0, "0 or more")
        if self.reads_text:
            check_choice("metric", self.metric, TEXT_METRICS)
            if self.training.sequence_length is None or self.training.context_length is None:
                raise ValueError("Text data need `sequence_length` and `context_length`.")
            if self.stateful and self.training.context_length:
                raise ValueError(
                    "`context_length` must be 0 with stateful=True: a stateful model carries its "
                    f"states instead. Received: {self.training.context_length}"
                )
        elif self.metric != self.entry.metric:
            raise ValueError(f"`metric` must be {self.entry.metric!r}. Received: {self.metric!r}")
        if self.dtype_policy is not None:
            check_choice("dtype_policy", self.dtype_policy, DTYPE_POLICIES)

    def replace(self, **options: Any) -> "Recipe":
        """Returns a recipe with some options replaced, see `zoo.recipe`.

        An option applies wherever it is known, to the model, its training and its data. A different
        `setting` replaces the whole training, and the arguments that it sets.
        `stateful=True` sets `context_length=0`, because the state is the context.

        Raises:
            ValueError: An unknown option, an invalid value, or inconsistent options.
        """
        options = _typed(self.entry, options)
        given = options.pop("data_options", {})
        for name in self.entry.data_options:
            if name in given and options.setdefault(name, given[name]) != given[name]:
                raise ValueError(
                    f"`{name}` is given twice. Received: {name}={options[name]!r} and "
                    f"data_options={given!r}"
                )
        kept = self.data_options if options.get("data", self.data) == self.data else {}
        known = {name: options[name] for name in self.entry.data_options if name in options}
        training = {k: v for k, v in options.items() if k in Training.__dataclass_fields__}
        if options.get("stateful"):
            training.setdefault("context_length", 0)
        setting = options.get("setting", self.setting)
        base, arguments = self.training, self.arguments
        if setting != self.setting:
            base = self.entry.training_by(setting)
            arguments = arguments | self.entry.arguments_by(setting)
        return dataclasses.replace(
            self,
            arguments={name: options.get(name, value) for name, value in arguments.items()},
            training=base.replace(**training),
            data_options={**kept, **given, **known},
            **{name: value for name, value in options.items() if name in _FIELDS},
        )

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.entry.name

    @property
    def reads_text(self) -> bool:
        """Whether the model is a language model."""
        return self.entry.reads_text

    @property
    def channels(self) -> int | None:
        """Number of input channels, or None for a language model."""
        return self.entry.channels

    @property
    def from_data(self) -> tuple[str, ...]:
        """Names of the arguments that a run takes from its data."""
        return tuple(name for name in _FROM_DATA if name in self.arguments)

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
        weights: str | os.PathLike | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> keras.Model:
        """Returns the compiled model.

        Args:
            weights: `"pretrained"`, or path of a weights file. Defaults to None, initial weights.
            vocabulary: `Vocabulary` to save with a language model. It sets `vocabulary_size`.
        """
        path = None
        if weights is not None:
            path, published = pretrained.find(self, weights)
            if published is not None and vocabulary not in (None, published):
                raise ValueError(
                    f"{self.name}: the pretrained weights have a vocabulary of {len(published)} "
                    f"tokens. Omit `vocabulary` to use it. Received: {vocabulary!r}"
                )
            vocabulary = published or vocabulary
        arguments = dict(self.arguments)
        if vocabulary is not None:
            size = arguments["vocabulary_size"]
            if size not in (self.entry.arguments["vocabulary_size"], len(vocabulary)):
                raise ValueError(
                    f"The vocabulary has {len(vocabulary)} tokens, but vocabulary_size={size}"
                )
            arguments["vocabulary_size"] = len(vocabulary)
        with default_policy(self.dtype_policy):
            model = self.entry.function(**arguments)
            if vocabulary is not None:
                model.vocabulary = vocabulary
            channels = () if self.reads_text else (self.channels,)
            model.build((None, None, *channels))
        self.compile(model)
        return model if path is None else pretrained.load_weights(model, self.name, path)

    def compile(self, model: keras.Model) -> None:
        """Compiles a model with the recipe's optimizer and metrics."""
        if self.reads_text:
            metrics = {"metrics": [TEXT_METRICS[self.metric]()]}
        elif self.entry.metrics is not None:
            metrics = {"weighted_metrics": self.entry.metrics()}
        else:
            metrics = {}
        model.compile(
            optimizer=self.training.make_optimizer(),
            jit_compile="auto" if self.jit_compile is None else self.jit_compile,
            **metrics,
        )

    def load_data(self) -> Dataset:
        """Loads the data set, a `Dataset`.

        Raises:
            ValueError: The data have the wrong kind, or a checksum other than `data_checksum`.
            FileNotFoundError: A file is missing.
        """
        loaded = datasets.load(self.data, self.data_dir, **self.data_options)
        if self.reads_text and loaded.vocabulary is None:
            raise ValueError(
                f"A language model needs text, but the data set {self.data!r} has none. "
                'Use data="text", data_options={"path": ...}'
            )
        if not self.reads_text and (loaded.vocabulary is not None or not loaded.sizes["train"]):
            raise ValueError(
                f"{self.name} needs separate sequences, but the data set {self.data!r} has none."
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
        follow = {name: len(loaded.vocabulary or ()) for name in self.from_data}
        return self.replace(data_checksum=loaded.checksum, **follow)

    def stream(
        self, part: Any, target_counting: str = "all", shuffle: bool = False
    ) -> keras.utils.PyDataset:
        """Returns batches of a data split, for `fit` or `evaluate`.

        Args:
            part: `train`, `valid` or `test` of the result of `load_data`. The tokens of a text must
                belong to its vocabulary.
            target_counting: For text: `"all"`, or `"original"` to follow the authors' code,
                see `data.TokenStream`.
            shuffle: Whether to read separate sequences in a new order in each epoch, which needs
                the callback `data.EpochOrder`, and to augment them as specified in `training`.
                Text is always read in order.
        """
        batch_size = self.training.batch_size
        if self.reads_text:
            length, context = self.training.sequence_length, self.training.context_length
            assert length is not None and context is not None  # by `__post_init__`
            return TokenStream(
                part,
                batch_size,
                length,
                context_length=context,
                stateful=self.stateful,
                target_counting=target_counting,
            )
        if target_counting != "all":
            raise ValueError(f"`target_counting` is for text. Received: {target_counting!r}")
        order: dict[str, Any] = {"seed": self.seed or 0, "shuffle": shuffle}
        stream: keras.utils.PyDataset
        if isinstance(part, list):
            if shuffle:
                order |= {name: getattr(self.training, name) or 0.0 for name in _MUSIC_FIELDS}
            stream = PianoRollStream(part, batch_size, **order)
        else:
            x, y = part
            shift = self.training.shift
            if shuffle and shift is not None:
                order["augment"] = functools.partial(datasets.shift_images, self.data, most=shift)
            stream = SequenceStream(x, y, batch_size, **order)
        channels = stream[0][0].shape[-1]
        if channels != self.channels:
            raise ValueError(
                f"The data set {self.data!r} has {channels} channels, but {self.name} reads "
                f"{self.channels}."
            )
        return stream

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """Returns the schedule and the stopping rule as callbacks for `fit`."""
        return self.training.callbacks()

    def to_dict(self) -> dict[str, Any]:
        """Returns the recipe as a dict of JSON values, from which `recipe_from_dict` reads it."""
        training = dataclasses.asdict(self.training)
        training = {k: v for k, v in training.items() if k not in self.entry.foreign_fields}
        written = {
            "name": self.name,
            "trellis_keras": trellis_keras.__version__,
            "arguments": self.arguments,
            "training": training,
            **{name: getattr(self, name) for name in _FIELDS},
        }
        return json.loads(json.dumps(written))

    def changes(self) -> dict[str, Any]:
        """Returns the options with which `zoo.recipe` returns this recipe.

        They exclude arguments that a run takes from its data, and the paths of the data.
        """
        setting = {} if self.setting is None else {"setting": self.setting}
        base = Recipe.published(self.entry).replace(**setting).options()
        unused = _unused(dataclasses.asdict(self.training))
        left_out = ("data_dir", "data_checksum", *_FROM_DATA, *unused)
        return setting | {
            name: value
            for name, value in self.options().items()
            if name not in left_out and value != base.get(name)
        }

    def options(self) -> dict[str, Any]:
        """Returns {option: value} of the whole recipe, as `zoo.recipe` takes them."""
        written = self.to_dict()
        fields = {name: written[name] for name in _FIELDS}
        others = dict(fields["data_options"])
        known = {name: others.pop(name) for name in self.entry.data_options if name in others}
        fields["data_options"] = others
        return {**known, **written["arguments"], **written["training"], **fields}

    def to_json(self) -> str:
        """Returns the recipe as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def check_choice(name: str, value: Any, choices: Collection) -> None:
    """Raises a `ValueError` unless the value is one of the choices."""
    if value not in choices:
        words = [choice for choice in choices if choice is not None]
        raise ValueError(
            f"`{name}` must be one of {', '.join(map(str, sorted(words)))}. Received: {value!r}"
        )


def _check(name, value, is_right, wording):
    if value is not None and not is_right(value):
        raise ValueError(f"`{name}` must be {wording}. Received: {value}")


def _typed(entry, options):
    """Returns the options in the types of their annotations, or raises ValueError."""
    for name in options:
        if name not in entry.options:
            raise ValueError(_unknown(entry, name))
    return _absolute({k: _in_type(entry.name, k, v, entry.options[k]) for k, v in options.items()})


def _unknown(entry, name):
    if name in _TEXT_FIELDS:
        return f"`{name}` is an option of language models; {entry.name} reads whole sequences."
    if name in _DEPTH_FIELDS:
        return f"`{name}` is an option of TrellisNets of text. Received: {entry.name}"
    kinds = ((_MUSIC_FIELDS, "music"), (_IMAGE_FIELDS, "images"))
    for fields, kind in kinds:
        if name in fields:
            return f"`{name}` is an option of models of {kind}. {entry.name} reads {entry.data}."
    near = suggestion(name, entry.options)
    return f"{entry.name} has no option {name!r}.{near or ' It has: ' + ', '.join(entry.options)}"


_KINDS = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
    str: (str, "text"),
    dict: (dict, 'a mapping such as {"path": "my.txt"}'),
    tuple: ((list, tuple), "a list"),
    type(None): (type(None), "none"),
}


def _in_type(model, name, value, wanted):
    """Returns the value in the type of an annotation such as `int | None`, or raises."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, dict):
        value = json.loads(json.dumps(value, default=os.fspath))  # as it is read back from JSON
    if wanted is Any:
        return value
    kinds = typing.get_args(wanted) if _is_union(wanted) else (wanted,)
    for kind in kinds:
        plain = typing.get_origin(kind) or kind
        if plain is tuple and isinstance(value, (list, tuple)):
            item = typing.get_args(kind)[0]
            if all(_is_a(item, one) for one in value):
                return tuple(item(one) for one in value)
        elif plain is not tuple and _is_a(plain, value):
            return value if value is None else plain(value)
    wording = " or ".join(map(_wording, kinds))
    raise ValueError(f"{model}: `{name}` must be {wording}. Received: {value!r}")


def _wording(kind):
    if typing.get_origin(kind) is not tuple:
        return _KINDS[kind][1]
    examples = {int: "[2, 3]", float: "[0.1, 0.5, 0.9]", str: '["a", "b"]'}
    return f"a list such as {examples[typing.get_args(kind)[0]]}"


def _is_union(annotation):
    return typing.get_origin(annotation) is not tuple and bool(typing.get_args(annotation))


def _is_a(kind, value):
    # In Python, True and False are also integers.
    if isinstance(value, bool) != (kind is bool):
        return False
    return isinstance(value, _KINDS[kind][0]) and (kind is not float or abs(value) < math.inf)


def _absolute(options):
    """Makes paths absolute: a run is evaluated from other working directories."""
    options = dict(options)
    if options.get("data_dir") is not None:
        options["data_dir"] = _absolute_path(options["data_dir"])
    given = options.get("data_options", {})
    paths = {name: given[name] for name in FILE_OPTIONS if isinstance(given.get(name), str)}
    if paths:
        absolute = {name: _absolute_path(path) for name, path in paths.items()}
        options["data_options"] = given | absolute
    return options


def _absolute_path(path):
    return os.path.abspath(os.path.expanduser(path))
