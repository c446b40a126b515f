"""The Lattice Recurrent Unit's models and baselines (Ahuja & Morency 2018, section 4 and Table 1).

LRU is the Lattice, not the Linear Recurrent Unit. The models for the four texts share their
training settings (the paper's "Training Details"): batches of 250 x 50 characters with carried
states, Adam, Glorot initialization, no dropout. From the authors' code: the decay of 0.9 is applied
per epoch, and training stops after three consecutive epochs without a decrease of the validation
loss by more than 1e-4 (or after 20; the table goes to 59). The Adam betas printed in the paper, 0.1
and 0.001, are 1 - beta.

The paper gives sizes of 10M and 24M parameters but no widths: `hidden_units` is the number closest
to 10M; the numbers for 24M are in published.csv. The paper does not say which rows have 2 layers
and which 4.
"""

from typing import Any

import keras

from trellis_keras.layers import LRU, DenseHead, GridLSTMCell, RHNCell, StackedRNN
from trellis_keras.layers.checks import check_choice
from trellis_keras.layers.recurrent_cell import GateInitializer
from trellis_keras.models import LanguageModel
from trellis_keras.training import Adam, EarlyStopping, ExponentialDecay
from trellis_keras.zoo.registry import register
from trellis_keras.zoo.rows import sub_seed, with_defaults
from trellis_keras.zoo.training_settings import Training, adamw_cycle

__all__ = [
    "lru_char_ptb", "lru_enwik8", "lru_text8", "lru_war_and_peace",
    "grid_lstm_char_ptb", "grid_lstm_enwik8", "grid_lstm_text8", "grid_lstm_war_and_peace",
    "gru_char_ptb_lru_paper", "gru_enwik8", "gru_text8_lru_paper", "gru_war_and_peace",
    "lstm_char_ptb_lru_paper", "lstm_enwik8", "lstm_text8_lru_paper", "lstm_war_and_peace",
    "rhn_char_ptb", "rhn_enwik8", "rhn_text8", "rhn_war_and_peace",
]  # fmt: skip


def _training():
    return Training(
        optimizer=Adam(1e-3),
        schedule=ExponentialDecay(0.9),
        stopping=EarlyStopping(against="previous", patience=3, min_delta=1e-4, verbose=1),
        batch_size=250,
        epochs=60,
        stream={"sequence_length": 50, "context_length": 0},
    )


def _fast(epochs, decay_steps):
    """`setting="fast"`: smaller batches, AdamW, warm-up and cosine decay."""
    return adamw_cycle(
        2e-3,
        weight_decay=0.02,
        clip_norm=1.0,
        batch_size=64,
        epochs=epochs,
        sequence_length=50,
        context_length=0,
        warmup_steps=500,
        decay_steps=decay_steps,
    )


_SHARED: dict[str, Any] = {"metric": "cross_entropy", "training": _training}
# "first 90% for training, next 5% for validation and last 5% for testing for all datasets": for
# Penn Treebank this is not the usual split, so results of other papers are not comparable.
_SPLIT = {"split": [0.9, 0.05, 0.05]}
# (text, its symbols, data and fast recipe)
_TEXTS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    # "around 5 million characters": the three files have 5.9 million, the training file alone
    # (`files="train"`) 5.06 million. A 7-gram model differs by 0.028 nats between the two test
    # splits.
    (
        "character-level Penn Treebank",
        50,
        {
            "data": "char_ptb",
            "data_options": {**_SPLIT, "files": "all"},
            "fast": lambda: _fast(3, 4_480),  # 1,660 steps an epoch
        },
    ),
    # The paper says "around 5 million characters"; the commonly used text, also used here, has 3.2
    # million, so the published result may be for another text.
    (
        "War and Peace by characters",
        82,
        {
            "data": "war_and_peace",
            "data_options": _SPLIT,
            "fast": lambda: _fast(6, 4_894),  # 899 steps an epoch
        },
    ),
    ("enwik8 by bytes", 205, {"data": "enwik8"}),  # the paper's 205 symbols are the distinct bytes
    ("text8", 27, {"data": "text8"}),
)


