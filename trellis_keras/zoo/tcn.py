"""The TCN paper's models (Bai et al. 2018): its TCNs, and the LSTM, GRU and RNN baselines."""

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from trellis_keras.data import Vocabulary
from trellis_keras.layers import TCN, DenseHead, StackedRNN
from trellis_keras.layers.tcn import receptive_field_of
from trellis_keras.models import (
    DigitsRecalled,
    LanguageModel,
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)
from trellis_keras.types import Tensor
from trellis_keras.zoo.recipe import Training, check_choice
from trellis_keras.zoo.registry import register, sub_seed
from trellis_keras.zoo.trellisnet import adaptive_softmax, resolve_cutoffs

__all__ = [
    "gru_adding",
    "gru_char_ptb",
    "gru_copy_memory",
    "gru_jsb",
    "gru_nottingham",
    "gru_permuted_mnist",
    "gru_ptb",
    "gru_seq_mnist",
    "gru_text8",
    "lstm_adding",
    "lstm_char_ptb",
    "lstm_copy_memory",
    "lstm_jsb",
    "lstm_nottingham",
    "lstm_permuted_mnist",
    "lstm_ptb",
    "lstm_seq_mnist",
    "lstm_text8",
    "rnn_adding",
    "rnn_char_ptb",
    "rnn_copy_memory",
    "rnn_jsb",
    "rnn_nottingham",
    "rnn_permuted_mnist",
    "rnn_ptb",
    "rnn_seq_mnist",
    "rnn_text8",
    "tcn_adding",
    "tcn_char_ptb",
    "tcn_copy_memory",
    "tcn_jsb",
    "tcn_lambada",
    "tcn_nottingham",
    "tcn_permuted_mnist",
    "tcn_ptb",
    "tcn_seq_mnist",
    "tcn_text8",
    "tcn_wt103",
]

# Kernel size, blocks and filters of Table 2.
ADDING = {200: (6, 7, 27), 400: (7, 7, 27), 600: (8, 8, 24)}
COPY_MEMORY = {500: (6, 9, 10), 1000: (8, 8, 10), 2000: (8, 9, 10)}
PIXELS = {"67k": (7, 8, 25), "37k": (6, 8, 20)}

_ACTIVATIONS = ("relu", "glu")
_DROPOUT_KINDS = ("spatial", "element")
_DEEPEST = 40  # blocks; the dilation doubles from one to the next


# Data, batches and schedule of each benchmark, the same for all its nets

_WORST_OF_THREE: dict[str, Any] = {
    "schedule": "worst_of_last",
    "decay_factor": 0.1,
    "decay_window": 3,
    "decay_strict": True,
}
_ADDING: dict[str, Any] = {
    "data": "adding",
    "metric": "mse",
    "channels": 2,
    "data_arguments": ("T",),
}
_ADDING_BATCHES: dict[str, Any] = {"batch_size": 32, "epochs": 10}
_COPY_MEMORY: dict[str, Any] = {
    "data": "copy_memory",
    "metric": "cross_entropy",
    "channels": 1,
    "data_arguments": ("T",),
    "metrics": lambda: [
        keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
        DigitsRecalled(),
    ],
}
_COPY_MEMORY_BATCHES: dict[str, Any] = {"batch_size": 32, "epochs": 50}
_SEQ_MNIST: dict[str, Any] = {"data": "seq_mnist", "metric": "accuracy", "channels": 1}
_PERMUTED_MNIST: dict[str, Any] = {"data": "permuted_mnist", "metric": "accuracy", "channels": 1}
_MNIST_BATCHES: dict[str, Any] = {
    "batch_size": 64,
    "epochs": 20,
    "schedule": "steps",
    "decay_factor": 0.1,
    "decay_epochs": (10,),
}
_JSB: dict[str, Any] = {"data": "jsb", "metric": "frame_nll", "channels": 88}
_NOTTINGHAM: dict[str, Any] = {"data": "nottingham", "metric": "frame_nll", "channels": 88}
_MUSIC_BATCHES: dict[str, Any] = {"batch_size": 1, "epochs": 100, **_WORST_OF_THREE}
_PTB: dict[str, Any] = {"data": "ptb", "metric": "perplexity"}
_WORD_SCHEDULE: dict[str, Any] = {
    "epochs": 100,
    "schedule": "worst_of_last",
    "decay_factor": 0.5,
    "decay_window": 5,
    "decay_strict": False,
}
_WORD_BATCHES: dict[str, Any] = {
    "batch_size": 16,
    "sequence_length": 80,
    "context_length": 40,
    **_WORD_SCHEDULE,
}
_CHAR_PTB: dict[str, Any] = {"data": "char_ptb", "metric": "bpc"}
_TEXT8: dict[str, Any] = {"data": "text8", "metric": "bpc"}
_CHAR_BATCHES: dict[str, Any] = {
    "batch_size": 32,
    "epochs": 100,
    "sequence_length": 400,
    "context_length": 80,
    **_WORST_OF_THREE,
}


