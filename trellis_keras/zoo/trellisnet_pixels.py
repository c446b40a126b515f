"""TrellisNet on images read pixel by pixel (Bai et al. 2019, Tables 4 and 5)."""

import dataclasses
from typing import ClassVar

from trellis_keras.layers import TrellisLayer
from trellis_keras.zoo import tasks
from trellis_keras.zoo.config import check_choice
from trellis_keras.zoo.recipe import Recipe
from trellis_keras.zoo.registry import register
from trellis_keras.zoo.tasks import SequenceConfig
from trellis_keras.zoo.training import SequenceTraining

HIDDEN_UNITS = {"140k": 120, "8m": 990}
# The program's: levels enough to see an image of 1,024 pixels.
DILATIONS = (1, *(2**i for i in range(10)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrellisPixels(SequenceConfig):
    """Everything that makes a TrellisNet on pixels and its optimizer.

    Attributes:
        size: `"140k"` (120 + 10 units, the authors' program's) or `"8m"` (990 + 10, the published
            size); it sets `hidden_units`, unless they are given too.
        hidden_units: Hidden channels beside the output channels.
        output_units: Output channels.
        kernel_size: Taps of the convolutions.
        dilations: Dilation of each level.
        hidden_dropout: Variational dropout rate of h in the convolution.
        weight_dropout: DropConnect rate of the past taps.
        weight_norm: Whether the kernels are weight-normed.
        **: Those of `SequenceConfig` and `Config`.
    """

    task: ClassVar = tasks.PIXELS
    POSITIVE: ClassVar[tuple] = (
        *SequenceConfig.POSITIVE,
        "hidden_units",
        "output_units",
        "kernel_size",
    )
    COMPUTES: ClassVar[tuple] = ("dilations",)
    RATES: ClassVar[tuple] = (*SequenceConfig.RATES, "hidden_dropout", "weight_dropout")

    size: str = "140k"
    hidden_units: int = HIDDEN_UNITS["140k"]
    output_units: int = 10
    kernel_size: int = 2
    dilations: tuple[int, ...] = DILATIONS
    hidden_dropout: float = 0.0
    weight_dropout: float = 0.0
    weight_norm: bool = True

    def __post_init__(self):
        super().__post_init__()
        check_choice("size", self.size, HIDDEN_UNITS)
        if not self.dilations or min(self.dilations) < 1:
            raise ValueError(
                f"`dilations` must be numbers of 1 or more. Received: {self.dilations}"
            )

    def settings(self, fields):
        if fields.get("size", self.size) == self.size:
            return {}
        check_choice("size", fields["size"], HIDDEN_UNITS)
        return {"hidden_units": HIDDEN_UNITS[fields["size"]]}

    def derived(self):
        return {
            "units": self.hidden_units + self.output_units,
            "depth": len(self.dilations),
            "receptive_field": 1 + (self.kernel_size - 1) * sum(self.dilations),
        }

    def summary(self):
        return (
            f"{len(self.dilations)} levels, {self.hidden_units} hidden + {self.output_units} "
            f"output units, sees {self.derived()['receptive_field']:,} pixels"
        )

    def backbone(self):
        return TrellisLayer(
            self.derived()["units"],
            self.derived()["depth"],
            output_units=self.output_units,
            kernel_size=self.kernel_size,
            dilation_rate=list(self.dilations),
            weight_norm=self.weight_norm,
            dropout=self.hidden_dropout,
            weight_dropout=self.weight_dropout,
            return_sequences=False,
            seed=self.sub_seed(10),
            name="trellis",
        )


def _pixels(name, data, channels, published):
    return Recipe(
        name,
        TrellisPixels(
            channels=channels,
            input_dropout=0.2,
            hidden_dropout=0.2,
            output_dropout=0.2,
            weight_dropout=0.1,
            optimizer="adam",
            learning_rate=2e-3,
            clip_norm=0.5,
            l2=1e-6,
        ),
        SequenceTraining(
            data=data,
            published=published,
            source="TrellisNet Table 4",
            batch_size=64,
            epochs=200,
            decay_rule="steps",
            decay_factor=0.1,
            decay_epochs=(50, 75, 90),
        ),
    )


@register(_pixels("trellisnet_seq_mnist", "seq_mnist", 1, 0.9920))
def trellisnet_seq_mnist(config):
    """TrellisNet on sequential MNIST (TrellisNet, Tables 4 and 5): published accuracy 99.20 %.

    Parameters: 137,910 with the authors' program's 120 + 10 units and 11 dilated levels, which
    are taken here; 8,020,110 with `size="8m"`. Published: 8M. The paper contradicts itself: its
    Table 5 has hidden size 100 and 16 levels without dilations, which make 0.1M parameters and
    see 17 pixels; "8M" takes 1000 units in all. Batch size, epochs and decay are the program's.

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        **: The fields of `TrellisPixels`.

    Returns:
        A compiled `SequenceClassifier`.
    """
    return config.build()


@register(_pixels("trellisnet_permuted_mnist", "permuted_mnist", 1, 0.9813))
def trellisnet_permuted_mnist(config):
    """TrellisNet on permuted MNIST (TrellisNet, Tables 4 and 5): published accuracy 98.13 %.

    Parameters: 137,910, or 8,020,110 with `size="8m"` (published: 8M), see
    `trellisnet_seq_mnist`. The paper's permutation is not published, see `data.pixel_permutation`.

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        **: The fields of `TrellisPixels`.

    Returns:
        A compiled `SequenceClassifier`.
    """
    return config.build()


@register(_pixels("trellisnet_seq_cifar10", "seq_cifar10", 3, 0.7342))
def trellisnet_seq_cifar10(config):
    """TrellisNet on sequential CIFAR-10 (TrellisNet, Tables 4 and 5): published accuracy 73.42 %.

    Parameters: 139,990, or 8,036,110 with `size="8m"` (published: 8M), see
    `trellisnet_seq_mnist`.

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        **: The fields of `TrellisPixels`.

    Returns:
        A compiled `SequenceClassifier`.
    """
    return config.build()
