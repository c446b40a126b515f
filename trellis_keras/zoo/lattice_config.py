"""Configurations of the LRU paper's language models: LRU, LSTM, GRU, Grid-LSTM and RHN."""

import dataclasses
from typing import ClassVar

import keras

from trellis_keras.layers import LRU, GridLSTMCell, RHNCell
from trellis_keras.layers.heads import DenseHead
from trellis_keras.layers.rnn import GateInitializer, StackedRNN
from trellis_keras.zoo import lattice_settings
from trellis_keras.zoo.config import check_choice
from trellis_keras.zoo.language import TextConfig
from trellis_keras.zoo.lattice_settings import SIZES, TOLERANCE

CONVENTIONS = ("paper", "authors")
# Parameters of one LRU: so many times H^2, and H.
_LRU_PARAMETERS = {"ug": (12, 6), "rg": (10, 5), "ps": (8, 4)}
_LRU_NAMES = {"ug": "LRU", "rg": "RG-LRU", "ps": "PS-LRU"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitLanguageModel(TextConfig):
    """A language model of the LRU paper, of one kind of recurrent unit; a subclass says which.

    Embedding, recurrent layers and output layer are equally wide and share no weights. The states
    are carried from batch to batch.

    Attributes:
        size: `"10m"` or `"24m"` parameters, the paper's, or `"1m"`.
        hidden_units: Number of units. None: what gives the size within 1 % for the vocabulary.
        **: Those of `TextConfig` and `Config`.
    """

    POSITIVE: ClassVar[tuple] = (*TextConfig.POSITIVE, "hidden_units")
    BENCHMARK: ClassVar[tuple] = (*TextConfig.BENCHMARK, "size", "hidden_units")

    size: str = "10m"
    hidden_units: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_choice("size", self.size, SIZES)
        _ = self.units  # there is such a number

    # What a subclass says

    @property
    def unit(self):
        """The unit's name in Table 1."""
        raise NotImplementedError

    @property
    def unit_parameters(self):
        """(a, b) of the a * units^2 + b * units parameters of all recurrent layers."""
        raise NotImplementedError

    @property
    def is_the_papers(self):
        """Whether the subclass' own fields are such as the paper has."""
        raise NotImplementedError

    # What follows

    @property
    def units(self):
        """Number of units, as given or as solved."""
        if self.hidden_units is not None:
            return self.hidden_units
        return lattice_settings.solved_units(*self.unit_parameters, self.vocabulary_size, self.size)

    @property
    def embedding_dim(self):
        return self.units

    @property
    def reading(self):
        return "repackage"

    def parameters(self):
        """Returns the number of parameters."""
        return lattice_settings.parameters(*self.unit_parameters, self.units, self.vocabulary_size)

    def published_on(self, data, data_options):
        off = abs(self.parameters() / SIZES[self.size] - 1)
        theirs = self.is_the_papers and self.metric == "cross_entropy" and off <= TOLERANCE
        row = lattice_settings.result(self.unit, self.size, data, data_options) if theirs else None
        if row is None:
            return super().published_on(data, data_options)
        epochs, loss = row
        return {"published": loss, "published_epochs": epochs, "source": "LRU Table 1"}

    def derived(self):
        return {"units": self.units, "parameters": self.parameters()}

    def extras(self):
        kernel = keras.initializers.GlorotUniform(self.sub_seed(5))
        head = DenseHead(self.vocabulary_size, kernel_initializer=kernel, name="head")
        return {"head": head, "tie_embeddings": False}

    def make_embeddings_initializer(self):
        return keras.initializers.RandomNormal(stddev=1.0, seed=self.seed)  # the authors' program's

    def _glorot(self, layer, gates):
        """Initializers of one of Keras' layers: every gate by itself, as in the LRU."""
        return {
            f"{name}_initializer": GateInitializer(
                keras.initializers.GlorotUniform(self.sub_seed(100 * i + layer)),
                gates,
                fan_in=2 * self.units,
            )
            for i, name in enumerate(("kernel", "recurrent"), start=2)
        }


_STEPS = {"return_sequences": True, "return_state": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayeredLanguageModel(UnitLanguageModel):
    """One whose recurrent layers lie above each other.

    Attributes:
        layers: Number of layers. The paper has 2 or 4 and does not say where.
        **: Those of `UnitLanguageModel`, `TextConfig` and `Config`.
    """

    POSITIVE: ClassVar[tuple] = (*UnitLanguageModel.POSITIVE, "layers")
    BENCHMARK: ClassVar[tuple] = (*UnitLanguageModel.BENCHMARK, "layers")

    layers: int = 2

    @property
    def is_the_papers(self):
        return self.layers in (2, 4)

    def summary(self):
        layers = "layer" if self.layers == 1 else "layers"
        return f"{self.layers} {layers} of {self.units} {self.unit} units"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LRULanguageModel(LayeredLanguageModel):
    """A language model of Lattice Recurrent Units.

    Attributes:
        variant: `"ug"` (the full LRU), `"rg"` or `"ps"`, see `layers.LRUCell`.
        convention: `"paper"` or `"authors"`: which way round the update gate of `"rg"` and
            `"ps"` works. Of `"ug"` paper and program agree.
        **: Those of `LayeredLanguageModel`, `UnitLanguageModel`, `TextConfig` and `Config`.
    """

    BENCHMARK: ClassVar[tuple] = (*LayeredLanguageModel.BENCHMARK, "variant")
    COMPUTES: ClassVar[tuple] = ("convention",)

    variant: str = "ug"
    convention: str = "paper"

    def __post_init__(self):
        check_choice("variant", self.variant, _LRU_NAMES)
        check_choice("convention", self.convention, CONVENTIONS)
        super().__post_init__()

    @property
    def unit(self):
        return _LRU_NAMES[self.variant]

    @property
    def unit_parameters(self):
        return tuple(self.layers * n for n in _LRU_PARAMETERS[self.variant])

    def backbone(self):
        return LRU(
            self.units,
            depth=self.layers,
            variant=self.variant,
            convention=self.convention,
            return_sequences=True,
            stateful=True,
            seed=self.sub_seed(10),
            name="lru",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LSTMLanguageModel(LayeredLanguageModel):
    """A language model of Keras' LSTM, whose forget gates begin with the bias 1.

    Attributes:
        **: Those of `LayeredLanguageModel`, `UnitLanguageModel`, `TextConfig` and `Config`.
    """

    unit = "LSTM"
    jit_compile: bool | None = None

    @property
    def unit_parameters(self):
        return 8 * self.layers, 4 * self.layers

    def backbone(self):
        return StackedRNN(
            [
                keras.layers.LSTM(self.units, **_STEPS, **self._glorot(i, 4), name=f"lstm_{i + 1}")
                for i in range(self.layers)
            ],
            stateful=True,
            name="recurrent",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRULanguageModel(LayeredLanguageModel):
    """A language model of Keras' GRU, with the reset gate after the product.

    The paper's Eq. 3 has it before; what was trained is PyTorch's (footnote 6), with it after.

    Attributes:
        **: Those of `LayeredLanguageModel`, `UnitLanguageModel`, `TextConfig` and `Config`.
    """

    unit = "GRU"
    jit_compile: bool | None = None

    @property
    def unit_parameters(self):
        return 6 * self.layers, 6 * self.layers

    def backbone(self):
        return StackedRNN(
            [
                keras.layers.GRU(
                    self.units,
                    reset_after=True,
                    **_STEPS,
                    **self._glorot(i, 3),
                    name=f"gru_{i + 1}",
                )
                for i in range(self.layers)
            ],
            stateful=True,
            name="recurrent",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridLSTMLanguageModel(LayeredLanguageModel):
    """A language model of a two-dimensional Grid-LSTM, see `layers.GridLSTMCell`.

    Attributes:
        convention: `"paper"` (both LSTMs of a node read the old states) or `"authors"` (the one
            of time reads what that of depth has just written).
        share_depth_weights: Whether the layers have the same weights (the paper's footnote 3), or
            each its own (the authors' program, for which nothing is published).
        **: Those of `LayeredLanguageModel`, `UnitLanguageModel`, `TextConfig` and `Config`.
    """

    BENCHMARK: ClassVar[tuple] = (*LayeredLanguageModel.BENCHMARK, "share_depth_weights")
    COMPUTES: ClassVar[tuple] = ("convention",)
    unit = "Grid-LSTM"

    convention: str = "paper"
    share_depth_weights: bool = True

    def __post_init__(self):
        check_choice("convention", self.convention, CONVENTIONS)
        super().__post_init__()

    @property
    def unit_parameters(self):
        layers = 1 if self.share_depth_weights else self.layers
        return 16 * layers, 8 * layers

    @property
    def is_the_papers(self):
        return super().is_the_papers and self.share_depth_weights

    def summary(self):
        return super().summary() + (", coupled across depth" if self.share_depth_weights else "")

    def backbone(self):
        cell = GridLSTMCell(
            self.units,
            depth=self.layers,
            update="parallel" if self.convention == "paper" else "sequential",
            share_depth_weights=self.share_depth_weights,
            seed=self.sub_seed(10),
            name="grid_lstm",
        )
        return StackedRNN([keras.layers.RNN(cell, **_STEPS)], stateful=True, name="recurrent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RHNLanguageModel(UnitLanguageModel):
    """A language model of a Recurrent Highway Network of one layer, see `layers.RHNCell`.

    Attributes:
        transition_depth: Number of highway layers in a step.
        transform_bias: Initial bias of the transform gates. The paper names none, and its program
            has none that stands out; the authors of the RHN begin with -2 to -4.
        **: Those of `UnitLanguageModel`, `TextConfig` and `Config`.
    """

    POSITIVE: ClassVar[tuple] = (*UnitLanguageModel.POSITIVE, "transition_depth")
    BENCHMARK: ClassVar[tuple] = (*UnitLanguageModel.BENCHMARK, "transition_depth")
    unit = "RHN"

    transition_depth: int = 5
    transform_bias: float = 0.0

    @property
    def unit_parameters(self):
        return 2 * (self.transition_depth + 1), 2 * self.transition_depth

    @property
    def is_the_papers(self):
        return self.transition_depth == 5

    def summary(self):
        return f"{self.units} RHN units, transition depth {self.transition_depth}"

    def backbone(self):
        cell = RHNCell(
            self.units,
            self.transition_depth,
            transform_bias_initializer=keras.initializers.Constant(self.transform_bias),
            seed=self.sub_seed(10),
            name="rhn",
        )
        return StackedRNN([keras.layers.RNN(cell, **_STEPS)], stateful=True, name="recurrent")
