"""The models of the TCN paper's benchmarks and of pixels: sizes, settings, a step of training."""

import keras
import numpy as np
import pytest

from trellis_keras import data, zoo
from trellis_keras.zoo import registry, runs

TCN_PAPER = ("adding", "copy_memory", "seq_mnist", "permuted_mnist", "jsb", "nottingham")
TEXTS = ("ptb", "char_ptb", "text8")
RECURRENT = [f"{cell}_{name}" for cell in ("lstm", "gru", "rnn") for name in TCN_PAPER + TEXTS]
PIXELS = ("seq_mnist", "permuted_mnist", "seq_cifar10")
SEQUENCES = [
    *(f"tcn_{name}" for name in TCN_PAPER),
    *(f"trellisnet_{name}" for name in PIXELS),
    *(name for name in RECURRENT if not name.endswith(TEXTS)),
]
LANGUAGE = [
    *(f"trellisnet_ptb{kind}" for kind in ("", "_large", "_mos", "_mos_large")),
    "trellisnet_wt103",
    *(f"tcn_{name}" for name in (*TEXTS, "wt103", "lambada")),
    *(f"{cell}_{name}" for cell in ("lstm", "gru", "rnn") for name in TEXTS),
]


def tcn_parameters(widths, kernel_size):
    """By TABLES: k w (a + w) + 4 w a block, and a shortcut where widths differ."""
    total = 0
    for a, w in zip(widths, widths[1:], strict=False):
        total += kernel_size * w * (a + w) + 4 * w + (a * w + w) * (a != w)
    return total


# Sizes


@pytest.mark.parametrize(
    ("name", "arguments", "parameters"),
    [
        ("tcn_adding", {"T": 200}, 58_051),
        ("tcn_adding", {"T": 400}, 67_582),
        ("tcn_adding", {}, 70_369),
        ("tcn_adding", {"T": 200, "filters": 30}, tcn_parameters([2] + 7 * [30], 6) + 31),
        ("tcn_copy_memory", {"T": 500}, 10_750),
        ("tcn_copy_memory", {}, 12_530),
        ("tcn_copy_memory", {"T": 2000}, 14_170),
        ("tcn_seq_mnist", {}, 66_910),
        ("tcn_permuted_mnist", {"size": "37k"}, 37_010),
        ("tcn_jsb", {}, 269_938),
        ("tcn_nottingham", {}, 1_053_238),
        ("tcn_char_ptb", {}, 2_222_100),
        ("tcn_text8", {}, 4_129_667),
        ("tcn_ptb", {}, 14_659_600),
        ("trellisnet_ptb_large", {}, 32_576_800),
        ("trellisnet_ptb_mos", {}, 25_681_735),
        ("trellisnet_ptb_mos_large", {}, 34_178_935),
        ("trellisnet_seq_mnist", {}, 137_910),
        ("trellisnet_seq_mnist", {"size": "8m"}, 8_020_110),
        ("trellisnet_permuted_mnist", {}, 137_910),
        ("trellisnet_seq_cifar10", {}, 139_990),
        ("lstm_adding", {"T": 200}, 72_458),
        ("lstm_adding", {}, 69_291),
        ("lstm_seq_mnist", {}, 69_950),
        ("lstm_copy_memory", {}, 10_910),
        ("lstm_copy_memory", {"T": 2000}, 16_418),
        ("lstm_jsb", {}, 569_688),
        ("lstm_nottingham", {}, 1_222_088),
        ("lstm_nottingham", {"layers": 3, "hidden_units": 280}, 1_694_648),
        ("lstm_ptb", {}, 18_778_400),
        ("lstm_char_ptb", {}, 4_648_850),
        ("lstm_text8", {}, 4_720_835),
    ],
)
def test_parameters(name, arguments, parameters):
    assert zoo.get_model(name, **arguments).count_params() == parameters


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_parameters(name):
    config = zoo.recipe(name).model
    small = config.replace(hidden_units=6, layers=2)
    assert small.build().count_params() == small.parameters()
    assert f"{config.parameters():,}" in getattr(zoo, name).__doc__


