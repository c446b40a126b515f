"""LRU against the same cells in `keras.layers.RNN`, and against `keras.layers.GRU`."""

from benchmarks.case import Case

# Keras and the package are imported by the functions: each variant runs in its own process.

TIME, BATCH, UNITS, DEPTH = 50, 100, 512, 2


def _lru(variant):
    from trellis_keras.layers import LRU

    return [LRU(UNITS, DEPTH, variant=variant, return_sequences=True)]


def _cells(variant):
    import keras

    from trellis_keras.layers import LRUCell

    cells = [LRUCell(UNITS, variant) for _ in range(DEPTH)]
    return [keras.layers.RNN(cells, return_sequences=True)]


def _gru(variant):
    import keras

    return [keras.layers.GRU(UNITS, return_sequences=True) for _ in range(DEPTH)]


def training(make, blocks, jit_compile, variant=None):
    """A training step of only the layers.

    Args:
        make: Function that returns the list of layers.
        blocks: Number of (units, units) products per step of a cell.
        jit_compile: Whether to compile with XLA.
        variant: The variant of the LRU.
    """

    def build():
        import keras
        import numpy as np

        model = keras.Sequential([keras.Input((TIME, UNITS)), *make(variant)])
        model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=jit_compile)
        x = np.random.default_rng(0).normal(size=(BATCH, TIME, UNITS)).astype("float32")
        amount = 6.0 * blocks * UNITS**2 * DEPTH * TIME * BATCH

        def step():
            model.train_on_batch(x, x)
            return amount

        return step

    return build


def _case(variant, blocks):
    return Case(
        f"training step of LRU ({variant}), {DEPTH} x {UNITS} units, {TIME} steps, batch {BATCH}",
        {
            "RNN of cells, graph": training(_cells, blocks, False, variant),
            "RNN of cells, XLA": training(_cells, blocks, True, variant),
            "LRU, graph": training(_lru, blocks, False, variant),
            "LRU, XLA": training(_lru, blocks, True, variant),
            "GRU, graph": training(_gru, 6, False),
            "GRU, XLA": training(_gru, 6, True),
        },
        baseline="RNN of cells, graph",
    )


CASES = {
    "lru": _case("ug", 12),
    "lru_rg": _case("rg", 10),
    "lru_ps": _case("ps", 8),
}
