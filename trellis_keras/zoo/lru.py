"""The Lattice Recurrent Unit's models and baselines (Ahuja & Morency 2018, section 4 and Table 1).

LRU is the Lattice, not the Linear Recurrent Unit. The models of four texts have the same training
(the paper's "Training Details"), and as many units as give the published number of parameters.
"""

import math

import keras

from trellis_keras.data import Vocabulary
from trellis_keras.layers import LRU, DenseHead, GridLSTMCell, RHNCell, StackedRNN
from trellis_keras.layers.rnn import GateInitializer
from trellis_keras.models import LanguageModel
from trellis_keras.zoo.recipe import Training, check_choice
from trellis_keras.zoo.registry import register, sub_seed

__all__ = [
    "grid_lstm_char_ptb",
    "grid_lstm_enwik8",
    "grid_lstm_text8",
    "grid_lstm_war_and_peace",
    "gru_enwik8",
    "gru_war_and_peace",
    "lru_char_ptb",
    "lru_enwik8",
    "lru_text8",
    "lru_war_and_peace",
    "lstm_enwik8",
    "lstm_war_and_peace",
    "rhn_char_ptb",
    "rhn_enwik8",
    "rhn_text8",
    "rhn_war_and_peace",
]

SIZES = {"1m": 1_000_000, "10m": 10_000_000, "24m": 24_000_000}
# How far the number of parameters may be from the size.
_TOLERANCE = 0.01
_CONVENTIONS = ("paper", "authors")

# "first 90% for training, next 5% for validation and last 5% for testing for all datasets"
_SPLIT = {"split": [0.9, 0.05, 0.05]}
# {corpus: (title, options of the data set, distinct characters, remark)}
_CORPORA = {
    "char_ptb": (
        "character-level Penn Treebank",
        _SPLIT,
        50,
        "All of Penn Treebank is one text here, split 90/5/5: not the usual split, so no other\n"
        "    paper's figure is comparable.\n    ",
    ),
    "war_and_peace": (
        "War and Peace by characters",
        _SPLIT,
        82,
        'The paper says "around 5 million characters"; the text in common use, taken here, has\n'
        "    3.2 million, so the published figure may be of another text.\n    ",
    ),
    "enwik8": ("enwik8 by bytes", {}, 205, "The paper's 205 symbols are the distinct bytes.\n    "),
    "text8": ("text8", {}, 27, ""),
}
# Names that the TCN paper's baselines have.
_IN_THE_TCN_PAPER = ("lstm_char_ptb", "gru_char_ptb", "lstm_text8", "gru_text8")

_TRAINING = Training(
    optimizer="adam",
    learning_rate=1e-3,
    batch_size=250,
    epochs=60,
    sequence_length=50,
    context_length=0,
    schedule="exponential",
    decay_factor=0.9,
    stop_patience=3,
    stop_min_delta=1e-4,
    stop_against="previous",
)

_DOC = """{unit} on {title}, 10M parameters (LRU paper, Table 1).

    {note}

    The paper's training: batches of 250 x 50 characters with the state carried over, Adam, Glorot
    initialization, no dropout. From the authors' code: the decay of 0.9 is an epoch's, and training
    ends after three epochs in a row without a fall of the validation loss by more than 1e-4 (or
    after 20; the table goes to 59). The betas of Adam that the paper prints, 0.1 and 0.001, are
    1 - beta.
    """
_FULL_NAMES = {"LRU": "Lattice Recurrent Unit", "RHN": "Recurrent Highway Network"}
_LAYERS = "Which rows have 2 and which 4 layers is not published."


# Sizes


def parameters(squares: int, linear: int, units: int, vocabulary_size: int) -> int:
    """Returns the number of parameters of a language model.

    Args:
        squares, linear: The recurrent layers have `squares * units**2 + linear * units`. Embedding
            and output layer are as wide and share no weights.
        units: Number of units.
        vocabulary_size: Number of tokens.
    """
    recurrent = squares * units**2 + linear * units
    return recurrent + 2 * vocabulary_size * units + vocabulary_size


def solve_units(squares: int, linear: int, vocabulary_size: int, size: str) -> int:
    """Returns the number of units that comes nearest to a size.

    Args:
        squares, linear, vocabulary_size: As in `parameters`.
        size: A key of `SIZES`.

    Raises:
        ValueError: No number of units comes within 1 %.
    """
    wanted = SIZES[size]
    half = (linear + 2 * vocabulary_size) / (2 * squares)
    root = math.sqrt(half**2 + max(wanted - vocabulary_size, 0) / squares) - half
    around = (max(math.floor(root), 1), math.ceil(root) or 1)
    error = {n: abs(parameters(squares, linear, n, vocabulary_size) - wanted) for n in around}
    units = min(error, key=lambda n: error[n])
    if error[units] > _TOLERANCE * wanted:
        raise ValueError(
            f'No number of units gives size="{size}" to {_TOLERANCE:.0%} with a vocabulary of '
            f"{vocabulary_size:,}: {units} make "
            f"{parameters(squares, linear, units, vocabulary_size):,} parameters. Give "
            "`hidden_units`."
        )
    return units