@pytest.mark.parametrize(
    ("benchmark", "published"),
    [
        ("adding", 70e3),
        ("copy_memory", 16e3),
        ("seq_mnist", 70e3),
        ("jsb", 300e3),
        ("nottingham", 1e6),
        ("ptb", 13e6),
        ("char_ptb", 3e6),
        ("text8", 4.6e6),
    ],
)
def test_equal_sizes(benchmark, published):
    for cell in ("lstm", "gru", "rnn"):
        config = zoo.recipe(f"{cell}_{benchmark}", size="equal").model
        assert config.parameters() == pytest.approx(published, rel=0.01)


# Settings


def test_T_brings_its_setting():
    config = zoo.recipe("tcn_adding", T=200).model
    assert (config.kernel_size, config.depth, config.filters) == (6, 7, 27)
    assert zoo.recipe("tcn_adding", T=200, filters=30).model.filters == 30
    # What is set by name stays when the recipe is bound to its data.
    assert zoo.recipe("tcn_adding", filters=30).replace(T=600, seed=1).model.filters == 30
    # Not published: the smallest that sees the whole sequence.
    assert zoo.recipe("tcn_adding", T=1271).model.kernel_size == 6
    assert zoo.recipe("tcn_adding", T=1272).model.kernel_size == 7
    assert zoo.recipe("tcn_copy_memory", T=3552).model.depth == 9
    assert zoo.recipe("tcn_adding", T=5000, kernel_size=8, depth=9).model.filters == 24


def test_the_published_result_belongs_to_its_benchmark():
    for other in ({"T": 200}, {"activation": "glu"}):
        assert zoo.recipe("tcn_adding", **other).training.published is None
    assert zoo.recipe("tcn_adding", filters=30).training.published == 5.8e-5
    assert zoo.recipe("tcn_seq_mnist", size="37k").training.published is None
    assert zoo.recipe("lstm_copy_memory", T=500).training.published is None
    assert zoo.recipe("tcn_adding", T=200, published=1.0).training.published == 1.0


def test_only_an_lstm_has_a_forget_gate():
    assert zoo.recipe("gru_adding").model.forget_bias == 1.0
    assert zoo.recipe("gru_adding", cell="lstm", T=200).model.forget_bias == 5.0
    with pytest.raises(ValueError, match="Only an LSTM has a forget gate.*forget_bias=2.0.*'gru'"):
        zoo.recipe("gru_adding", forget_bias=2.0)


def test_settings_of_the_mixture_of_softmaxes():
    model = zoo.trellisnet_ptb_mos(**small("trellisnet_ptb_mos"))
    assert (model.head.experts, model.head.latent_dropout.rate) == (2, 0.29)
    bias = np.abs(zoo.trellisnet_ptb_mos(depth=8, vocabulary_size=9).head.latent_bias)
    assert bias.max() == pytest.approx(480**-0.5, rel=0.01)
    recipe = zoo.recipe("trellisnet_ptb_mos")
    assert (recipe.model.weight_dropout, recipe.model.clip_norm) == (0.45, 0.2)
    assert "1000 hidden + 480 output units, 15 softmaxes" in recipe.model.summary()


@pytest.mark.parametrize(
    ("ablation", "fields", "published"),
    [
        ("no_hidden_dropout", {"hidden_dropout": 0.0}, 64.69),
        ("no_weight_dropout", {"weight_dropout": 0.0}, 63.82),
        ("no_auxiliary_losses", {"aux_weight": 0.0}, 57.99),
        ("no_long_sequence_parallelism", {"history": "repackage"}, 57.35),
        ("mixed_group_kernel", {"groups": 2, "hidden_units": 2062}, 59.18),
        ("injection_every_2", {"injection_every": 2}, 57.44),
        ("injection_every_5", {"injection_every": 5}, 59.75),
        ("injection_every_10", {"injection_every": 10}, 60.70),
        ("injection_every_20", {"injection_every": 20}, 74.91),
    ],
)
def test_ablations(ablation, fields, published):
    complete = zoo.recipe("trellisnet_ptb")
    recipe = complete.replace(ablation=ablation)
    assert vars(recipe.model) == vars(complete.model) | fields | {"ablation": ablation}
    assert (recipe.training.published, recipe.training.source) == (published, "TrellisNet Table 6")
    assert recipe.replace(ablation=None) == complete
    assert complete.from_json(recipe.to_json()) == recipe
    # One after another, and of a shallower net.
    other = recipe.replace(depth=8, hidden_units=4).replace(ablation="no_weight_dropout")
    assert other.model.weight_dropout == 0
    assert other.model.hidden_dropout == 0.28 and other.model.aux_every == 4


