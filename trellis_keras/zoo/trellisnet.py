"""TrellisNet models (Bai et al. 2019) for words, characters and pixels."""

import keras

from trellis_keras.layers import AdaptiveSoftmax, MixtureOfSoftmaxes, TrellisLayer
from trellis_keras.models import LanguageModel, SequenceClassifier
from trellis_keras.training import SGD, Adam, GrowingDepth, PlateauDecay, StepDecay
from trellis_keras.zoo.registry import register
from trellis_keras.zoo.rows import like, sub_seed, torch_uniform
from trellis_keras.zoo.training_settings import Training, adamw_cycle

__all__ = [
    "trellisnet_ptb", "trellisnet_ptb_large", "trellisnet_ptb_mos", "trellisnet_ptb_mos_large",
    "trellisnet_wt103", "trellisnet_char_ptb", "trellisnet_char",
    "trellisnet_seq_mnist", "trellisnet_permuted_mnist", "trellisnet_seq_cifar10",
]  # fmt: skip


# Language models


def _on_ptb(clip_norm=0.225):
    return Training(
        optimizer=SGD(20.0, clip_norm=clip_norm, l2=1e-6),
        schedule=PlateauDecay(factor=0.25, rule="best_before", window=10, min_lr=0.02, verbose=1),
        batch_size=16,
        epochs=500,
        # As much context as the receptive field, one step per level.
        stream={"sequence_length": 110, "context_length": 55},
    )


def _fast_ptb():
    """AdamW, warm-up and cosine decay, 16 levels in the first epochs, less dropout.

    Longer segments, of which a fifth is context, cost less per scored token.
    """
    return adamw_cycle(  # 265 steps an epoch
        1.5e-3,
        weight_decay=0.05,
        clip_norm=0.25,
        batch_size=16,
        epochs=52,
        sequence_length=275,
        context_length=55,
        growth=GrowingDepth(depth=16, epochs=36),
        warmup_steps=265,
        decay_steps=13_515,
    )