def _resolve(unit_parameters):
    """Returns the `resolve` of a unit, which solves the number of units.

    Args:
        unit_parameters: Function from a model's arguments to `squares, linear` of `parameters`.
    """

    def resolve(size, hidden_units, vocabulary_size, **arguments):
        counts = unit_parameters(**arguments)
        if size is None and hidden_units is None:
            size = "10m"
        if size is None:
            return {}
        check_choice("size", size, SIZES)
        solved = solve_units(*counts, vocabulary_size, size)
        if hidden_units is not None:
            count = parameters(*counts, hidden_units, vocabulary_size)
            if abs(count / SIZES[size] - 1) > _TOLERANCE:
                raise ValueError(
                    f'size="{size}" takes hidden_units={solved}. Received: {hidden_units}. Leave '
                    "`size` out for a net of another size."
                )
        return {"size": size, "hidden_units": solved}

    return resolve


# Models


def _language_model(backbone, hidden_units, vocabulary_size, seed, vocabulary):
    """Embedding, recurrent layers and output layer of the same width, which share no weights."""
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
        vocabulary=vocabulary,
        seed=seed,
    )


def _on_all_corpora(unit, function, unit_parameters, note=_LAYERS, fixed=None):
    """Registers and returns a unit's models of the four texts.

    Args:
        unit: Name of the unit; in lower case it is the first part of the models' names.
        function: Function that builds them.
        unit_parameters: As in `_resolve`.
        note: What the docstrings say of the unit.
        fixed: Arguments of the function that are not the models'.
    """
    models = []
    for corpus, (title, options, characters, remark) in _CORPORA.items():
        name = f"{unit.lower().replace('-', '_')}_{corpus}"
        model = register(
            data=corpus,
            data_options=options,
            metric="cross_entropy",
            training=_TRAINING,
            resolve=_resolve(unit_parameters),
            fixed=fixed,
            name=name,
            setting="lru_paper" if name in _IN_THE_TCN_PAPER else None,
            defaults={"vocabulary_size": characters},
            doc=_DOC.format(unit=_FULL_NAMES.get(unit, unit), title=title, note=f"{remark}{note}"),
        )(function)
        models.append(model)
    return models


# An LRU has 12 H^2 + 6 H parameters, an RG-LRU 10 H^2 + 5 H, a PS-LRU 8 H^2 + 4 H.
_LRU_BLOCKS = {"ug": 2, "rg": 1, "ps": 0}


def _lru_parameters(layers, variant, convention, **_):
    check_choice("variant", variant, _LRU_BLOCKS)
    check_choice("convention", convention, _CONVENTIONS)
    blocks = 4 + _LRU_BLOCKS[variant]
    return 2 * blocks * layers, blocks * layers


def _lru(
    size: str | None = None,
    variant: str = "ug",
    convention: str = "paper",
    layers: int = 2,
    hidden_units: int | None = None,
    stateful: bool = True,
    vocabulary_size: int = 50,
    seed: int | None = 0,
    vocabulary: Vocabulary | None = None,
) -> LanguageModel:
    """
    Args:
        size: `"10m"` or `"24m"` parameters, the paper's, or `"1m"`. Defaults to `"10m"`, or to None
            where `hidden_units` are given.
        variant: `"ug"` (the full LRU), `"rg"` or `"ps"`, see `layers.LRUCell`.
        convention: `"paper"` or `"authors"`: which way round the update gate of `"rg"` and `"ps"`
            works. For `"ug"` paper and code agree.
        layers: Positive integer, number of layers.
        hidden_units: Positive integer, number of units. Defaults to what gives the size.
        stateful: Whether the states are carried from batch to batch.
        vocabulary_size: Positive integer, number of tokens. A run takes it from its data.
        seed: Seed of the weights. None: other weights each time.
        weights: None, `"pretrained"`, or path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        dtype_policy: Keras' dtype policy of all layers. Defaults to the global one.
        jit_compile: Whether XLA compiles the training step. None: what suits model and machine.

    Returns:
        A compiled `LanguageModel`.
    """
    assert hidden_units is not None  # from `_resolve`
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
    return _language_model(backbone, hidden_units, vocabulary_size, seed, vocabulary)


lru_char_ptb, lru_war_and_peace, lru_enwik8, lru_text8 = _on_all_corpora(
    "LRU", _lru, _lru_parameters
)


_KERAS_LAYERS = {"lstm": (keras.layers.LSTM, 4), "gru": (keras.layers.GRU, 3)}


