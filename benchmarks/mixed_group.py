"""Mixed-group kernels computed by group, against the same kernels as dense ones with zeros.

Which is faster depends on the width of the groups; see the rule in `kernels.mixed_group`.
"""

from benchmarks.case import Case

# Keras and the package are imported by the functions: each variant runs in its own process.

TIME, BATCH, DEPTH, CHANNELS = 64, 16, 16, 64


def training(width, number, by_group):
    """A training step of only the layer, compiled by XLA.

    Args:
        width: Channels per group.
        number: Number of groups.
        by_group: Whether to compute products by group, overriding the rule.
    """

    def build():
        import keras
        import numpy as np

        from trellis_keras.kernels import mixed_group
        from trellis_keras.layers import TrellisLayer

        mixed_group._LEAST_WIDTH = 0 if by_group else width + 1
        layer = TrellisLayer(
            width * number, DEPTH, kernel_structure="mixed_group", groups=[width] * number
        )
        model = keras.Sequential([keras.Input((TIME, CHANNELS)), layer])
        model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=True)
        rng = np.random.default_rng(0)
        x = rng.normal(size=(BATCH, TIME, CHANNELS)).astype("float32")
        y = np.zeros((BATCH, TIME, width * number), "float32")

        def step():
            model.train_on_batch(x, y)
            return 0.0

        return step

    return build


def _case(width, number):
    return Case(
        f"Training step of a mixed-group TrellisLayer with {number} groups of {width} channels, "
        f"LSTM gates, {DEPTH} levels, batch {BATCH} of {TIME} steps, XLA. Ratio: to the product "
        "with all zeros.",
        {
            "with zeros": training(width, number, by_group=False),
            "by group": training(width, number, by_group=True),
        },
        baseline="with zeros",
    )


CASES = {
    "mixed_group_64": _case(64, 4),
    "mixed_group_8": _case(8, 16),
    "mixed_group_2": _case(2, 16),
}