# Heads, the same for all nets of a benchmark


def _small_head(seed):
    """The authors' initial head where outputs are numbers or digits of a generated task."""
    return keras.initializers.RandomNormal(stddev=0.01, seed=sub_seed(seed, 5))


def _torch_head(seed):
    """PyTorch's default: uniform within 1 / sqrt(channels)."""
    return keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform", seed=sub_seed(seed, 5))


def _sum(backbone, seed):
    return SequenceRegressor(backbone, kernel_initializer=_small_head(seed), seed=seed)


def _copy(backbone, seed):
    return SequenceClassifier(
        backbone, num_classes=10, per_step=True, kernel_initializer=_small_head(seed), seed=seed
    )


def _digit(backbone, seed):
    return SequenceClassifier(
        backbone, num_classes=10, kernel_initializer=_torch_head(seed), seed=seed
    )


def _music(backbone, seed):
    return PolyphonicModel(backbone, kernel_initializer=_torch_head(seed), seed=seed)


# TCNs of whole sequences


def _tcn(filters, kernel_size, depth, dropout, dropout_kind, activation, seed, **options):
    return TCN(
        filters,
        kernel_size,
        depth,
        dropout=dropout,
        dropout_kind=dropout_kind,
        activation=activation,
        **options,
        seed=sub_seed(seed, 10),
        name="tcn",
    )


def _check_tcn(depth, activation, dropout_kind, **_):
    check_choice("activation", activation, _ACTIVATIONS)
    check_choice("dropout_kind", dropout_kind, _DROPOUT_KINDS)
    if depth > _DEEPEST:  # the last dilation would be longer than any sequence
        raise ValueError(f"`depth` must be at most {_DEEPEST}. Received: {depth}")
    return {}


def _row_of_table_2(table, longer):
    """Returns the `resolve` of a generated task.

    Args:
        table: {T: (kernel size, blocks, filters)}.
        longer: By how many steps a sequence is longer than T.
    """

    def resolve(T, kernel_size, depth, filters, **others):
        steps = T + longer
        row = table.get(T)
        if row is None:  # the smallest published net that sees the whole sequence
            seen = {receptive_field_of(*row[:2]): row for row in table.values()}
            row = seen.get(min((field for field in seen if field >= steps), default=None))
        if row is None:
            if kernel_size is None or depth is None:
                raise ValueError(
                    f"No published net sees a whole sequence of T={T}: the widest sees {max(seen)} "
                    "steps. Give `kernel_size` and `depth`."
                )
            row = table[max(table)]
        depth = row[1] if depth is None else depth
        _check_tcn(depth, **others)
        if steps < 2 ** (depth - 1):
            raise ValueError(
                f"T={T} is too short: sequences have the length {steps}, and the last of {depth} "
                f"blocks has the dilation {2 ** (depth - 1)}. `depth` must be at most "
                f"{steps.bit_length()}."
            )
        return dict(zip(("kernel_size", "depth", "filters"), row, strict=True))

    return resolve


@register(
    **_ADDING,
    training=Training(optimizer="adam", learning_rate=2e-3, **_ADDING_BATCHES),
    resolve=_row_of_table_2(ADDING, longer=0),
)
def tcn_adding(
    T: int = 600,
    kernel_size: int | None = None,
    depth: int | None = None,
    filters: int | None = None,
    dropout: float = 0.0,
    dropout_kind: str = "element",
    activation: str = "relu",
    seed: int | None = 0,
) -> SequenceRegressor:
    """TCN on the adding problem, T=600, 70K parameters (Bai et al. 2018, Tables 1 and 2).

    T=200 has 58,051 parameters, T=400 67,582 and T=600 70,369 (published: 70K for all; for T=200
    that takes `filters=30`). There is no published result for T=200 and 400. Batch size and epochs
    are the authors' code's, the paper names none; that code's learning rate (4e-3) and width are
    not the paper's, which are taken here. With `activation="glu"` (Table 5) `filters=17` has the
    same size.

    Args:
        T: Positive integer, steps of a sequence.
        kernel_size: Positive integer, taps of the convolutions.
        depth: Positive integer, number of blocks, of dilations 1, 2, 4, ...
        filters: Positive integer, channels of each block. These three default to the row of Table 2
            for T, or where it has none to the smallest row that sees the whole sequence.
        dropout: Dropout rate after each convolution.
        dropout_kind: `"element"` drops each number by itself (the authors' code), `"spatial"` whole
            channels of a row (the paper).
        activation: `"relu"`, or `"glu"` for the gated net of Table 5, which has nearly twice the
            parameters at the same width.
        seed: Seed of weights, dropouts and the order of sequences. None: other weights each time.
        weights: None, `"pretrained"`, or path of a weights file.
        dtype_policy: Keras' dtype policy of all layers. Defaults to the global one.
        jit_compile: Whether XLA compiles the training step. None: what suits model and machine.

    Returns:
        A compiled `SequenceRegressor`.
    """
    backbone = _tcn(
        filters,
        kernel_size,
        depth,
        dropout,
        dropout_kind,
        activation,
        seed,
        return_sequences=False,
    )
    return _sum(backbone, seed)