def _language_model(backbone, hidden_units, vocabulary_size, seed):
    """Embedding, recurrent layers and output layer of the same width, without tied weights."""
    head = DenseHead(
        vocabulary_size,
        kernel_initializer=keras.initializers.GlorotUniform(sub_seed(seed, 5)),
        name="head",
    )
    return LanguageModel(
        vocabulary_size,
        hidden_units,
        backbone,
        head=head,
        tie_embeddings=False,
        embeddings_initializer=keras.initializers.RandomNormal(stddev=1.0, seed=seed),
        seed=seed,
    )


def _on_texts(builder, prefix, widths, doc, **fixed):
    """Registers a language model for each of the four texts, and returns the functions.

    `widths` are their `hidden_units`, `doc` is their docstring, with `{text}`, and `fixed` has the
    arguments of the builder that they do not take.
    """
    functions = []
    for units, (text, symbols, entry) in zip(widths, _TEXTS, strict=True):
        name = f"{prefix}_{entry['data']}"
        if prefix in ("lstm", "gru") and entry["data"] in ("char_ptb", "text8"):
            name += "_lru_paper"  # the TCN paper has models of the shorter names
        defaults = {"hidden_units": units, "vocabulary_size": symbols}
        made = with_defaults(builder, name, doc.replace("{text}", text), fixed, **defaults)
        functions.append(register(**_SHARED, **entry)(made))
    return functions


def _lru(
    variant: str = "ug",
    convention: str = "paper",
    layers: int = 2,
    hidden_units: int = 643,
    stateful: bool = True,
    vocabulary_size: int = 50,
    seed: int | None = 0,
) -> LanguageModel:
    """Lattice Recurrent Unit on {text}, 10M parameters (LRU paper, Table 1).

    Args:
        variant: `"ug"` (the full LRU), `"rg"` or `"ps"`, see `layers.LRUCell`.
        convention: `"paper"` or `"authors"`, the orientation of the update gate in `"rg"` and
            `"ps"`. For `"ug"` paper and code agree.
        layers: Positive integer, number of layers.
        hidden_units: Positive integer, number of units.
        stateful: Boolean, whether to carry the states from batch to batch.

    Other arguments are as in `trellisnet_ptb`.

    Returns:
        A compiled `LanguageModel`.
    """
    backbone = LRU(
        hidden_units,
        depth=layers,
        variant=variant,
        convention=convention,
        return_sequences=True,
        stateful=stateful,
        seed=sub_seed(seed, 10),
        name="lru",
    )
    return _language_model(backbone, hidden_units, vocabulary_size, seed)


lru_char_ptb, lru_war_and_peace, lru_enwik8, lru_text8 = _on_texts(
    _lru, "lru", (643, 642, 637, 644), _lru.__doc__
)


_KERAS_LAYERS = {"lstm": (keras.layers.LSTM, 4), "gru": (keras.layers.GRU, 3)}


def _keras_rnn(
    cell,
    layers: int = 2,
    hidden_units: int = 787,
    stateful: bool = True,
    vocabulary_size: int = 50,
    seed: int | None = 0,
) -> LanguageModel:
    make, gates = _KERAS_LAYERS[cell]
    stack = []
    for i in range(layers):
        # Each gate is initialized separately, as in the LRU.
        initializers = {
            f"{kernel}_initializer": GateInitializer(
                keras.initializers.GlorotUniform(sub_seed(seed, offset + i)),
                gates,
                fan_in=2 * hidden_units,
            )
            for kernel, offset in (("kernel", 200), ("recurrent", 300))
        }
        layer = make(
            hidden_units,
            return_sequences=True,
            return_state=True,
            **initializers,
            name=f"{cell}_{i + 1}",
        )
        stack.append(layer)
    backbone = StackedRNN(stack, stateful=stateful, name="recurrent")
    return _language_model(backbone, hidden_units, vocabulary_size, seed)