def _keras_rnn(
    cell: str,
    size: str | None = None,
    layers: int = 2,
    hidden_units: int | None = None,
    stateful: bool = True,
    vocabulary_size: int = 50,
    seed: int | None = 0,
    vocabulary: Vocabulary | None = None,
) -> LanguageModel:
    """
    Args:
        size: `"10m"` or `"24m"` parameters, the paper's, or `"1m"`. Defaults to `"10m"`, or to None
            where `hidden_units` are given.
        layers: Positive integer, number of layers.
        hidden_units: Positive integer, number of units. Defaults to what gives the size.
        **: As in `lru_char_ptb`.

    Returns:
        A compiled `LanguageModel`.
    """
    assert hidden_units is not None  # from `_resolve`
    make, gates = _KERAS_LAYERS[cell]
    stack = []
    for i in range(layers):
        # Each gate is initialized by itself, as in the LRU.
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
    return _language_model(backbone, hidden_units, vocabulary_size, seed, vocabulary)


lstm_char_ptb, lstm_war_and_peace, lstm_enwik8, lstm_text8 = _on_all_corpora(
    "LSTM",
    _keras_rnn,
    lambda layers, **_: (8 * layers, 4 * layers),
    fixed={"cell": "lstm"},
    note=f"Keras' LSTM, whose forget gates start with the bias 1.\n    {_LAYERS}",
)


gru_char_ptb, gru_war_and_peace, gru_enwik8, gru_text8 = _on_all_corpora(
    "GRU",
    _keras_rnn,
    lambda layers, **_: (6 * layers, 6 * layers),
    fixed={"cell": "gru"},
    note="Keras' GRU, with the reset gate after the product. The paper's Eq. 3 has it before;\n"
    f"    what was trained is PyTorch's (footnote 6), with it after.\n    {_LAYERS}",
)


def _grid_lstm_parameters(layers, convention, share_depth_weights, **_):
    check_choice("convention", convention, _CONVENTIONS)
    matrices = 1 if share_depth_weights else layers
    return 16 * matrices, 8 * matrices


def _grid_lstm(
    size: str | None = None,
    convention: str = "paper",
    share_depth_weights: bool = True,
    layers: int = 2,
    hidden_units: int | None = None,
    stateful: bool = True,
    vocabulary_size: int = 50,
    seed: int | None = 0,
    vocabulary: Vocabulary | None = None,
) -> LanguageModel:
    """
    Args:
        size: `"10m"` or `"24m"` parameters, the paper's, or `"1m"`. Defaults to `"10m"`, or to None
            where `hidden_units` are given.
        convention: `"paper"` (both LSTMs of a node read the old states) or `"authors"` (the one of
            time reads what that of depth has just written), see `layers.GridLSTMCell`.
        share_depth_weights: Whether the layers share their weights (the paper's footnote 3), or
            each has its own (the authors' code, for which nothing is published).
        layers: Positive integer, number of layers.
        hidden_units: Positive integer, number of units. Defaults to what gives the size.
        **: As in `lru_char_ptb`.

    Returns:
        A compiled `LanguageModel`.
    """
    assert hidden_units is not None  # from `_resolve`
    cell = GridLSTMCell(
        hidden_units,
        depth=layers,
        update="parallel" if convention == "paper" else "sequential",
        share_depth_weights=share_depth_weights,
        seed=sub_seed(seed, 10),
        name="grid_lstm",
    )
    layer = keras.layers.RNN(cell, return_sequences=True, return_state=True)
    backbone = StackedRNN([layer], stateful=stateful, name="recurrent")
    return _language_model(backbone, hidden_units, vocabulary_size, seed, vocabulary)


grid_lstm_char_ptb, grid_lstm_war_and_peace, grid_lstm_enwik8, grid_lstm_text8 = _on_all_corpora(
    "Grid-LSTM", _grid_lstm, _grid_lstm_parameters
)


def _rhn(
    size: str | None = None,
    transition_depth: int = 5,
    transform_bias: float = 0.0,
    hidden_units: int | None = None,
    stateful: bool = True,
    vocabulary_size: int = 50,
    seed: int | None = 0,
    vocabulary: Vocabulary | None = None,
) -> LanguageModel:
    """
    Args:
        size: `"10m"` or `"24m"` parameters, the paper's, or `"1m"`. Defaults to `"10m"`, or to None
            where `hidden_units` are given.
        transition_depth: Positive integer, highway layers in a step.
        transform_bias: Initial bias of the transform gates. The paper does not name one; the
            authors of the RHN start with -2 to -4.
        hidden_units: Positive integer, number of units. Defaults to what gives the size.
        **: As in `lru_char_ptb`.

    Returns:
        A compiled `LanguageModel`.
    """
    assert hidden_units is not None  # from `_resolve`
    cell = RHNCell(
        hidden_units,
        transition_depth,
        transform_bias_initializer=keras.initializers.Constant(transform_bias),
        seed=sub_seed(seed, 10),
        name="rhn",
    )
    layer = keras.layers.RNN(cell, return_sequences=True, return_state=True)
    backbone = StackedRNN([layer], stateful=stateful, name="recurrent")
    return _language_model(backbone, hidden_units, vocabulary_size, seed, vocabulary)


rhn_char_ptb, rhn_war_and_peace, rhn_enwik8, rhn_text8 = _on_all_corpora(
    "RHN",
    _rhn,
    lambda transition_depth, **_: (2 * (transition_depth + 1), 2 * transition_depth),
    note="The transition depth is 5, in one layer.",
)
