"""Training steps of zoo models in float32 and bfloat16, with XLA and without.

    python -m benchmarks run 'precision_*'

shows which pair suits a machine, and whether `jit_compile=None` chooses it.
"""

from benchmarks.case import Case

# Keras and the package are imported by the functions: each variant runs in its own process.

MODELS = ("trellisnet_seq_mnist", "tcn_seq_mnist", "tcn_ptb", "tcn_char_ptb", "lstm_ptb")
MODELS += ("lru_char_ptb",)
PAIRS = {
    f"{label}, {compiler}": {"dtype_policy": policy, "jit_compile": compiler == "XLA"}
    for label, policy in (("float32", "float32"), ("bfloat16", "mixed_bfloat16"))
    for compiler in ("graph", "XLA")
}


def training(name, **options):
    """A training step on random data, in batches of the recipe's shape."""

    def build():
        import numpy as np

        from trellis_keras import zoo

        recipe = zoo.recipe(name, **options)
        model, training = recipe.build(), recipe.training
        rng, rows = np.random.default_rng(0), training.batch_size
        if recipe.stateful:
            model.backbone.reset_state(rows)
        if recipe.reads_text:
            tokens = rng.integers(0, model.vocabulary_size, (rows, training.sequence_length + 1))
            x, y = tokens[:, :-1], tokens[:, 1 + training.context_length :]
        else:
            x = rng.random((rows, 784, 1), dtype="float32")
            y = rng.integers(0, 10, rows)

        def step():
            model.train_on_batch(x, y)
            return 0

        return step

    return build


CASES = {
    f"precision_{name}": Case(
        f"training step of {name}",
        {label: training(name, **options) for label, options in PAIRS.items()},
        baseline="float32, graph",
    )
    for name in MODELS
}
