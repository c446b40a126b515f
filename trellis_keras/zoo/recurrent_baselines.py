"""The LSTMs, GRUs and RNNs that the TCN paper compares its networks with (Bai et al. 2018)."""

import functools

import keras

from trellis_keras.layers import DenseHead, Dropout, StackedRNN
from trellis_keras.layers.recurrent_cell import ChronoBias, ForgetBias
from trellis_keras.models import LanguageModel
from trellis_keras.training import RMSprop
from trellis_keras.zoo import tcn
from trellis_keras.zoo.registry import register
from trellis_keras.zoo.rows import sub_seed, with_defaults

__all__ = [
    "lstm_adding", "gru_adding", "rnn_adding",
    "lstm_copy_memory", "gru_copy_memory", "rnn_copy_memory",
    "lstm_seq_mnist", "gru_seq_mnist", "rnn_seq_mnist",
    "lstm_permuted_mnist", "gru_permuted_mnist", "rnn_permuted_mnist",
    "lstm_jsb", "gru_jsb", "rnn_jsb",
    "lstm_nottingham", "gru_nottingham", "rnn_nottingham",
    "lstm_ptb", "gru_ptb", "rnn_ptb",
    "lstm_char_ptb", "gru_char_ptb", "rnn_char_ptb",
    "lstm_text8", "gru_text8", "rnn_text8",
]  # fmt: skip

# Table 3 has the LSTM's settings. Data, batches, epochs and schedule are those of the TCN on the
# same benchmark. Text is read in overlapping segments, without carried states.


def _gate_bias(forget_bias, steps, seed):
    """Returns the initializer of an LSTM's biases."""
    if forget_bias == "chrono" and steps is not None:
        return ChronoBias(steps, seed)
    if isinstance(forget_bias, str):
        chrono = "" if steps is None else ' or "chrono"'
        raise ValueError(f"`forget_bias` must be a number{chrono}. Received: {forget_bias!r}")
    return ForgetBias(forget_bias)


def _stack(
    cell, layers, hidden_units, dropout, forget_bias, seed, steps=None, return_sequences=True
):
    """Layers of Keras' own LSTM, GRU (reset gate after the product) or SimpleRNN, with dropout.

    `steps` is the length of the sequences for `forget_bias="chrono"`.
    """
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
            bias = _gate_bias(forget_bias, steps, sub_seed(seed, 400 + i))
            options |= {"unit_forget_bias": False, "bias_initializer": bias}
            stack.append(keras.layers.LSTM(hidden_units, **options))
        stack.append(Dropout(dropout, seed=sub_seed(seed, 100 + i)))
    return StackedRNN(stack, return_sequences=return_sequences, name="recurrent")


def _of_sequences(
    cell,
    head,
    return_sequences,
    steps,
    layers: int = 1,
    hidden_units: int = 130,
    dropout: float = 0.0,
    forget_bias: float | str = 1.0,
    seed: int | None = 0,
) -> keras.Model:
    """A head on the recurrent layers."""
    size = layers, hidden_units, dropout, forget_bias
    return head(_stack(cell, *size, seed, steps, return_sequences), seed)


def _of_text(
    cell,
    tie_embeddings,
    layers: int = 2,
    hidden_units: int = 600,
    embedding_dim: int = 120,
    dropout: float = 0.1,
    forget_bias: float = 1.0,
    vocabulary_size: int = 50,
    seed: int | None = 0,
) -> LanguageModel:
    """A language model of the recurrent layers."""
    head = None
    if not tie_embeddings:
        kernel = keras.initializers.RandomUniform(-0.1, 0.1, seed=sub_seed(seed, 5))
        head = DenseHead(vocabulary_size, kernel_initializer=kernel, name="head")
    return LanguageModel(
        vocabulary_size,
        embedding_dim,
        _stack(cell, layers, hidden_units, dropout, forget_bias, seed),
        head=head,
        tie_embeddings=tie_embeddings,
        embeddings_initializer=keras.initializers.RandomUniform(-0.1, 0.1, seed=seed),
        seed=seed,
    )


_WITHOUT_SETTINGS = """No settings are published: these are the LSTM's, with the width for the
    published size.

    Arguments as in `lstm_{task}`.
    """


