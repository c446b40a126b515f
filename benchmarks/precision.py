"""Training steps of zoo models in float32 and bfloat16, with and without XLA.

    python -m benchmarks run 'precision_*'

shows which combination is fastest on a machine, and whether `jit_compile=None` chooses it.
"""

from benchmarks.case import Case

# Keras and the package are imported by the functions: each variant runs in its own process.

MODELS = ("trellisnet_seq_mnist", "tcn_seq_mnist", "tcn_ptb", "tcn_char_ptb", "lstm_ptb")
MODELS += ("tcn_adding", "tcn_copy_memory", "lru_char_ptb")
# Steps and channels of the inputs, shape and number of classes of the targets (0: real numbers).
SHAPES = {
    "seq_mnist": ((784, 1), (), 10),
    "adding": ((600, 2), (1,), 0),
    "copy_memory": ((1020, 1), (1020,), 9),
}
PAIRS = {
    f"{label}, {compiler}": {"dtype_policy": policy, "jit_compile": compiler == "XLA"}
    for label, policy in (("float32", "float32"), ("bfloat16", "mixed_bfloat16"))
    for compiler in ("graph", "XLA")
}


def training(name, **options):
    """A training step on random data in the shape of the recipe's batches."""

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
            inputs, targets, classes = SHAPES[recipe.data]
            x = rng.random((rows, *inputs), dtype="float32")
            y = rng.random((rows, *targets), dtype="float32")
            y = (classes * y).astype("int32") if classes else y

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