@register(
    data="ptb",
    metric="perplexity",
    training=_on_ptb,
    fast=_fast_ptb,
    fast_arguments={
        "input_dropout": 0.4,
        "hidden_dropout": 0.24,
        "output_dropout": 0.4,
        "weight_dropout": 0.45,
    },
)
def trellisnet_ptb(
    depth: int = 55,
    hidden_units: int = 1000,
    output_units: int | None = 400,
    embedding_dim: int = 400,
    kernel_size: int = 2,
    injection_every: int = 1,
    groups: int | None = None,
    weight_norm: bool = False,
    experts: int | None = None,
    cutoffs: tuple[int, ...] = (),
    stateful: bool = False,
    aux_every: int = 16,
    aux_weight: float = 0.05,
    embedding_dropout: float = 0.1,
    input_dropout: float = 0.45,
    hidden_dropout: float = 0.28,
    output_dropout: float = 0.45,
    latent_dropout: float = 0.0,
    weight_dropout: float = 0.5,
    activation_reg: float = 2.0,
    temporal_activation_reg: float = 1.0,
    initial_stddev: float = 0.01,
    initial_embedding: float = 0.1,
    rematerialize: bool = False,
    vocabulary_size: int = 10_000,
    seed: int | None = 0,
) -> LanguageModel:
    """TrellisNet on word-level Penn Treebank, 24.2M parameters (Bai et al. 2019, Tables 1 and 5).

    The ablations of Table 6 are this model with other arguments, see zoo/published.csv. Without
    long-sequence parallelism (`stateful=True`), the segment length equals the depth:
    `sequence_length=55, context_length=0`. The mixed-group kernel has more hidden units, to keep
    the same size (appendix D): `groups=2, hidden_units=2062`, 24.17M parameters.
    (`count_params()` returns 60.4M, because the kernels are stored with their zeros.) The paper
    does not give the number of groups, but its figures show two; 3 groups take 2495 hidden units,
    4 take 2880.

    Args:
        depth: Positive integer, number of levels.
        hidden_units: Positive integer, hidden channels in addition to the output channels.
        output_units: Positive integer, output channels. Without `experts` it must equal
            `embedding_dim`, because the output matrix is tied to the embedding; `None` means
            this value.
        embedding_dim: Positive integer, width of the embedding.
        kernel_size: Positive integer, number of taps of the convolution.
        injection_every: Positive integer, number of levels between injections of the input.
        groups: Positive integer, number of equally wide groups of a mixed-group kernel. Defaults to
            `None`, a dense kernel.
        weight_norm: Boolean, whether the kernels are weight-normalized.
        experts: Positive integer, number of softmaxes of a mixture. Defaults to `None`, one
            softmax.
        cutoffs: Tuple of integers, first word of each tail of an adaptive softmax (see
            `layers.AdaptiveSoftmax`), with words sorted by decreasing frequency; `()` is a full
            softmax.
        stateful: Boolean, whether to carry the state from batch to batch, instead of overlapping
            segments.
        aux_every: Positive integer up to `depth`, number of levels between auxiliary losses.
        aux_weight: Float, weight of the auxiliary losses; 0 disables them.
        embedding_dropout: Float, rate of word dropout.
        input_dropout, hidden_dropout, output_dropout: Floats, variational dropout rates of the
            input, of h in the convolution and of the output.
        latent_dropout: Float, variational dropout rate of a mixture's latent vectors.
        weight_dropout: Float, DropConnect rate of the past taps.
        activation_reg, temporal_activation_reg: Floats, weights of AR and TAR in the loss.
        initial_stddev: Float, standard deviation of the initial kernels and biases.
        initial_embedding: Float, bound of the uniform initial embedding.
        rematerialize: Boolean, whether the backward pass recomputes activations, which saves
            memory.
        vocabulary_size: Positive integer, number of tokens. A run takes it from its data.
        seed: Integer, seed of weights and dropouts. Defaults to `0`; None draws a new one each
            time.
        weights: None, `"pretrained"`, or path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        dtype_policy: String, Keras' dtype policy of all layers. Defaults to the global one.
        jit_compile: Boolean, whether training is compiled by XLA. Defaults to `None`, automatic.

    Returns:
        A compiled `LanguageModel`.
    """
    output_units = embedding_dim if output_units is None else output_units
    units = hidden_units + output_units
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
        kernel_structure="dense" if groups is None else "mixed_group",
        groups=None if groups is None else [units // groups] * groups,
        weight_norm=weight_norm,
        dropout=hidden_dropout,
        weight_dropout=weight_dropout,
        aux_every=aux_every if aux_weight else None,
        return_aux=bool(aux_weight),
        stateful=stateful,
        rematerialize=rematerialize,
        **initializers,
        seed=sub_seed(seed, 10),
        name="trellis",
    )
    if experts is not None and cutoffs:
        raise ValueError(
            "A head has either `experts` or `cutoffs`; cutoffs=() is a full softmax. Received: "
            f"experts={experts}, cutoffs={cutoffs}"
        )
    if experts is None and latent_dropout:
        raise ValueError(f"`latent_dropout` needs `experts`. Received: {latent_dropout}")
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
        seed=seed,
    )


def adaptive_softmax(
    vocabulary_size: int, cutoffs: tuple[int, ...], seed: int | None
) -> AdaptiveSoftmax | None:
    """Returns an `AdaptiveSoftmax`, or None (a full softmax) without cutoffs."""
    if not cutoffs:
        return None
    return AdaptiveSoftmax(
        vocabulary_size, cutoffs, div_value=1.0, seed=sub_seed(seed, 30), name="head"
    )


def _uniform(bound, seed=None):
    return keras.initializers.RandomUniform(-bound, bound, seed=seed)


@register(data="ptb", metric="perplexity", training=_on_ptb)
@like(trellisnet_ptb, hidden_units=1300)
def trellisnet_ptb_large() -> None:
    """A larger `trellisnet_ptb`, 32.6M parameters (Bai et al. 2019, Table 1).

    The paper says "1.4x larger" without saying how; 1300 hidden units match the published sizes of
    this model (33M) and of `trellisnet_ptb_mos_large`.

    Arguments as in `trellisnet_ptb`.
    """


@register(data="ptb", metric="perplexity", training=lambda: _on_ptb(clip_norm=0.2))
@like(
    trellisnet_ptb,
    output_units=480,
    embedding_dim=280,
    experts=15,
    embedding_dropout=0.05,
    output_dropout=0.4,
    latent_dropout=0.29,
    weight_dropout=0.45,
)
def trellisnet_ptb_mos() -> None:
    """TrellisNet with a mixture of 15 softmaxes on word-level Penn Treebank, 25.7M parameters.

    Tables 1 and 5 of Bai et al. 2019. The rates of input and latent dropout are the defaults of the
    authors' code, which does not confirm that they belong to this model.

    Arguments as in `trellisnet_ptb`.
    """


