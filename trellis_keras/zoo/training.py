"""How the zoo's models are trained: on a text, or on separate sequences."""

import dataclasses
import math

from trellis_keras import data
from trellis_keras.training import (
    ASGDSwitch,
    EarlyStopping,
    ExponentialDecay,
    PlateauDecay,
    StepDecay,
)
from trellis_keras.zoo.config import check_choice, check_field

DECAY_RULES = ("best_before", "worst_of_last", "patience", "steps", "exponential", "average")
# Which fields a rule of the learning rate uses; the plateau rules have them all but the steps.
_PLATEAU = ("decay_factor", "decay_window", "decay_strict", "min_learning_rate")
_USED_BY = {
    None: (),
    "steps": ("decay_factor", "decay_epochs"),
    "exponential": ("decay_factor",),
    "average": ("decay_window",),
}
_DECAY = (*_PLATEAU, "decay_epochs")
_STOPPING = ("stop_min_delta", "stop_against")
# What is published of the model that is trained so.
PUBLISHED = ("published", "published_epochs", "source")
_UNIFORM_GUESS = {"perplexity": float, "bpc": math.log2, "cross_entropy": math.log}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What all ways of training share.

    Attributes:
        data: Name of the data set, see `data.list_datasets()`.
        data_options: The data set's options, such as the `path` of a text.
        data_dir: Folder of local copies of the data. None: see `data.load`.
        data_checksum: The checksum of the only data that will do, set by a run so that it
            does not go on with other ones. None: any.
        published: The published test result, in the model's metric, or None.
        published_epochs: After how many epochs the lowest validation loss was reached there, or
            None.
        source: Where it is published.
        batch_size: Rows of a batch.
        epochs: Upper limit.
        decay_rule: Of the learning rate: a rule of `training.PlateauDecay`, `"steps"` for
            `training.StepDecay`, or `"exponential"` for `training.ExponentialDecay`. Or
            `"average"`: it stays, and `training.ASGDSwitch` averages the weights instead (with
            the optimizer `"asgd"` only). None: it stays.
        decay_factor: What the learning rate is multiplied with.
        decay_window: Epochs that the plateau rule, or `"average"`, looks back.
        decay_strict: Whether an equal value is good enough for the plateau rule. None: as the
            rule has it.
        decay_epochs: Epochs after which `"steps"` decays.
        min_learning_rate: Lower limit of the plateau rules.
        stop_patience: Training stops after so many epochs in a row in which the validation loss
            did not fall, see `training.EarlyStopping`. None: at the upper limit only.
        stop_min_delta: By how much it must fall.
        stop_against: Against which loss: the `"best"`, or that of the `"previous"` epoch.
    """

    data: str
    data_options: dict = dataclasses.field(default_factory=dict)
    data_dir: str | None = None
    data_checksum: str | None = None
    published: float | None = None
    published_epochs: int | None = None
    source: str = ""
    batch_size: int
    epochs: int
    decay_rule: str | None = None
    decay_factor: float = 0.1
    decay_window: int = 10
    decay_strict: bool | None = None
    decay_epochs: tuple[int, ...] = ()
    min_learning_rate: float = 0.0
    stop_patience: int | None = None
    stop_min_delta: float = 0.0
    stop_against: str = "best"

    def replace(self, **fields):
        """Returns another training; options of another data set do not stay.

        Raises:
            ValueError: A field that the new training has no use for.
        """
        if fields.get("data", self.data) != self.data:
            fields = {"data_options": {}, **fields}
        new = dataclasses.replace(self, **fields)
        # A run's recipe has them all.
        if "decay_rule" not in fields:
            used = _USED_BY.get(self.decay_rule, _PLATEAU)
            _check_used(fields, set(_DECAY) - set(used), "decay_rule", self.decay_rule)
        if "stop_patience" not in fields and self.stop_patience is None:
            _check_used(fields, _STOPPING, "stop_patience", None)
        return new

    def check(self, model):
        """Raises a `ValueError` where fields are wrong, or do not fit the model's."""
        if self.data not in data.list_datasets():
            raise ValueError(
                f"`data` must be one of {data.list_datasets()}. Received: {self.data!r}"
            )
        if self.decay_rule is not None:
            check_choice("decay_rule", self.decay_rule, DECAY_RULES)
        if self.decay_rule == "average" and model.optimizer != "asgd":
            raise ValueError(
                '`decay_rule="average"` needs optimizer="asgd". '
                f"Received: optimizer={model.optimizer!r}"
            )
        for name in ("batch_size", "epochs"):
            check_field(self, name, lambda value: value >= 1, "1 or more")
        theirs = sorted(set(self.data_options) & set(model.data_options()))
        if theirs:
            raise ValueError(f"`data_options` must leave {theirs} to the model's field {theirs}.")
        for fields, rule in (("decay_...", self._decay), ("stop_...", self._stopping)):
            try:
                rule()
            except ValueError as error:
                raise ValueError(f"The fields `{fields}` make no rule: {error}") from error

    def load(self, model):
        """Loads the data set."""
        options = {**self.data_options, **model.data_options()}
        loaded = data.load(self.data, self.data_dir, **options)
        self._check_kind(loaded)
        if self.data_checksum not in (None, loaded.checksum):
            raise ValueError(
                f"The data {self.data!r} have changed since the run began: their checksum is "
                f"{loaded.checksum[:12]}..., not {self.data_checksum[:12]}... Put the earlier ones "
                "back, or train in another folder."
            )
        return loaded

    def callbacks(self):
        """Returns the published rules of learning rate and stopping as callbacks for `fit`."""
        return [*self._decay(), *self._stopping()]

    def _decay(self):
        if self.decay_rule is None:
            return []
        if self.decay_rule == "steps":
            return [StepDecay(self.decay_epochs, self.decay_factor, verbose=1)]
        if self.decay_rule == "exponential":
            return [ExponentialDecay(self.decay_factor)]
        if self.decay_rule == "average":
            return [ASGDSwitch(self.decay_window, verbose=1)]
        decay = PlateauDecay(
            factor=self.decay_factor,
            rule=self.decay_rule,
            window=self.decay_window,
            strict=self.decay_strict,
            min_lr=self.min_learning_rate,
            verbose=1,
        )
        return [decay]

    def _stopping(self):
        if self.stop_patience is None:
            return []
        stopping = EarlyStopping(
            patience=self.stop_patience,
            min_delta=self.stop_min_delta,
            against=self.stop_against,
            verbose=1,
        )
        return [stopping]

    def derived(self, model):
        """Returns what follows from fields that are None."""
        return {}

    def model_fields(self, loaded):
        """Returns the fields of the model that the data decide."""
        return {}

    def _check_kind(self, loaded):
        raise NotImplementedError

    def stream(self, model, part, target_counting, shuffle):
        """Returns a part of the data as batches."""
        raise NotImplementedError

    def counted(self, part, stream):
        """Returns what a figure over the stream is a mean of: {noun: number}."""
        raise NotImplementedError

    def describe(self, model, loaded):
        """Returns lines on the data and the batches."""
        raise NotImplementedError


