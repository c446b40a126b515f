"""A recipe: a model's configuration and how to train it, as published or as overridden."""

import dataclasses
import json
import os
import typing

import trellis_keras
from trellis_keras import data
from trellis_keras.training import PlateauDecay, StepDecay

DECAY_RULES = ("best_before", "worst_of_last", "patience", "steps", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTraining:
    """How a language model is trained.

    Attributes:
        data: Name of the corpus, see `data.list_datasets()`.
        data_options: The corpus' options, such as the `path` of a text.
        metric: `"perplexity"` or `"bpc"`; what the published result is given in.
        published: The published test result, or None.
        source: Where it is published.
        batch_size: Rows of a batch.
        segment: Tokens of a row that one batch reads. None: the model's number of levels.
        horizon: With `history="chop"`, how many of them are read but not counted. None: the
            number of levels, so that every counted token sees its whole receptive field.
        epochs: Upper limit.
        decay_rule: Of the learning rate: a rule of `training.PlateauDecay`, `"steps"` for
            `training.StepDecay`, or `"none"`.
        decay_factor: What the learning rate is multiplied with.
        decay_window: Epochs that the plateau rule looks back.
        decay_epochs: Epochs after which `"steps"` decays.
        min_learning_rate: Lower limit of the plateau rules.
    """

    data: str
    data_options: dict = dataclasses.field(default_factory=dict)
    metric: str
    published: float | None = None
    source: str = ""
    batch_size: int
    segment: int | None = None
    horizon: int | None = None
    epochs: int
    decay_rule: str = "none"
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
            dataclasses.replace(self.training, **parts["training"]),
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
        return self.model.depth if self.training.horizon is None else self.training.horizon

    def _check(self):
        training = self.training
        if training.decay_rule not in DECAY_RULES:
            raise ValueError(
                f"`decay_rule` must be one of {DECAY_RULES}. Received: {training.decay_rule!r}"
            )
        if training.metric not in ("perplexity", "bpc"):
            raise ValueError(
                f'`metric` must be "perplexity" or "bpc". Received: {training.metric!r}'
            )
        for name in ("batch_size", "epochs"):
            if getattr(training, name) < 1:
                raise ValueError(f"`{name}` must be positive. Received: {getattr(training, name)}")
        if self.model.history == "repackage" and training.horizon is not None:
            raise ValueError('`horizon` belongs to history="chop". Received: history="repackage"')
        if self.horizon >= self.segment:
            raise ValueError(
                "`horizon` must be smaller than `segment`, or no token is counted. "
                f"Received: horizon={self.horizon}, segment={self.segment}"
            )
        self.callbacks()

    def load_data(self, data_dir=None):
        """Loads the corpus."""
        return data.load(self.training.data, data_dir, **self.training.data_options)

    def stream(self, tokens, protocol="exact"):
        """Returns a split as batches for `fit` or `evaluate`."""
        return data.TokenStream(
            tokens,
            batch_size=self.training.batch_size,
            segment=self.segment,
            history=self.model.history,
            horizon=self.horizon,
            protocol=protocol,
            vocabulary_size=self.model.vocabulary_size,
        )

    def callbacks(self):
        """Returns the published learning-rate rule as callbacks for `fit`."""
        training = self.training
        if training.decay_rule == "none":
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
        """Returns the recipe as JSON text."""
        fields = {
            "name": self.name,
            "trellis_keras": trellis_keras.__version__,
            "model": vars(self.model),
            "training": vars(self.training),
        }
        return json.dumps(fields, indent=2) + "\n"

    def from_json(self, text):
        """Returns this recipe with the fields that `to_json` wrote."""
        fields = json.loads(text)
        return self.replace(**fields["model"], **fields["training"])


def _checked(name, part, field, value):
    """Returns the value in the field's type, or raises."""
    wanted = typing.get_type_hints(type(part))[field]
    allowed = typing.get_args(wanted) if typing.get_origin(wanted) is not tuple else (tuple,)
    allowed = allowed or (wanted,)
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    is_bool = isinstance(value, bool)
    if float in allowed and isinstance(value, int) and not is_bool:
        value = float(value)
    if not isinstance(value, allowed) or (is_bool and bool not in allowed):
        kinds = " or ".join(getattr(kind, "__name__", str(kind)) for kind in allowed)
        raise ValueError(f"{name}: `{field}` must be {kinds}. Received: {value!r}")
    return value