@register(
    **_COPY_MEMORY,
    training=Training(
        optimizer="rmsprop", learning_rate=5e-4, clip_norm=1.0, **_COPY_MEMORY_BATCHES
    ),
    resolve=_row_of_table_2(COPY_MEMORY, longer=20),
)
def tcn_copy_memory(
    T: int = 1000,
    kernel_size: int | None = None,
    depth: int | None = None,
    filters: int | None = None,
    dropout: float = 0.05,
    dropout_kind: str = "element",
    activation: str = "relu",
    seed: int | None = 0,
) -> SequenceClassifier:
    """TCN on copy memory, T=1000, 12.5K parameters (Bai et al. 2018, Tables 1 and 2).

    The published cross-entropy is the mean over all T + 20 steps. `recalled` beside it is the share
    of sequences with all ten digits right.

    T=500 has 10,750 parameters, T=1000 12,530 and T=2000 14,170 (published: 16K for all; 12, 11 and
    11 filters make 15.3K, 15.1K and 17.1K). There is no published result for T=500 and 2000. Batch
    size and epochs are the authors' code's, the paper names none. That code clips before the
    backward pass, without effect; here gradients are clipped as the paper says. With
    `activation="glu"` (Table 5) `filters=7` has the same size.

    Args:
        T: Positive integer, steps that the digits must be remembered; a sequence has T + 20.
        **: As in `tcn_adding`.

    Returns:
        A compiled `SequenceClassifier` of every step.
    """
    return _copy(_tcn(filters, kernel_size, depth, dropout, dropout_kind, activation, seed), seed)


def _resolve_pixels(size, depth, **others):
    check_choice("size", size, PIXELS)
    row = dict(zip(("kernel_size", "depth", "filters"), PIXELS[size], strict=True))
    _check_tcn(row["depth"] if depth is None else depth, **others)
    return row


_PIXELS: dict[str, Any] = {
    "training": Training(optimizer="adam", learning_rate=2e-3, **_MNIST_BATCHES),
    "resolve": _resolve_pixels,
}


@register(**_SEQ_MNIST, **_PIXELS)
def tcn_seq_mnist(
    size: str = "67k",
    kernel_size: int | None = None,
    depth: int | None = None,
    filters: int | None = None,
    dropout: float = 0.0,
    dropout_kind: str = "element",
    activation: str = "relu",
    seed: int | None = 0,
) -> SequenceClassifier:
    """TCN on sequential MNIST, 67K parameters (Bai et al. 2018, Tables 1 and 2).

    Published: 70K. The paper does not say what Table 2's other setting (`size="37k"`, 37,010
    parameters) is for; its Table 4 names 21K, which takes 15 filters with that setting. Batch size,
    epochs and decay are the authors' code's; that code's dropout (0.05) is not the paper's (0),
    which is taken here. With `activation="glu"` (Table 5) `filters=18` has the same size.

    Args:
        size: `"67k"` or `"37k"`, Table 2's two settings. It sets kernel size, depth and filters
            unless they are given.
        **: As in `tcn_adding`.

    Returns:
        A compiled `SequenceClassifier`.
    """
    backbone = _tcn(
        filters,
        kernel_size,
        depth,
        dropout,
        dropout_kind,
        activation,
        seed,
        return_sequences=False,
    )
    return _digit(backbone, seed)


tcn_permuted_mnist = register(
    **_PERMUTED_MNIST,
    **_PIXELS,
    name="tcn_permuted_mnist",
    doc="""TCN on permuted MNIST, 67K parameters (Bai et al. 2018, Tables 1 and 2).

    Published: 70K (Table 4 names 42K). The paper's permutation is not published, see
    `zoo.datasets.pixel_permutation`.
    """,
)(tcn_seq_mnist)

_MUSIC: dict[str, Any] = {
    "training": Training(optimizer="adam", learning_rate=2e-3, clip_norm=0.4, **_MUSIC_BATCHES),
    "resolve": _check_tcn,
}


