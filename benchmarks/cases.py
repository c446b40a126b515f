"""The benchmark cases. Each variant of a case builds a function that runs one step.

Those that compare with keras-tcn need it: `pip install --no-deps keras-tcn`, as version 3.5.7
requires tensorflow-macos on every system.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial

import keras
import numpy as np
from keras import ops

from keras_streams.xla import compile_xla
from tools.process import words as draw
from trellis_keras import kernels, zoo
from trellis_keras.layers import (
    LRU,
    TCN,
    AdaptiveSoftmax,
    DenseHead,
    LRUCell,
    StackedRNN,
    TrellisLayer,
)
from trellis_keras.theorem1 import to_trellis

COMPILERS = {"graph": False, "XLA": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """A set of variants to compare.

    Attributes:
        about: One-line description of a step.
        variants: {name: function that returns `step() -> amount`}.
        baseline: String, the variant that the others are compared with. Defaults to `None`.
        unit: What the amount of a step counts: `"token"`, or `"operation"`, floating-point
            operations of the full computation, 0 if not counted. Defaults to `"operation"`.
    """

    about: str
    variants: dict[str, Callable]
    baseline: str | None = None
    unit: str = "operation"

    def left_out(self, backend):
        """Returns the variants that a backend lacks: on JAX, Keras has no graphs without XLA."""
        return [name for name in self.variants if backend == "jax" and name.endswith("graph")]


def compilers(build, makers, **options):
    """Returns the variants "<name>, graph" and "<name>, XLA" of each maker."""
    return {
        f"{name}, {label}": build(make, jit_compile=jit_compile, **options)
        for name, make in makers.items()
        for label, jit_compile in COMPILERS.items()
    }


# Steps: training


def layer_training(
    make, shape, batch, outputs=0, jit_compile=True, plain=False, policy="float32", amount=0.0
):
    """A training step of a layer on random sequences.

    Args:
        make: Function that returns the layer.
        shape: (steps, channels) of the inputs.
        batch: Integer, number of sequences.
        outputs: Integer, units of a Dense layer on top: classes, or 1 for regression. Defaults to
            `0`, no such layer.
        jit_compile: Boolean, whether to compile with XLA.
        plain: Boolean, whether to compute every position, without kernels.
        policy: String, dtype policy.
        amount: Float, floating-point operations of the full computation.
    """

    def build():
        keras.config.set_dtype_policy(policy)
        head = [keras.layers.Dense(outputs)] if outputs else []
        model = keras.Sequential([keras.Input(shape), make(), *head])
        loss = "mse"
        x = np.random.default_rng(0).normal(size=(batch, *shape)).astype("float32")
        y = np.zeros((batch, *model.output_shape[1:]), "float32")
        if outputs > 1:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            y = np.arange(batch) % outputs
        model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=jit_compile)
        return train_step(model, x, y, plain, amount)

    return build


def zoo_training(name, plain=False, amount=0.0, **options):
    """A training step of a zoo model on random data in the shape of the recipe's batches."""

    def build():
        recipe = zoo.recipe(name, **options)
        model, training = recipe.build(), recipe.training
        rng, rows = np.random.default_rng(0), training.batch_size
        if recipe.stateful:
            model.backbone.reset_state(rows)
        if recipe.reads_text:
            length, context = (training.stream[k] for k in ("sequence_length", "context_length"))
            tokens = rng.integers(0, model.vocabulary_size, (rows, length + 1))
            x, y = tokens[:, :-1], tokens[:, 1 + context :]
        else:
            inputs, targets, classes = SHAPES[recipe.data]
            x = rng.random((rows, *inputs), dtype="float32")
            y = rng.random((rows, *targets), dtype="float32")
            y = (classes * y).astype("int32") if classes else y
        return train_step(model, x, y, plain, amount)

    return build


