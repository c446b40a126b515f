"""The recurrent baselines of the TCN paper (Bai et al. 2018, Tables 1 and 3).

`lstm_*`, `gru_*` and `rnn_*` for nine benchmarks. Data, batches, epochs and the rule of the
learning rate are those of the `tcn_*` recipe for the same benchmark; the paper has no others.
"""

# tcn and tcn_language: their recipes are taken over.
from trellis_keras.zoo import recurrent_settings, registry, tcn, tcn_language  # noqa: F401
from trellis_keras.zoo.recipe import Recipe
from trellis_keras.zoo.recurrent import RecurrentLanguageModel, RecurrentSequenceModel
from trellis_keras.zoo.recurrent_settings import CELLS

_DOC = """{cell} on {title} (TCN, {tables}): published {metric} {published}.

    Parameters: {count:,} (published {size}).{remark}

    {settings} Batches, epochs and decay are those of `tcn_{benchmark}`.

    Args:
        weights: None, `"pretrained"` or the path of a weights file.{vocabulary}
        **: The fields of `{config}`.

    Returns:
        A compiled `{model}`.
    """
_VOCABULARY = """
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`."""
_LSTM = (
    'The settings are Table 3\'s; `size="equal"` has the hidden size that gives the published\n'
    "    number of parameters."
)
_OTHERS = (
    "No settings are published: these are the LSTM's of Table 3, with the hidden size that "
    "gives the\n    published number of parameters."
)


def _three(benchmark, title, size, *published, remark="", **model):
    """Registers and returns a benchmark's LSTM, GRU and RNN.

    Args:
        benchmark: Name of the benchmark; `tcn_{benchmark}` has its data.
        title: The benchmark in the docstrings.
        size: The published number of parameters in the docstrings.
        *published: The three results.
        remark: What else the docstring of the LSTM says.
        **model: The configuration's fields that are not in Table 3.
    """
    rows = zip(CELLS, published, (f" {remark}".rstrip(), "", ""), strict=True)
    return [_register(benchmark, title, size, *row, model) for row in rows]


def _register(benchmark, title, size, cell, published, remark, model):
    tcn_recipe = registry.recipe(f"tcn_{benchmark}")
    chosen_size = "table3" if cell == "lstm" else "equal"
    settings = recurrent_settings.fields(benchmark, cell, chosen_size, model.get("T"))
    if model.get("tie_embeddings"):
        settings["embedding_dim"] = settings["hidden_units"]
    reads_text = registry.reads_text(tcn_recipe.model)
    config = RecurrentLanguageModel if reads_text else RecurrentSequenceModel
    recipe = Recipe(
        f"{cell}_{benchmark}",
        config(benchmark=benchmark, cell=cell, size=chosen_size, **settings, **model),
        tcn_recipe.replace(published=published).training,
    )

    def build(config, *vocabulary):
        return config.build(*vocabulary)

    build.__name__ = build.__qualname__ = recipe.name
    build.__doc__ = _DOC.format(
        cell=cell.upper(),
        title=title,
        tables="Tables 1 and 3" if cell == "lstm" else "Table 1",
        metric=recipe.model.metric,
        published=f"{published:g}",
        count=recipe.model.parameters(),
        size=size,
        remark=remark,
        settings=_LSTM if cell == "lstm" else _OTHERS,
        benchmark=benchmark,
        vocabulary=_VOCABULARY if reads_text else "",
        config=config.__name__,
        model="LanguageModel" if reads_text else recipe.model.task.model.__name__,
    )
    return registry.register(recipe)(build)


lstm_adding, gru_adding, rnn_adding = _three(
    "adding",
    "the adding problem, T=600",
    "70K",
    0.164,
    5.3e-5,
    0.177,
    remark="With T=200 or 400 72,458, and no published result.",
    T=600,
    channels=2,
)
lstm_copy_memory, gru_copy_memory, rnn_copy_memory = _three(
    "copy_memory",
    "copy memory, T=1000",
    "16K",
    0.0204,
    0.0197,
    0.0202,
    remark="With T=2000 16,418, and no published result.",
    T=1000,
    channels=1,
)
lstm_seq_mnist, gru_seq_mnist, rnn_seq_mnist = _three(
    "seq_mnist", "sequential MNIST", "70K", 0.872, 0.962, 0.215, channels=1
)
lstm_permuted_mnist, gru_permuted_mnist, rnn_permuted_mnist = _three(
    "permuted_mnist", "permuted MNIST", "70K", 0.857, 0.873, 0.253, channels=1
)
lstm_jsb, gru_jsb, rnn_jsb = _three(
    "jsb",
    "JSB Chorales",
    "300K",
    8.45,
    8.43,
    8.91,
    remark="Table 3 and Table 1 contradict each other here.",
    channels=88,
)
lstm_nottingham, gru_nottingham, rnn_nottingham = _three(
    "nottingham",
    "Nottingham",
    "1M",
    3.29,
    3.46,
    4.05,
    remark="Of Table 3's two rows the smaller net; 3 layers of 280 make 1,694,648.",
    channels=88,
)
lstm_ptb, gru_ptb, rnn_ptb = _three(
    "ptb",
    "word-level Penn Treebank",
    "13M",
    78.93,
    92.48,
    114.50,
    remark="Table 3 and Table 1 contradict each other here.",
    vocabulary_size=10_000,
    tie_embeddings=True,
    metric="perplexity",
)
lstm_char_ptb, gru_char_ptb, rnn_char_ptb = _three(
    "char_ptb",
    "character-level Penn Treebank",
    "3M",
    1.36,
    1.37,
    1.48,
    remark="Table 3 and Table 1 contradict each other here.",
    vocabulary_size=50,
    embedding_dim=120,
    metric="bpc",
)
lstm_text8, gru_text8, rnn_text8 = _three(
    "text8",
    "text8",
    "4.6M",
    1.50,
    1.53,
    1.69,
    vocabulary_size=27,
    embedding_dim=120,
    metric="bpc",
)
