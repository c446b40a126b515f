"""A recipe: a model's configuration and how to train it, as published or as overridden."""

import dataclasses
import json
import numbers
import os
import typing

import trellis_keras
from trellis_keras import data
from trellis_keras.training import PlateauDecay, StepDecay

DECAY_RULES = ("best_before", "worst_of_last", "patience", "steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTraining:
    """How a language model is trained.

    Attributes:
        data: Name of the corpus, see `data.list_datasets()`.
        data_options: The corpus' options, such as the `path` of a text.
        data_dir: Folder of local copies of the data. None: see `data.load`.
        data_checksum: `Corpus.checksum` of the only data that will do, set by a run so that it
            does not go on with other ones. None: any.
        published: The published test result, in the model's metric, or None.
        source: Where it is published.
        batch_size: Rows of a batch.
        segment: Tokens of a row that one batch reads. None: the model's number of levels.
        horizon: With `history="chop"`, how many of them are read but not counted. None: as many
            as the model looks back (with two taps the number of levels), so that every counted
            token sees its whole receptive field.
        epochs: Upper limit.
        decay_rule: Of the learning rate: a rule of `training.PlateauDecay`, or `"steps"` for
            `training.StepDecay`. None: it stays.
        decay_factor: What the learning rate is multiplied with.
        decay_window: Epochs that the plateau rule looks back.
        decay_epochs: Epochs after which `"steps"` decays.
        min_learning_rate: Lower limit of the plateau rules.
    """

    data: str
    data_options: dict = dataclasses.field(default_factory=dict)
    data_dir: str | None = None
    data_checksum: str | None = None
    published: float | None = None
    source: str = ""
    batch_size: int
    segment: int | None = None
    horizon: int | None = None
    epochs: int
    decay_rule: str | None = None
    decay_factor: float = 0.1
    decay_window: int = 10
    decay_epochs: tuple[int, ...] = ()
    min_learning_rate: float = 0.0


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A zoo model's configuration (`model`) and its training (`training`).

    Recipes do not change: `replace` returns a new one. They are written as JSON into a run's
    folder, from where the run can be repeated.
    """

    name: str
    model: typing.Any
    training: TextTraining

    def replace(self, **overrides):
        """Returns a recipe with other fields, of the model's or of the training's.

        Raises:
            ValueError: An unknown field, or a value of the wrong type, or fields that do not
                fit each other.
        """
        parts = {"model": {}, "training": {}}
        for field, value in overrides.items():
            part = next((p for p in parts if field in vars(getattr(self, p))), None)
            if part is None:
                raise ValueError(
                    f"{self.name}: unknown field {field!r}. It has: {', '.join(self.fields())}"
                )
            parts[part][field] = _checked(self.name, getattr(self, part), field, value)
        new = Recipe(
            self.name,
            self.model.replace(**parts["model"]),
            dataclasses.replace(self.training, **_absolute(parts["training"])),
        )
        new._check()
        return new

    def fields(self):
        """Returns {field: value} of the model's configuration and of the training."""
        return {**vars(self.model), **vars(self.training)}

    @property
    def segment(self):
        return self.training.segment or self.model.depth

    @property
    def horizon(self):
        if self.model.history == "repackage":
            return 0
        given = self.training.horizon
        return self.model.depth * max(self.model.kernel_size - 1, 1) if given is None else given

    def _check(self):
        training = self.training
        if training.data not in data.list_datasets():
            raise ValueError(
                f"`data` must be one of {data.list_datasets()}. Received: {training.data!r}"
            )
        check_field(
            training,
            "decay_rule",
            lambda value: value in DECAY_RULES,
            f"one of {', '.join(DECAY_RULES)} or none",
        )
        for name in ("batch_size", "epochs", "segment"):
            check_field(training, name, lambda value: value >= 1, "1 or more")
        check_field(training, "horizon", lambda value: value >= 0, "0 or more")
        if self.model.history == "repackage" and training.horizon is not None:
            raise ValueError('`horizon` belongs to history="chop". Received: history="repackage"')
        if self.horizon >= self.segment:
            raise ValueError(
                "`horizon` must be smaller than `segment`, or no token is counted. "
                f"Received: horizon={self.horizon}, segment={self.segment}"
            )
        try:
            self.callbacks()
        except ValueError as error:
            raise ValueError(f"The fields `decay_...` make no rule: {error}") from error

    def load_data(self):
        """Loads the corpus.

        Raises:
            ValueError: It is not what it should be, or not the one of `data_checksum`.
            FileNotFoundError: A file is missing.
        """
        training = self.training
        corpus = data.load(training.data, training.data_dir, **training.data_options)
        if training.data_checksum not in (None, corpus.checksum):
            raise ValueError(
                f"The data {training.data!r} have changed since the run began: their checksum is "
                f"{corpus.checksum[:12]}..., not {training.data_checksum[:12]}..."
            )
        return corpus

    def stream(self, tokens, protocol="exact"):
        """Returns a split as batches for `fit` or `evaluate`.

        Its tokens are those of the data's vocabulary, which the model must be built with: the
        recipe's `vocabulary_size` may be another as long as no run has set it.
        """
        return data.TokenStream(
            tokens,
            batch_size=self.training.batch_size,
            segment=self.segment,
            history=self.model.history,
            horizon=self.horizon,
            protocol=protocol,
        )

    def callbacks(self):
        """Returns the published learning-rate rule as callbacks for `fit`."""
        training = self.training
        if training.decay_rule is None:
            return []
        if training.decay_rule == "steps":
            return [StepDecay(training.decay_epochs, training.decay_factor, verbose=1)]
        decay = PlateauDecay(
            factor=training.decay_factor,
            rule=training.decay_rule,
            window=training.decay_window,
            min_lr=training.min_learning_rate,
            verbose=1,
        )
        return [decay]

    def to_json(self):
        """Returns the recipe as JSON text.

        `derived` is for the reader: what follows from fields that are None.
        """
        fields = {
            "name": self.name,
            "trellis_keras": trellis_keras.__version__,
            "model": vars(self.model),
            "training": vars(self.training),
            "derived": {**self.model.derived(), "segment": self.segment, "horizon": self.horizon},
        }
        return json.dumps(fields, indent=2) + "\n"

    def from_json(self, text):
        """Returns this recipe with the fields that `to_json` wrote."""
        fields = json.loads(text)
        return self.replace(**fields["model"], **fields["training"])


def check_field(part, name, is_right, wording):
    """Raises a `ValueError` unless a field's value is None or right."""
    value = getattr(part, name)
    if value is not None and not is_right(value):
        raise ValueError(f"`{name}` must be {wording}. Received: {value}")


_KINDS = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
    str: (str, "text"),
    dict: (dict, 'a mapping such as {"path": "my.txt"}'),
    type(None): (type(None), "none"),
}


