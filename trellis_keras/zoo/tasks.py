"""What the configurations of models of whole sequences share: a task, its head, its metric."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import keras

from trellis_keras.models import (
    DigitsRecalled,
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)
from trellis_keras.zoo.config import Config

_OUTPUTS = ("units", "num_classes", "keys")


@dataclasses.dataclass(frozen=True)
class Task:
    """What a benchmark asks of a model, whatever its backbone is.

    Attributes:
        model: Class of the model.
        options: Its arguments beside the backbone.
        per_step: Whether the backbone must return every step.
        metric: The published figure: the name of a metric, or, where none has this name, of
            the loss.
        metrics: Makes the metrics.
        small_head: Whether the head's weights begin as N(0, 0.01) and not, as PyTorch's do,
            uniform within 1 / sqrt(channels); the TCN authors' choice.
    """

    model: type
    options: dict
    per_step: bool
    metric: str
    metrics: Callable[[], list] = list
    small_head: bool = False

    @property
    def outputs(self):
        """Number of outputs of the head."""
        return next(self.options[name] for name in _OUTPUTS if name in self.options)


def _accuracy():
    return keras.metrics.SparseCategoricalAccuracy(name="accuracy")


ADDING = Task(SequenceRegressor, {"units": 1}, False, "mse", small_head=True)
COPY_MEMORY = Task(
    SequenceClassifier,
    {"num_classes": 10, "per_step": True},
    True,
    "cross_entropy",
    lambda: [_accuracy(), DigitsRecalled()],
    small_head=True,
)
PIXELS = Task(SequenceClassifier, {"num_classes": 10}, False, "accuracy", lambda: [_accuracy()])
MUSIC = Task(PolyphonicModel, {"keys": 88}, True, "frame_nll")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceConfig(Config):
    """A model of whole sequences around some backbone; a subclass names the `task`.

    Attributes:
        channels: Channels of an input's step.
        input_dropout: Rate of dropped inputs, each by itself.
        output_dropout: Rate of dropped outputs of the backbone, each by itself.
    """

    task: ClassVar[Task]
    POSITIVE: ClassVar[tuple] = (*Config.POSITIVE, "channels")
    RATES: ClassVar[tuple] = ("input_dropout", "output_dropout")

    channels: int
    input_dropout: float = 0.0
    output_dropout: float = 0.0

    @property
    def metric(self):
        """The published figure."""
        return self.task.metric

    def backbone(self):
        """Returns the layer before the head."""
        raise NotImplementedError

    def build(self):
        """Returns the compiled model, its weights initialised."""
        task = self.task
        model = task.model(
            self.backbone(),
            **task.options,
            input_dropout=self.input_dropout,
            output_dropout=self.output_dropout,
            kernel_initializer=self._head_initializer(),
            seed=self.seed,
        )
        model.build((None, None, self.channels))
        model.compile(weighted_metrics=task.metrics() or None, **self.make_compile_options())
        return model

    def _head_initializer(self):
        seed = self.sub_seed(5)
        if self.task.small_head:
            return keras.initializers.RandomNormal(stddev=0.01, seed=seed)
        return keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform", seed=seed)
