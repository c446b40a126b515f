"""AdaptiveSoftmax against a full softmax, at the size of WikiText-103."""

from benchmarks.case import Case

# Keras and the package are imported by the functions: each variant runs in its own process.

WORDS, CHANNELS, BATCH, TIME = 267_735, 512, 16, 110
CUTOFFS = (2_800, 20_000, 76_000)


def _dense():
    from trellis_keras.layers import DenseHead

    return DenseHead(WORDS)


def _adaptive(**options):
    def make():
        from trellis_keras.layers import AdaptiveSoftmax

        return AdaptiveSoftmax(WORDS, CUTOFFS, **options)

    return make


def training(make, jit_compile):
    """A training step of only a head, with plain SGD.

    Targets are drawn with probability 1 / rank. Real text has fewer words in the last tail, so the
    adaptive softmax is slightly faster on it.
    """

    def build():
        import keras
        import numpy as np

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

        model = HeadOnly(make())
        model.build((None, None, CHANNELS))
        model.compile(keras.optimizers.SGD(0.1), jit_compile=jit_compile)
        rng = np.random.default_rng(0)
        hidden = rng.normal(size=(BATCH, TIME, CHANNELS)).astype("float32")
        frequency = 1 / np.arange(1, WORDS + 1)
        words = rng.choice(WORDS, (BATCH, TIME), p=frequency / np.sum(frequency)).astype("int32")

        def step():
            model.train_on_batch(hidden, words)
            return 0

        return step

    return build


def _process_alone():
    """An almost empty step, for the memory of a process without a head."""
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((CHANNELS,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    x = np.zeros((BATCH * TIME, CHANNELS), "float32")

    def step():
        model.train_on_batch(x, x[:, :1])
        return 0

    return step


CASES = {
    "adaptive_softmax": Case(
        f"training step of a head, {WORDS} words, {CHANNELS} channels, {BATCH * TIME} tokens",
        {
            "full softmax, graph": training(_dense, False),
            "full softmax, XLA": training(_dense, True),
            "adaptive, graph": training(_adaptive(), False),
            "adaptive, XLA": training(_adaptive(), True),
            "adaptive, div_value 4, graph": training(_adaptive(div_value=4), False),
            "adaptive, div_value 4, XLA": training(_adaptive(div_value=4), True),
            "no head": _process_alone,
        },
        baseline="full softmax, XLA",
    )
}