@register(**_JSB, **_MUSIC)
def tcn_jsb(
    kernel_size: int = 3,
    depth: int = 2,
    filters: int = 150,
    dropout: float = 0.5,
    dropout_kind: str = "element",
    activation: str = "relu",
    seed: int | None = 0,
) -> PolyphonicModel:
    """TCN on JSB Chorales, 270K parameters (Bai et al. 2018, Tables 1 and 2).

    Published: 300K, which takes 159 filters. One piece a batch, epochs and decay are the authors'
    code's; its learning rate (1e-3) is not the paper's, which is taken here. With
    `activation="glu"` (Table 5) `filters=104` has the same size.

    Args:
        **: As in `tcn_adding`.

    Returns:
        A compiled `PolyphonicModel`.
    """
    return _music(_tcn(filters, kernel_size, depth, dropout, dropout_kind, activation, seed), seed)


tcn_nottingham = register(
    **_NOTTINGHAM,
    **_MUSIC,
    name="tcn_nottingham",
    defaults={"kernel_size": 6, "depth": 4, "dropout": 0.2},
    doc="""TCN on Nottingham, 1.05M parameters (Bai et al. 2018, Tables 1 and 2).

    Published: 1M, which takes 146 filters. With `activation="glu"` (Table 5) `filters=105` has the
    same size. All else is as in `tcn_jsb`.
    """,
)(tcn_jsb)


# TCN language models


def _initial_embedding(kind, seed):
    if kind == "normal":
        return keras.initializers.RandomNormal(stddev=0.01, seed=seed)
    return keras.initializers.RandomUniform(-0.1, 0.1, seed=seed)


def _resolve_text(cutoffs, vocabulary_size, initial_embedding, **others):
    check_choice("initial_embedding", initial_embedding, ("normal", "uniform"))
    return _check_tcn(**others) | resolve_cutoffs(cutoffs, vocabulary_size)


_SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 4.0, "clip_norm": 0.4}
_WORDS: dict[str, Any] = {"resolve": _resolve_text}


@register(**_PTB, **_WORDS, training=Training(**_SGD, **_WORD_BATCHES))
def tcn_ptb(
    kernel_size: int = 3,
    depth: int = 4,
    filters: int = 600,
    embedding_dim: int = 600,
    dropout: float = 0.5,
    dropout_kind: str = "element",
    input_dropout: float = 0.25,
    activation: str = "relu",
    cutoffs: tuple[int, ...] | None = (),
    initial_embedding: str = "normal",
    vocabulary_size: int = 10_000,
    seed: int | None = 0,
    vocabulary: Vocabulary | None = None,
) -> LanguageModel:
    """TCN on word-level Penn Treebank, 14.7M parameters (Bai et al. 2018, Tables 1 and 2).

    Published: 13M, which takes 487 filters in the first three blocks. The paper halves SGD's rate
    on a plateau and names no initial one: rate 4, input dropout, segments of 80 words with 40
    counted and the definition of a plateau are the authors' code's. With `activation="glu"`
    (Table 5) `filters=345` has the same size.

    Args:
        kernel_size: Positive integer, taps of the convolutions.
        depth: Positive integer, number of blocks, of dilations 1, 2, 4, ...
        filters: Positive integer, channels of all blocks but the last.
        embedding_dim: Positive integer, width of the embedding and the last block. The embedding's
            matrix is the output's too.
        dropout: Dropout rate after each convolution.
        dropout_kind: `"element"` drops each number by itself (the authors' code), `"spatial"` whole
            channels of a row (the paper).
        input_dropout: Dropout rate of the embedded input, each number by itself.
        activation: `"relu"`, or `"glu"` for the gated net of Table 5, which has nearly twice the
            parameters at the same width.
        cutoffs: First word of each tail of an adaptive softmax (see `layers.AdaptiveSoftmax`), for
            words numbered by falling frequency. `()` is a full softmax, None the clusters of
            `trellisnet_wt103`.
        initial_embedding: `"normal"`, N(0, 0.01) as in the authors' programs for words, or
            `"uniform"`, U(-0.1, 0.1) as in that for characters.
        vocabulary_size: Positive integer, number of tokens. A run takes it from its data.
        seed: Seed of weights and dropouts. None: other weights each time.
        weights: None, `"pretrained"`, or path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        dtype_policy: Keras' dtype policy of all layers. Defaults to the global one.
        jit_compile: Whether XLA compiles the training step. None: what suits model and machine.

    Returns:
        A compiled `LanguageModel`.
    """
    widths = [filters] * (depth - 1) + [embedding_dim]
    return LanguageModel(
        vocabulary_size,
        embedding_dim,
        _tcn(widths, kernel_size, depth, dropout, dropout_kind, activation, seed),
        head=adaptive_softmax(vocabulary_size, cutoffs, seed),
        input_dropout=input_dropout,
        input_dropout_kind="element",
        embeddings_initializer=_initial_embedding(initial_embedding, seed),
        vocabulary=vocabulary,
        seed=seed,
    )