def _check_used(fields, unused, name, value):
    given = [field for field in unused if field in fields]
    if given:
        raise ValueError(
            f"`{name}={value!r}` has no use for `{min(given)}`. Give another `{name}` too, or "
            f"leave `{min(given)}` out."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTraining(Training):
    """How a language model is trained.

    Attributes:
        segment: Tokens of a row that one batch reads. None: the model's number of levels.
        horizon: Where segments overlap, how many of them are read but not counted. None: as many
            as the model looks back (with two taps the number of levels), so that every counted
            token sees its whole receptive field.
        **: Those of `Training`.
    """

    segment: int | None = None
    horizon: int | None = None

    def segment_of(self, model):
        return self.segment or model.default_segment

    def horizon_of(self, model):
        if model.reading == "repackage":
            return 0
        return model.default_horizon if self.horizon is None else self.horizon

    def check(self, model):
        super().check(model)
        check_field(self, "segment", lambda value: value >= 1, "1 or more")
        check_field(self, "horizon", lambda value: value >= 0, "0 or more")
        if model.reading == "repackage" and self.horizon is not None:
            raise ValueError('`horizon` belongs to history="chop". Received: history="repackage"')
        segment, horizon = self.segment_of(model), self.horizon_of(model)
        for name, value in (("segment", segment), ("horizon", horizon)):
            if value is None:
                raise ValueError(f"`{name}` must be given for this model. Received: none")
        if horizon >= segment:
            raise ValueError(
                "`horizon` must be smaller than `segment`, or no token is counted. "
                f"Received: horizon={horizon}, segment={segment}"
            )

    def derived(self, model):
        return {"segment": self.segment_of(model), "horizon": self.horizon_of(model)}

    def model_fields(self, loaded):
        return {"vocabulary_size": len(loaded.vocabulary)}

    def _check_kind(self, loaded):
        if loaded.vocabulary is None:
            raise ValueError(
                f"A language model is trained on a text, and the data set {self.data!r} has none "
                'for training. Give one: data="text", data_options={"path": ...}'
            )

    def stream(self, model, part, target_counting, shuffle):
        del shuffle  # a text is read in its order
        return data.TokenStream(
            part,
            batch_size=self.batch_size,
            sequence_length=self.segment_of(model),
            context_length=self.horizon_of(model),
            stateful=model.reading == "repackage",
            target_counting=target_counting,
        )

    def counted(self, part, stream):
        return {"targets": stream.targets_counted}

    def describe(self, model, loaded):
        sizes = ", ".join(f"{split} {size:,}" for split, size in loaded.sizes.items())
        size = len(loaded.vocabulary)
        guess = _UNIFORM_GUESS[model.metric](size)
        chop = model.reading == "chop"
        return [
            f"{self.data}: {sizes} {loaded.vocabulary.unit}s, vocabulary {size:,} "
            f"(a uniform guess: {model.metric} {guess:.4g})",
            f"batches of {self.batch_size} x {self.segment_of(model)} tokens, history "
            f"{model.reading}" + (f", horizon {self.horizon_of(model)}" if chop else ""),
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceTraining(Training):
    """How a model of separate sequences is trained: in a new order in each epoch."""

    def _check_kind(self, loaded):
        if loaded.vocabulary is not None or not loaded.sizes["train"]:
            raise ValueError(
                f"This model is trained on separate sequences. The data set {self.data!r} has none."
            )

    def stream(self, model, part, target_counting, shuffle):
        if target_counting != "all":
            raise ValueError(
                f'A `target_counting` other than "all" is for texts. Received: {target_counting!r}'
            )
        is_music = isinstance(part, list)
        make = data.PianoRollStream if is_music else data.SequenceStream
        arrays = [part] if is_music else part
        stream = make(*arrays, self.batch_size, seed=model.seed or 0, shuffle=shuffle)
        channels = stream[0][0].shape[-1]
        if channels != model.channels:
            raise ValueError(
                f"The data set {self.data!r} has {channels} channels, the model has "
                f"channels={model.channels}"
            )
        return stream

    def counted(self, part, stream):
        if isinstance(stream, data.PianoRollStream):
            return {"frames": stream.frames_counted}
        return {"sequences": stream.sequences_counted}

    def describe(self, model, loaded):
        sizes = ", ".join(f"{split} {size:,}" for split, size in loaded.sizes.items())
        given = ", ".join(f"{name} {value}" for name, value in model.data_options().items())
        return [
            f"{self.data}{f' ({given})' if given else ''}: {sizes} sequences",
            f"batches of {self.batch_size}, in a new order in each epoch",
        ]
