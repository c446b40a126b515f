"""The Lattice Recurrent Unit and its baselines on four texts (Ahuja & Morency 2018, Table 1).

All have the recipe of the paper's section "Training Details". LRU is the Lattice, not the Linear
Recurrent Unit.
"""

import textwrap

from trellis_keras.zoo.lattice_config import (
    GridLSTMLanguageModel,
    GRULanguageModel,
    LayeredLanguageModel,
    LRULanguageModel,
    LSTMLanguageModel,
    RHNLanguageModel,
)
from trellis_keras.zoo.lattice_settings import CORPORA
from trellis_keras.zoo.recipe import Recipe
from trellis_keras.zoo.registry import register
from trellis_keras.zoo.training import TextTraining

# Names that the TCN paper's baselines have (`zoo.baselines`).
_IN_THE_TCN_PAPER = ("lstm_char_ptb", "gru_char_ptb", "lstm_text8", "gru_text8")

_DOC = (
    "{unit} on {title} (LRU paper, Table 1): published cross-entropy {published:.3f} nats.",
    "That is the figure of 10M parameters, reached after {epochs} epochs; {large:.3f}, after "
    '{large_epochs}, is that of `size="24m"`.{variants} {remark}',
    "The recipe is the paper's: batches of 250 x 50 characters with the state carried over, Adam "
    "with a rate of 0.001 that is multiplied by 0.9 after each epoch, Glorot's initial weights, "
    "no dropout, the first 90 % of the text for training, 5 % for validation and 5 % for the "
    "test, and the end after three epochs in a row without a fall of the validation loss by more "
    "than 1e-4 against the epoch before. {depth}",
    "That the factor is an epoch's, and when training ends, is the word of the authors' program. "
    "Its upper limit is 20 epochs unless told otherwise; the table goes to 59. The betas of Adam "
    "that the paper prints, 0.1 and 0.001, are 1 - beta.",
)
_VARIANTS = " The other `variant`s have figures of their own."
_LAYERS = "Which rows of the table have 2 and which 4 layers is not published."
_RHN = "The transition depth is 5, in one layer."
_OTHER_SETTING = "`{name}` is such a model in the TCN paper's setting."
_ARGS = """

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        **: The fields of `{config}`.

    Returns:
        A compiled `LanguageModel`.
    """


def _four(prefix, config):
    """Registers and returns a unit's models of the four texts.

    Args:
        prefix: The first part of their names.
        config: A subclass of `UnitLanguageModel`.
    """
    return [_register(f"{prefix}_{name}", config, corpus) for name, corpus in CORPORA.items()]


def _register(name, config, corpus):
    model = config(
        vocabulary_size=corpus.vocabulary_size,
        optimizer="adam",
        learning_rate=1e-3,
        metric="cross_entropy",
    )
    training = TextTraining(
        data=corpus.data,
        data_options=corpus.options,
        **model.published_on(corpus.data, corpus.options),
        batch_size=250,
        segment=50,
        epochs=60,
        decay_rule="exponential",
        decay_factor=0.9,
        stop_patience=3,
        stop_min_delta=1e-4,
        stop_against="previous",
    )
    recipe = Recipe(f"{name}_lru" if name in _IN_THE_TCN_PAPER else name, model, training)

    def build(config, vocabulary):
        return config.build(vocabulary)

    build.__name__ = build.__qualname__ = recipe.name
    build.__doc__ = _docstring(name, recipe, corpus)
    return register(recipe)(build)


def _docstring(name, recipe, corpus):
    model, training = recipe.model, recipe.training
    large = model.replace(size="24m").published_on(corpus.data, corpus.options)
    facts = {
        "unit": model.unit,
        "title": corpus.title,
        "published": training.published,
        "epochs": training.published_epochs,
        "large": large["published"],
        "large_epochs": large["published_epochs"],
        "variants": _VARIANTS if isinstance(model, LRULanguageModel) else "",
        "remark": corpus.remark,
        "depth": _LAYERS if isinstance(model, LayeredLanguageModel) else _RHN,
    }
    paragraphs = [paragraph.format(**facts) for paragraph in _DOC]
    if name in _IN_THE_TCN_PAPER:
        paragraphs.append(_OTHER_SETTING.format(name=name))
    wrapped = [textwrap.fill(p, 96, subsequent_indent="    ") for p in paragraphs]
    return "\n\n    ".join(wrapped) + _ARGS.format(config=type(model).__name__)


lru_char_ptb, lru_war_and_peace, lru_enwik8, lru_text8 = _four("lru", LRULanguageModel)
lstm_char_ptb_lru, lstm_war_and_peace, lstm_enwik8, lstm_text8_lru = _four(
    "lstm", LSTMLanguageModel
)
gru_char_ptb_lru, gru_war_and_peace, gru_enwik8, gru_text8_lru = _four("gru", GRULanguageModel)
grid_lstm_char_ptb, grid_lstm_war_and_peace, grid_lstm_enwik8, grid_lstm_text8 = _four(
    "grid_lstm", GridLSTMLanguageModel
)
rhn_char_ptb, rhn_war_and_peace, rhn_enwik8, rhn_text8 = _four("rhn", RHNLanguageModel)