tcn_wt103 = register(
    data="wt103",
    metric="perplexity",
    **_WORDS,
    training=Training(**_SGD, **_WORD_BATCHES),
    name="tcn_wt103",
    defaults={
        "depth": 5,
        "filters": 1000,
        "embedding_dim": 400,
        "dropout": 0.4,
        "cutoffs": None,
        "vocabulary_size": 267_735,
    },
    doc="""TCN on WikiText-103, 132.1M parameters (Bai et al. 2018, Tables 1 and 2).

    Published: 148M, which takes `kernel_size=5` or `filters=1308`. The paper's row has dropout 0.4
    and clip 0.4 in merged cells. The authors' code has no program for this data set, and the paper
    does not say what its softmax is: the clusters are those of `trellisnet_wt103`. With
    `cutoffs=()` it is a full softmax (132,060,735 parameters). All else is as in `tcn_ptb`.
    """,
)(tcn_ptb)

tcn_lambada = register(
    data="lambada",
    metric="perplexity",
    **_WORDS,
    training=Training(
        **_SGD, **_WORD_SCHEDULE, batch_size=20, sequence_length=100, context_length=50
    ),
    name="tcn_lambada",
    defaults={
        "kernel_size": 4,
        "depth": 5,
        "filters": 500,
        "embedding_dim": 500,
        "dropout": 0.4,
        "input_dropout": 0.1,
        "vocabulary_size": 93_215,
    },
    doc="""TCN on LAMBADA, 56.7M parameters (Bai et al. 2018, Tables 1 and 2).

    Published: perplexity of the last words 1279. The 93,215 words are those of the data set's first
    list; the newer one has 112,746 (66.5M parameters). The softmax is a full one, as in the
    authors' code (the paper does not say). The authors' evaluation reads the last word before it
    predicts it; whether 1279 was measured so is not known (see `zoo.datasets.last_word_examples`).
    Segments and input dropout are that code's, the decay is the paper's.

    The training text, 2,662 novels, is not part of the data set: train with `data="text",
    data_options={"path": ..., "unit": "word", "unknown": "<unk>"}`.
    """,
)(tcn_ptb)

_CHARACTERS: dict[str, Any] = {
    "training": Training(optimizer="adam", learning_rate=2e-3, clip_norm=0.15, **_CHAR_BATCHES),
    "resolve": _resolve_text,
}
_CHARACTER_NET: dict[str, Any] = {
    "embedding_dim": 100,
    "dropout": 0.1,
    "input_dropout": 0.1,
    "initial_embedding": "uniform",
}

tcn_char_ptb = register(
    **_CHAR_PTB,
    **_CHARACTERS,
    name="tcn_char_ptb",
    defaults={"depth": 3, "filters": 450, "vocabulary_size": 50, **_CHARACTER_NET},
    doc="""TCN on character-level Penn Treebank, 2.2M parameters (Bai et al. 2018, Tables 1 and 2).

    Published: 3M, which takes 531 filters. Segments of 400 characters with 320 counted, input
    dropout and decay are the authors' code's; the optimizer is the paper's Adam, not the code's
    SGD. With `activation="glu"` (Table 5) `filters=309` has the same size.
    """,
)(tcn_ptb)

tcn_text8 = register(
    **_TEXT8,
    **_CHARACTERS,
    name="tcn_text8",
    defaults={
        "kernel_size": 2,
        "depth": 5,
        "filters": 520,
        "vocabulary_size": 27,
        **_CHARACTER_NET,
    },
    doc="""TCN on text8, 4.1M parameters (Bai et al. 2018, Tables 1 and 2).

    Published: 4.6M and 5M (550 filters make 4.6M). The paper's row has embedding, dropout and clip
    in merged cells. With `activation="glu"` (Table 5) `filters=364` has the same size. All else is
    as in `tcn_char_ptb`.
    """,
)(tcn_ptb)


# Recurrent baselines
#
# Table 3 has the LSTM's settings. GRU and RNN have no published ones: they have the LSTM's, with
# the hidden size that gives the published number of parameters. Data, batches, epochs and schedule
# are those of the TCN on the same benchmark. Texts are read in overlapping segments; no state is
# carried over.


