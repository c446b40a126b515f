"""The kinds of task of the TCN paper: which model, what data, which figure of merit."""

import dataclasses
import math

import keras

from trellis_keras.data import TokenStream
from trellis_keras.models import (
    LanguageModel,
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)
from trellis_keras.training import Adam
from trellis_keras.zoo import Recipe, Training, datasets
from trellis_keras.zoo.datasets.synthetic import COPIED


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """Settings of recurrent nets: Table 3's for the LSTM.

    `optimizer` (class, learning rate) is the LSTM's alone; None is that of the TCN.
    """

    layers: int = 1
    dropout: float = 0.0
    clip: float | None = None
    forget_bias: float = 1.0
    optimizer: tuple | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A task and the published settings of its nets.

    A kind of task is a subclass: it says which model is trained on what data, and which figure of
    merit is reported.
    """

    name: str
    data: str
    options: dict = dataclasses.field(default_factory=dict)
    size: int  # parameters that the paper gives to every net
    kernel_size: int
    depth: int
    filters: int
    dropout: float = 0.0
    clip: float | None = None
    optimizer: tuple = (Adam, 2e-3)
    recurrent: Recurrent = Recurrent()
    batch_size: int = 32
    epochs: int
    training: Training | None = None  # whose rule lowers the rate; None: it stays

    metric = "mse"
    metric_label = "Mean squared error"
    log_scale = False
    per_step = False
    last_filters = None  # of a tied language model: the last block is as wide as the embedding
    channels = 1

    def load(self, data_dir=None):
        """The data, in three splits."""
        return datasets.load(self.data, data_dir, **self.options)

    def stream(self, splits, split, seed):
        """Batches of a split."""
        return splits.stream(split, self.batch_size, seed=seed)

    def make_optimizer(self, net):
        """A new optimizer with the settings of a kind of net."""
        (make, rate), clip = self.optimizer, self.clip
        if net != "tcn":
            clip = self.recurrent.clip
        if net == "lstm" and self.recurrent.optimizer:
            make, rate = self.recurrent.optimizer
        return make(rate, clip_norm=clip)

    def metrics(self):
        """Metrics to compile the model with, or None for the model's own."""
        return None

    def value(self, logs):
        """The figure of merit, from the logs of an evaluation."""
        return logs["loss"]

    def decay(self):
        """A new callback that lowers the learning rate from epoch to epoch, or None."""
        rules = [] if self.training is None else self.training.callbacks()
        return rules[0] if rules else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adding(Task):
    """The adding problem (section 5.2, Fig. 2)."""

    channels = 2
    log_scale = True

    def model(self, backbone, **options):
        return SequenceRegressor(backbone, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyMemory(Task):
    """Copy memory (section 5.2, Fig. 4; section 5.4, Fig. 5)."""

    metric = "cross_entropy_nats"
    metric_label = "Cross-entropy in nats a step"
    log_scale = True
    per_step = True

    def model(self, backbone, **options):
        return SequenceClassifier(backbone, 10, per_step=True, **options)

    def metrics(self):
        return [Recall()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pixels(Task):
    """Images of digits, pixel by pixel (section 5.2, Fig. 3)."""

    metric = "accuracy_percent"
    metric_label = "Accuracy in %"

    def model(self, backbone, **options):
        return SequenceClassifier(backbone, 10, **options)

    def value(self, logs):
        return 100 * logs["accuracy"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Music(Task):
    """Polyphonic music (section 5.3)."""

    metric = "nll_nats_per_frame"
    metric_label = "NLL in nats a frame"
    per_step = True
    channels = 88

    def model(self, backbone, **options):
        return PolyphonicModel(backbone, **options)

    def value(self, logs):
        return logs["frame_nll"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(Task):
    """Language modeling with tied embeddings (section 5.3); TCN only."""

    recipe: Recipe  # embedding and dropouts
    segment: int
    counted: int  # last steps of a segment; the others are history

    per_step = True

    @property
    def channels(self):
        return self.recipe.arguments["embedding_dim"]

    @property
    def last_filters(self):
        return self.recipe.arguments["embedding_dim"]

    @property
    def words(self):
        return self.data == "ptb"

    @property
    def metric(self):
        return "perplexity" if self.words else "bits_per_character"

    @property
    def metric_label(self):
        return "Perplexity" if self.words else "Bits a character"

    def stream(self, splits, split, seed):
        return TokenStream(
            getattr(splits, split),
            self.batch_size,
            self.segment,
            context_length=self.segment - self.counted,
        )

    def model(self, backbone, seed, **options):
        arguments = self.recipe.arguments
        return LanguageModel(
            arguments["vocabulary_size"],
            arguments["embedding_dim"],
            backbone,
            embeddings_initializer=_embeddings(arguments["initial_embedding"], seed),
            input_dropout=arguments["input_dropout"],
            input_dropout_kind="element",
            seed=seed,
            **options,
        )

    def value(self, logs):
        return math.exp(logs["loss"]) if self.words else logs["loss"] / math.log(2)


def _embeddings(kind, seed):
    if kind == "normal":
        return keras.initializers.RandomNormal(stddev=0.01, seed=seed)
    return keras.initializers.RandomUniform(-0.1, 0.1, seed=seed)


class Recall(keras.metrics.SparseCategoricalAccuracy):
    """Accuracy on the last ten steps of copy memory: those that must be recalled."""

    def __init__(self, name="recall", dtype=None):
        super().__init__(name, dtype)

    def update_state(self, y_true, y_pred, sample_weight=None):
        if sample_weight is not None and len(sample_weight.shape) > 1:  # not of whole rows
            sample_weight = sample_weight[:, -COPIED:]
        super().update_state(y_true[:, -COPIED:], y_pred[:, -COPIED:], sample_weight)
