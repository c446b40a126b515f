"""A StackedRNN's LSTM and GRU against Keras' own loops over the same layers."""

from benchmarks.case import Case

# Keras and the package are imported by the functions: each variant runs in its own process.

TIME, UNITS = 100, 512


def training(kind, batch, dtype_policy, stacked, jit_compile):
    """A training step of only the layer, in a StackedRNN or as Keras' layer."""

    def build():
        import keras
        import numpy as np

        from trellis_keras.layers import StackedRNN

        keras.config.set_dtype_policy(dtype_policy)
        make, blocks = {"lstm": (keras.layers.LSTM, 8), "gru": (keras.layers.GRU, 6)}[kind]
        if stacked:
            layer = StackedRNN([make(UNITS, return_sequences=True, return_state=True)])
        else:
            layer = make(UNITS, return_sequences=True)
        model = keras.Sequential([keras.Input((TIME, UNITS)), layer])
        model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=jit_compile)
        x = np.random.default_rng(0).normal(size=(batch, TIME, UNITS)).astype("float32")
        amount = 6.0 * blocks * UNITS**2 * TIME * batch

        def step():
            model.train_on_batch(x, x)
            return amount

        return step

    return build


def _case(kind, batch, dtype_policy="float32"):
    name, arguments = kind.upper(), (kind, batch, dtype_policy)
    return Case(
        f"training step of {name}, {UNITS} units, {TIME} steps, batch {batch}, {dtype_policy}",
        {
            f"keras.layers.{name}, graph": training(*arguments, stacked=False, jit_compile=False),
            f"keras.layers.{name}, XLA": training(*arguments, stacked=False, jit_compile=True),
            f"StackedRNN of {name}, graph": training(*arguments, stacked=True, jit_compile=False),
            f"StackedRNN of {name}, XLA": training(*arguments, stacked=True, jit_compile=True),
        },
        baseline=f"keras.layers.{name}, graph",
    )


CASES = {}
for kind in ("lstm", "gru"):
    CASES[f"rnn_{kind}_4"] = _case(kind, 4)
    CASES[f"rnn_{kind}_64"] = _case(kind, 64)
    CASES[f"rnn_{kind}_64_bf16"] = _case(kind, 64, "mixed_bfloat16")