@keras.saving.register_keras_serializable("trellis_keras")
class ForgetBias(keras.initializers.Initializer):
    """Zeros, except for an LSTM's forget gate: `LSTM(..., unit_forget_bias=False)`, any value.

    Args:
        value: Float, initial bias of the forget gate.

    Example:

    >>> np.asarray(ForgetBias(5.0)((8,))).tolist()  # input, forget, candidate, output
    [0.0, 0.0, 5.0, 5.0, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, shape: tuple[int, ...], dtype: str | None = None) -> Tensor:
        gate = (shape[0] // 4,)
        values = (0.0, self.value, 0.0, 0.0)
        return ops.concatenate([ops.full(gate, value, dtype=dtype) for value in values])

    def get_config(self) -> dict[str, Any]:
        return {"value": self.value}


def _recurrent(cell, layers, hidden_units, dropout, forget_bias, seed, return_sequences=True):
    """Layers of Keras' own LSTM, GRU (reset gate after the product) or SimpleRNN, with dropout."""
    stack = []
    for i in range(layers):
        options = {
            "return_sequences": True,
            "return_state": True,
            "kernel_initializer": keras.initializers.GlorotUniform(sub_seed(seed, 200 + i)),
            "recurrent_initializer": keras.initializers.Orthogonal(seed=sub_seed(seed, 300 + i)),
            "name": f"{cell}_{i + 1}",
        }
        if cell == "gru":
            stack.append(keras.layers.GRU(hidden_units, reset_after=True, **options))
        elif cell == "rnn":
            stack.append(keras.layers.SimpleRNN(hidden_units, **options))
        else:
            options |= {"unit_forget_bias": False, "bias_initializer": ForgetBias(forget_bias)}
            stack.append(keras.layers.LSTM(hidden_units, **options))
        stack.append(keras.layers.Dropout(dropout, seed=sub_seed(seed, 100 + i)))
    return StackedRNN(stack, return_sequences=return_sequences, name="recurrent")


def _recurrent_sequence_model(
    cell: str,
    head: Callable[..., keras.Model],
    T: int | None,
    size: str,
    layers: int | None,
    hidden_units: int | None,
    dropout: float,
    forget_bias: float | None,
    seed: int | None,
) -> keras.Model:
    """
    Args:
        T: Of adding and copy memory, as in their TCNs. It sets layers, hidden units, forget bias,
            clipping and optimizer; a T that Table 3 does not have takes the next larger row.
        size: Of an LSTM: `"paper"`, the published hidden size, or `"matched"`, the one that gives
            the published number of parameters.
        layers: Positive integer, number of recurrent layers.
        hidden_units: Positive integer, units of each layer.
        dropout: Rate of dropped outputs of each layer, each number by itself.
        forget_bias: Of an LSTM: initial bias of the forget gate.
        seed: Seed of weights, dropouts and the order of sequences. None: other weights each time.
        weights: None, `"pretrained"`, or path of a weights file.
        dtype_policy: Keras' dtype policy of all layers. Defaults to the global one.
        jit_compile: Whether XLA compiles the training step. None: what suits model and machine.

    Returns:
        A compiled `SequenceRegressor`, `SequenceClassifier` or `PolyphonicModel`.
    """
    every_step = head in (_copy, _music)
    net = _recurrent(cell, layers, hidden_units, dropout, forget_bias, seed, every_step)
    return head(net, seed)


def _recurrent_language_model(
    cell: str,
    size: str,
    layers: int,
    hidden_units: int | None,
    embedding_dim: int | None,
    dropout: float,
    forget_bias: float,
    tie_embeddings: bool,
    vocabulary_size: int,
    seed: int | None,
    vocabulary: Vocabulary | None = None,
) -> LanguageModel:
    """
    Args:
        size: Of an LSTM: `"paper"`, the published hidden size, or `"matched"`, the one that gives
            the published number of parameters.
        layers: Positive integer, number of recurrent layers.
        hidden_units: Positive integer, units of each layer.
        embedding_dim: Positive integer, width of the embedding. Where its matrix is the output's
            too (`*_ptb`), it is `hidden_units`.
        dropout: Rate of dropped outputs of each layer, each number by itself.
        forget_bias: Of an LSTM: initial bias of the forget gate.
        vocabulary_size: Positive integer, number of tokens. A run takes it from its data.
        seed: Seed of weights and dropouts. None: other weights each time.
        weights: None, `"pretrained"`, or path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        dtype_policy: Keras' dtype policy of all layers. Defaults to the global one.
        jit_compile: Whether XLA compiles the training step. None: what suits model and machine.

    Returns:
        A compiled `LanguageModel`.
    """
    assert embedding_dim is not None  # from `resolve`
    head = None
    if not tie_embeddings:
        kernel = keras.initializers.RandomUniform(-0.1, 0.1, seed=sub_seed(seed, 5))
        head = DenseHead(vocabulary_size, kernel_initializer=kernel, name="head")
    return LanguageModel(
        vocabulary_size,
        embedding_dim,
        _recurrent(cell, layers, hidden_units, dropout, forget_bias, seed),
        head=head,
        tie_embeddings=tie_embeddings,
        embeddings_initializer=keras.initializers.RandomUniform(-0.1, 0.1, seed=seed),
        vocabulary=vocabulary,
        seed=seed,
    )


