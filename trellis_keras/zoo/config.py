"""What the configurations of all zoo models share: optimizer, XLA, seed, and checks of fields."""

import dataclasses
from typing import ClassVar

from trellis_keras.training import ASGD, SGD, Adam, RMSprop

DTYPE_POLICIES = ("float32", "float64", "mixed_bfloat16")
OPTIMIZERS = {"sgd": SGD, "asgd": ASGD, "adam": Adam, "rmsprop": RMSprop}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The part of a configuration that no architecture changes.

    A subclass lists in `POSITIVE`, `NOT_NEGATIVE` and `RATES` which of its fields must be so, and
    says in `settings` which published settings follow from which field, in `BENCHMARK` which fields
    decide what is measured: with another value there the published result is none, and in
    `COMPUTES` which ones change what the same weights compute.

    Attributes:
        optimizer: `"sgd"`, `"adam"`, `"rmsprop"`, or `"asgd"`, which is SGD until the training's
            `decay_rule`, `"average"`, has it average the weights.
        learning_rate: Its initial learning rate.
        clip_norm: Gradients are clipped to this global norm. None: not at all.
        l2: Weight decay, added to the gradient.
        jit_compile: Whether XLA compiles the training step. None: Keras decides (`"auto"`): on
            TensorFlow it does without XLA on a CPU, and for cuDNN's layers on a GPU.
        dtype_policy: Keras' dtype policy of all layers: `"float32"`, `"float64"`, or
            `"mixed_bfloat16"`, whose weights stay in float32. None: `keras.config.dtype_policy()`.
        seed: Of the initial weights, the dropouts and the order of the examples. None: other
            weights each time (a run's dropouts and order are then those of seed 0).
    """

    POSITIVE: ClassVar[tuple] = ("learning_rate", "clip_norm")
    NOT_NEGATIVE: ClassVar[tuple] = ("l2", "seed")
    RATES: ClassVar[tuple] = ()
    BENCHMARK: ClassVar[tuple] = ()
    COMPUTES: ClassVar[tuple] = ()

    optimizer: str
    learning_rate: float
    clip_norm: float | None = None
    l2: float = 0.0
    jit_compile: bool | None = True
    dtype_policy: str | None = None
    seed: int | None = 0

    def __post_init__(self):
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        if self.dtype_policy is not None:
            check_choice("dtype_policy", self.dtype_policy, DTYPE_POLICIES)
        for name in self.POSITIVE:
            check_field(self, name, lambda value: value > 0, "positive")
        for name in self.NOT_NEGATIVE:
            check_field(self, name, lambda value: value >= 0, "0 or more")
        for name in self.RATES:
            check_field(self, name, lambda value: 0 <= value < 1, "in [0, 1)")

    def replace(self, **fields):
        """Returns a configuration with other fields, and what follows from them."""
        return dataclasses.replace(self, **{**self.settings(fields), **fields})

    def settings(self, fields):
        """Returns the fields that follow from the new values `fields`; those given win."""
        return {}

    def has_result_of(self, other):
        """Whether another configuration's published result is this one's too."""
        return all(getattr(self, name) == getattr(other, name) for name in self.BENCHMARK)

    def computed_otherwise(self, other):
        """Returns the fields by which another configuration computes something else than this one
        from weights that fit both: {name: its value}.
        """
        theirs = {name: getattr(other, name) for name in self.COMPUTES}
        return {name: value for name, value in theirs.items() if value != getattr(self, name)}

    def published_on(self, data, data_options):
        """Returns the fields of the training that say what is published of this model.

        They are asked for where the recipe's own figure does not hold: `has_result_of` says no, or
        the data are others.

        Args:
            data: Name of the data set.
            data_options: Its options.
        """
        return {"published": None, "published_epochs": None, "source": ""}

    def derived(self):
        """Returns what follows from the fields, for the reader of a recipe."""
        return {}

    def data_options(self):
        """Returns the options of the data set that the model decides, such as T."""
        return {}

    def summary(self):
        """Returns the architecture in a few words."""
        raise NotImplementedError

    def make_compile_options(self):
        """Returns the arguments of `compile` that do not depend on the task."""
        automatic = self.jit_compile is None
        return {
            "optimizer": self.make_optimizer(),
            "jit_compile": "auto" if automatic else self.jit_compile,
        }

    def make_optimizer(self):
        return OPTIMIZERS[self.optimizer](self.learning_rate, clip_norm=self.clip_norm, l2=self.l2)

    def sub_seed(self, offset):
        """Returns a seed for a part of the model: none has the same numbers as another."""
        return None if self.seed is None else self.seed + offset


def check_choice(name, value, choices):
    """Raises a `ValueError` unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {sorted(choices)}. Received: {value!r}")


def check_field(part, name, is_right, wording):
    """Raises a `ValueError` unless a field's value is None or right."""
    value = getattr(part, name)
    if value is not None and not is_right(value):
        raise ValueError(f"`{name}` must be {wording}. Received: {value}")
