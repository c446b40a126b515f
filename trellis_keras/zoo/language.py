"""What the configurations of language models share."""

import dataclasses
from typing import ClassVar

import keras

from trellis_keras.layers import AdaptiveSoftmax
from trellis_keras.layers.heads import check_cutoffs
from trellis_keras.models import BitsPerCharacter, CrossEntropy, LanguageModel, Perplexity
from trellis_keras.zoo.config import Config, check_choice, check_field

INPUT_DROPOUT_KINDS = ("variational", "element")
# First words of the tails of the TrellisNet authors' program for WikiText-103.
WIKITEXT103_CUTOFFS = (2_800, 20_000, 76_000)
METRICS = {"perplexity": Perplexity, "bpc": BitsPerCharacter, "cross_entropy": CrossEntropy}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """A language model around some backbone; a subclass says how wide its embedding is.

    Attributes:
        vocabulary_size: Number of tokens. A run takes it from its data.
        embedding_dropout: Rate of dropped words.
        input_dropout: Dropout rate of the embedded input.
        input_dropout_kind: `"variational"` drops the same channels at all steps of a row,
            `"element"` every number by itself.
        output_dropout: Variational dropout rate of the output.
        metric: `"perplexity"`, `"bpc"` or `"cross_entropy"` (in nats), what is shown beside the
            loss.
    """

    POSITIVE: ClassVar[tuple] = (*Config.POSITIVE, "vocabulary_size")
    RATES: ClassVar[tuple] = ("embedding_dropout", "input_dropout", "output_dropout")
    BENCHMARK: ClassVar[tuple] = ("metric",)

    vocabulary_size: int
    embedding_dropout: float = 0.0
    input_dropout: float = 0.0
    input_dropout_kind: str = "variational"
    output_dropout: float = 0.0
    metric: str

    def __post_init__(self):
        super().__post_init__()
        check_choice("metric", self.metric, METRICS)
        check_choice("input_dropout_kind", self.input_dropout_kind, INPUT_DROPOUT_KINDS)

    @property
    def reading(self):
        """How a text is read: `"chop"` (segments overlap) or `"repackage"` (states are kept)."""
        return "chop"

    @property
    def default_segment(self):
        """Tokens of a segment where the recipe says nothing. None: it must."""
        return None

    @property
    def default_horizon(self):
        """Uncounted tokens of a segment where the recipe says nothing. None: it must."""
        return None

    def backbone(self):
        """Returns the layer between embedding and output matrix."""
        raise NotImplementedError

    def build(self, vocabulary=None):
        """Returns the compiled `LanguageModel`, its weights initialised."""
        model = LanguageModel(
            self.vocabulary_size,
            self.embedding_dim,
            self.backbone(),
            embedding_dropout=self.embedding_dropout,
            input_dropout=self.input_dropout,
            input_dropout_kind=self.input_dropout_kind,
            output_dropout=self.output_dropout,
            embeddings_initializer=self.make_embeddings_initializer(),
            vocabulary=vocabulary,
            seed=self.seed,
            **self.extras(),
        )
        model.build((None, None))
        model.compile(metrics=[METRICS[self.metric]()], **self.make_compile_options())
        return model

    def extras(self):
        """Returns further arguments of `LanguageModel`."""
        return {}

    def make_embeddings_initializer(self):
        """Returns the initializer of the embedding."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig(TextConfig):
    """A language model whose embedding is as wide as one likes.

    Attributes:
        embedding_dim: Width of the embedding.
        initial_embedding: The initial embedding is uniform within plus or minus this.
        cutoffs: First word of each tail of an adaptive softmax (see `layers.AdaptiveSoftmax`), for
            vocabularies in which words are numbered by falling frequency. Those published for
            WikiText-103 are cut off where another vocabulary ends. Empty: a full softmax.
        div_value: By how much each tail is narrower than the one before it; 1 with an output
            matrix that is the embedding's.
        activation_reg: AR of the loss.
        temporal_activation_reg: TAR of the loss.
        **: Those of `TextConfig` and `Config`.
    """

    POSITIVE: ClassVar[tuple] = (*TextConfig.POSITIVE, "embedding_dim")
    NOT_NEGATIVE: ClassVar[tuple] = (
        *Config.NOT_NEGATIVE,
        "initial_embedding",
        "activation_reg",
        "temporal_activation_reg",
    )

    # Whether the output matrix is the embedding's.
    tie_embeddings: ClassVar[bool] = True

    embedding_dim: int
    initial_embedding: float = 0.1
    cutoffs: tuple[int, ...] = ()
    div_value: float = 1.0
    activation_reg: float = 0.0
    temporal_activation_reg: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_cutoffs(self.cutoffs, self.vocabulary_size)
        projected = bool(self.cutoffs) and not self.tie_embeddings
        check_field(
            self,
            "div_value",
            lambda value: value == 1 or projected and value > 1,
            "1, or more with `cutoffs` and an output matrix of its own",
        )

    def settings(self, fields):
        words = fields.get("vocabulary_size")
        if words is None or self.cutoffs != WIKITEXT103_CUTOFFS:
            return {}
        return {"cutoffs": tuple(first for first in self.cutoffs if first < words)}

    def extras(self):
        return {
            "head": self.head(),
            "tie_embeddings": self.tie_embeddings,
            "activation_reg": self.activation_reg,
            "temporal_activation_reg": self.temporal_activation_reg,
        }

    def head(self):
        """Returns the output head. None: the model's own."""
        if not self.cutoffs:
            return None
        return AdaptiveSoftmax(
            self.vocabulary_size,
            self.cutoffs,
            div_value=self.div_value,
            seed=self.sub_seed(30),
            name="head",
        )

    def clusters(self):
        """Returns what a summary says of an adaptive softmax."""
        return f", softmax in {len(self.cutoffs) + 1} clusters" if self.cutoffs else ""

    def make_embeddings_initializer(self):
        bound = self.initial_embedding
        return keras.initializers.RandomUniform(-bound, bound, seed=self.seed)
