"""What the TCN paper has published of its nets (Bai et al. 2018, Tables 1 and 5)."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The figures of a data set, in `metric`.

    Attributes:
        metric: What they are.
        kernel_size, depth: Taps and blocks of the net of Table 2.
        relu: Its filters, and its figure in Table 1.
        glu: Likewise of the gated net of Table 5, which is as large: the paper does not name its
            filters, and these make it so. None: there is no such net.
        options: The options of the data set that belong to the figures.
    """

    metric: str
    kernel_size: int
    depth: int
    relu: tuple[int, float]
    glu: tuple[int, float] | None = None
    options: dict = dataclasses.field(default_factory=dict)

    def of(self, config):
        """Returns {"published", "source"} of a net; an empty dict if it is none of the two."""
        net = (config.metric, config.kernel_size, config.depth, config.data_options())
        if net != (self.metric, self.kernel_size, self.depth, self.options):
            return {}
        row = {"relu": self.relu, "glu": self.glu}[config.activation]
        if row is None or row[0] != config.filters:
            return {}
        table = {"relu": 1, "glu": 5}[config.activation]
        given = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return {"published": row[1], "source": f"TCN Table {table}{given and f' ({given})'}"}


_PIXELS = {"metric": "accuracy", "kernel_size": 7, "depth": 8}

RESULTS = {
    "adding": Result(
        metric="mse", kernel_size=8, depth=8, relu=(24, 5.8e-5), glu=(17, 5.6e-5),
        options={"T": 600},
    ),
    "copy_memory": Result(
        metric="cross_entropy", kernel_size=8, depth=8, relu=(10, 3.5e-5), glu=(7, 0.00508),
        options={"T": 1000},
    ),
    "seq_mnist": Result(**_PIXELS, relu=(25, 0.990), glu=(18, 0.990)),
    "permuted_mnist": Result(**_PIXELS, relu=(25, 0.972), glu=(18, 0.969)),
    "jsb": Result(
        metric="frame_nll", kernel_size=3, depth=2, relu=(150, 8.10), glu=(104, 8.13)
    ),
    "nottingham": Result(
        metric="frame_nll", kernel_size=6, depth=4, relu=(150, 3.07), glu=(105, 3.12)
    ),
    "ptb": Result(
        metric="perplexity", kernel_size=3, depth=4, relu=(600, 88.68), glu=(345, 87.94)
    ),
    "wt103": Result(metric="perplexity", kernel_size=3, depth=5, relu=(1000, 45.19)),
    "lambada": Result(metric="perplexity", kernel_size=4, depth=5, relu=(500, 1279.0)),
    "char_ptb": Result(metric="bpc", kernel_size=3, depth=3, relu=(450, 1.31), glu=(309, 1.306)),
    "text8": Result(metric="bpc", kernel_size=2, depth=5, relu=(520, 1.45), glu=(364, 1.485)),
}  # fmt: skip


class PublishedNet:
    """The part of a TCN's configuration that says what is published of it."""

    def has_result_of(self, other):
        """As in `Config`; the figures with gates are those of one size."""
        gated = "glu" in (self.activation, other.activation)
        same_size = all(
            getattr(self, name) == getattr(other, name)
            for name in ("kernel_size", "depth", "filters")
        )
        return super().has_result_of(other) and (same_size or not gated)

    def published_on(self, data, data_options):
        """As in `Config`."""
        found = RESULTS[data].of(self) if data in RESULTS and not data_options else {}
        return super().published_on(data, data_options) | found