def train_step(model, x, y, plain, amount):
    """Returns a training step; the first call compiles it."""

    def step():
        with kernels.disabled() if plain else contextlib.nullcontext():
            model.train_on_batch(x, y)
        return amount

    return step


# Steps and channels of the inputs, shape and number of classes of the targets (0: real numbers).
SHAPES = {
    "seq_mnist": ((784, 1), (), 10),
    "adding": ((600, 2), (1,), 0),
    "copy_memory": ((1020, 1), (1020,), 9),
}


def keras_tcn(filters, kernel_size, depth, return_sequences=False):
    """keras-tcn's network without skip connections, which TCN and the paper do not have."""

    def make():
        import tcn

        return tcn.TCN(
            filters,
            kernel_size,
            dilations=[2**i for i in range(depth)],
            use_skip_connections=False,
            return_sequences=return_sequences,
        )

    return make


def lru_cells():
    return keras.layers.RNN([LRUCell(512), LRUCell(512)], return_sequences=True)


def keras_rnn(kind, layers=1):
    layer = partial(getattr(keras.layers, kind), 512, return_sequences=True)
    return lambda: keras.Sequential([layer() for _ in range(layers)])


def stacked_rnn(kind):
    layer = partial(getattr(keras.layers, kind), 512, return_sequences=True, return_state=True)
    return lambda: StackedRNN([layer()])


def mixed_group(width, number, by_group):
    """A layer whose products are computed by group or not, whatever the width."""

    class Layer(TrellisLayer):
        multiplies_by_group = by_group

    return lambda: Layer(
        width * number, 16, kernel_structure="mixed_group", groups=[width] * number
    )


def gemm(dtype="float32", m=16 * 110, k=2800, n=5600, repeats=8):
    """The matrix product of the word-level models, as the limit of the machine."""

    def build():
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


def head_training(make, jit_compile, words=267_735, channels=512, batch=16, time=110):
    """A training step of only an output head, with words drawn with probability 1 / rank."""

    def build():
        class HeadOnly(keras.Model):
            def __init__(self, head):
                super().__init__()
                self.head = head

            def build(self, input_shape):
                self.head.build(input_shape)

            def call(self, hidden):
                return hidden

            def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
                return keras.ops.mean(self.head.loss(y_pred, y))

        model = HeadOnly(make(words))
        model.build((None, None, channels))
        model.compile(keras.optimizers.SGD(0.1), jit_compile=jit_compile)
        rng = np.random.default_rng(0)
        hidden = rng.normal(size=(batch, time, channels)).astype("float32")
        return train_step(model, hidden, draw(rng, words, (batch, time)), False, 0.0)

    return build


def adaptive_softmax(**options):
    return partial(AdaptiveSoftmax, cutoffs=(2_800, 20_000, 76_000), **options)


# Steps: inference


def inference(make, inputs, jit_compile=True):
    """The outputs of a whole input; `make` returns a function of it, and its variables."""

    def build():
        function, variables = make()
        if jit_compile:
            compiled = compile_xla(function, variables)
        else:
            import tensorflow as tf

            compiled = tf.function(function)
        x = ops.convert_to_tensor(inputs())

        def step():
            np.asarray(compiled(x))
            return 1

        return step

    return build


def streamed(make, inputs, width):
    """Cached steps in a compiled loop; the amount is their number."""

    def build():
        stream, x = make(), inputs()
        batch, steps = x.shape[:2]
        cache = stream.initial_cache(batch)

        def run(x, *leaves):
            def turn(i, y, *leaves):
                state = keras.tree.pack_sequence_as(cache, leaves)
                y, state = stream.step(ops.take(x, i, axis=1), state)
                return i + 1, y, *keras.tree.flatten(state)

            y = ops.zeros((batch, width))
            return ops.while_loop(lambda i, *_: i < steps, turn, (0, y, *leaves))[1]

        compiled = compile_xla(run, stream.variables)
        x, leaves = ops.convert_to_tensor(x), keras.tree.flatten(cache)

        def step():
            np.asarray(compiled(x, *leaves))
            return steps

        return step

    return build


