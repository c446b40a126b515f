"""TrellisNet's published models (Bai et al. 2019, Table 5)."""

import dataclasses
from typing import ClassVar

import keras

from trellis_keras.layers import MixtureOfSoftmaxes, TrellisLayer
from trellis_keras.layers.trellis import MEMORIES
from trellis_keras.zoo.config import check_choice, check_field
from trellis_keras.zoo.language import LanguageConfig
from trellis_keras.zoo.recipe import Recipe
from trellis_keras.zoo.registry import register
from trellis_keras.zoo.training import TextTraining

HISTORIES = ("chop", "repackage")
LEAST_AUX_EVERY = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrellisLanguageModel(LanguageConfig):
    """Everything that makes a TrellisNet language model and its optimizer.

    The output matrix is the embedding's, also with an adaptive softmax (`cutoffs`), which then has
    full-width tails as the authors' split loss has.

    Attributes:
        hidden_units: Hidden channels beside the output channels.
        output_units: Output channels. None: as many as the embedding has.
        experts: Number of softmaxes of a mixture (see `layers.MixtureOfSoftmaxes`), with which
            `output_units` may be any. None: a single softmax.
        latent_dropout: Variational dropout rate of the mixture's latent vectors.
        depth: Number of levels.
        kernel_size: Taps of the convolutions.
        history: `"chop"` (segments overlap) or `"repackage"` (the state is carried over).
        aux_every: Auxiliary losses are taken every so many levels. None: no auxiliary losses.
        aux_weight: Their weight.
        hidden_dropout: Variational dropout rate of h in the convolution.
        weight_dropout: DropConnect rate of the past taps.
        weight_norm: Whether the kernels are weight-normed.
        initial_stddev: Standard deviation of the initial kernels and biases.
        injection_every: x enters every so many levels.
        groups: Number of equally wide groups of channels of a mixed-group kernel (Eq. 5). None: the
            kernels are dense.
        memory: `"fast"`, or `"lean"` for a slower step that takes less memory (see
            `layers.TrellisLayer`).
        **: Those of `LanguageConfig` and `Config`.
    """

    POSITIVE: ClassVar[tuple] = (
        *LanguageConfig.POSITIVE,
        "hidden_units",
        "output_units",
        "experts",
        "depth",
        "kernel_size",
        "injection_every",
        "groups",
    )
    NOT_NEGATIVE: ClassVar[tuple] = (
        *LanguageConfig.NOT_NEGATIVE,
        "aux_weight",
        "initial_stddev",
    )
    COMPUTES: ClassVar[tuple] = ("depth", "injection_every", "groups")
    RATES: ClassVar[tuple] = (
        *LanguageConfig.RATES,
        "hidden_dropout",
        "weight_dropout",
        "latent_dropout",
    )

    hidden_units: int
    output_units: int | None = None
    experts: int | None = None
    latent_dropout: float = 0.0
    depth: int
    kernel_size: int = 2
    history: str
    aux_every: int | None = None
    aux_weight: float = 0.0
    hidden_dropout: float = 0.0
    weight_dropout: float = 0.0
    weight_norm: bool = False
    initial_stddev: float = 0.01
    injection_every: int = 1
    groups: int | None = None
    memory: str | None = "fast"

    def __post_init__(self):
        super().__post_init__()
        check_choice("history", self.history, HISTORIES)
        if self.memory is not None:
            check_choice("memory", self.memory, MEMORIES)
        check_field(
            self,
            "aux_every",
            lambda value: 1 <= value <= self.depth,
            f"at least 1 and at most `depth`, {self.depth}",
        )
        check_field(
            self,
            "output_units",
            lambda value: self.experts or value == self.embedding_dim,
            f"`embedding_dim`, {self.embedding_dim}, because the output matrix is the embedding's",
        )
        check_field(
            self,
            "latent_dropout",
            lambda value: self.experts or value == 0,
            "0 without a mixture of softmaxes (`experts`)",
        )
        check_field(
            self,
            "cutoffs",
            lambda value: not (self.experts and value),
            f"() with a mixture of softmaxes (`experts`, {self.experts})",
        )
        units = self.derived()["units"]
        check_field(
            self,
            "groups",
            lambda value: units % value == 0,
            f"a divisor of the {units} hidden and output units",
        )

    @property
    def reading(self):
        return self.history

    @property
    def default_segment(self):
        return self.depth

    @property
    def default_horizon(self):
        return self.depth * max(self.kernel_size - 1, 1)

    def replace(self, **fields):
        """As in `Config`; one field of the auxiliary losses without the other is refused."""
        new = super().replace(**fields)
        given = [fields[name] for name in ("aux_every", "aux_weight") if name in fields]
        if len(given) == 1 and given[0] and not new._has_aux:
            raise ValueError(
                "Auxiliary losses need both `aux_every` and a positive `aux_weight`. Received: "
                f"aux_every={new.aux_every}, aux_weight={new.aux_weight:g}"
            )
        return new

    def settings(self, fields):
        """A changed depth brings a fitting aux_every.

        The auxiliary losses of a shallower net are taken at its middle, or left out where that
        would be below level 4.
        """
        follows = super().settings(fields)
        if "depth" not in fields or self.aux_every is None:
            return follows
        fitting = min(self.aux_every, fields["depth"] // 2)
        return {**follows, "aux_every": fitting if fitting >= LEAST_AUX_EVERY else None}

    def derived(self):
        """Returns what follows from the fields."""
        output_units = self.output_units or self.embedding_dim
        return {"output_units": output_units, "units": self.hidden_units + output_units}

    def summary(self):
        auxiliary = f", auxiliary losses every {self.aux_every} levels" if self._has_aux else ""
        units = self.derived()["output_units"]
        mixture = f", {self.experts} softmaxes" if self.experts else ""
        return (
            f"{self.depth} levels, {self.hidden_units} hidden + {units} output units"
            f"{mixture}{self.clusters()}{auxiliary}{self._structure()}"
        )

    def _structure(self):
        """Says how many weights a mixed-group kernel has: a model's count has its zeros too."""
        if self.groups is None:
            return ""
        weights = kernel_weights(
            self.embedding_dim, self.derived()["units"], self.kernel_size, self.groups
        )
        return f", kernels in {self.groups} groups ({weights:,} weights, all others are zero)"

    @property
    def _has_aux(self):
        return self.aux_every is not None and self.aux_weight > 0

    def backbone(self):
        groups = {}
        if self.groups is not None:
            width = self.derived()["units"] // self.groups
            groups = {"kernel_structure": "mixed_group", "groups": [width] * self.groups}
        return TrellisLayer(
            **self.derived(),
            **groups,
            depth=self.depth,
            kernel_size=self.kernel_size,
            injection_every=self.injection_every,
            memory=self.memory,
            weight_norm=self.weight_norm,
            dropout=self.hidden_dropout,
            weight_dropout=self.weight_dropout,
            aux_every=self.aux_every if self._has_aux else None,
            return_aux=self._has_aux,
            stateful=self.history == "repackage",
            seed=self.sub_seed(10),
            name="trellis",
            **self._initializers(),
        )

    def extras(self):
        return {**super().extras(), "aux_weight": self.aux_weight if self._has_aux else 0.0}

    def head(self):
        if self.experts is None:
            return super().head()
        # The authors' biases begin as their kernels do.
        bound = self.derived()["output_units"] ** -0.5
        return MixtureOfSoftmaxes(
            self.vocabulary_size,
            self.experts,
            latent_dropout=self.latent_dropout,
            expert_bias_initializer=keras.initializers.RandomUniform(-bound, bound),
            seed=self.sub_seed(30),
            name="head",
        )

    def _initializers(self):
        names = ("kernel_initializer", "recurrent_initializer", "bias_initializer")
        return {
            name: keras.initializers.RandomNormal(
                stddev=self.initial_stddev, seed=self.sub_seed(20 + i)
            )
            for i, name in enumerate(names)
        }


def kernel_weights(channels, units, kernel_size, groups=None):
    """Returns the number of weights of the kernels of a TrellisNet with an LSTM's gates.

    Args:
        channels: Of x.
        units: Of h.
        kernel_size: Taps.
        groups: Number of equally wide groups of a mixed-group kernel. None: a dense one.
    """
    if groups is None:
        return 4 * units * kernel_size * (channels + units)
    width = units // groups
    # Past taps connect each group with itself, the current one x and each with the next.
    return 4 * width * (channels + width * (groups * kernel_size - 1))


@register(
    Recipe(
        "trellisnet_char_ptb",
        TrellisLanguageModel(
            vocabulary_size=50,
            embedding_dim=200,
            hidden_units=1000,
            depth=125,
            history="repackage",
            aux_every=70,
            aux_weight=0.3,
            input_dropout=0.1,
            hidden_dropout=0.3,
            output_dropout=0.1,
            weight_dropout=0.25,
            weight_norm=True,
            optimizer="adam",
            learning_rate=2e-3,
            clip_norm=0.2,
            l2=1e-6,
            metric="bpc",
        ),
        TextTraining(
            data="char_ptb",
            published=1.158,
            source="TrellisNet Table 3",
            batch_size=24,
            epochs=400,
            decay_rule="steps",
            decay_factor=0.1,
            decay_epochs=(220, 350),
        ),
    )
)
def trellisnet_char_ptb(config, vocabulary):
    """TrellisNet on character-level Penn Treebank: 13.5M parameters (published 1.158 bits).

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        **: The fields of `TrellisLanguageModel`.

    Returns:
        A compiled `LanguageModel`.
    """
    return config.build(vocabulary)


@register(
    Recipe(
        "trellisnet_char",
        TrellisLanguageModel(
            vocabulary_size=96,
            embedding_dim=64,
            hidden_units=96,
            depth=10,
            history="chop",
            initial_stddev=0.07,
            initial_embedding=1.0,
            optimizer="adam",
            learning_rate=8e-3,
            clip_norm=1.0,
            metric="bpc",
        ),
        TextTraining(
            data="pydoc",
            batch_size=32,
            segment=74,
            epochs=4,
            decay_rule="steps",
            decay_factor=0.5,
            decay_epochs=(2, 3),
        ),
    )
)
def trellisnet_char(config, vocabulary):
    """A small TrellisNet for the characters of any text; trains in minutes on two cores.

    Not a published model: its initial weights are livelier than the paper's, so that it gets
    somewhere within an epoch.

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        **: The fields of `TrellisLanguageModel`.

    Returns:
        A compiled `LanguageModel`.
    """
    return config.build(vocabulary)
