"""A 2-layer LSTM truncated to M steps: its TrellisNet (Theorem 1) against running every window.

Computes all outputs of a batch of sequences, without gradients. "Every window" follows the
definition: for each position, it runs the LSTM over the last M steps, all windows in one batch.
"LSTM" is not truncated, which is a different function and takes a fraction 1 / M of the work.
"""

from benchmarks.case import Case

# Keras and the package are imported by the functions: each variant runs in its own process.


def lstm(units):
    """Returns a two-layer LSTM, with the same weights in every process."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.LSTM(units, return_sequences=True) for _ in range(2)]
    return keras.Sequential([keras.Input((None, units)), *layers])


def untruncated(model, truncation):
    return model


def converted(model, truncation):
    from trellis_keras.theorem1 import to_trellis

    return to_trellis(model.layers, truncation)


def every_window(model, truncation):
    """Returns a function that runs the truncated model on (batch, time, channels)."""
    import numpy as np
    from keras import ops

    def call(x, training=False):
        batch, time, channels = x.shape
        later = time - truncation
        steps = np.arange(1, later + 1)[:, None] + np.arange(truncation)
        windows = ops.reshape(ops.take(x, steps, axis=1), (batch * later, truncation, channels))
        # Windows of the first positions start at the first step.
        first = model(x[:, :truncation], training=training)
        last = model(windows, training=training)[:, -1]
        return ops.concatenate([first, ops.reshape(last, (batch, later, last.shape[-1]))], axis=1)

    return call


def inference(make, batch, jit_compile, time=512, units=128, truncation=32):
    """A step: all outputs of a batch."""

    def build():
        import numpy as np

        from benchmarks.compiled import compiled_call

        x = np.random.default_rng(0).normal(size=(batch, time, units)).astype("float32")
        model = lstm(units)
        function = make(model, truncation)
        variables = getattr(function, "variables", model.variables)
        return compiled_call(function, variables, x, jit_compile)

    return build


def _case(batch):
    makers = {"every window": every_window, "TrellisNet": converted, "LSTM": untruncated}
    return Case(
        f"all outputs of a 2-layer LSTM of 128 units, truncated to 32 steps: batch {batch}, "
        "512 steps",
        {
            f"{name}, {how}": inference(make, batch, how == "XLA")
            for name, make in makers.items()
            for how in ("graph", "XLA")
        },
        baseline="every window, graph",
    )


CASES = {"theorem1_1": _case(1), "theorem1_16": _case(16)}
