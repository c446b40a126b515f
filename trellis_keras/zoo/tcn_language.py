"""The TCN paper's language models (Bai et al. 2018, Tables 1 and 2)."""

import dataclasses
from typing import ClassVar

import keras

from trellis_keras.layers import TCN
from trellis_keras.zoo.config import check_choice
from trellis_keras.zoo.language import WIKITEXT103_CUTOFFS, LanguageConfig
from trellis_keras.zoo.recipe import Recipe
from trellis_keras.zoo.registry import register
from trellis_keras.zoo.tcn import ACTIVATIONS, DROPOUT_KINDS, check_depth, receptive_field
from trellis_keras.zoo.tcn_results import PublishedNet
from trellis_keras.zoo.training import TextTraining


@dataclasses.dataclass(frozen=True, kw_only=True)
class TCNLanguageModel(PublishedNet, LanguageConfig):
    """Everything that makes a TCN language model and its optimizer.

    The last block is as wide as the embedding, to whose matrix the output is tied. As in the
    authors' programs every number of the embedded input is dropped by itself
    (`input_dropout_kind="element"`).

    Attributes:
        kernel_size: Taps of the convolutions.
        depth: Number of blocks, of dilations 1, 2, 4, ...
        filters: Channels of all blocks but the last.
        dropout: Dropout rate after each convolution.
        dropout_kind: `"element"` drops every number by itself (the authors' program as
            it is now), `"spatial"` whole channels of a row (the paper).
        activation: `"relu"`, or `"glu"` for the gated net of Table 5, which has nearly twice the
            parameters at the same width.
        normal_embedding: Whether the initial embedding is N(0, 0.01), as in the authors' word
            programs, and not uniform within `initial_embedding`.
        **: Those of `LanguageConfig` and `Config`.
    """

    POSITIVE: ClassVar[tuple] = (*LanguageConfig.POSITIVE, "kernel_size", "depth", "filters")
    RATES: ClassVar[tuple] = (*LanguageConfig.RATES, "dropout")
    BENCHMARK: ClassVar[tuple] = (*LanguageConfig.BENCHMARK, "activation")

    kernel_size: int
    depth: int
    filters: int
    jit_compile: bool | None = None
    dropout: float = 0.0
    dropout_kind: str = "element"
    activation: str = "relu"
    normal_embedding: bool = False
    input_dropout_kind: str = "element"

    def __post_init__(self):
        super().__post_init__()
        check_depth(self)
        check_choice("activation", self.activation, ACTIVATIONS)
        check_choice("dropout_kind", self.dropout_kind, DROPOUT_KINDS)

    @property
    def default_horizon(self):
        return receptive_field(self.kernel_size, self.depth) - 1

    def derived(self):
        return {"receptive_field": receptive_field(self.kernel_size, self.depth)}

    def summary(self):
        return (
            f"{self.depth} blocks of {self.filters} filters, the last of {self.embedding_dim}, "
            f"kernel size {self.kernel_size}, sees {self.derived()['receptive_field']:,} tokens"
            f"{self.clusters()}"
        )

    def backbone(self):
        return TCN(
            [self.filters] * (self.depth - 1) + [self.embedding_dim],
            self.kernel_size,
            self.depth,
            dropout=self.dropout,
            dropout_kind=self.dropout_kind,
            activation=self.activation,
            seed=self.sub_seed(10),
            name="tcn",
        )

    def make_embeddings_initializer(self):
        if self.normal_embedding:
            return keras.initializers.RandomNormal(stddev=0.01, seed=self.seed)
        return super().make_embeddings_initializer()


# The program's: half, when not better than the worst of the last five epochs.
WORD_DECAY = {
    "decay_rule": "worst_of_last",
    "decay_factor": 0.5,
    "decay_window": 5,
    "decay_strict": False,
}
# A tenth, when worse than the worst of the last three.
CHARACTER_DECAY = {
    "decay_rule": "worst_of_last",
    "decay_factor": 0.1,
    "decay_window": 3,
    "decay_strict": True,
}


def _recipe(name, model, *, data, **training):
    published = model.published_on(data, {})
    return Recipe(name, model, TextTraining(data=data, **published, epochs=100, **training))


def _words(name, *, model, training):
    return _recipe(
        name,
        TCNLanguageModel(
            **model,
            clip_norm=0.4,
            normal_embedding=True,
            optimizer="sgd",
            learning_rate=4.0,
            metric="perplexity",
        ),
        **training,
        **WORD_DECAY,
    )


def _characters(name, *, data, **model):
    return _recipe(
        name,
        TCNLanguageModel(
            **model,
            embedding_dim=100,
            dropout=0.1,
            input_dropout=0.1,
            clip_norm=0.15,
            optimizer="adam",
            learning_rate=2e-3,
            metric="bpc",
        ),
        data=data,
        batch_size=32,
        segment=400,
        horizon=80,
        **CHARACTER_DECAY,
    )