def _table_3(
    layers, paper, matched, *, forget_bias=1.0, optimizer="adam", learning_rate=2e-3, clip_norm
):
    """A row of Table 3.

    Args:
        layers: Number of layers.
        paper: The LSTM's hidden size.
        matched: Hidden sizes of LSTM, GRU and RNN for the published number of parameters.
        forget_bias: Initial bias of the LSTM's forget gate. Defaults to Keras' own.
        optimizer, learning_rate: Default to the paper's Adam where the table names no rate.
        clip_norm: Norm to clip the gradient to.
    """
    training = {
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        "clip_norm": clip_norm,
    }
    return {
        "layers": layers,
        "hidden_units": {"paper": paper, "matched": dict(zip(_CELLS, matched, strict=True))},
        "forget_bias": forget_bias,
        "training": training,
    }


_CELLS = ("lstm", "gru", "rnn")
_LSTM_SETTINGS = "The settings are Table 3's."
_OTHER_SETTINGS = (
    "No settings are published: these are the LSTM's of Table 3, with the hidden size that gives\n"
    "    the published number of parameters."
)


def _baselines(
    benchmark,
    title,
    published_size,
    function,
    entry,
    batches,
    rows,
    *,
    remark="",
    fixed,
    **defaults,
):
    """Registers and returns the LSTM, GRU and RNN of a benchmark.

    Args:
        benchmark: Name of the benchmark.
        title: The benchmark in the docstrings.
        published_size: Number of parameters in the docstrings.
        function: `_recurrent_sequence_model` or `_recurrent_language_model`.
        entry: Data and metric, arguments of `register`.
        batches: Batches, epochs and schedule, fields of `Training`.
        rows: {T: row of Table 3}, or {None: row} without T.
        remark: What else the LSTM's docstring says of the settings.
        fixed: Further arguments of the function that are not the models'.
        **defaults: Defaults of the function's other arguments.
    """

    def row_of(T):
        return rows[T if T is None else min((t for t in rows if t >= T), default=max(rows))]

    def resolve(cell, size, hidden_units, T=None, embedding_dim=None, tie_embeddings=False, **_):
        check_choice("size", size, ("paper", "matched"))
        row = row_of(T)
        if hidden_units is None:
            sizes = row["hidden_units"]
            hidden_units = sizes["paper"] if size == "paper" else sizes["matched"][cell]
        if tie_embeddings and embedding_dim not in (None, hidden_units):
            raise ValueError(
                "`embedding_dim` must be `hidden_units`: the output matrix is the embedding's. "
                f"Received: embedding_dim={embedding_dim}, hidden_units={hidden_units}"
            )
        return {**row, "hidden_units": hidden_units, "embedding_dim": hidden_units}

    def training(T=None, **_):
        return Training(**row_of(T)["training"], **batches)

    functions = []
    for cell in _CELLS:
        is_lstm = cell == "lstm"
        tables = "Tables 1 and 3" if is_lstm else "Table 1"
        settings = f"{_LSTM_SETTINGS}{remark}" if is_lstm else _OTHER_SETTINGS
        build = register(
            **entry,
            training=training,
            resolve=resolve,
            name=f"{cell}_{benchmark}",
            fixed={"cell": cell, **fixed}
            | ({} if is_lstm else {"size": "matched", "forget_bias": 1.0}),
            defaults={"layers": None, "hidden_units": None, "seed": 0, **defaults}
            | ({"size": "paper", "forget_bias": None} if is_lstm else {}),
            doc=f"""{cell.upper()} on {title} (Bai et al. 2018, {tables}).

    Published: {published_size} parameters.
    {settings}
    Data, batches, epochs and schedule are those of `tcn_{benchmark}`.
    """,
        )(function)
        functions.append(build)
    return functions


lstm_adding, gru_adding, rnn_adding = _baselines(
    "adding",
    "the adding problem, T=600",
    "70K",
    _recurrent_sequence_model,
    _ADDING,
    _ADDING_BATCHES,
    {
        200: _table_3(
            2, 77, (76, 87, 152),
            forget_bias=5.0, optimizer="sgd", learning_rate=1e-3, clip_norm=50.0,
        ),
        400: _table_3(2, 77, (76, 87, 152), forget_bias=10.0, clip_norm=50.0),
        600: _table_3(1, 130, (131, 151, 263), clip_norm=5.0),
    },
    fixed={"head": _sum},
    T=600,
    dropout=0.0,
)  # fmt: skip