# Channels of a group by TABLES: with p = 400, 4 d (p + d (2 G - 1)) weights.
@pytest.mark.parametrize(("groups", "width"), [(2, 1231), (3, 965), (4, 820)])
def test_a_mixed_group_kernel_of_the_same_size(groups, width):
    config = zoo.recipe("trellisnet_ptb", ablation="mixed_group_kernel", groups=groups).model
    assert config.hidden_units == groups * width - 400
    weights = 4 * width * (400 + width * (2 * groups - 1))
    assert weights == pytest.approx(4 * 1400 * 2 * 1800, rel=2e-3)
    assert f"kernels in {groups} groups ({weights:,} weights" in config.summary()
    assert zoo.recipe("trellisnet_ptb").replace(groups=groups).replace(groups=None) == zoo.recipe(
        "trellisnet_ptb"
    )


def test_the_net_of_a_mixed_group_kernel():
    sizes = {"depth": 4, "embedding_dim": 4, "hidden_units": 5, "vocabulary_size": 9}
    recipe = zoo.recipe("trellisnet_ptb", ablation="mixed_group_kernel", groups=3, **sizes)
    backbone = recipe.model.build().backbone
    assert (backbone.kernel_structure, backbone.groups) == ("mixed_group", [3, 3, 3])
    kernels = (backbone.kernel, backbone.recurrent_kernel)
    assert sum(kernel.count_connections() for kernel in kernels) == 4 * 3 * (4 + 3 * 5)
    assert "(228 weights" in recipe.model.summary()


def test_ablations_of_the_segments_and_of_other_data():
    short = zoo.recipe("trellisnet_ptb", ablation="no_long_sequence_parallelism")
    assert (short.segment, short.horizon) == (55, 0)
    assert zoo.recipe("trellisnet_ptb", segment=120, history="chop").segment == 120
    recipe = zoo.recipe("trellisnet_ptb", ablation="injection_every_2", data="wt2")
    assert recipe.training.published is None
    assert zoo.recipe("trellisnet_ptb", ablation="injection_every_2", hidden_dropout=0.1)
    model = zoo.trellisnet_ptb(ablation="no_auxiliary_losses", depth=8, vocabulary_size=9)
    assert not model.backbone.return_aux


def test_the_tcn_drops_single_numbers_of_its_input():
    for name in LANGUAGE:
        model = zoo.get_model(name, **small(name))
        kind = type(model.input_dropout).__name__
        assert kind == ("Dropout" if name.startswith("tcn_") else "VariationalDropout")
        if name.startswith("tcn_"):
            assert model.input_dropout.rate == zoo.recipe(name).model.input_dropout > 0
    with pytest.raises(ValueError, match="`input_dropout_kind` must be one of"):
        zoo.recipe("tcn_ptb", input_dropout_kind="spatial")


