"""The benchmark cases. Each variant of a case builds a function that runs one step."""

import contextlib

from benchmarks.adaptive_softmax import CASES as ADAPTIVE_SOFTMAX_CASES
from benchmarks.case import Case
from benchmarks.generation import CASES as GENERATION_CASES
from benchmarks.lru import CASES as LRU_CASES
from benchmarks.mixed_group import CASES as MIXED_GROUP_CASES
from benchmarks.precision import CASES as PRECISION_CASES
from benchmarks.rnn import CASES as RNN_CASES
from benchmarks.tcn import CASES as TCN_CASES
from benchmarks.theorem1 import CASES as THEOREM1_CASES
from benchmarks.zoo_xla import CASES as ZOO_XLA_CASES

# Keras and the package are imported by the functions: each variant runs in its own process.


def _training_step(model, x, y, plain=False, amount=0):
    """Returns a training step, with or without kernels; the first call compiles it."""
    from trellis_keras import kernels

    def step():
        with kernels.disabled() if plain else contextlib.nullcontext():
            model.train_on_batch(x, y)
        return amount

    return step


def gemm(dtype="float32", m=16 * 110, k=2800, n=5600, repeats=8):
    """The matrix product of the word-level models, as the limit of the machine."""

    def build():
        import keras
        import numpy as np
        from keras import ops

        rng = np.random.default_rng(0)
        a = ops.cast(rng.normal(size=(m, k)), dtype)
        b = ops.cast(rng.normal(size=(k, n)), dtype)
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            product = tf.function(lambda a, b: tf.reduce_sum(tf.cast(a @ b, "float32")))
        else:
            import jax

            product = jax.jit(lambda a, b: (a @ b).astype("float32").sum())

        def step():
            for _ in range(repeats):
                float(product(a, b))
            return 2.0 * m * k * n * repeats

        return step

    return build


def pixels(plain=False, jit_compile=False):
    """A training step of the pixel classifier: 784 steps, dilations 1, 1, 2, 4, ..., 512."""

    def build():
        import keras
        import numpy as np

        from trellis_keras.layers import TrellisLayer

        layer = TrellisLayer(
            130,
            11,
            output_units=10,
            dilation_rate=[1, *(2**i for i in range(10))],
            return_sequences=False,
        )
        model = keras.Sequential([keras.Input((784, 1)), layer, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(2e-3), loss, jit_compile=jit_compile)
        x = np.random.default_rng(0).normal(size=(32, 784, 1)).astype("float32")
        y = np.arange(32) % 10
        return _training_step(model, x, y, plain)

    return build


def word_ptb(depth, plain=False, jit_compile=True, policy="float32", zoo=False, **layer_options):
    """A training step of word-level PTB: 400 -> 1400 units, batch 16, 110 steps, half counted."""

    def build():
        import keras
        import numpy as np

        from trellis_keras.layers import TrellisLayer
        from trellis_keras.models import LanguageModel
        from trellis_keras.training import SGD
        from trellis_keras.zoo import trellisnet_ptb

        keras.config.set_dtype_policy(policy)
        if zoo:
            model = trellisnet_ptb(depth=depth, jit_compile=jit_compile)
        else:
            layer = TrellisLayer(1400, depth, output_units=400, **layer_options)
            model = LanguageModel(10_000, 400, layer)
            model.build((None, None))
            model.compile(SGD(20.0, clip_norm=0.225), jit_compile=jit_compile)
        tokens = np.random.default_rng(0).integers(0, 10_000, (16, 111))
        x, y = tokens[:, :-1], tokens[:, 56:]
        core = 6.0 * 16 * 110 * 2 * 1400 * 5600 * depth
        decoder = 6.0 * 16 * 55 * 400 * 10_000
        return _training_step(model, x, y, plain, core + decoder)

    return build


def char_ptb(depth=125, jit_compile=True):
    """A training step of character-level PTB, all options on: batch 24, 125 steps, stateful."""

    def build():
        import numpy as np

        from trellis_keras.zoo import trellisnet_char_ptb

        model = trellisnet_char_ptb(depth=depth, jit_compile=jit_compile)
        model.backbone.reset_state(24)
        tokens = np.random.default_rng(0).integers(0, 50, (24, depth + 1))
        return _training_step(model, tokens[:, :-1], tokens[:, 1:])

    return build


def small_levels(depth, time=110, kept=None, plain=False):
    """A training step of many small levels, to see how compile and step times grow."""

    def build():
        import keras
        import numpy as np

        from trellis_keras.layers import TrellisLayer

        layer = TrellisLayer(64, depth, output_units=16, output_length=kept)
        model = keras.Sequential([keras.Input((time, 16)), layer])
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=True)
        x = np.random.default_rng(0).normal(size=(16, time, 16)).astype("float32")
        y = x if kept is None else x[:, -kept:]
        return _training_step(model, x, y, plain)

    return build