# "RMSprop/Adam" without a rate: the TCN's RMSprop.
_COPYING: dict[str, Any] = {"optimizer": "rmsprop", "learning_rate": 5e-4}
lstm_copy_memory, gru_copy_memory, rnn_copy_memory = _baselines(
    "copy_memory",
    "copy memory, T=1000",
    "16K",
    _recurrent_sequence_model,
    _COPY_MEMORY,
    _COPY_MEMORY_BATCHES,
    {
        500: _table_3(1, 50, (61, 70, 121), clip_norm=0.25, **_COPYING),
        1000: _table_3(1, 50, (61, 70, 121), clip_norm=1.0, **_COPYING),
        2000: _table_3(3, 28, (28, 32, 55), clip_norm=1.0, **_COPYING),
    },
    fixed={"head": _copy},
    T=1000,
    dropout=0.05,
)

_MNIST: dict[str, Any] = {"optimizer": "rmsprop", "learning_rate": 1e-3, "clip_norm": 1.0}
lstm_seq_mnist, gru_seq_mnist, rnn_seq_mnist = _baselines(
    "seq_mnist",
    "sequential MNIST",
    "70K",
    _recurrent_sequence_model,
    _SEQ_MNIST,
    _MNIST_BATCHES,
    {None: _table_3(1, 130, (130, 150, 259), **_MNIST)},
    fixed={"head": _digit, "T": None},
    dropout=0.0,
)
lstm_permuted_mnist, gru_permuted_mnist, rnn_permuted_mnist = _baselines(
    "permuted_mnist",
    "permuted MNIST",
    "70K",
    _recurrent_sequence_model,
    _PERMUTED_MNIST,
    _MNIST_BATCHES,
    {None: _table_3(1, 130, (130, 150, 259), forget_bias=10.0, **_MNIST)},
    fixed={"head": _digit, "T": None},
    dropout=0.0,
)

_CONTRADICTION = " Tables 1 and 3 contradict each other here."
# "SGD/Adam" without a rate: the paper's Adam.
lstm_jsb, gru_jsb, rnn_jsb = _baselines(
    "jsb",
    "JSB Chorales",
    "300K",
    _recurrent_sequence_model,
    _JSB,
    _MUSIC_BATCHES,
    {None: _table_3(2, 200, (141, 163, 288), forget_bias=10.0, clip_norm=1.0)},
    remark=_CONTRADICTION,
    fixed={"head": _music, "T": None},
    dropout=0.2,
)
# The second of Table 3's two rows, which is nearer to the published size.
lstm_nottingham, gru_nottingham, rnn_nottingham = _baselines(
    "nottingham",
    "Nottingham",
    "1M",
    _recurrent_sequence_model,
    _NOTTINGHAM,
    _MUSIC_BATCHES,
    {None: _table_3(1, 500, (448, 521, 915), learning_rate=4e-3, clip_norm=1.0)},
    remark=" Of its two rows this is the smaller net; 3 layers of 280\n    units make 1,694,648.",
    fixed={"head": _music, "T": None},
    dropout=0.1,
)
lstm_ptb, gru_ptb, rnn_ptb = _baselines(
    "ptb",
    "word-level Penn Treebank",
    "13M",
    _recurrent_language_model,
    _PTB,
    _WORD_BATCHES,
    {None: _table_3(3, 700, (556, 616, 858), optimizer="sgd", learning_rate=30.0, clip_norm=0.3)},
    remark=_CONTRADICTION,
    fixed={"tie_embeddings": True},
    embedding_dim=None,
    dropout=0.4,
    vocabulary_size=10_000,
)
lstm_char_ptb, gru_char_ptb, rnn_char_ptb = _baselines(
    "char_ptb",
    "character-level Penn Treebank",
    "3M",
    _recurrent_language_model,
    _CHAR_PTB,
    _CHAR_BATCHES,
    {None: _table_3(2, 600, (478, 554, 971), clip_norm=0.5)},
    remark=_CONTRADICTION,
    fixed={"tie_embeddings": False},
    embedding_dim=120,
    dropout=0.1,
    vocabulary_size=50,
)
lstm_text8, gru_text8, rnn_text8 = _baselines(
    "text8",
    "text8",
    "4.6M",
    _recurrent_language_model,
    _TEXT8,
    _CHAR_BATCHES,
    {None: _table_3(1, 1024, (1010, 1174, 2071), learning_rate=1e-2, clip_norm=0.5)},
    fixed={"tie_embeddings": False},
    embedding_dim=120,
    dropout=0.15,
    vocabulary_size=27,
)
