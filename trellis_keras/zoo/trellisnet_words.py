"""TrellisNet on words: Penn Treebank and WikiText-103 (Bai et al. 2019, Tables 1, 2, 5 and 6)."""

import dataclasses
from typing import ClassVar

from trellis_keras.zoo.config import check_choice
from trellis_keras.zoo.language import WIKITEXT103_CUTOFFS
from trellis_keras.zoo.recipe import Recipe
from trellis_keras.zoo.registry import register
from trellis_keras.zoo.training import TextTraining
from trellis_keras.zoo.trellisnet import TrellisLanguageModel, kernel_weights

# What Table 6 takes out, and the test perplexity that is left then.
COMPLETE = {
    "hidden_dropout": 0.28,
    "weight_dropout": 0.5,
    "aux_weight": 0.05,
    "history": "chop",
    "injection_every": 1,
    "groups": None,
}
ABLATIONS = {
    None: (56.97, {}),
    "no_hidden_dropout": (64.69, {"hidden_dropout": 0.0}),
    "no_weight_dropout": (63.82, {"weight_dropout": 0.0}),
    "no_auxiliary_losses": (57.99, {"aux_weight": 0.0}),
    "no_long_sequence_parallelism": (57.35, {"history": "repackage"}),
    # The paper does not say how many groups; two are those of its figures.
    "mixed_group_kernel": (59.18, {"groups": 2}),
    "injection_every_2": (57.44, {"injection_every": 2}),
    "injection_every_5": (59.75, {"injection_every": 5}),
    "injection_every_10": (60.70, {"injection_every": 10}),
    "injection_every_20": (74.91, {"injection_every": 20}),
}
# Beside the output units, where the kernels are dense.
HIDDEN_UNITS = 1000
# Words that a row of a batch reads with history="chop".
SEGMENT = 110


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrellisAblation(TrellisLanguageModel):
    """A TrellisNet language model of words from which Table 6 takes something out.

    Attributes:
        ablation: None for the complete model, or what it goes without: `"no_hidden_dropout"`,
            `"no_weight_dropout"`, `"no_auxiliary_losses"`, `"no_long_sequence_parallelism"` (no
            segments twice as long as the net is deep, of which the first half is not counted: they
            are as long as the net is deep, and the state is carried over), `"mixed_group_kernel"`
            (no dense kernel), or all injections of the input but every second, fifth, ... one:
            `"injection_every_2"`, `_5`, `_10`, `_20`. It sets the fields in question, unless they
            are given too.
        groups: As in `TrellisLanguageModel`. It brings the hidden units with which the kernels have
            as many weights as the complete model's.
        **: Those of `TrellisLanguageModel`.
    """

    BENCHMARK: ClassVar[tuple] = (*TrellisLanguageModel.BENCHMARK, "ablation")

    ablation: str | None = None

    def __post_init__(self):
        super().__post_init__()
        _check(self.ablation)

    @property
    def default_segment(self):
        return SEGMENT if self.history == "chop" else self.depth

    def settings(self, fields):
        follows = super().settings(fields)
        ablation = fields.get("ablation", self.ablation)
        if ablation != self.ablation:
            _check(ablation)
            follows = {**follows, **COMPLETE, **ABLATIONS[ablation][1]}
        chosen = {**vars(self), **follows, **fields}
        if chosen["groups"] != self.groups:
            follows["hidden_units"] = _hidden_units(chosen)
        return follows

    def published_on(self, data, data_options):
        if data != "ptb" or data_options or self.metric != "perplexity":
            return super().published_on(data, data_options)
        table = 1 if self.ablation is None else 6
        perplexity, _ = ABLATIONS[self.ablation]
        return {
            "published": perplexity,
            "published_epochs": None,
            "source": f"TrellisNet Table {table}",
        }


def _hidden_units(fields):
    """The hidden units with which the kernels are as large as dense ones of `HIDDEN_UNITS`."""
    groups, channels = fields["groups"], fields["embedding_dim"]
    if groups is None or groups < 1:  # which is refused where all fields are checked
        return HIDDEN_UNITS
    outputs = fields["output_units"] or channels
    wanted = kernel_weights(channels, HIDDEN_UNITS + outputs, fields["kernel_size"])

    def miss(width):
        units = groups * width
        return abs(kernel_weights(channels, units, fields["kernel_size"], groups) - wanted)

    return groups * min(range(1, HIDDEN_UNITS + outputs + 1), key=miss) - outputs


def _check(ablation):
    if ablation is not None:
        check_choice("ablation", ablation, set(ABLATIONS) - {None})


def _training(published, segment=SEGMENT):
    return TextTraining(
        data="ptb",
        published=published,
        source="TrellisNet Table 1",
        batch_size=16,
        segment=segment,
        epochs=500,
        decay_rule="best_before",
        decay_factor=0.25,
        decay_window=10,
        min_learning_rate=0.02,
    )


# What all models of Table 1 share.
SHARED = {
    "vocabulary_size": 10_000,
    "depth": 55,
    "aux_every": 16,
    "input_dropout": 0.45,
    "activation_reg": 2.0,
    "temporal_activation_reg": 1.0,
    "optimizer": "sgd",
    "learning_rate": 20.0,
    "l2": 1e-6,
    "metric": "perplexity",
    **COMPLETE,
}
SINGLE = {**SHARED, "embedding_dim": 400, "embedding_dropout": 0.1, "output_dropout": 0.45}
SINGLE |= {"clip_norm": 0.225}
MIXTURE = {
    **SHARED,
    "embedding_dim": 280,
    "output_units": 480,
    "experts": 15,
    "latent_dropout": 0.29,
    "embedding_dropout": 0.05,
    "output_dropout": 0.4,
    "weight_dropout": 0.45,
    "clip_norm": 0.2,
}