CASES = (
    {
        "gemm": Case(
            "matrix product 1760 x 2800 x 5600", {"float32": gemm(), "bf16": gemm("bfloat16")}
        ),
        "pixels": Case(
            "training step, 784 pixels, 11 levels, batch 32",
            {
                "all positions, graph": pixels(plain=True),
                "all positions, XLA": pixels(plain=True, jit_compile=True),
                "cone, graph": pixels(),
                "cone, XLA": pixels(jit_compile=True),
            },
            baseline="all positions, graph",
        ),
        "word_ptb_12": Case(
            "training step, word PTB core, 12 levels",
            {
                "plain, graph": word_ptb(12, plain=True, jit_compile=False),
                "float32, graph": word_ptb(12, jit_compile=False),
                "float32, XLA": word_ptb(12),
                "float32, graph, without depth_loop_tf": word_ptb(
                    12, jit_compile=False, fused=False
                ),
                "float32, XLA, without depth_loop_tf": word_ptb(12, fused=False),
                "bf16, graph": word_ptb(12, policy="mixed_bfloat16", jit_compile=False),
                "GEMM float32": gemm(),
            },
            baseline="plain, graph",
        ),
        "word_ptb_12_xla": Case(
            "training step, word PTB core, 12 levels, XLA",
            {"plain, XLA": word_ptb(12, plain=True), "float32, XLA": word_ptb(12)},
            baseline="plain, XLA",
        ),
        # All variants of a case are in memory at once, so those of 55 levels are separate cases.
        "word_ptb_55": Case(
            "training step, word PTB core, 55 levels",
            {"float32, XLA": word_ptb(55), "GEMM float32": gemm()},
        ),
        "word_ptb_55_lean": Case(
            "training step, word PTB core, 55 levels, pre-activations computed again",
            {"float32, XLA": word_ptb(55, rematerialize=True), "GEMM float32": gemm()},
        ),
        "word_ptb_55_bf16": Case(
            "training step, word PTB core, 55 levels, mixed_bfloat16",
            {
                "bf16, graph": word_ptb(55, policy="mixed_bfloat16", jit_compile=False),
                "GEMM float32": gemm(),
            },
        ),
        "word_ptb_55_plain": Case(
            "training step, word PTB core, 55 levels, every position computed",
            {
                "plain, graph": word_ptb(55, plain=True, jit_compile=False),
                "float32, XLA": word_ptb(55),
            },
            baseline="plain, graph",
        ),
        "word_ptb_55_zoo": Case(
            "training step of trellisnet_ptb, everything on",
            {"XLA": word_ptb(55, zoo=True), "GEMM float32": gemm()},
        ),
        "char_ptb": Case("training step, char PTB, 125 levels, everything on", {"XLA": char_ptb()}),
        "depth": Case(
            "training step of small levels, XLA: compile and step time against depth",
            {f"{depth} levels": small_levels(depth) for depth in (35, 70, 140)}
            | {
                "140 levels, half kept": small_levels(140, time=280, kept=140),
                "35 levels, plain": small_levels(35, plain=True),
            },
        ),
        "time": Case(
            "training step of 35 small levels, XLA: step time against length",
            {f"{time} steps": small_levels(35, time) for time in (110, 220, 440)},
        ),
    }
    | TCN_CASES
    | LRU_CASES
    | RNN_CASES
    | GENERATION_CASES
    | ADAPTIVE_SOFTMAX_CASES
    | THEOREM1_CASES
    | MIXED_GROUP_CASES
    | PRECISION_CASES
    | ZOO_XLA_CASES
)