def test_T_of_the_recurrent_nets():
    config = zoo.recipe("lstm_adding", T=400).model
    assert (config.layers, config.hidden_units, config.forget_bias) == (2, 77, 10.0)
    assert zoo.recipe("lstm_adding", T=300).model.forget_bias == 10.0
    assert zoo.recipe("lstm_adding", T=200).model.optimizer == "sgd"
    assert zoo.recipe("gru_copy_memory", T=9000).model.hidden_units == 32
    assert zoo.recipe("lstm_ptb", size="equal").model.embedding_dim == 556
    weights = zoo.lstm_adding(T=200).backbone.layers[0].get_weights()
    np.testing.assert_array_equal(weights[2].reshape(4, 77)[:, 0], [0, 5, 0, 0])


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("tcn_adding", {"T": 0}, "`T` must be positive"),
        ("tcn_adding", {"T": 63}, "T=63 is too short: .* has the dilation 64. .* at most 6"),
        ("tcn_copy_memory", {"T": 107}, "T=107 is too short: sequences have 127 steps"),
        ("tcn_adding", {"T": 9999}, "widest sees 3571 steps"),
        ("tcn_adding", {"data_options": {"T": 5}}, "leave .'T'. to the model"),
        ("tcn_adding", {"activation": "tanh"}, "`activation` must be one of"),
        ("tcn_adding", {"dropout": 1.0}, r"`dropout` must be in \[0, 1\)"),
        ("tcn_adding", {"data": "sums"}, "`data` must be one of .*'adding'"),
        ("tcn_adding", {"batch_size": 0}, "`batch_size` must be 1 or more"),
        ("tcn_seq_mnist", {"size": "70k"}, r"`size` must be one of \['37k', '67k'\]"),
        ("trellisnet_seq_mnist", {"size": "1m"}, r"`size` must be one of \['140k', '8m'\]"),
        ("trellisnet_seq_mnist", {"dilations": [1, 0]}, "`dilations` must be numbers of 1"),
        (
            "trellisnet_ptb",
            {"ablation": "no_bias"},
            "`ablation` must be one of .'injection_every_10'",
        ),
        ("trellisnet_ptb", {"groups": 0}, "`groups` must be positive"),
        (
            "trellisnet_ptb",
            {"groups": 3, "hidden_units": 999},
            "`groups` must be a divisor of the 1399 hidden and output units",
        ),
        ("trellisnet_ptb_mos", {"experts": 0}, "`experts` must be positive"),
        ("trellisnet_ptb_mos", {"experts": None}, "`output_units` must be `embedding_dim`, 280"),
        ("trellisnet_ptb", {"latent_dropout": 0.1}, "`latent_dropout` must be 0 without a mixture"),
        ("tcn_ptb", {"segment": None}, "`segment` must be given"),
        ("tcn_ptb", {"horizon": 80}, "horizon=80, segment=80"),
        ("lstm_ptb", {"horizon": None}, "`horizon` must be given"),
        ("gru_jsb", {"size": "table3"}, 'use size="equal"'),
        ("gru_jsb", {"T": 5}, "`T` is a setting of adding and copy memory"),
        ("lstm_jsb", {"cell": "lru"}, "`cell` must be one of"),
        ("lstm_ptb", {"embedding_dim": 5}, "`embedding_dim` must be `hidden_units`"),
    ],
)
def test_wrong_settings(name, fields, message):
    with pytest.raises(ValueError, match=message):
        zoo.recipe(name, **fields)


def test_the_horizon_of_a_tcn_covers_its_receptive_field():
    assert zoo.recipe("tcn_char_ptb", horizon=None).horizon == 28
    assert zoo.recipe("tcn_char_ptb").horizon == 80


@pytest.mark.parametrize("name", zoo.list_models())
def test_json_round_trip(name):
    recipe = zoo.recipe(name, epochs=3)
    assert zoo.recipe(name).from_json(recipe.to_json()) == recipe


def test_data_that_a_model_cannot_be_trained_on():
    with pytest.raises(ValueError, match="trained on separate sequences. .* 'pydoc' has none"):
        zoo.recipe("tcn_jsb", data="pydoc").load_data()
    options = {"T": 8, "train": 2, "valid": 2, "test": 2}
    with pytest.raises(ValueError, match="'adding' has none for training. Give one"):
        zoo.recipe("tcn_ptb", data="adding", data_options=options).load_data()
    recipe = zoo.recipe("tcn_seq_mnist", data="adding", data_options=options)
    with pytest.raises(ValueError, match="'adding' has 2 channels, the model has channels=1"):
        recipe.stream(recipe.load_data().train)


# A step of training


