"""TCN against keras-tcn at equal sizes.

Install it with `pip install --no-deps keras-tcn`, as version 3.5.7 requires tensorflow-macos on
every system.
"""

from benchmarks.case import Case

# Keras and the package are imported by the functions: each variant runs in its own process.

ADDING = {"time": 600, "channels": 2, "kernel_size": 8, "depth": 8, "filters": 24, "outputs": 1}
_SIZE = (ADDING["kernel_size"], ADDING["depth"], ADDING["filters"])
# The receptive field of tcn_adding: two convolutions per block, with dilations 1, 2, 4, ...
RECEPTIVE_FIELD = 1 + 2 * (ADDING["kernel_size"] - 1) * (2 ** ADDING["depth"] - 1)
PIXELS = {"time": 784, "channels": 1, "kernel_size": 7, "depth": 8, "filters": 25, "outputs": 10}


def _ours(kernel_size, depth, filters):
    from trellis_keras.layers import TCN

    return TCN(filters, kernel_size, depth, return_sequences=False)


def _all_positions(kernel_size, depth, filters):
    """Ours without the dependency cone."""
    import keras

    from trellis_keras.layers import TCN

    last = keras.layers.Lambda(lambda y: y[:, -1])
    return keras.Sequential([TCN(filters, kernel_size, depth), last])


def keras_tcn(kernel_size, depth, filters):
    """keras-tcn's network without skip connections, which TCN and the paper do not have."""
    import tcn

    return tcn.TCN(
        filters,
        kernel_size,
        dilations=[2**i for i in range(depth)],
        use_skip_connections=False,
        return_sequences=False,
    )


def training(make, size, jit_compile, batch=32):
    def build():
        import keras
        import numpy as np

        shape, outputs = (size["time"], size["channels"]), size["outputs"]
        layer = make(size["kernel_size"], size["depth"], size["filters"])
        model = keras.Sequential([keras.Input(shape), layer, keras.layers.Dense(outputs)])
        loss = "mse"
        y = np.zeros((batch, 1), "float32")
        if outputs > 1:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            y = np.arange(batch) % outputs
        model.compile(keras.optimizers.Adam(2e-3), loss, jit_compile=jit_compile)
        x = np.random.default_rng(0).normal(size=(batch, *shape)).astype("float32")

        def step():
            model.train_on_batch(x, y)
            return 0

        return step

    return build


def streamed(batch, steps=64):
    """Steps of ours in a compiled loop."""

    def build():
        from benchmarks.compiled import compiled_steps

        ours = _ours(*_SIZE)
        ours.build((None, None, 2))
        return compiled_steps(ours, _inputs(batch, steps), ADDING["filters"])

    return build


def window(make, batch, time, jit_compile=True):
    """The last output of a window of `time` steps."""

    def build():
        from benchmarks.compiled import compiled_window

        return compiled_window(make(*_SIZE), _inputs(batch, time), jit_compile)

    return build


def _inputs(batch, time):
    import numpy as np

    return np.random.default_rng(0).normal(size=(batch, time, 2)).astype("float32")


def _training_case(about, size):
    return Case(
        about,
        {
            "keras-tcn, graph": training(keras_tcn, size, False),
            "keras-tcn, XLA": training(keras_tcn, size, True),
            "all positions, graph": training(_all_positions, size, False),
            "cone, graph": training(_ours, size, False),
            "cone, XLA": training(_ours, size, True),
        },
        baseline="keras-tcn, graph",
    )


def _streaming_case(batch):
    field = f"keras-tcn, receptive field of {RECEPTIVE_FIELD}"
    return Case(
        f"a step of tcn_adding's shape, batch {batch}",
        {
            f"{field}, graph": window(keras_tcn, batch, RECEPTIVE_FIELD, False),
            f"{field}, XLA": window(keras_tcn, batch, RECEPTIVE_FIELD),
            "keras-tcn, sequence of 600, XLA": window(keras_tcn, batch, ADDING["time"]),
            "streamed": streamed(batch),
        },
        baseline=f"{field}, XLA",
    )


CASES = {
    "tcn_adding": _training_case("training step of tcn_adding, T=600, batch 32", ADDING),
    "tcn_pixels": _training_case("training step of tcn_seq_mnist, batch 32", PIXELS),
    "tcn_streaming_1": _streaming_case(1),
    "tcn_streaming_32": _streaming_case(32),
}