def generated(batch, prompt=16, new=48):
    """`generate`, prompt included in the time; only new tokens count."""

    def build():
        model, tokens = word_model(), word_ids(batch, prompt)()

        def step():
            model.generate(tokens, prompt + new, sampler="greedy")
            return new

        return step

    return build


def numbers(*shape):
    return lambda: np.random.default_rng(0).normal(size=shape).astype("float32")


def word_ids(batch, time):
    return lambda: np.random.default_rng(0).integers(0, 10_000, (batch, time)).astype("int32")


def whole(make):
    """A function that calls a layer."""

    def function():
        layer = make()
        return lambda x: layer(x, training=False), layer.variables

    return function


def word_model():
    return zoo.trellisnet_ptb(aux_weight=0.0)


def next_word(cone, greedy=False):
    """The last output of a window of words; `cone` computes only what it depends on."""

    def make():
        model = word_model()

        def call(tokens):
            length = {"output_length": 1} if cone else {}
            hidden = model.backbone(model.embedding(tokens), training=False, **length)
            scores = model.head(hidden[:, -1])
            return ops.argmax(scores, axis=-1) if greedy else scores

        return call, model.variables

    return make


# Theorem 1: a 2-layer LSTM of 128 units, truncated to M = 32 steps
TRUNCATION = 32


def two_lstms():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.LSTM(128, return_sequences=True) for _ in range(2)]
    return keras.Sequential([keras.Input((None, 128)), *layers])


def converted():
    return to_trellis(two_lstms().layers, TRUNCATION)


def every_window():
    """By definition: runs the LSTM over the last M steps of each position, all in one batch."""
    model = two_lstms()

    def call(x):
        batch, time, channels = x.shape
        later = time - TRUNCATION
        steps = np.arange(1, later + 1)[:, None] + np.arange(TRUNCATION)
        windows = ops.reshape(ops.take(x, steps, axis=1), (batch * later, TRUNCATION, channels))
        # Windows of the first positions start at the first step.
        first = model(x[:, :TRUNCATION])
        last = ops.reshape(model(windows)[:, -1], (batch, later, channels))
        return ops.concatenate([first, last], axis=1)

    return call, model.variables


# The cases

ADDING = {"filters": 24, "kernel_size": 8, "depth": 8}
PIXELS = {"filters": 25, "kernel_size": 7, "depth": 8}
# The zoo's models, in float32 and bfloat16, with and without XLA.
PRECISION = ("trellisnet_seq_mnist", "tcn_seq_mnist", "tcn_ptb", "tcn_char_ptb", "lstm_ptb")
PRECISION += ("tcn_adding", "tcn_copy_memory", "lru_char_ptb")
PRECISION += ("lstm_adding", "gru_adding", "rnn_adding", "lstm_copy_memory")


# What trellisnet_ptb adds to the network.
_BARE = ("aux_weight", "embedding_dropout", "input_dropout", "hidden_dropout", "output_dropout")
_BARE += ("weight_dropout", "activation_reg", "temporal_activation_reg")


def word_training(depth, **options):
    """A training step of trellisnet_ptb without dropouts and auxiliary losses."""
    core = 6.0 * 16 * 110 * 2 * 1400 * 5600 * depth
    decoder = 6.0 * 16 * 55 * 400 * 10_000
    options = {"depth": depth, **dict.fromkeys(_BARE, 0.0), **options}
    return zoo_training("trellisnet_ptb", amount=core + decoder, **options)


def tcn_case(about, shape, sizes, outputs):
    ours = partial(TCN, **sizes, return_sequences=False)
    makers = {"keras-tcn": keras_tcn(**sizes), "cone": ours}
    options = {"shape": shape, "batch": 32, "outputs": outputs}
    variants = compilers(layer_training, makers, **options)
    plain = layer_training(ours, jit_compile=False, plain=True, **options)
    return Case(about, {**variants, "all positions, graph": plain}, baseline="keras-tcn, graph")