def _baselines(
    words,
    doc,
    *,
    fixed,
    lstm,
    gru,
    rnn,
    fast=(None, None, None),
    fast_arguments=None,
    builder=_of_sequences,
    **entry,
):
    """Registers the LSTM, GRU and RNN of a benchmark, and returns their functions.

    Args:
        words: The benchmark in the first line of the docstrings.
        doc: The rest of the LSTM's docstring.
        fixed: {argument: value} of the builder's arguments that the models do not take.
        lstm: (number of parameters, {argument: default} where it differs from the builder's).
        gru, rnn: (number of parameters, {argument: default} where it differs from the LSTM's).
        fast: `Training` of `setting="fast"` for each of the three cells, or None.
        fast_arguments: {argument: value} of the LSTM's `setting="fast"`. Defaults to the same.
    """
    functions, task = [], entry["data"]
    rows = zip(("lstm", "gru", "rnn"), (lstm, gru, rnn), fast, strict=True)
    for cell, (size, own), training in rows:
        given, defaults = {"cell": cell, **fixed}, {**lstm[1], **own}
        tables, rest, of_fast = "Tables 1 and 3", doc, fast_arguments or {}
        if cell != "lstm":
            given["forget_bias"] = defaults.pop("forget_bias", None)  # they have no such gate
            tables, rest, of_fast = "Table 1", _WITHOUT_SETTINGS.format(task=task), {}
        title = f"{cell.upper()} on {words}, {size} parameters (Bai et al. 2018, {tables})."
        text = f"{title}\n\n    {rest}"
        made = with_defaults(builder, f"{cell}_{task}", text, given, **defaults)
        functions.append(register(**entry, fast=training, fast_arguments=of_fast)(made))
    return functions


lstm_adding, gru_adding, rnn_adding = _baselines(
    "the adding problem, T=600",
    """Published: 70K, which takes 131 units. Table 3 has two other networks, without published
    results: `layers=2, hidden_units=77` (72,458 parameters), clipped at 50, for T=200 with
    `forget_bias=5.0` and SGD with rate 1e-3, for T=400 with `forget_bias=10.0`.

    Args:
        layers: Positive integer, number of recurrent layers.
        hidden_units: Positive integer, units of each layer.
        dropout: Float, element-wise dropout rate of each layer's outputs.
        forget_bias: Float, initial bias of the forget gate, or `"chrono"`: biases with which the
            units remember for 2 to 600 steps, see `ChronoBias`.

    Other arguments are as in `tcn_adding`.

    Returns:
        A compiled `SequenceRegressor`.
    """,
    fixed={**tcn.ADDING_NET, "steps": 600},
    lstm=("69K", {}),
    gru=("70K", {"hidden_units": 151}),
    rnn=("70K", {"hidden_units": 263}),
    fast=(functools.partial(tcn.fast_synthetic, 10, 1_500, 14_130), tcn.fast_adding, None),
    **tcn.ADDING,
    training=lambda: tcn.on_adding(clip_norm=5.0),
)


lstm_copy_memory, gru_copy_memory, rnn_copy_memory = _baselines(
    "copy memory, T=1000",
    """Published: 16K, which takes 61 units. Table 3 has two other networks, without published
    results: for T=500 the same network, clipped at 0.25, for T=2000 `layers=3, hidden_units=28`
    (16,418 parameters).

    Arguments as in `lstm_adding`; `"chrono"` is for 1,020 steps.
    """,
    fixed={**tcn.COPY_NET, "steps": 1_020},
    lstm=("11K", {"hidden_units": 50, "dropout": 0.05}),
    gru=("16K", {"hidden_units": 70}),
    rnn=("16K", {"hidden_units": 121}),
    fast=(tcn.fast_copy_memory, None, None),
    **tcn.COPY_MEMORY,
    training=tcn.on_copy_memory,
)


def _fast_mnist(peak):
    return tcn.fast_cycle(  # 860 steps an epoch
        peak, batch_size=64, epochs=12, warmup_steps=430, decay_steps=9_890
    )


def _fast_rnn_mnist():
    return tcn.fast_cycle(3e-4, batch_size=64, epochs=2, warmup_steps=430, decay_steps=1_290)


lstm_seq_mnist, gru_seq_mnist, rnn_seq_mnist = _baselines(
    "sequential MNIST",
    """The settings are Table 3's. The fast recipe has `forget_bias="chrono"`.

    Arguments as in `lstm_adding`.
    """,
    fixed={**tcn.DIGIT_NET, "steps": 28 * 28},
    lstm=("70K", {}),
    gru=("70K", {"hidden_units": 150}),
    rnn=("70K", {"hidden_units": 259}),
    fast=(lambda: _fast_mnist(2e-3), None, _fast_rnn_mnist),
    fast_arguments={"forget_bias": "chrono"},
    **tcn.SEQ_MNIST,
    training=lambda: tcn.on_mnist(RMSprop(1e-3, clip_norm=1.0)),
)


lstm_permuted_mnist, gru_permuted_mnist, rnn_permuted_mnist = _baselines(
    "permuted MNIST",
    """The settings are Table 3's. The fast recipe has `forget_bias=1`, with which the network
    learns sooner than with the table's 10.

    Arguments as in `lstm_adding`.
    """,
    fixed={**tcn.DIGIT_NET, "steps": 28 * 28},
    lstm=("70K", {"forget_bias": 10.0}),
    gru=("70K", {"hidden_units": 150}),
    rnn=("70K", {"hidden_units": 259}),
    fast=(lambda: _fast_mnist(5e-3), lambda: _fast_mnist(2e-3), _fast_rnn_mnist),
    fast_arguments={"forget_bias": 1.0},
    **tcn.PERMUTED_MNIST,
    training=lambda: tcn.on_mnist(RMSprop(1e-3, clip_norm=1.0)),
)


