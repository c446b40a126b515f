"""TrellisNet's models (Bai et al. 2019): words, characters and pixels."""

from typing import Any

import keras

from trellis_keras.data import Vocabulary
from trellis_keras.layers import AdaptiveSoftmax, MixtureOfSoftmaxes, TrellisLayer
from trellis_keras.layers.heads import check_cutoffs
from trellis_keras.models import LanguageModel, SequenceClassifier
from trellis_keras.zoo.recipe import Training, check_choice
from trellis_keras.zoo.registry import register, sub_seed

__all__ = [
    "trellisnet_char",
    "trellisnet_char_ptb",
    "trellisnet_permuted_mnist",
    "trellisnet_ptb",
    "trellisnet_ptb_large",
    "trellisnet_ptb_mos",
    "trellisnet_ptb_mos_large",
    "trellisnet_seq_cifar10",
    "trellisnet_seq_mnist",
    "trellisnet_wt103",
]

# First words of the tails of the authors' adaptive softmax for WikiText-103.
WIKITEXT103_CUTOFFS = (2_800, 20_000, 76_000)

# Hidden channels of the published nets of words, whose kernels are dense.
_HIDDEN_UNITS = 1000
# The arguments of `trellisnet_ptb` that Table 6 changes, in the complete model ...
_COMPLETE: dict[str, Any] = {
    "hidden_dropout": 0.28,
    "weight_dropout": 0.5,
    "stateful": False,
    "injection_every": 1,
}
# ... and without one of its parts.
ABLATIONS: dict[str, dict[str, Any]] = {
    "no_hidden_dropout": {"hidden_dropout": 0.0},
    "no_weight_dropout": {"weight_dropout": 0.0},
    "no_auxiliary_losses": {"aux_weight": 0.0},
    "no_long_sequence_parallelism": {"stateful": True},
    # The paper does not say how many groups; its figures have two.
    "mixed_group_kernel": {"groups": 2},
    "injection_every_2": {"injection_every": 2},
    "injection_every_5": {"injection_every": 5},
    "injection_every_10": {"injection_every": 10},
    "injection_every_20": {"injection_every": 20},
}
# The lowest level of an auxiliary loss, unless `aux_every` is given.
_LOWEST_AUX_LEVEL = 4


# Language models


