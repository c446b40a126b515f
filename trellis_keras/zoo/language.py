"""What the configurations of language models share."""

import dataclasses
from typing import ClassVar

import keras

from trellis_keras.models import LanguageModel
from trellis_keras.training import BitsPerCharacter, CrossEntropy, Perplexity
from trellis_keras.zoo.config import Config, check_choice

METRICS = {"perplexity": Perplexity, "bpc": BitsPerCharacter, "cross_entropy": CrossEntropy}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig(Config):
    """A language model around some backbone; a subclass says how wide its embedding is.

    Attributes:
        vocabulary_size: Number of tokens. A run takes it from its data.
        embedding_dropout: Rate of dropped words.
        input_dropout: Variational dropout rate of the embedded input.
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
    output_dropout: float = 0.0
    metric: str

    def __post_init__(self):
        super().__post_init__()
        check_choice("metric", self.metric, METRICS)

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
            output_dropout=self.output_dropout,
            embeddings_initializer=self._embeddings_initializer(),
            vocabulary=vocabulary,
            seed=self.seed,
            **self.extras(),
        )
        model.build((None, None))
        model.compile(
            self.make_optimizer(),
            metrics=[METRICS[self.metric]()],
            jit_compile=self.jit_compile,
        )
        return model

    def extras(self):
        """Returns further arguments of `LanguageModel`."""
        return {}

    def _embeddings_initializer(self):
        """Returns the initializer of the embedding."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig(TextConfig):
    """A language model whose embedding is as wide as one likes.

    Attributes:
        embedding_dim: Width of the embedding.
        initial_embedding: The initial embedding is uniform within plus or minus this.
        **: Those of `TextConfig` and `Config`.
    """

    POSITIVE: ClassVar[tuple] = (*TextConfig.POSITIVE, "embedding_dim")
    NOT_NEGATIVE: ClassVar[tuple] = (*Config.NOT_NEGATIVE, "initial_embedding")

    embedding_dim: int
    initial_embedding: float = 0.1

    def _embeddings_initializer(self):
        bound = self.initial_embedding
        return keras.initializers.RandomUniform(-bound, bound, seed=self.seed)