# One piece per batch: these networks need over a thousand steps before they learn anything.
_fast_recurrent_jsb = functools.partial(
    tcn.fast_cycle, batch_size=1, transpose=0.3, note_dropout=0.1, warmup_steps=1_000
)

lstm_jsb, gru_jsb, rnn_jsb = _baselines(
    "JSB Chorales",
    """Published: 300K, which takes 141 units: Tables 1 and 3 are inconsistent. The settings are
    Table 3's.

    Arguments as in `lstm_adding`, but `forget_bias` is a number.
    """,
    fixed={**tcn.MUSIC_NET, "steps": None},
    lstm=("570K", {"layers": 2, "hidden_units": 200, "dropout": 0.2, "forget_bias": 10.0}),
    gru=("300K", {"hidden_units": 163}),
    rnn=("300K", {"hidden_units": 288}),
    fast=(
        lambda: _fast_recurrent_jsb(2e-3, epochs=120, decay_steps=26_480),
        lambda: _fast_recurrent_jsb(2e-3, epochs=50, decay_steps=10_450),
        lambda: _fast_recurrent_jsb(7e-4, epochs=50, decay_steps=10_450),
    ),
    **tcn.JSB,
    # "SGD/Adam" without a rate: the paper's Adam.
    training=lambda: tcn.on_music(2e-3, clip_norm=1.0),
)


# One piece per batch.
_fast_recurrent_nottingham = functools.partial(  # 694 steps an epoch
    tcn.fast_cycle, batch_size=1, note_dropout=0.1, warmup_steps=1_000
)

lstm_nottingham, gru_nottingham, rnn_nottingham = _baselines(
    "Nottingham",
    """Published: 1M, which takes 448 units. This is the smaller network of Table 3's two rows; the
    other has 3 layers of 280 units (1,694,648 parameters), clipped at 0.5.

    Arguments as in `lstm_adding`, but `forget_bias` is a number.
    """,
    fixed={**tcn.MUSIC_NET, "steps": None},
    lstm=("1.22M", {"hidden_units": 500, "dropout": 0.1}),
    gru=("1M", {"hidden_units": 521}),
    rnn=("1M", {"hidden_units": 915}),
    fast=(
        lambda: _fast_recurrent_nottingham(3e-3, epochs=30, decay_steps=19_820),
        lambda: _fast_recurrent_nottingham(1e-3, epochs=100, decay_steps=68_400),
        lambda: _fast_recurrent_nottingham(4e-4, epochs=50, decay_steps=33_700),
    ),
    **tcn.NOTTINGHAM,
    training=lambda: tcn.on_music(4e-3, clip_norm=1.0),
)


lstm_ptb, gru_ptb, rnn_ptb = _baselines(
    "word-level Penn Treebank",
    """Published: 13M, which takes 556 units: Tables 1 and 3 are inconsistent. The settings are
    Table 3's.

    Args:
        embedding_dim: Positive integer, width of the embedding. Must equal `hidden_units`, because
            the output matrix is tied to the embedding.
        forget_bias: Float, initial bias of the forget gate.

    Other arguments are as in `lstm_adding` and `tcn_ptb`.

    Returns:
        A compiled `LanguageModel`.
    """,
    fixed={"tie_embeddings": True},
    lstm=(
        "18.8M",
        {
            "layers": 3,
            "hidden_units": 700,
            "embedding_dim": 700,
            "dropout": 0.4,
            "vocabulary_size": 10_000,
        },
    ),
    gru=("13M", {"hidden_units": 616, "embedding_dim": 616}),
    rnn=("13M", {"hidden_units": 858, "embedding_dim": 858}),
    builder=_of_text,
    **tcn.PTB,
    training=lambda: tcn.on_words(30.0, clip_norm=0.3),
)


lstm_char_ptb, gru_char_ptb, rnn_char_ptb = _baselines(
    "character-level Penn Treebank",
    """Published: 3M, which takes 478 units: Tables 1 and 3 are inconsistent. The settings are
    Table 3's.

    Arguments as in `lstm_ptb`.
    """,
    fixed={"tie_embeddings": False},
    lstm=("4.65M", {}),
    gru=("3M", {"hidden_units": 554}),
    rnn=("3M", {"hidden_units": 971}),
    builder=_of_text,
    **tcn.CHAR_PTB,
    training=lambda: tcn.on_characters(2e-3, clip_norm=0.5),
)


lstm_text8, gru_text8, rnn_text8 = _baselines(
    "text8",
    """Published: 4.6M and 5M (1010 and 1056 units). The settings are Table 3's; its embedding is
    that of character-level Penn Treebank.

    Arguments as in `lstm_ptb`.
    """,
    fixed={"tie_embeddings": False},
    lstm=("4.72M", {"layers": 1, "hidden_units": 1024, "dropout": 0.15, "vocabulary_size": 27}),
    gru=("4.6M", {"hidden_units": 1174}),
    rnn=("4.6M", {"hidden_units": 2071}),
    builder=_of_text,
    **tcn.TEXT8,
    training=lambda: tcn.on_characters(1e-2, clip_norm=0.5),
)