def tcn_streaming_case(batch):
    steps = TCN(**ADDING).receptive_field
    theirs, field = whole(keras_tcn(**ADDING)), numbers(batch, steps, 2)
    name = f"keras-tcn, receptive field of {steps}"

    def ours():
        layer = TCN(**ADDING, return_sequences=False)
        layer.build((None, None, 2))
        return layer

    return Case(
        f"a step of tcn_adding's shape, batch {batch}",
        {
            f"{name}, graph": inference(theirs, field, jit_compile=False),
            f"{name}, XLA": inference(theirs, field),
            "keras-tcn, sequence of 600, XLA": inference(theirs, numbers(batch, 600, 2)),
            "streamed": streamed(ours, numbers(batch, 64, 2), ADDING["filters"]),
        },
        baseline=f"{name}, XLA",
        unit="token",
    )


def word_case(batch, about, greedy, ours):
    window = "window of 110"
    last = inference(next_word(True, greedy), word_ids(batch, 110))
    return Case(
        f"a {about} of trellisnet_ptb's shape, batch {batch}",
        {
            window: inference(next_word(False, greedy), word_ids(batch, 110)),
            f"{window}, last output only": last,
            **ours,
        },
        baseline=window,
        unit="token",
    )


def rnn_case(kind, batch, policy="float32"):
    makers = {f"keras.layers.{kind}": keras_rnn(kind), f"StackedRNN of {kind}": stacked_rnn(kind)}
    amount = 6.0 * {"LSTM": 8, "GRU": 6}[kind] * 512**2 * 100 * batch
    return Case(
        f"training step of {kind}, 512 units, 100 steps, batch {batch}, {policy}",
        compilers(
            layer_training, makers, shape=(100, 512), batch=batch, policy=policy, amount=amount
        ),
        baseline=f"keras.layers.{kind}, graph",
    )


def theorem1_case(batch):
    makers = {
        "every window": every_window,
        "TrellisNet": whole(converted),
        "LSTM": whole(two_lstms),
    }
    return Case(
        f"all outputs of a 2-layer LSTM of 128 units, truncated to 32 steps: batch {batch}, "
        "512 steps (the variant LSTM is not truncated, which is a different function)",
        compilers(inference, makers, inputs=numbers(batch, 512, 128)),
        baseline="every window, graph",
        unit="token",
    )


def mixed_group_case(width, number):
    return Case(
        f"training step of a mixed-group TrellisLayer with {number} groups of {width} channels, "
        "16 levels, batch 16 of 64 steps, XLA",
        {
            "with zeros": layer_training(mixed_group(width, number, False), (64, 64), 16),
            "by group": layer_training(mixed_group(width, number, True), (64, 64), 16),
        },
        baseline="with zeros",
    )


def precision_case(name):
    return Case(
        f"training step of {name}",
        {
            f"{label}, {compiler}": zoo_training(name, dtype_policy=policy, jit_compile=jit_compile)
            for label, policy in (("float32", "float32"), ("bfloat16", "mixed_bfloat16"))
            for compiler, jit_compile in COMPILERS.items()
        },
        baseline="float32, graph",
    )


_PIXELS_OPTIONS = {"output_units": 10, "return_sequences": False}
_PIXELS_OPTIONS |= {"dilation_rate": [1, *(2**i for i in range(10))]}