@register(
    Recipe(
        "trellisnet_ptb",
        TrellisAblation(hidden_units=HIDDEN_UNITS, **SINGLE),
        _training(ABLATIONS[None][0], segment=None),  # it follows the ablation
    )
)
def trellisnet_ptb(config, vocabulary):
    """TrellisNet on word-level Penn Treebank: 24.2M parameters (published test perplexity 56.97).

    With `ablation=` it goes without one of its parts, as in the paper's Table 6:
    `"no_hidden_dropout"` (published 64.69), `"no_weight_dropout"` (63.82), `"no_auxiliary_losses"`
    (57.99), `"no_long_sequence_parallelism"` (57.35), `"mixed_group_kernel"` (59.18),
    `"injection_every_2"` (57.44), `_5` (59.75), `_10` (60.70) and `_20` (74.91).

    The mixed-group kernel's hidden units are raised so that the size stays (appendix D). The paper
    does not say how many groups it has; here they are two, each of 1231 channels, and 24.17M
    parameters. (`count_params()` says 60.4M: the kernels are stored with their zeros.) `groups=3`
    brings 965 channels a group, `groups=4` 820.

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        **: The fields of `TrellisAblation`.

    Returns:
        A compiled `LanguageModel`.
    """
    return config.build(vocabulary)


@register(
    Recipe(
        "trellisnet_ptb_large",
        TrellisLanguageModel(hidden_units=1300, **SINGLE),
        _training(56.80),
    )
)
def trellisnet_ptb_large(config, vocabulary):
    """A larger `trellisnet_ptb`: 32.6M parameters (published: 33M, test perplexity 56.80).

    The paper says "1.4x larger" and not by what; 1300 hidden units fit the sizes of this model
    and of `trellisnet_ptb_mos_large`. All else is as in `trellisnet_ptb`.

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
        "trellisnet_ptb_mos",
        TrellisLanguageModel(hidden_units=1000, **MIXTURE),
        _training(54.67),
    )
)
def trellisnet_ptb_mos(config, vocabulary):
    """TrellisNet with a mixture of 15 softmaxes on word-level Penn Treebank.

    Parameters: 25,681,735 (published: 25M, test perplexity 54.67). Input and latent dropout are
    the authors' program's defaults, which are not said to be those of this model.

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
        "trellisnet_ptb_mos_large",
        TrellisLanguageModel(hidden_units=1300, **MIXTURE),
        _training(54.19),
    )
)
def trellisnet_ptb_mos_large(config, vocabulary):
    """A larger `trellisnet_ptb_mos`: 34.2M parameters (published: 34M, test perplexity 54.19).

    1300 hidden units as in `trellisnet_ptb_large`; all else is as in `trellisnet_ptb_mos`.

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
        "trellisnet_wt103",
        TrellisLanguageModel(
            vocabulary_size=267_735,
            embedding_dim=512,
            hidden_units=1488,
            depth=70,
            history="repackage",
            aux_every=25,
            aux_weight=0.08,
            input_dropout=0.1,
            hidden_dropout=0.1,
            output_dropout=0.1,
            weight_dropout=0.1,
            weight_norm=True,
            cutoffs=WIKITEXT103_CUTOFFS,
            optimizer="adam",
            learning_rate=1e-3,
            clip_norm=0.1,
            metric="perplexity",
        ),
        TextTraining(
            data="wt103",
            published=29.19,
            published_epochs=25,
            source="TrellisNet Table 2",
            batch_size=40,
            epochs=25,
            decay_rule="steps",
            decay_factor=0.1,
            decay_epochs=(15, 20),
        ),
    )
)
def trellisnet_wt103(config, vocabulary):
    """TrellisNet on WikiText-103 (Tables 2 and 5): published test perplexity 29.19.

    Parameters: 177,565,594 (published 180M): Table 5's 2000 units, of which 512 are output. The
    authors' program has 1600 beside these (`hidden_units=1600`: 181,710,042 parameters); with
    them, and without weight dropout, an earlier version of the paper reports 30.35.

    The adaptive softmax has the clusters of the authors' program and the embedding's matrix. Batch,
    segment, input dropout and the learning rate's two steps are that program's too. (There the rate
    also falls when the validation loss is worse than the best of all but the last five epochs.)

    A training step in float32 needs about 14.1 GiB by XLA's own account of its buffers on a CPU
    (`python -m benchmarks.memory account`: 2.6 parameters, moments and gradients, 0.125 each of 70
    levels, 1.2 auxiliary losses, 1.4 all else), 8.4 with `memory="lean"`. So a GPU of 24 GiB should
    hold it, one of 16 GiB the lean one; neither was tried.

    Training and evaluation never hold all words' logits. `predict`, `generate` and an exported
    model do, 1 MiB for each token that they score: `model.head.top_k` and `log_prob` do not.

    Args:
        weights: None, `"pretrained"` or the path of a weights file.
        vocabulary: `data.Vocabulary` to save with the model; it sets `vocabulary_size`.
        **: The fields of `TrellisLanguageModel`.

    Returns:
        A compiled `LanguageModel`.
    """
    return config.build(vocabulary)