@register(data="ptb", metric="perplexity", training=lambda: _on_ptb(clip_norm=0.2))
@like(trellisnet_ptb_mos, hidden_units=1300)
def trellisnet_ptb_mos_large() -> None:
    """A larger `trellisnet_ptb_mos`, 34.2M parameters (Bai et al. 2019, Table 1).

    It has 1300 hidden units, as `trellisnet_ptb_large` does.

    Arguments as in `trellisnet_ptb_mos`.
    """


@register(
    data="wt103",
    metric="perplexity",
    training=lambda: Training(
        optimizer=Adam(1e-3, clip_norm=0.1),
        schedule=StepDecay(epochs=(15, 20), factor=0.1),
        batch_size=40,
        epochs=25,
        stream={"sequence_length": 70, "context_length": 0},
    ),
)
@like(
    trellisnet_ptb,
    depth=70,
    hidden_units=1488,
    output_units=512,
    embedding_dim=512,
    weight_norm=True,
    cutoffs=(2_800, 20_000, 76_000),
    stateful=True,
    aux_every=25,
    aux_weight=0.08,
    embedding_dropout=0.0,
    input_dropout=0.1,
    hidden_dropout=0.1,
    output_dropout=0.1,
    weight_dropout=0.1,
    activation_reg=0.0,
    temporal_activation_reg=0.0,
    vocabulary_size=267_735,
)
def trellisnet_wt103() -> None:
    """TrellisNet on WikiText-103, 177.6M parameters (Bai et al. 2019, Tables 2 and 5).

    Published: 180M parameters. Table 5 has 2000 units, of which 512 are output. The authors' code
    has 1600 hidden units besides (`hidden_units=1600`: 181,710,042 parameters); with them, and
    without weight dropout, an earlier version of the paper reports 30.35.

    The clusters of the adaptive softmax, batch size, segment length, input dropout and the two
    learning-rate steps follow the authors' code. (There the rate also falls when the validation
    loss is worse than the best of all but the last five epochs.)

    A training step in float32 needs about 14.1 GiB according to XLA's buffer assignment on a CPU
    (`python -m benchmarks.memory account`), and 8.4 with `rematerialize=True`. It should therefore
    fit a GPU with 24 GiB, or 16 GiB with `rematerialize=True`; neither has been tried.

    Training and evaluation never store the logits of all words. `predict`, `generate` and an
    exported model do, 1 MiB per scored token; `model.head.loss` does not.

    Arguments as in `trellisnet_ptb`.
    """


def _fast_char_ptb():
    """AdamW, warm-up and cosine decay, 25 levels in the first epochs, less dropout.

    Meant for minutes of a GPU (benchmarks/gpu); it has been rehearsed, but not trained.
    """
    return adamw_cycle(  # 1,265 steps an epoch
        2e-3,
        weight_decay=0.01,
        clip_norm=0.25,
        batch_size=32,
        epochs=9,
        sequence_length=125,
        context_length=0,
        growth=GrowingDepth(depth=25, epochs=7),
        warmup_steps=500,
        decay_steps=10_885,
    )


@register(
    data="char_ptb",
    metric="bpc",
    training=lambda: Training(
        optimizer=Adam(2e-3, clip_norm=0.2, l2=1e-6),
        schedule=StepDecay(epochs=(220, 350), factor=0.1),
        batch_size=24,
        epochs=400,
        stream={"sequence_length": 125, "context_length": 0},
    ),
    fast=_fast_char_ptb,
    fast_arguments={"hidden_dropout": 0.1, "weight_dropout": 0.1},
)
@like(
    trellisnet_ptb,
    depth=125,
    output_units=200,
    embedding_dim=200,
    weight_norm=True,
    stateful=True,
    aux_every=70,
    aux_weight=0.3,
    embedding_dropout=0.0,
    input_dropout=0.1,
    hidden_dropout=0.3,
    output_dropout=0.1,
    weight_dropout=0.25,
    activation_reg=0.0,
    temporal_activation_reg=0.0,
    vocabulary_size=50,
)
def trellisnet_char_ptb() -> None:
    """TrellisNet on character-level Penn Treebank, 13.5M parameters (Bai et al. 2019, Table 5).

    Published: 13.4M. The authors' code has 1050 hidden units and 140 levels; these are the paper's.

    Arguments as in `trellisnet_ptb`.
    """


