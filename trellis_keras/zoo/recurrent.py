"""Configurations of the recurrent baselines: Keras' own LSTM, GRU and SimpleRNN in layers."""

import dataclasses
from typing import ClassVar

import keras
from keras import ops

from trellis_keras.layers.heads import DenseHead
from trellis_keras.layers.rnn import StackedRNN
from trellis_keras.zoo import recurrent_settings
from trellis_keras.zoo.config import Config, check_choice
from trellis_keras.zoo.language import LanguageConfig
from trellis_keras.zoo.recurrent_settings import BENCHMARKS, CELLS, SIZES
from trellis_keras.zoo.tasks import SequenceConfig


@keras.saving.register_keras_serializable("trellis_keras")
class ForgetBias(keras.initializers.Initializer):
    """Zeros, but for an LSTM's forget gate: `LSTM(..., unit_forget_bias=False)`, any value.

    Args:
        value: Initial bias of the forget gate.

    Example:

    >>> np.asarray(ForgetBias(5.0)((8,))).tolist()  # input, forget, candidate, output
    [0.0, 0.0, 5.0, 5.0, 0.0, 0.0, 0.0, 0.0]
    """

    def __init__(self, value):
        self.value = value

    def __call__(self, shape, dtype=None):
        gate = (shape[0] // 4,)
        values = (0.0, self.value, 0.0, 0.0)
        return ops.concatenate([ops.full(gate, value, dtype=dtype) for value in values])

    def get_config(self):
        return {"value": self.value}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(Config):
    """Layers of LSTM, GRU or SimpleRNN.

    Attributes:
        benchmark: Row of `recurrent_settings`, set by the recipe. It, `T`, `cell` and `size` set
            the fields of that row, unless they are given too.
        cell: `"lstm"`, `"gru"` (with the reset gate after the product) or `"rnn"`.
        size: `"table3"`, the published hidden size (of the LSTM only), or `"equal"`, the one that
            gives the net the published number of parameters.
        layers: Number of recurrent layers.
        hidden_units: Units of each.
        dropout: Rate of dropped outputs of each layer, each by itself.
        forget_bias: Initial bias of an LSTM's forget gate; 1 for the other cells, which have none.
        **: Those of `Config`.
    """

    POSITIVE: ClassVar[tuple] = ("layers", "hidden_units")
    RATES: ClassVar[tuple] = ("dropout",)
    BENCHMARK: ClassVar[tuple] = ("benchmark", "cell")

    benchmark: str
    cell: str
    size: str
    layers: int
    hidden_units: int
    # 8 to 13 times slower with XLA on a CPU: `python -m benchmarks run xla_lstm_adding`.
    jit_compile: bool | None = None
    dropout: float = 0.0
    forget_bias: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_choice("benchmark", self.benchmark, BENCHMARKS)
        check_choice("cell", self.cell, CELLS)
        _check_size(self.size)
        if self.cell != "lstm" and self.forget_bias != 1.0:
            raise ValueError(
                f"Only an LSTM has a forget gate. Received: forget_bias={self.forget_bias}, "
                f"cell={self.cell!r}"
            )

    def settings(self, fields):
        chosen = {**vars(self), **fields}
        names = ("benchmark", "cell", "size", "T")
        if not any(name in fields and fields[name] != vars(self)[name] for name in names):
            return super().settings(fields)
        for name, choices in (("benchmark", BENCHMARKS), ("cell", CELLS)):
            check_choice(name, chosen[name], choices)
        _check_size(chosen["size"])
        row = recurrent_settings.fields(
            chosen["benchmark"], chosen["cell"], chosen["size"], chosen.get("T")
        )
        return {**super().settings(fields), **row}

    def summary(self):
        layers = "layer" if self.layers == 1 else "layers"
        return f"{self.layers} {layers} of {self.hidden_units} {self.cell.upper()} units"

    def recurrent_parameters(self, channels):
        """Returns the number of parameters of the layers above `channels` inputs."""
        blocks, biases = {"lstm": (4, 1), "gru": (3, 2), "rnn": (1, 1)}[self.cell]
        units = self.hidden_units
        widths = [channels] + [units] * (self.layers - 1)
        return sum(blocks * units * (width + units + biases) for width in widths)

    def recurrent_layers(self, return_sequences):
        """Returns the layers as a `StackedRNN` that returns all steps or the last one."""
        layers = []
        for i in range(self.layers):
            dropout = keras.layers.Dropout(self.dropout, seed=self.sub_seed(100 + i))
            layers += [self._layer(i), dropout]
        return StackedRNN(layers, return_sequences=return_sequences, name="recurrent")

    def _layer(self, i):
        options = {
            "return_sequences": True,
            "return_state": True,
            "kernel_initializer": keras.initializers.GlorotUniform(self.sub_seed(200 + i)),
            "recurrent_initializer": keras.initializers.Orthogonal(seed=self.sub_seed(300 + i)),
            "name": f"{self.cell}_{i + 1}",
        }
        if self.cell == "gru":
            return keras.layers.GRU(self.hidden_units, reset_after=True, **options)
        if self.cell == "rnn":
            return keras.layers.SimpleRNN(self.hidden_units, **options)
        return keras.layers.LSTM(
            self.hidden_units,
            unit_forget_bias=False,
            bias_initializer=ForgetBias(self.forget_bias),
            **options,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentSequenceModel(RecurrentConfig, SequenceConfig):
    """Everything that makes a recurrent net on whole sequences and its optimizer.

    Attributes:
        T: Of adding and copy memory, as in `TCNAdding` and `TCNCopyMemory`. A T that is not in
            Table 3 has the settings of the next larger one there, or of the largest.
        **: Those of `RecurrentConfig`, `SequenceConfig` and `Config`.
    """

    POSITIVE: ClassVar[tuple] = (*SequenceConfig.POSITIVE, *RecurrentConfig.POSITIVE, "T")
    RATES: ClassVar[tuple] = (*SequenceConfig.RATES, *RecurrentConfig.RATES)
    BENCHMARK: ClassVar[tuple] = (*RecurrentConfig.BENCHMARK, "T")

    T: int | None = None

    @property
    def task(self):
        return BENCHMARKS[self.benchmark].task

    def data_options(self):
        return {} if self.T is None else {"T": self.T}

    def parameters(self):
        """Returns the number of parameters."""
        head = (self.hidden_units + 1) * self.task.outputs
        return self.recurrent_parameters(self.channels) + head

    def backbone(self):
        return self.recurrent_layers(return_sequences=self.task.per_step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentLanguageModel(RecurrentConfig, LanguageConfig):
    """Everything that makes a recurrent language model and its optimizer.

    It reads overlapping segments as the TCN does, and not one after the other with its state.

    Attributes:
        tie_embeddings: Whether the output matrix is the embedding's, which must then be as wide
            as a layer.
        **: Those of `RecurrentConfig`, `LanguageConfig` and `Config`.
    """

    POSITIVE: ClassVar[tuple] = (*LanguageConfig.POSITIVE, *RecurrentConfig.POSITIVE)
    RATES: ClassVar[tuple] = (*LanguageConfig.RATES, *RecurrentConfig.RATES)
    BENCHMARK: ClassVar[tuple] = (*LanguageConfig.BENCHMARK, *RecurrentConfig.BENCHMARK)

    tie_embeddings: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.tie_embeddings and self.embedding_dim != self.hidden_units:
            raise ValueError(
                "With `tie_embeddings` the output matrix is the embedding's: `embedding_dim` must "
                f"be `hidden_units`. Received: {self.embedding_dim} and {self.hidden_units}"
            )

    def settings(self, fields):
        """As in `RecurrentConfig`; a tied embedding follows the layers' width."""
        found = super().settings(fields)
        chosen = {**vars(self), **found, **fields}
        if chosen["tie_embeddings"]:
            found["embedding_dim"] = chosen["hidden_units"]
        return found

    def summary(self):
        return super().summary() + self.clusters()

    def parameters(self):
        """Returns the number of parameters that the model has with a full softmax."""
        widths = self.embedding_dim + 1 + (0 if self.tie_embeddings else self.hidden_units)
        return self.recurrent_parameters(self.embedding_dim) + widths * self.vocabulary_size

    def backbone(self):
        return self.recurrent_layers(return_sequences=True)

    def head(self):
        if self.cutoffs or self.tie_embeddings:
            return super().head()
        kernel = keras.initializers.RandomUniform(-0.1, 0.1, seed=self.sub_seed(5))
        return DenseHead(self.vocabulary_size, kernel_initializer=kernel, name="head")


def _check_size(size):
    if size not in SIZES:
        raise ValueError(
            f"`size` must be one of {sorted(SIZES)}. Received: {size!r}. (Sizes such as 10m are "
            "the LRU paper's, whose models are lstm_char_ptb_lru, gru_char_ptb_lru, "
            "lstm_text8_lru, gru_text8_lru and others.)"
        )