lstm_char_ptb_lru_paper, lstm_war_and_peace, lstm_enwik8, lstm_text8_lru_paper = _on_texts(
    _keras_rnn,
    "lstm",
    (787, 785, 778, 789),
    """LSTM on {text}, 10M parameters (LRU paper, Table 1).

    It uses Keras' LSTM, with a forget gate bias of 1.

    Arguments as in `lru_char_ptb`.
    """,
    cell="lstm",
)
gru_char_ptb_lru_paper, gru_war_and_peace, gru_enwik8, gru_text8_lru_paper = _on_texts(
    _keras_rnn,
    "gru",
    (908, 906, 895, 910),
    """GRU on {text}, 10M parameters (LRU paper, Table 1).

    It uses Keras' GRU, with the reset gate after the product. In the paper's Eq. 3 it comes before
    the product, but the paper trained PyTorch's GRU (footnote 6), where it comes after.

    Arguments as in `lru_char_ptb`.
    """,
    cell="gru",
)


def _of_cell(cell, hidden_units, stateful, vocabulary_size, seed):
    layer = keras.layers.RNN(cell, return_sequences=True, return_state=True)
    backbone = StackedRNN([layer], stateful=stateful, name="recurrent")
    return _language_model(backbone, hidden_units, vocabulary_size, seed)


def _grid_lstm(
    convention: str = "paper",
    share_depth_weights: bool = True,
    layers: int = 2,
    hidden_units: int = 787,
    stateful: bool = True,
    vocabulary_size: int = 50,
    seed: int | None = 0,
) -> LanguageModel:
    """Grid-LSTM on {text}, 10M parameters (LRU paper, Table 1).

    Args:
        convention: `"paper"` (both LSTMs of a node read the old states) or `"authors"` (the time
            LSTM reads the new output of the depth LSTM), see `layers.GridLSTMCell`.
        share_depth_weights: Boolean, whether the layers share their weights (the paper's footnote
            3), or have separate weights (the authors' code, without published results).

    Other arguments are as in `lru_char_ptb`.
    """
    check_choice("convention", convention, ("paper", "authors"))
    cell = GridLSTMCell(
        hidden_units,
        depth=layers,
        update="parallel" if convention == "paper" else "sequential",
        share_depth_weights=share_depth_weights,
        seed=sub_seed(seed, 10),
        name="grid_lstm",
    )
    return _of_cell(cell, hidden_units, stateful, vocabulary_size, seed)


grid_lstm_char_ptb, grid_lstm_war_and_peace, grid_lstm_enwik8, grid_lstm_text8 = _on_texts(
    _grid_lstm, "grid_lstm", (787, 785, 778, 789), _grid_lstm.__doc__
)


def _rhn(
    transition_depth: int = 5,
    transform_bias: float = 0.0,
    hidden_units: int = 908,
    stateful: bool = True,
    vocabulary_size: int = 50,
    seed: int | None = 0,
) -> LanguageModel:
    """RHN on {text}, 10M parameters (LRU paper, Table 1).

    The Recurrent Highway Network has one layer, whose transition depth is 5.

    Args:
        transition_depth: Positive integer, number of highway layers per step.
        transform_bias: Float, initial bias of the transform gates. The paper does not state it; the
            RHN authors use -2 to -4.

    Other arguments are as in `lru_char_ptb`.
    """
    cell = RHNCell(
        hidden_units,
        transition_depth,
        transform_bias_initializer=keras.initializers.Constant(transform_bias),
        seed=sub_seed(seed, 10),
        name="rhn",
    )
    return _of_cell(cell, hidden_units, stateful, vocabulary_size, seed)


rhn_char_ptb, rhn_war_and_peace, rhn_enwik8, rhn_text8 = _on_texts(
    _rhn, "rhn", (908, 906, 896, 910), _rhn.__doc__
)