@register(
    data="pydoc",
    metric="bpc",
    training=lambda: Training(
        optimizer=Adam(8e-3, clip_norm=1.0),
        schedule=StepDecay(epochs=(2, 3), factor=0.5),
        batch_size=32,
        epochs=4,
        stream={"sequence_length": 74, "context_length": 10},
    ),
)
@like(
    trellisnet_ptb,
    depth=10,
    hidden_units=96,
    output_units=None,
    embedding_dim=64,
    aux_every=5,
    aux_weight=0.0,
    embedding_dropout=0.0,
    input_dropout=0.0,
    hidden_dropout=0.0,
    output_dropout=0.0,
    weight_dropout=0.0,
    activation_reg=0.0,
    temporal_activation_reg=0.0,
    initial_stddev=0.07,
    initial_embedding=1.0,
    vocabulary_size=96,
)
def trellisnet_char() -> None:
    """A small TrellisNet for the characters of any text, trained in minutes on two cores.

    This model is not from a paper. Its initial weights are larger than in the papers, so that it
    learns within the first epoch.

    Arguments as in `trellisnet_ptb`.
    """


# Pixels

# The authors' code: enough levels to see an image of 1,024 pixels.
_PIXEL_DILATIONS = (1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def _on_pixels():
    return Training(
        optimizer=Adam(2e-3, clip_norm=0.5, l2=1e-6),
        schedule=StepDecay(epochs=(50, 75, 90), factor=0.1),
        batch_size=64,
        epochs=200,
    )


def _fast_pixels(epochs, warmup_steps, decay_steps):
    """AdamW, warm-up and cosine decay, images shifted by up to a pixel."""
    return adamw_cycle(
        3e-3,
        weight_decay=0.01,
        clip_norm=0.5,
        batch_size=64,
        epochs=epochs,
        shift=1,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
    )


@register(
    data="seq_mnist",
    metric="accuracy",
    channels=1,
    training=_on_pixels,
    fast=lambda: _fast_pixels(26, 1_720, 20_640),  # 860 steps an epoch
)
def trellisnet_seq_mnist(
    hidden_units: int = 120,
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

    Published: 8M parameters. The paper is inconsistent: its Table 5 has hidden size 100 and 16
    levels without dilations, which give 0.1M parameters and a receptive field of 17 pixels; "8M"
    takes 1000 units in total (`hidden_units=990`: 8,020,110 parameters). The defaults follow the
    authors' code: 120 + 10 units and 11 dilated levels, and its batch size, epochs and decay.

    Args:
        output_units: Positive integer, output channels.
        dilations: Tuple of integers, dilation rate of each level.
        input_dropout, output_dropout: Floats, element-wise dropout rates.
        hidden_dropout: Float, variational dropout rate of h in the convolution.
        seed: Integer, seed of weights, dropouts and the order of the images. Defaults to `0`; None
            draws a new one each time.

    Other arguments are as in `trellisnet_ptb`.

    Returns:
        A compiled `SequenceClassifier`.
    """
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
        kernel_initializer=torch_uniform(seed),
        seed=seed,
    )


@register(
    data="permuted_mnist",
    metric="accuracy",
    channels=1,
    training=_on_pixels,
    fast=lambda: _fast_pixels(30, 1_720, 24_080),  # 860 steps an epoch
)
@like(trellisnet_seq_mnist)
def trellisnet_permuted_mnist() -> None:
    """TrellisNet on permuted MNIST, 138K parameters (Bai et al. 2019, Tables 4 and 5).

    Published: 8M parameters, see `trellisnet_seq_mnist`. The paper's permutation is not published
    (see `zoo.datasets.pixel_permutation`).

    Arguments as in `trellisnet_seq_mnist`.
    """


@register(
    data="seq_cifar10",
    metric="accuracy",
    channels=3,
    training=_on_pixels,
    fast=lambda: _fast_pixels(25, 1_408, 16_192),  # 704 steps an epoch
)
@like(trellisnet_seq_mnist)
def trellisnet_seq_cifar10() -> None:
    """TrellisNet on sequential CIFAR-10, 140K parameters (Bai et al. 2019, Tables 4 and 5).

    Published: 8M parameters, see `trellisnet_seq_mnist`; `hidden_units=990` gives 8,036,110.

    Arguments as in `trellisnet_seq_mnist`.
    """