def _resolve(usual_depth=None, usual_every=None, usual_weight=0.0):
    """Returns the `resolve` of a language model.

    Args:
        usual_depth: Published depth.
        usual_every, usual_weight: `aux_every` and `aux_weight` at this depth.
    """

    def resolve(
        ablation,
        depth,
        kernel_size,
        embedding_dim,
        output_units,
        hidden_units,
        experts,
        latent_dropout,
        cutoffs,
        groups,
        aux_every,
        aux_weight,
        vocabulary_size,
        **_,
    ):
        if ablation is not None:
            check_choice("ablation", ablation, ABLATIONS)
        values = _COMPLETE | ABLATIONS.get(ablation, {})
        aux_weight = values.get("aux_weight") if aux_weight is None else aux_weight
        groups = values.get("groups") if groups is None else groups
        output_units = embedding_dim if output_units is None else output_units
        if hidden_units is None:
            hidden_units = _units_of_equal_size(embedding_dim, output_units, kernel_size, groups)
        units = hidden_units + output_units
        if groups is not None and units % groups:
            raise ValueError(
                f"`groups` must be a divisor of the {units} hidden and output units. "
                f"Received: {groups}"
            )
        if experts is None and (output_units != embedding_dim or latent_dropout):
            raise ValueError(
                "Without a mixture of softmaxes (`experts`), `output_units` must be "
                "`embedding_dim`, because the output matrix is the embedding's, and "
                f"`latent_dropout` must be 0. Received: output_units={output_units}, "
                f"embedding_dim={embedding_dim}, latent_dropout={latent_dropout}"
            )
        if experts is not None and cutoffs:
            raise ValueError("`cutoffs` must be () with a mixture of softmaxes (`experts`).")
        return {
            **values,
            "groups": groups,
            "output_units": output_units,
            "hidden_units": hidden_units,
            **resolve_cutoffs(cutoffs, vocabulary_size),
            **auxiliary_losses(depth, aux_every, aux_weight),
        }

    def auxiliary_losses(depth, aux_every, aux_weight):
        if aux_every is None and usual_every is not None and aux_weight != 0:
            # A shallow net has them at its middle.
            every = usual_every if depth >= usual_depth else min(usual_every, depth // 2)
            aux_every = every if every >= _LOWEST_AUX_LEVEL else None
        if aux_weight is None:
            aux_weight = usual_weight if aux_every else 0.0
        _check_auxiliary_losses(depth, aux_every, aux_weight)
        return {"aux_every": aux_every, "aux_weight": aux_weight}

    return resolve


def _check_auxiliary_losses(depth, aux_every, aux_weight):
    if (aux_every is None) != (aux_weight == 0):
        raise ValueError(
            "Auxiliary losses need both `aux_every` and a positive `aux_weight`. Received: "
            f"aux_every={aux_every}, aux_weight={aux_weight:g}"
        )
    if aux_every is not None and aux_every > depth:
        raise ValueError(f"`aux_every` must be at most `depth`, {depth}. Received: {aux_every}")


def _units_of_equal_size(embedding_dim, output_units, kernel_size, groups):
    """The hidden units with which mixed-group kernels are as large as the published dense ones."""
    units = _HIDDEN_UNITS + output_units
    if groups is None:
        return _HIDDEN_UNITS
    dense = kernel_weights(embedding_dim, units, kernel_size)

    def error(width):
        return abs(kernel_weights(embedding_dim, groups * width, kernel_size, groups) - dense)

    return groups * min(range(1, units + 1), key=error) - output_units


def kernel_weights(channels: int, units: int, kernel_size: int, groups: int | None = None) -> int:
    """Returns the number of weights of the kernels of a TrellisNet with an LSTM's gates.

    Args:
        channels: Positive integer, channels of x.
        units: Positive integer, channels of h.
        kernel_size: Positive integer, taps.
        groups: Number of equally wide groups of a mixed-group kernel. Defaults to None, dense.
    """
    if groups is None:
        return 4 * units * kernel_size * (channels + units)
    width = units // groups
    # Past taps connect each group with itself, the current one x and each with the next.
    return 4 * width * (channels + width * (groups * kernel_size - 1))


def resolve_cutoffs(cutoffs: tuple[int, ...] | None, vocabulary_size: int) -> dict[str, Any]:
    """Returns {"cutoffs"}: None stands for the published ones, as far as the vocabulary goes."""
    if cutoffs is None:
        cutoffs = tuple(first for first in WIKITEXT103_CUTOFFS if first < vocabulary_size)
    check_cutoffs(cutoffs, vocabulary_size)
    return {"cutoffs": cutoffs}


def _lengths(depth, kernel_size, stateful, sequence_length=0):
    """Returns fields of `Training`: how long a segment is, and how much of it is context.

    Overlapping segments have as much context as the net looks back, and at least as many tokens
    that are counted. Where the state is carried over, a segment is as long as the net is deep.
    """
    if stateful:
        return {"sequence_length": depth, "context_length": 0}
    context = depth * max(kernel_size - 1, 1)
    return {"sequence_length": max(sequence_length, 2 * context), "context_length": context}


def _train_ptb(clip_norm):
    return lambda depth, kernel_size, stateful, **_: Training(
        optimizer="sgd",
        learning_rate=20.0,
        clip_norm=clip_norm,
        l2=1e-6,
        batch_size=16,
        epochs=500,
        **_lengths(depth, kernel_size, stateful, sequence_length=110),
        schedule="best_before",
        decay_factor=0.25,
        decay_window=10,
        min_learning_rate=0.02,
    )


_PTB: dict[str, Any] = {"data": "ptb", "metric": "perplexity", "resolve": _resolve(55, 16, 0.05)}


@register(**_PTB, training=_train_ptb(clip_norm=0.225))
def trellisnet_ptb(
    ablation: str | None = None,
    depth: int = 55,
    hidden_units: int | None = None,
    output_units: int | None = None,
    embedding_dim: int = 400,
    kernel_size: int = 2,
    stateful: bool | None = None,
    injection_every: int | None = None,
    groups: int | None = None,
    weight_norm: bool = False,
    experts: int | None = None,
    cutoffs: tuple[int, ...] | None = (),
    aux_every: int | None = None,
    aux_weight: float | None = None,
    embedding_dropout: float = 0.1,
    input_dropout: float = 0.45,
    hidden_dropout: float | None = None,
    output_dropout: float = 0.45,
    latent_dropout: float = 0.0,
    weight_dropout: float | None = None,
    activation_reg: float = 2.0,
    temporal_activation_reg: float = 1.0,
    initial_stddev: float = 0.01,
    initial_embedding: float = 0.1,
    rematerialize: bool = False,
    vocabulary_size: int = 10_000,
    seed: int | None = 0,
    vocabulary: Vocabulary | None = None,
) -> LanguageModel:
    """TrellisNet on word-level Penn Treebank, 24.2M parameters (Bai et al. 2019, Tables 1 and 5).

    `ablation` takes out one part, as in the paper's Table 6. The mixed-group kernel then has more
    hidden units, so that the size stays (appendix D): two groups of 1231 channels, 24.17M
    parameters. (`count_params()` says 60.4M: the kernels are stored with their zeros.) The paper
    does not give the number of groups; `groups=3` has 965 channels a group, `groups=4` 820.

    Args:
        ablation: `"no_hidden_dropout"`, `"no_weight_dropout"`, `"no_auxiliary_losses"`,
            `"no_long_sequence_parallelism"` (the state is carried over, and segments are as long as
            the net is deep), `"mixed_group_kernel"`, or `"injection_every_2"`, `_5`, `_10` or
            `_20`. It sets the arguments in question unless they are given. Defaults to None, the
            complete model.
        depth: Positive integer, number of levels.
        hidden_units: Positive integer, hidden channels beside the output channels. Defaults to
            1000, or with `groups` to what gives the same size.
        output_units: Positive integer, output channels. Defaults to `embedding_dim`.
        embedding_dim: Positive integer, width of the embedding, whose matrix is the output's too.
        kernel_size: Positive integer, taps of the convolution.
        stateful: Whether the state is carried from batch to batch, instead of overlapping segments.
        injection_every: Positive integer, levels from one injection of the input to the next.
        groups: Number of groups of a mixed-group kernel. Defaults to None, a dense kernel.
        weight_norm: Whether the kernels are weight-normalized.
        experts: Number of softmaxes of a mixture. Defaults to None, a single softmax.
        cutoffs: First word of each tail of an adaptive softmax (see `layers.AdaptiveSoftmax`), for
            words numbered by falling frequency. `()` is a full softmax, None the clusters of the
            authors' code for WikiText-103, as far as the vocabulary goes.
        aux_every: Levels from one auxiliary loss to the next. Defaults to the published number, or
            half of a smaller `depth`.
        aux_weight: Weight of the auxiliary losses; 0 leaves them out.
        embedding_dropout: Rate of dropped words.
        input_dropout, hidden_dropout, output_dropout: Variational dropout rates of the input, of
            h in the convolution and of the output.
        latent_dropout: Variational dropout rate of the mixture's latent vectors.
        weight_dropout: DropConnect rate of the past taps.
        activation_reg, temporal_activation_reg: Weights of AR and TAR in the loss.
        initial_stddev: Standard deviation of the initial kernels and biases.
        initial_embedding: The initial embedding is uniform within plus or minus this.
        rematerialize: Whether the backward pass computes activations again, which saves memory.
        vocabulary_size: Positive integer, number of tokens. A run takes it from its data.
        seed: Seed of weights and dropouts. None: other weights each time.
        weights: None, `"pretrained"`, or path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        dtype_policy: Keras' dtype policy of all layers. Defaults to the global one.
        jit_compile: Whether XLA compiles the training step. None: what suits model and machine.

    Returns:
        A compiled `LanguageModel`.
    """
    # `register` has called `_resolve`, which replaces these defaults of None.
    assert hidden_units is not None and output_units is not None and injection_every is not None
    assert hidden_dropout is not None and weight_dropout is not None and aux_weight is not None
    units = hidden_units + output_units
    structure: dict[str, Any] = {}
    if groups is not None:
        structure = {"kernel_structure": "mixed_group", "groups": [units // groups] * groups}
    initializers = {
        f"{name}_initializer": keras.initializers.RandomNormal(
            stddev=initial_stddev, seed=sub_seed(seed, 20 + i)
        )
        for i, name in enumerate(("kernel", "recurrent", "bias"))
    }
    backbone = TrellisLayer(
        units,
        depth,
        output_units=output_units,
        kernel_size=kernel_size,
        injection_every=injection_every,
        weight_norm=weight_norm,
        dropout=hidden_dropout,
        weight_dropout=weight_dropout,
        aux_every=aux_every,
        return_aux=aux_every is not None,
        stateful=bool(stateful),
        rematerialize=rematerialize,
        **initializers,
        **structure,
        seed=sub_seed(seed, 10),
        name="trellis",
    )
    head = adaptive_softmax(vocabulary_size, cutoffs, seed)
    if experts is not None:
        head = MixtureOfSoftmaxes(
            vocabulary_size,
            experts,
            latent_dropout=latent_dropout,
            expert_bias_initializer=_uniform(output_units**-0.5),  # as the authors' kernels
            seed=sub_seed(seed, 30),
            name="head",
        )
    return LanguageModel(
        vocabulary_size,
        embedding_dim,
        backbone,
        head=head,
        embedding_dropout=embedding_dropout,
        input_dropout=input_dropout,
        output_dropout=output_dropout,
        aux_weight=aux_weight,
        activation_reg=activation_reg,
        temporal_activation_reg=temporal_activation_reg,
        embeddings_initializer=_uniform(initial_embedding, seed),
        vocabulary=vocabulary,
        seed=seed,
    )


def adaptive_softmax(
    vocabulary_size: int, cutoffs: tuple[int, ...] | None, seed: int | None
) -> AdaptiveSoftmax | None:
    """Returns an `AdaptiveSoftmax`, or None (a full softmax) without cutoffs."""
    if not cutoffs:
        return None
    return AdaptiveSoftmax(
        vocabulary_size, cutoffs, div_value=1.0, seed=sub_seed(seed, 30), name="head"
    )


def _uniform(bound, seed=None):
    return keras.initializers.RandomUniform(-bound, bound, seed=seed)


trellisnet_ptb_large = register(
    **_PTB,
    training=_train_ptb(clip_norm=0.225),
    name="trellisnet_ptb_large",
    fixed={"ablation": None},
    defaults={"hidden_units": 1300},
    doc="""A larger `trellisnet_ptb`, 32.6M parameters (Bai et al. 2019, Table 1).

    The paper says "1.4x larger" and not by what; 1300 hidden units fit the published sizes of this
    model (33M) and of `trellisnet_ptb_mos_large`.
    """,
)(trellisnet_ptb)

_MIXTURE: dict[str, Any] = {
    "embedding_dim": 280,
    "output_units": 480,
    "experts": 15,
    "latent_dropout": 0.29,
    "embedding_dropout": 0.05,
    "output_dropout": 0.4,
    "weight_dropout": 0.45,
}

trellisnet_ptb_mos = register(
    **_PTB,
    training=_train_ptb(clip_norm=0.2),
    name="trellisnet_ptb_mos",
    fixed={"ablation": None},
    defaults={"hidden_units": 1000, **_MIXTURE},
    doc="""TrellisNet with a mixture of 15 softmaxes on word-level Penn Treebank, 25.7M parameters.

    Tables 1 and 5 of Bai et al. 2019. The rates of input and latent dropout are the defaults of the
    authors' code, which does not say that they are this model's.
    """,
)(trellisnet_ptb)

trellisnet_ptb_mos_large = register(
    **_PTB,
    training=_train_ptb(clip_norm=0.2),
    name="trellisnet_ptb_mos_large",
    fixed={"ablation": None},
    defaults={"hidden_units": 1300, **_MIXTURE},
    doc="""A larger `trellisnet_ptb_mos`, 34.2M parameters (Bai et al. 2019, Table 1).

    1300 hidden units as in `trellisnet_ptb_large`.
    """,
)(trellisnet_ptb)

trellisnet_wt103 = register(
    data="wt103",
    metric="perplexity",
    training=lambda depth, kernel_size, stateful, **_: Training(
        optimizer="adam",
        learning_rate=1e-3,
        clip_norm=0.1,
        batch_size=40,
        epochs=25,
        **_lengths(depth, kernel_size, stateful),
        schedule="steps",
        decay_factor=0.1,
        decay_epochs=(15, 20),
    ),
    resolve=_resolve(70, 25, 0.08),
    name="trellisnet_wt103",
    fixed={"ablation": None},
    defaults={
        "depth": 70,
        "hidden_units": 1488,
        "embedding_dim": 512,
        "stateful": True,
        "weight_norm": True,
        "cutoffs": None,
        "embedding_dropout": 0.0,
        "input_dropout": 0.1,
        "hidden_dropout": 0.1,
        "output_dropout": 0.1,
        "weight_dropout": 0.1,
        "activation_reg": 0.0,
        "temporal_activation_reg": 0.0,
        "vocabulary_size": 267_735,
    },
    doc="""TrellisNet on WikiText-103, 177.6M parameters (Bai et al. 2019, Tables 2 and 5).

    Published: 180M parameters. Table 5 has 2000 units, of which 512 are output. The authors' code
    has 1600 beside these (`hidden_units=1600`: 181,710,042 parameters); with them, and without
    weight dropout, an earlier version of the paper reports 30.35.

    The clusters of the adaptive softmax, batch, segment, input dropout and the two steps of the
    learning rate are those of the authors' code. (There the rate also falls when the validation
    loss is worse than the best of all but the last five epochs.)

    A training step in float32 needs about 14.1 GiB by XLA's own account of its buffers on a CPU
    (`python -m benchmarks.memory account`), and 8.4 with `rematerialize=True`. So a GPU of 24 GiB
    should hold it, and one of 16 GiB with `rematerialize=True`; neither was tried.

    Training and evaluation never hold all words' logits. `predict`, `generate` and an exported
    model do, 1 MiB for each token that they score: `model.head.top_k` and `log_prob` do not.
    """,
)(trellisnet_ptb)

trellisnet_char_ptb = register(
    data="char_ptb",
    metric="bpc",
    training=lambda depth, kernel_size, stateful, **_: Training(
        optimizer="adam",
        learning_rate=2e-3,
        clip_norm=0.2,
        l2=1e-6,
        batch_size=24,
        epochs=400,
        **_lengths(depth, kernel_size, stateful),
        schedule="steps",
        decay_factor=0.1,
        decay_epochs=(220, 350),
    ),
    resolve=_resolve(125, 70, 0.3),
    name="trellisnet_char_ptb",
    fixed={"ablation": None},
    defaults={
        "depth": 125,
        "hidden_units": 1000,
        "embedding_dim": 200,
        "stateful": True,
        "weight_norm": True,
        "embedding_dropout": 0.0,
        "input_dropout": 0.1,
        "hidden_dropout": 0.3,
        "output_dropout": 0.1,
        "weight_dropout": 0.25,
        "activation_reg": 0.0,
        "temporal_activation_reg": 0.0,
        "vocabulary_size": 50,
    },
    doc="""TrellisNet on character-level Penn Treebank, 13.5M parameters (Bai et al. 2019, Table 5).

    Published: 13.4M. The authors' code has 1050 hidden units and 140 levels; these are the paper's.
    """,
)(trellisnet_ptb)

trellisnet_char = register(
    data="pydoc",
    metric="bpc",
    training=lambda depth, kernel_size, stateful, **_: Training(
        optimizer="adam",
        learning_rate=8e-3,
        clip_norm=1.0,
        batch_size=32,
        epochs=4,
        **_lengths(depth, kernel_size, stateful, sequence_length=74),
        schedule="steps",
        decay_factor=0.5,
        decay_epochs=(2, 3),
    ),
    resolve=_resolve(),
    name="trellisnet_char",
    fixed={"ablation": None},
    defaults={
        "depth": 10,
        "hidden_units": 96,
        "embedding_dim": 64,
        "embedding_dropout": 0.0,
        "input_dropout": 0.0,
        "hidden_dropout": 0.0,
        "output_dropout": 0.0,
        "weight_dropout": 0.0,
        "activation_reg": 0.0,
        "temporal_activation_reg": 0.0,
        "initial_stddev": 0.07,
        "initial_embedding": 1.0,
        "vocabulary_size": 96,
    },
    doc="""A small TrellisNet for the characters of any text, trained in minutes on two cores.

    No paper has this model. Its initial weights are larger than the papers', so that it learns
    within the first epoch.
    """,
)(trellisnet_ptb)


# Pixels

_PIXEL_UNITS = {"140k": 120, "8m": 990}
# The authors' code: enough levels to see an image of 1,024 pixels.
_PIXEL_DILATIONS = (1, *(2**i for i in range(10)))


def _resolve_pixels(size, **_):
    check_choice("size", size, _PIXEL_UNITS)
    return {"hidden_units": _PIXEL_UNITS[size]}


_PIXELS: dict[str, Any] = {
    "metric": "accuracy",
    "training": Training(
        optimizer="adam",
        learning_rate=2e-3,
        clip_norm=0.5,
        l2=1e-6,
        batch_size=64,
        epochs=200,
        schedule="steps",
        decay_factor=0.1,
        decay_epochs=(50, 75, 90),
    ),
    "resolve": _resolve_pixels,
}


@register(data="seq_mnist", channels=1, **_PIXELS)
def trellisnet_seq_mnist(
    size: str = "140k",
    hidden_units: int | None = None,
    output_units: int = 10,
    kernel_size: int = 2,
    dilations: tuple[int, ...] = _PIXEL_DILATIONS,
    input_dropout: float = 0.2,
    hidden_dropout: float = 0.2,
    output_dropout: float = 0.2,
    weight_dropout: float = 0.1,
    weight_norm: bool = True,
    seed: int | None = 0,
) -> SequenceClassifier:
    """TrellisNet on sequential MNIST, 138K parameters (Bai et al. 2019, Tables 4 and 5).

    Published: 8M parameters. The paper contradicts itself: its Table 5 has hidden size 100 and 16
    levels without dilations, which make 0.1M parameters and see 17 pixels; "8M" takes 1000 units in
    all (`size="8m"`). The default is the authors' code: 120 + 10 units and 11 dilated levels. Batch
    size, epochs and decay are that code's too.

    Args:
        size: `"140k"` (137,910 parameters, with three channels 139,990) or `"8m"` (8,020,110 and
            8,036,110). It sets `hidden_units` unless they are given.
        hidden_units: Positive integer, hidden channels beside the output channels.
        output_units: Positive integer, output channels.
        kernel_size: Positive integer, taps of the convolution.
        dilations: Dilation of each level.
        input_dropout, output_dropout: Dropout rates, each number dropped by itself.
        hidden_dropout: Variational dropout rate of h in the convolution.
        weight_dropout: DropConnect rate of the past taps.
        weight_norm: Whether the kernels are weight-normalized.
        seed: Seed of weights, dropouts and the order of the images. None: other weights each time.
        weights: None, `"pretrained"`, or path of a weights file.
        dtype_policy: Keras' dtype policy of all layers. Defaults to the global one.
        jit_compile: Whether XLA compiles the training step. None: what suits model and machine.

    Returns:
        A compiled `SequenceClassifier`.
    """
    assert hidden_units is not None  # from `_resolve_pixels`
    backbone = TrellisLayer(
        hidden_units + output_units,
        len(dilations),
        output_units=output_units,
        kernel_size=kernel_size,
        dilation_rate=list(dilations),
        weight_norm=weight_norm,
        dropout=hidden_dropout,
        weight_dropout=weight_dropout,
        return_sequences=False,
        seed=sub_seed(seed, 10),
        name="trellis",
    )
    return SequenceClassifier(
        backbone,
        num_classes=10,
        input_dropout=input_dropout,
        output_dropout=output_dropout,
        kernel_initializer=keras.initializers.VarianceScaling(
            1 / 3, "fan_in", "uniform", seed=sub_seed(seed, 5)
        ),
        seed=seed,
    )


trellisnet_permuted_mnist = register(
    data="permuted_mnist",
    channels=1,
    **_PIXELS,
    name="trellisnet_permuted_mnist",
    doc="""TrellisNet on permuted MNIST, 138K parameters (Bai et al. 2019, Tables 4 and 5).

    Published: 8M parameters, see `trellisnet_seq_mnist`. The paper's permutation is not published
    (see `zoo.datasets.pixel_permutation`).
    """,
)(trellisnet_seq_mnist)

trellisnet_seq_cifar10 = register(
    data="seq_cifar10",
    channels=3,
    **_PIXELS,
    name="trellisnet_seq_cifar10",
    doc="""TrellisNet on sequential CIFAR-10, 140K parameters (Bai et al. 2019, Tables 4 and 5).

    Published: 8M parameters, see `trellisnet_seq_mnist`.
    """,
)(trellisnet_seq_mnist)