CASES = {
    "gemm": Case(
        "matrix product 1760 x 2800 x 5600", {"float32": gemm(), "bf16": gemm("bfloat16")}
    ),
    "pixels": Case(
        "training step, 784 pixels, 11 levels, batch 32",
        {
            f"{name}, {label}": layer_training(
                partial(TrellisLayer, 130, 11, **_PIXELS_OPTIONS),
                (784, 1),
                32,
                outputs=10,
                jit_compile=jit_compile,
                plain=plain,
            )
            for name, plain in (("all positions", True), ("cone", False))
            for label, jit_compile in COMPILERS.items()
        },
        baseline="all positions, graph",
    ),
    "word_ptb_12": Case(
        "training step, word PTB core, 12 levels",
        {
            "plain, graph": word_training(12, plain=True, jit_compile=False),
            "plain, XLA": word_training(12, plain=True, jit_compile=True),
            "float32, graph": word_training(12, jit_compile=False),
            "float32, XLA": word_training(12, jit_compile=True),
            "bf16, graph": word_training(12, dtype_policy="mixed_bfloat16", jit_compile=False),
            "GEMM float32": gemm(),
        },
        baseline="plain, graph",
    ),
    # All variants of a case are in memory at once.
    "word_ptb_55": Case(
        "training step, word PTB core, 55 levels",
        {"float32, XLA": word_training(55, jit_compile=True), "GEMM float32": gemm()},
    ),
    "word_ptb_55_bf16": Case(
        "training step, word PTB core, 55 levels, mixed_bfloat16",
        {
            "bf16, graph": word_training(55, dtype_policy="mixed_bfloat16", jit_compile=False),
            "GEMM float32": gemm(),
        },
    ),
    "depth": Case(
        "training step of small levels, XLA: compile and step time against depth",
        {
            f"{depth} levels": layer_training(
                partial(TrellisLayer, 64, depth, output_units=16), (110, 16), 16
            )
            for depth in (35, 70, 140)
        },
    ),
    "tcn_adding": tcn_case("training step of tcn_adding, T=600, batch 32", (600, 2), ADDING, 1),
    "tcn_pixels": tcn_case("training step of tcn_seq_mnist, batch 32", (784, 1), PIXELS, 10),
    "tcn_streaming_1": tcn_streaming_case(1),
    "tcn_streaming_32": tcn_streaming_case(32),
    "lru": Case(
        "training step of LRU, 2 x 512 units, 50 steps, batch 100",
        compilers(
            layer_training,
            {
                "RNN of cells": lru_cells,
                "LRU": partial(LRU, 512, 2, return_sequences=True),
                "GRU": keras_rnn("GRU", layers=2),
            },
            shape=(50, 512),
            batch=100,
        ),
        baseline="RNN of cells, graph",
    ),
    **{
        f"rnn_{kind.lower()}_{batch}": rnn_case(kind, batch)
        for kind in ("LSTM", "GRU")
        for batch in (4, 64)
    },
    **{
        f"rnn_{kind.lower()}_64_bf16": rnn_case(kind, 64, "mixed_bfloat16")
        for kind in ("LSTM", "GRU")
    },
    **{
        f"streaming_{batch}": word_case(
            batch, "token", False, {"cached": streamed(word_model, word_ids(batch, 16), 10_000)}
        )
        for batch in (1, 8)
    },
    **{
        f"generate_{batch}": word_case(
            batch, "generated token", True, {"generate": generated(batch)}
        )
        for batch in (1, 8)
    },
    "adaptive_softmax": Case(
        "training step of a head, 267735 words, 512 channels, 1760 tokens",
        compilers(
            head_training,
            {
                "full softmax": DenseHead,
                "adaptive": adaptive_softmax(),
                "adaptive, div_value 4": adaptive_softmax(div_value=4),
            },
        ),
        baseline="full softmax, graph",
    ),
    "theorem1_1": theorem1_case(1),
    "theorem1_16": theorem1_case(16),
    "mixed_group_64": mixed_group_case(64, 4),
    "mixed_group_8": mixed_group_case(8, 16),
    "mixed_group_2": mixed_group_case(2, 16),
    **{f"precision_{name}": precision_case(name) for name in PRECISION},
}