def small(name):
    """Arguments that make a small net of any of the models."""
    fields = vars(zoo.recipe(name).model)
    wanted = {
        "filters": 4,
        "hidden_units": 4,
        "depth": 2,
        "dilations": (1, 2),
        "vocabulary_size": 9,
        "embedding_dim": 4,
    }
    if "T" in fields and fields["T"]:
        wanted["T"] = 12
    if fields.get("experts"):
        wanted |= {"experts": 2, "output_units": 5}
    return {key: value for key, value in wanted.items() if key in fields}


def examples(name, config):
    """Random examples of the benchmark's kind."""
    rng = np.random.RandomState(0)
    if config.task.metric == "mse":
        return data.adding_examples(12, 4, 0)
    if config.task.metric == "cross_entropy":
        return data.copy_memory_examples(12, 4, 0)
    if config.task.metric == "accuracy":
        x = rng.rand(4, 12, config.channels).astype("float32")
        return x, rng.randint(0, 10, 4)
    return [rng.randint(0, 2, (frames, 88)) for frames in (5, 9)]


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_step_on_sequences(name):
    recipe = zoo.recipe(name, **small(name), batch_size=2, jit_compile=False)
    part = examples(name, recipe.model)
    stream = recipe.stream(part, shuffle=True)
    model = zoo.get_model(name, **vars(recipe.model))
    before = [weight.copy() for weight in model.get_weights()]
    history = model.fit(stream, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"][0])
    assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
    assert str(list(recipe.training.counted(part, stream).values())[0]).isdigit()


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_step_on_text(name):
    recipe = zoo.recipe(name, **small(name), batch_size=2, jit_compile=False)
    tokens = np.random.RandomState(0).randint(0, 9, 200)
    model = zoo.get_model(name, **vars(recipe.model))
    history = model.fit(recipe.stream(tokens), steps_per_epoch=1, verbose=0).history
    assert np.isfinite(history["loss"][0])
    assert np.isfinite(history[recipe.model.metric][0])


@pytest.mark.parametrize("name", ["tcn_copy_memory", "lstm_jsb", "trellisnet_seq_mnist"])
def test_a_compiled_step(name):
    recipe = zoo.recipe(name, **small(name), batch_size=2)
    model = zoo.get_model(name, **vars(recipe.model))
    # TensorFlow's loops over time are slow under XLA on a CPU, and cuDNN's layers go without it.
    assert model.jit_compile is (name.startswith("trellisnet") or keras.backend.backend() == "jax")
    stream = recipe.stream(examples(name, recipe.model))
    assert np.isfinite(model.fit(stream, shuffle=False, verbose=0).history["loss"][0])


@pytest.mark.parametrize(
    ("name", "filters"),
    [("tcn_adding", 17), ("tcn_copy_memory", 7), ("tcn_jsb", 104), ("tcn_char_ptb", 309)],
)
def test_a_gated_net_of_the_same_size(name, filters):
    gated = zoo.get_model(name, activation="glu", filters=filters)
    assert gated.backbone.blocks[0].activation == "glu"
    plain = zoo.get_model(name).count_params()
    assert gated.count_params() == pytest.approx(plain, rel=0.05)


def test_a_vocabulary_is_for_texts():
    assert not registry.reads_text(zoo.recipe("tcn_jsb").model)
    vocabulary = data.Vocabulary(["a", "b"], unit="character")
    with pytest.raises(ValueError, match="unknown arguments .'vocabulary'."):
        zoo.tcn_jsb(vocabulary=vocabulary)
    assert zoo.tcn_text8(vocabulary=vocabulary).vocabulary_size == 2


def test_descriptions_name_the_architecture():
    recipe = zoo.recipe("lstm_jsb", hidden_units=4)
    rolls = [np.zeros((4, 88))]
    splits = data.Dataset("jsb", rolls, rolls, rolls, "", data.PianoRollStream)
    shown = runs.describe(recipe, zoo.lstm_jsb(hidden_units=4), splits)
    assert "2 layers of 4 LSTM units" in shown
    assert "jsb: train 1, valid 1, test 1 sequences" in shown
    assert "published frame_nll 8.45" in shown
