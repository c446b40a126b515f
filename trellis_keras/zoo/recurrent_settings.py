"""Settings of the recurrent baselines (Bai et al. 2018, Table 3), and sizes solved from Table 1.

The table has the LSTM's settings only. GRU and RNN have the LSTM's, with the hidden size that gives
them the published number of parameters. Where the table leaves a choice, a line says what we took.
"""

import dataclasses

from trellis_keras.zoo import tasks

CELLS = ("lstm", "gru", "rnn")
SIZES = ("table3", "equal")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A row of Table 3.

    Attributes:
        layers: Number of layers.
        table3: The LSTM's hidden size.
        equal: Hidden sizes of LSTM, GRU and RNN for the published number of parameters.
        dropout: Dropout rate.
        clip_norm: Norm to clip the gradient to.
        forget_bias: Initial bias of the LSTM's forget gate; 1, Keras' own, where there is none.
        optimizer, learning_rate: The optimizer; Adam 2e-3, the paper's default, where there is
            none.
    """

    layers: int
    table3: int
    equal: tuple[int, int, int]
    dropout: float = 0.0
    clip_norm: float
    forget_bias: float = 1.0
    optimizer: str = "adam"
    learning_rate: float = 2e-3


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark's settings by T, or by None where there is no T; `task` is None for a text."""

    settings: dict
    task: tasks.Task | None = None


_ADDING = {
    200: Setting(
        layers=2, table3=77, equal=(76, 87, 152), clip_norm=50.0, forget_bias=5.0,
        optimizer="sgd", learning_rate=1e-3,
    ),
    400: Setting(layers=2, table3=77, equal=(76, 87, 152), clip_norm=50.0, forget_bias=10.0),
    600: Setting(layers=1, table3=130, equal=(131, 151, 263), clip_norm=5.0),
}  # fmt: skip

# "RMSprop/Adam" without a rate: the TCN's RMSprop.
_RMSPROP = {"dropout": 0.05, "optimizer": "rmsprop", "learning_rate": 5e-4}
_COPY_MEMORY = {
    500: Setting(layers=1, table3=50, equal=(61, 70, 121), clip_norm=0.25, **_RMSPROP),
    1000: Setting(layers=1, table3=50, equal=(61, 70, 121), clip_norm=1.0, **_RMSPROP),
    2000: Setting(layers=3, table3=28, equal=(28, 32, 55), clip_norm=1.0, **_RMSPROP),
}


def _mnist(forget_bias):
    return Setting(
        layers=1, table3=130, equal=(130, 150, 259), clip_norm=1.0, forget_bias=forget_bias,
        optimizer="rmsprop", learning_rate=1e-3,
    )  # fmt: skip


# "SGD/Adam" without a rate: the paper's Adam.
_JSB = Setting(
    layers=2, table3=200, equal=(141, 163, 288), dropout=0.2, clip_norm=1.0, forget_bias=10.0
)
# The second of its two rows, which is nearer to the published size.
_NOTTINGHAM = Setting(
    layers=1, table3=500, equal=(448, 521, 915), dropout=0.1, clip_norm=1.0, learning_rate=4e-3
)
_PTB = Setting(
    layers=3, table3=700, equal=(556, 616, 858), dropout=0.4, clip_norm=0.3,
    optimizer="sgd", learning_rate=30.0,
)  # fmt: skip
_CHAR_PTB = Setting(layers=2, table3=600, equal=(478, 554, 971), dropout=0.1, clip_norm=0.5)
_TEXT8 = Setting(
    layers=1, table3=1024, equal=(1010, 1174, 2071), dropout=0.15, clip_norm=0.5,
    learning_rate=1e-2,
)  # fmt: skip

BENCHMARKS = {
    "adding": Benchmark(_ADDING, tasks.ADDING),
    "copy_memory": Benchmark(_COPY_MEMORY, tasks.COPY_MEMORY),
    "seq_mnist": Benchmark({None: _mnist(forget_bias=1.0)}, tasks.PIXELS),
    "permuted_mnist": Benchmark({None: _mnist(forget_bias=10.0)}, tasks.PIXELS),
    "jsb": Benchmark({None: _JSB}, tasks.MUSIC),
    "nottingham": Benchmark({None: _NOTTINGHAM}, tasks.MUSIC),
    "ptb": Benchmark({None: _PTB}),
    "char_ptb": Benchmark({None: _CHAR_PTB}),
    "text8": Benchmark({None: _TEXT8}),
}


def fields(benchmark, cell, size, T=None):
    """Returns a configuration's fields by the settings of Table 3.

    Args:
        benchmark: A key of `BENCHMARKS`.
        cell: One of `CELLS`.
        size: One of `SIZES`.
        T: Of adding and copy memory. One that is not in the table has the settings of the next
            larger one there, or of the largest.

    Raises:
        ValueError: A GRU or RNN with the LSTM's size, or a T where there is none or none is given.
    """
    if size == "table3" and cell != "lstm":
        raise ValueError(f'Table 3 has sizes of the LSTM only: use size="equal" for {cell!r}.')
    by_T = BENCHMARKS[benchmark].settings
    if (T is None) != (None in by_T):
        raise ValueError(
            f"`T` is a setting of adding and copy memory. Received: T={T}, {benchmark}"
        )
    setting = by_T[T if T is None else min((t for t in by_T if t >= T), default=max(by_T))]
    return {
        "layers": setting.layers,
        "hidden_units": setting.table3 if size == "table3" else setting.equal[CELLS.index(cell)],
        "dropout": setting.dropout,
        "forget_bias": setting.forget_bias if cell == "lstm" else 1.0,
        "clip_norm": setting.clip_norm,
        "optimizer": setting.optimizer,
        "learning_rate": setting.learning_rate,
    }