def _checked(name, part, field, value):
    """Returns the value in the field's type, or raises."""
    wanted = typing.get_type_hints(type(part))[field]
    if typing.get_origin(wanted) is tuple:
        kind = typing.get_args(wanted)[0]
        if isinstance(value, (list, tuple)) and all(_is_a(kind, item) for item in value):
            return tuple(kind(item) for item in value)
        raise ValueError(f"{name}: `{field}` must be a list such as [2, 3]. Received: {value!r}")
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    kinds = typing.get_args(wanted) or (wanted,)
    for kind in kinds:
        if _is_a(kind, value):
            return value if value is None else kind(value)
    wording = " or ".join(_KINDS[kind][1] for kind in kinds)
    raise ValueError(f"{name}: `{field}` must be {wording}. Received: {value!r}")


def _is_a(kind, value):
    # True and False are integers in Python, but never meant as such.
    return isinstance(value, _KINDS[kind][0]) and (kind is bool or not isinstance(value, bool))


def _absolute(fields):
    """Makes paths independent of the working directory: a run is evaluated from other ones."""
    fields = dict(fields)
    if fields.get("data_dir") is not None:
        fields["data_dir"] = _absolute_path(fields["data_dir"])
    options = fields.get("data_options", {})
    if isinstance(options.get("path"), (str, os.PathLike)):
        fields["data_options"] = options | {"path": _absolute_path(options["path"])}
    return fields


def _absolute_path(path):
    return os.path.abspath(os.path.expanduser(path))
