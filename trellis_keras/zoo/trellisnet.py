"""TrellisNet's published models (Bai et al. 2019, Table 5)."""

import dataclasses

import keras

from trellis_keras.layers import TrellisLayer
from trellis_keras.models import LanguageModel
from trellis_keras.training import SGD, Adam, BitsPerCharacter, Perplexity
from trellis_keras.zoo.assets import load_weights
from trellis_keras.zoo.recipe import Recipe, TextTraining, check_field
from trellis_keras.zoo.registry import register

OPTIMIZERS = {"sgd": SGD, "adam": Adam}
METRICS = {"perplexity": Perplexity, "bpc": BitsPerCharacter}
HISTORIES = ("chop", "repackage")
LEAST_AUX_EVERY = 4

POSITIVE = (
    "vocabulary_size",
    "embedding_dim",
    "hidden_units",
    "depth",
    "kernel_size",
    "injection_every",
    "learning_rate",
    "clip_norm",
)
NOT_NEGATIVE = (
    "aux_weight",
    "activation_penalty",
    "temporal_activation_penalty",
    "initial_stddev",
    "initial_embedding",
    "l2",
    "seed",
)
RATES = (
    "embedding_dropout",
    "input_dropout",
    "hidden_dropout",
    "output_dropout",
    "weight_dropout",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrellisLanguageModel:
    """Everything that makes a TrellisNet language model and its optimizer.

    Attributes:
        vocabulary_size: Number of tokens. A run takes it from its data.
        embedding_dim: Width of the embedding, tied to the output matrix.
        hidden_units: Hidden channels beside the output channels.
        output_units: Output channels. None: as many as the embedding has.
        depth: Number of levels.
        kernel_size: Taps of the convolutions.
        history: `"chop"` (segments overlap) or `"repackage"` (the state is carried over).
        aux_every: Auxiliary losses are taken every so many levels. None: no auxiliary losses.
        aux_weight: Their weight.
        embedding_dropout: Rate of dropped words.
        input_dropout: Variational dropout rate of the embedded input.
        hidden_dropout: Variational dropout rate of h in the convolution.
        output_dropout: Variational dropout rate of the output.
        weight_dropout: DropConnect rate of the past taps.
        weight_norm: Whether the kernels are weight-normed.
        activation_penalty: AR of the loss.
        temporal_activation_penalty: TAR of the loss.
        initial_stddev: Standard deviation of the initial kernels and biases.
        initial_embedding: The initial embedding is uniform within plus or minus this.
        injection_every: x enters every so many levels.
        memory: `"fast"`, or `"lean"` for a slower step that takes less memory (see
            `layers.TrellisLayer`).
        optimizer: `"sgd"` or `"adam"`.
        learning_rate: Its initial learning rate.
        clip_norm: Gradients are clipped to this global norm. None: not at all.
        l2: Weight decay, added to the gradient.
        metric: `"perplexity"` or `"bpc"`, what is shown beside the loss.
        jit_compile: Whether XLA compiles the training step.
        seed: Of the initial weights and the dropouts. None: another one each time.
    """

    vocabulary_size: int
    embedding_dim: int
    hidden_units: int
    output_units: int | None = None
    depth: int
    kernel_size: int = 2
    history: str
    aux_every: int | None = None
    aux_weight: float = 0.0
    embedding_dropout: float = 0.0
    input_dropout: float = 0.0
    hidden_dropout: float = 0.0
    output_dropout: float = 0.0
    weight_dropout: float = 0.0
    weight_norm: bool = False
    activation_penalty: float = 0.0
    temporal_activation_penalty: float = 0.0
    initial_stddev: float = 0.01
    initial_embedding: float = 0.1
    injection_every: int = 1
    memory: str | None = "fast"
    optimizer: str
    learning_rate: float
    clip_norm: float | None = None
    l2: float = 0.0
    metric: str
    jit_compile: bool = True
    seed: int | None = 0

    def __post_init__(self):
        _check_choice("history", self.history, HISTORIES)
        _check_choice("optimizer", self.optimizer, OPTIMIZERS)
        _check_choice("metric", self.metric, METRICS)
        for name in POSITIVE:
            check_field(self, name, lambda value: value > 0, "positive")
        for name in NOT_NEGATIVE:
            check_field(self, name, lambda value: value >= 0, "0 or more")
        for name in RATES:
            check_field(self, name, lambda value: 0 <= value < 1, "in [0, 1)")
        check_field(
            self,
            "aux_every",
            lambda value: 1 <= value <= self.depth,
            f"at least 1 and at most `depth`, {self.depth}",
        )
        check_field(
            self,
            "output_units",
            lambda value: value == self.embedding_dim,
            f"`embedding_dim`, {self.embedding_dim}, because the output matrix is the embedding's",
        )

    def replace(self, **fields):
        """Returns a configuration with other fields; a changed depth brings a fitting aux_every.

        The auxiliary losses of a shallower net are taken at its middle, or left out where that
        would be below level 4.
        """
        if "depth" in fields and "aux_every" not in fields and self.aux_every is not None:
            fitting = min(self.aux_every, fields["depth"] // 2)
            fields["aux_every"] = fitting if fitting >= LEAST_AUX_EVERY else None
        return dataclasses.replace(self, **fields)

    def derived(self):
        """Returns what follows from the fields."""
        output_units = self.output_units or self.embedding_dim
        return {"output_units": output_units, "units": self.hidden_units + output_units}

    def build(self, vocabulary=None):
        """Returns the compiled `LanguageModel`, its weights initialised."""
        has_aux = self.aux_every is not None and self.aux_weight > 0
        backbone = TrellisLayer(
            **self.derived(),
            depth=self.depth,
            kernel_size=self.kernel_size,
            injection_every=self.injection_every,
            memory=self.memory,
            weight_norm=self.weight_norm,
            dropout=self.hidden_dropout,
            weight_dropout=self.weight_dropout,
            aux_every=self.aux_every if has_aux else None,
            return_aux=has_aux,
            stateful=self.history == "repackage",
            seed=None if self.seed is None else self.seed + 10,
            name="trellis",
            **self._initializers(),
        )
        model = LanguageModel(
            self.vocabulary_size,
            self.embedding_dim,
            backbone,
            embedding_dropout=self.embedding_dropout,
            input_dropout=self.input_dropout,
            output_dropout=self.output_dropout,
            aux_weight=self.aux_weight if has_aux else 0.0,
            activation_penalty=self.activation_penalty,
            temporal_activation_penalty=self.temporal_activation_penalty,
            embeddings_initializer=keras.initializers.RandomUniform(
                -self.initial_embedding, self.initial_embedding, seed=self.seed
            ),
            vocabulary=vocabulary,
            seed=self.seed,
        )
        model.build((None, None))
        optimizer = OPTIMIZERS[self.optimizer](
            self.learning_rate, clip_norm=self.clip_norm, l2=self.l2
        )
        model.compile(optimizer, metrics=[METRICS[self.metric]()], jit_compile=self.jit_compile)
        return model

    def _initializers(self):
        def normal(offset):
            seed = None if self.seed is None else self.seed + offset
            return keras.initializers.RandomNormal(stddev=self.initial_stddev, seed=seed)

        names = ("kernel_initializer", "recurrent_initializer", "bias_initializer")
        return {name: normal(20 + i) for i, name in enumerate(names)}


def _check_choice(name, value, choices):
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {sorted(choices)}. Received: {value!r}")


WORD_DECAY = {
    "decay_rule": "best_before",
    "decay_factor": 0.25,
    "decay_window": 10,
    "min_learning_rate": 0.02,
}


@register(
    Recipe(
        "trellisnet_ptb",
        TrellisLanguageModel(
            vocabulary_size=10_000,
            embedding_dim=400,
            hidden_units=1000,
            depth=55,
            history="chop",
            aux_every=16,
            aux_weight=0.05,
            embedding_dropout=0.1,
            input_dropout=0.45,
            hidden_dropout=0.28,
            output_dropout=0.45,
            weight_dropout=0.5,
            activation_penalty=2.0,
            temporal_activation_penalty=1.0,
            optimizer="sgd",
            learning_rate=20.0,
            clip_norm=0.225,
            l2=1e-6,
            metric="perplexity",
        ),
        TextTraining(
            data="ptb_word",
            published=56.97,
            source="TrellisNet Table 1",
            batch_size=16,
            segment=110,
            epochs=500,
            **WORD_DECAY,
        ),
    )
)
def trellisnet_ptb(config, weights, vocabulary):
    """TrellisNet on word-level Penn Treebank: 24.2M parameters (published test perplexity 56.97).

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        **: The fields of `TrellisLanguageModel`.

    Returns:
        A compiled `LanguageModel`.
    """
    return load_weights(config.build(vocabulary), "trellisnet_ptb", weights)


@register(
    Recipe(
        "trellisnet_char_ptb",
        TrellisLanguageModel(
            vocabulary_size=50,
            embedding_dim=200,
            hidden_units=1000,
            depth=125,
            history="repackage",
            aux_every=70,
            aux_weight=0.3,
            input_dropout=0.1,
            hidden_dropout=0.3,
            output_dropout=0.1,
            weight_dropout=0.25,
            weight_norm=True,
            optimizer="adam",
            learning_rate=2e-3,
            clip_norm=0.2,
            l2=1e-6,
            metric="bpc",
        ),
        TextTraining(
            data="ptb_char",
            published=1.158,
            source="TrellisNet Table 3",
            batch_size=24,
            epochs=400,
            decay_rule="steps",
            decay_factor=0.1,
            decay_epochs=(220, 350),
        ),
    )
)
def trellisnet_char_ptb(config, weights, vocabulary):
    """TrellisNet on character-level Penn Treebank: 13.5M parameters (published 1.158 bits).

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        **: The fields of `TrellisLanguageModel`.

    Returns:
        A compiled `LanguageModel`.
    """
    return load_weights(config.build(vocabulary), "trellisnet_char_ptb", weights)


@register(
    Recipe(
        "trellisnet_char",
        TrellisLanguageModel(
            vocabulary_size=96,
            embedding_dim=64,
            hidden_units=96,
            depth=10,
            history="chop",
            initial_stddev=0.07,
            initial_embedding=1.0,
            optimizer="adam",
            learning_rate=8e-3,
            clip_norm=1.0,
            metric="bpc",
        ),
        TextTraining(
            data="pydoc",
            batch_size=32,
            segment=74,
            epochs=4,
            decay_rule="steps",
            decay_factor=0.5,
            decay_epochs=(2, 3),
        ),
    )
)
def trellisnet_char(config, weights, vocabulary):
    """A small TrellisNet for the characters of any text; trains in minutes on two cores.

    Not a published model: its initial weights are livelier than the paper's, so that it gets
    somewhere within an epoch.

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        **: The fields of `TrellisLanguageModel`.

    Returns:
        A compiled `LanguageModel`.
    """
    return load_weights(config.build(vocabulary), "trellisnet_char", weights)