@register(
    _words(
        "tcn_ptb",
        model=dict(
            vocabulary_size=10_000,
            embedding_dim=600,
            kernel_size=3,
            depth=4,
            filters=600,
            dropout=0.5,
            input_dropout=0.25,
        ),
        training=dict(data="ptb", batch_size=16, segment=80, horizon=40),
    )
)
def tcn_ptb(config, vocabulary):
    """TCN on word-level Penn Treebank (TCN, Tables 1 and 2): published test perplexity 88.68.

    Parameters: 14,659,600 (published 13M, which takes 487 filters in the first three blocks). The
    paper halves SGD's rate on a plateau and names no first one: rate 4, input dropout, segments
    of 80 words with 40 counted and what a plateau is are the authors' program's.

    With gates (`activation="glu"`, Table 5): published 87.94; `filters=345` has the same size.

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        **: The fields of `TCNLanguageModel`.

    Returns:
        A compiled `LanguageModel`.
    """
    return config.build(vocabulary)


@register(
    _words(
        "tcn_wt103",
        model=dict(
            vocabulary_size=267_735,
            embedding_dim=400,
            kernel_size=3,
            depth=5,
            filters=1000,
            dropout=0.4,
            input_dropout=0.25,
            cutoffs=WIKITEXT103_CUTOFFS,
        ),
        training=dict(data="wt103", batch_size=16, segment=80, horizon=40),
    )
)
def tcn_wt103(config, vocabulary):
    """TCN on WikiText-103 (TCN, Tables 1 and 2): published test perplexity 45.19.

    Parameters: 132,061,938 (published 148M, which takes `kernel_size=5` or `filters=1308`). The
    rest is as in `tcn_ptb`; the paper's row has dropout 0.4 and clip 0.4 in merged cells. There
    is no program of the authors for this data set, and the paper does not say what its softmax is:
    the clusters are those of `trellisnet_wt103`. With `cutoffs=()` it is a full softmax
    (132,060,735 parameters).

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        **: The fields of `TCNLanguageModel`.

    Returns:
        A compiled `LanguageModel`.
    """
    return config.build(vocabulary)


@register(
    _words(
        "tcn_lambada",
        model=dict(
            vocabulary_size=93_215,
            embedding_dim=500,
            kernel_size=4,
            depth=5,
            filters=500,
            dropout=0.4,
            input_dropout=0.1,
        ),
        training=dict(data="lambada", batch_size=20, segment=100, horizon=50),
    )
)
def tcn_lambada(config, vocabulary):
    """TCN on LAMBADA (TCN, Tables 1 and 2): published perplexity of the last words 1279.

    Parameters: 56,710,715 (published 56M) with the 93,215 words of the data set's first list;
    66.5M with the 112,746 of the newer one. The softmax is a full one, as in the authors' program
    (the paper says nothing of it); `cutoffs=(2_000, 10_000, 30_000)`, say, makes it an adaptive
    one, of 1,503 more parameters. The authors' evaluation reads the last word before it
    predicts it; whether 1279 was measured so is not known (see `data.last_word_examples`).
    Segments and input dropout are their program's, the decay is the paper's.

    The training text, 2,662 novels, is not part of the data set: train with
    `data="text", data_options={"path": ..., "unit": "word", "unknown": "<unk>"}`.

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        **: The fields of `TCNLanguageModel`.

    Returns:
        A compiled `LanguageModel`.
    """
    return config.build(vocabulary)


@register(
    _characters(
        "tcn_char_ptb",
        data="char_ptb",
        vocabulary_size=50,
        kernel_size=3,
        depth=3,
        filters=450,
    )
)
def tcn_char_ptb(config, vocabulary):
    """TCN on character-level Penn Treebank (TCN, Tables 1 and 2): published 1.31 bits.

    Parameters: 2,222,100 (published 3M, which takes 531 filters). Segments of 400 characters with
    320 counted, input dropout and decay are the authors' program's; the optimizer is the paper's
    Adam, not the program's SGD.

    With gates (`activation="glu"`, Table 5): published 1.306; `filters=309` has the same size.

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        **: The fields of `TCNLanguageModel`.

    Returns:
        A compiled `LanguageModel`.
    """
    return config.build(vocabulary)


@register(
    _characters(
        "tcn_text8",
        data="text8",
        vocabulary_size=27,
        kernel_size=2,
        depth=5,
        filters=520,
    )
)
def tcn_text8(config, vocabulary):
    """TCN on text8 (TCN, Tables 1 and 2): published 1.45 bits.

    Parameters: 4,129,667 (published 4.6M and 5M; 4.6M takes 550 filters). All else is as in
    `tcn_char_ptb`; the paper's row has its embedding, dropout and clip in merged cells.

    With gates (`activation="glu"`, Table 5): published 1.485; `filters=364` has the same size.

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        **: The fields of `TCNLanguageModel`.

    Returns:
        A compiled `LanguageModel`.
    """
    return config.build(vocabulary)
