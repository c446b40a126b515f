"""Training steps of zoo models with and without XLA, which explain why some leave it to Keras."""

from benchmarks.case import Case

# Keras and the package are imported by the functions: each variant runs in its own process.

MODELS = ("lstm_adding", "lstm_copy_memory", "gru_adding", "rnn_adding", "tcn_adding")
MODELS += ("tcn_copy_memory",)


def training(name, jit_compile):
    """A training step on the first batch of the model's generated task."""

    def build():
        from trellis_keras import zoo

        few = {"train": 64, "valid": 1, "test": 1}
        recipe = zoo.recipe(name, data_options=few, jit_compile=jit_compile)
        batch = recipe.stream(recipe.load_data().train)[0]
        model = recipe.build()

        def step():
            model.train_on_batch(*batch)
            return 0

        return step

    return build


CASES = {
    f"xla_{name}": Case(
        f"training step of {name}",
        {"without XLA": training(name, False), "XLA": training(name, True)},
        baseline="XLA",
    )
    for name in MODELS
}
