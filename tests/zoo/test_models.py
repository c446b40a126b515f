"""The zoo's models: sizes, arguments that follow from others, a step of training of each kind."""

import inspect
import pydoc

import keras
import numpy as np
import pytest

from tests.support.parameters import slow_but
from tests.support.served import CHARACTERS
from trellis_keras import forecasting, zoo
from trellis_keras.data import Vocabulary
from trellis_keras.layers import AdaptiveSoftmax
from trellis_keras.zoo import lru, registry
from trellis_keras.zoo.trellisnet import ABLATIONS, WIKITEXT103_CUTOFFS

TINY = {"depth": 3, "hidden_units": 4, "embedding_dim": 4}


def tcn_parameters(widths, kernel_size):
    """By TABLES: k w (a + w) + 4 w a block, and a shortcut where widths differ."""
    total = 0
    for a, w in zip(widths, widths[1:], strict=False):
        total += kernel_size * w * (a + w) + 4 * w + (a * w + w) * (a != w)
    return total


# The registry


def test_list_models():
    modules = zoo.trellisnet, zoo.tcn, zoo.lru, zoo.series
    assert zoo.list_models() == sorted(name for module in modules for name in module.__all__)
    assert zoo.list_models("trellisnet_*_ptb") == ["trellisnet_char_ptb"]
    assert zoo.list_models("transformer_*") == []
    assert "tcn_jsb" in zoo.list_models(pretrained=True)
    assert "tcn_ptb" not in zoo.list_models(pretrained=True)
    twice = [name for name, setting in registry.list_settings() if setting == "lru_paper"]
    assert twice == ["gru_char_ptb", "gru_text8", "lstm_char_ptb", "lstm_text8"]


def test_help_shows_arguments_and_defaults():
    parameters = inspect.signature(zoo.tcn_jsb).parameters
    assert parameters["filters"].default == 150
    assert list(parameters)[-3:] == ["weights", "dtype_policy", "jit_compile"]
    assert parameters["jit_compile"].default is None
    for name in zoo.list_models():
        text = pydoc.plain(pydoc.render_doc(getattr(zoo, name)))
        assert "parameters" in text or name == "trellisnet_char"
        assert "Args:" in text and "A compiled" in text and "seed=0" in text, name
        assert max(map(len, getattr(zoo, name).__doc__.splitlines())) <= 100, name


def test_a_function_of_ones_own_is_a_model():
    @zoo.register(
        data="adding",
        metric="mse",
        channels=2,
        training=zoo.Training(optimizer="adam", learning_rate=1e-3, batch_size=2, epochs=1),
    )
    def my_model(units: int = 3, seed: int | None = 0):
        """A model of a test."""
        from trellis_keras.models import SequenceRegressor

        return SequenceRegressor(keras.layers.GRU(units), seed=seed)

    try:
        assert my_model(units=2).backbone.units == 2
        assert zoo.get_model("my_model").backbone.units == 3
        assert registry.describe("my_model") == "A model of a test."
        assert registry.published_value(zoo.recipe("my_model")) is None
        with pytest.raises(ValueError, match="The zoo has a model 'my_model' already"):
            zoo.register(data="adding", metric="mse", training=None)(inspect.unwrap(my_model))
    finally:
        del registry._ENTRIES["my_model", None], registry._FUNCTIONS["my_model"]


def test_what_a_model_does_not_take():
    with pytest.raises(ValueError, match="no option 'deep'. Did you mean 'depth'"):
        zoo.trellisnet_ptb(deep=8)
    with pytest.raises(ValueError, match="`epochs` is not an argument of the model but of its tr"):
        zoo.trellisnet_ptb(epochs=8)
    with pytest.raises(ValueError, match="tcn_jsb reads no text: it takes no `vocabulary`"):
        zoo.tcn_jsb(vocabulary=CHARACTERS)


def test_the_vocabulary_sets_the_size():
    vocabulary = Vocabulary(["a", "b", "c"], unit="character")
    model = zoo.trellisnet_char(vocabulary=vocabulary, **TINY)
    assert model.vocabulary_size == 3 and model.vocabulary == vocabulary
    with pytest.raises(ValueError, match="vocabulary has 3 tokens, but vocabulary_size=4"):
        zoo.trellisnet_char(vocabulary=vocabulary, vocabulary_size=4, **TINY)


def test_no_seed_gives_other_weights_each_time():
    one, other = (zoo.trellisnet_char(seed=None, **TINY).get_weights()[0] for _ in range(2))
    assert not np.array_equal(one, other)


def test_precision_is_an_argument():
    models = [zoo.tcn_jsb(dtype_policy=p) for p in (None, "mixed_bfloat16", "float64")]
    assert [m.compute_dtype for m in models] == ["float32", "bfloat16", "float64"]
    assert [m.backbone.compute_dtype for m in models] == ["float32", "bfloat16", "float64"]
    assert [str(m.weights[0].dtype) for m in models] == ["float32", "float32", "float64"]
    assert keras.config.dtype_policy().name == "float32"


def test_a_model_of_the_zoo_is_saved_whole(tmp_path):
    model = zoo.trellisnet_ptb(depth=8, hidden_units=4, embedding_dim=4, vocabulary_size=9)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    tokens = np.arange(20).reshape(2, 10) % 9
    np.testing.assert_array_equal(model(tokens), loaded(tokens))
    assert loaded.jit_compile is True
    assert loaded.optimizer.get_config() == model.optimizer.get_config()


# Sizes, by TABLES


@pytest.mark.parametrize(
    ("name", "arguments", "parameters"),
    [
        ("trellisnet_ptb", {}, 24_175_600),
        ("trellisnet_ptb_large", {}, 32_576_800),
        ("trellisnet_ptb_mos", {}, 25_681_735),
        ("trellisnet_ptb_mos_large", {}, 34_178_935),
        ("trellisnet_char_ptb", {}, 13_464_450),
        ("trellisnet_seq_mnist", {}, 137_910),
        ("trellisnet_seq_mnist", {"size": "8m"}, 8_020_110),
        ("trellisnet_permuted_mnist", {}, 137_910),
        ("trellisnet_seq_cifar10", {}, 139_990),
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


@pytest.mark.parametrize(
    ("name", "core", "embedding_dim", "tails", "parameters"),
    [
        ("trellisnet_wt103", 8 * 2000 * 2512 + 12 * 2000, 512, 3, 177_565_594),
        ("tcn_wt103", tcn_parameters([400, 1000, 1000, 1000, 1000, 400], 3), 400, 3, 132_061_938),
        ("tcn_lambada", tcn_parameters([500] * 6, 4), 500, 0, 56_710_715),
    ],
)
def test_parameters_of_many_words(name, core, embedding_dim, tails, parameters):
    """Built with fewer words, whose share is linear."""
    arguments = zoo.recipe(name).arguments
    words = arguments["vocabulary_size"]
    per_word = embedding_dim + 1
    assert core + (words + tails) * per_word == parameters
    assert len(arguments["cutoffs"]) == tails
    few = zoo.get_model(name, vocabulary_size=10, cutoffs=(2, 4, 7)[:tails])
    assert few.count_params() == core + (10 + tails) * per_word


@pytest.mark.parametrize(
    "benchmark",
    slow_but(["adding", "copy_memory", "jsb", "ptb", "char_ptb", "text8"], "adding", "char_ptb"),
)
def test_recurrent_nets_of_equal_size(benchmark):
    published = {"adding": 70e3, "copy_memory": 16e3, "jsb": 300e3, "ptb": 13e6, "text8": 4.6e6}
    wanted = published.get(benchmark, 3e6)
    for cell in ("lstm", "gru", "rnn"):
        size = {"size": "matched"} if cell == "lstm" else {}
        model = zoo.get_model(f"{cell}_{benchmark}", **size)
        assert model.count_params() == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    ("name", "filters"),
    [("tcn_adding", 17), ("tcn_copy_memory", 7), ("tcn_jsb", 104), ("tcn_char_ptb", 309)],
)
def test_a_gated_net_of_the_same_size(name, filters):
    gated = zoo.get_model(name, activation="glu", filters=filters)
    plain = zoo.get_model(name).count_params()
    assert gated.count_params() == pytest.approx(plain, rel=0.05)


# Units for 2 layers (10M of V=50 and 205, 24M of both), the same for 4 layers, and for 1M of V=50
# with 2 and with 4 layers.
UNITS = {
    "LRU": (lambda L: (12 * L, 6 * L), "643 637 998 991 455 452 706 703 202 143"),
    "RG-LRU": (lambda L: (10 * L, 5 * L), "704 697 1093 1085 499 495 773 769 221 157"),
    "PS-LRU": (lambda L: (8 * L, 4 * L), "787 778 1221 1212 557 552 864 859 247 175"),
    "GRU": (lambda L: (6 * L, 6 * L), "908 895 1410 1397 643 637 997 991 284 202"),
    "GRU, reset before": (lambda L: (6 * L, 3 * L), "908 896 1410 1397 643 637 998 991 284 202"),
    "LSTM": (lambda L: (8 * L, 4 * L), "787 778 1221 1212 557 552 864 859 247 175"),
    "LSTM, two biases": (lambda L: (8 * L, 8 * L), "787 777 1221 1211 557 552 864 859 246 175"),
    "Grid-LSTM, own": (lambda L: (16 * L, 8 * L), "557 552 864 859 394 392 611 609 175 124"),
    "Grid-LSTM": (lambda L: (16, 8), "787 778 1221 1212 787 778 1221 1212 247 247"),
    "RHN": (lambda L: (12, 10), "908 896 1410 1397 908 896 1410 1397 284 284"),
}


@pytest.mark.parametrize("unit", UNITS)
def test_units_for_a_size(unit):
    coefficients, expected = UNITS[unit]
    cases = [(L, size, V) for L in (2, 4) for size in ("10m", "24m") for V in (50, 205)]
    cases += [(2, "1m", 50), (4, "1m", 50)]
    solved = [lru.solve_units(*coefficients(L), V, size) for L, size, V in cases]
    assert solved == [int(units) for units in expected.split()]


@pytest.mark.parametrize(
    ("name", "fields", "unit"),
    [
        ("lru_enwik8", {}, "LRU"),
        ("lru_enwik8", {"variant": "rg"}, "RG-LRU"),
        ("lru_enwik8", {"variant": "ps", "layers": 4}, "PS-LRU"),
        ("lstm_enwik8", {}, "LSTM"),
        ("gru_enwik8", {"layers": 4}, "GRU"),
        ("grid_lstm_enwik8", {"share_depth_weights": False}, "Grid-LSTM, own"),
        ("grid_lstm_enwik8", {}, "Grid-LSTM"),
        ("rhn_enwik8", {}, "RHN"),
    ],
)
def test_units_of_the_lru_papers_models(name, fields, unit):
    coefficients, expected = UNITS[unit]
    layers = fields.get("layers", 2)
    index = {2: (1, 3), 4: (5, 7)}[layers]
    for size, place in zip(("10m", "24m"), index, strict=True):
        recipe = zoo.recipe(name, size=size, **fields)
        assert recipe.arguments["hidden_units"] == int(expected.split()[place])
    model = zoo.get_model(name, hidden_units=6, vocabulary_size=7, **fields)
    assert model.count_params() == lru.parameters(*coefficients(layers), 6, 7)
    assert model.embedding_dim == 6 and not model.tie_embeddings


def test_sizes_and_units_that_do_not_fit():
    with pytest.raises(ValueError, match='No number of units gives size="1m" to 1%.*270,000'):
        zoo.recipe("lru_text8", size="1m", vocabulary_size=270_000)
    with pytest.raises(ValueError, match='size="10m" takes hidden_units=643. Received: 30'):
        zoo.recipe("lru_char_ptb", size="10m", hidden_units=30)
    assert zoo.recipe("lru_char_ptb", hidden_units=30).arguments["size"] is None
    other = zoo.recipe("lru_char_ptb").replace(vocabulary_size=205)
    assert other.arguments["hidden_units"] == 637


# Arguments that follow from others


def test_T_takes_its_row_of_table_2():
    def net(name, **arguments):
        chosen = zoo.recipe(name, **arguments).arguments
        return chosen["kernel_size"], chosen["depth"], chosen["filters"]

    assert net("tcn_adding", T=400) == (7, 7, 27)
    assert net("tcn_adding", T=400, filters=30) == (7, 7, 30)
    # Not published: the smallest that sees the whole sequence.
    assert net("tcn_adding", T=1271) == (6, 7, 27)
    assert net("tcn_adding", T=1272) == (7, 7, 27)
    assert net("tcn_copy_memory", T=3551)[1] == 8
    assert net("tcn_copy_memory", T=3552)[1] == 9
    assert net("tcn_adding", T=5000, kernel_size=8, depth=9) == (8, 9, 24)
    assert net("tcn_seq_mnist", size="37k") == (6, 8, 20)


def test_T_takes_its_row_of_table_3():
    recipe = zoo.recipe("lstm_adding", T=400)
    assert {name: recipe.arguments[name] for name in ("layers", "hidden_units", "forget_bias")} == {
        "layers": 2, "hidden_units": 77, "forget_bias": 10.0,
    }  # fmt: skip
    assert zoo.recipe("lstm_adding", T=300).arguments["forget_bias"] == 10.0
    training = zoo.recipe("lstm_adding", T=200).training
    assert (training.optimizer, training.learning_rate, training.clip_norm) == ("sgd", 1e-3, 50.0)
    assert zoo.recipe("lstm_adding", T=200, clip_norm=None).training.clip_norm is None
    assert zoo.recipe("gru_copy_memory", T=9000).arguments["hidden_units"] == 32
    assert zoo.recipe("lstm_ptb", size="matched").arguments["embedding_dim"] == 556
    weights = zoo.lstm_adding(T=200).backbone.layers[0].get_weights()
    np.testing.assert_array_equal(weights[2].reshape(4, 77)[:, 0], [0, 5, 0, 0])


@pytest.mark.parametrize(("depth", "aux_every"), [(7, None), (9, 4), (31, 15), (55, 16), (200, 16)])
def test_auxiliary_losses_follow_the_depth(depth, aux_every):
    arguments = zoo.recipe("trellisnet_ptb", depth=depth).arguments
    assert arguments["aux_every"] == aux_every
    assert arguments["aux_weight"] == (0.05 if aux_every else 0.0)


def test_auxiliary_losses_of_ones_own():
    recipe = zoo.recipe("trellisnet_ptb", depth=8, aux_every=7).replace(vocabulary_size=9)
    assert recipe.arguments["aux_every"] == 7
    assert zoo.recipe("trellisnet_ptb", aux_weight=0.0).arguments["aux_every"] is None
    assert zoo.recipe("trellisnet_char_ptb").arguments["aux_every"] == 70
    model = zoo.trellisnet_ptb(ablation="no_auxiliary_losses", depth=8, vocabulary_size=9)
    assert not model.backbone.return_aux


def test_segments_follow_the_depth():
    def lengths(name, **options):
        training = zoo.recipe(name, **options).training
        return training.sequence_length, training.context_length

    assert lengths("trellisnet_ptb") == (110, 55)
    assert lengths("trellisnet_ptb", depth=8) == (110, 8)
    assert lengths("trellisnet_ptb", depth=8, kernel_size=3) == (110, 16)
    assert lengths("trellisnet_ptb", depth=200) == (400, 200)
    assert lengths("trellisnet_ptb", ablation="no_long_sequence_parallelism") == (55, 0)
    assert lengths("trellisnet_ptb", context_length=3) == (110, 3)
    assert lengths("trellisnet_char_ptb", depth=9) == (9, 0)
    assert lengths("lru_char_ptb") == (50, 0)


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_an_ablation_changes_its_part_alone(ablation):
    complete = zoo.recipe("trellisnet_ptb")
    changed = zoo.recipe("trellisnet_ptb", ablation=ablation)
    wanted = ABLATIONS[ablation] | {"ablation": ablation}
    if ablation == "mixed_group_kernel":
        wanted |= {"hidden_units": 2062}
    if ablation == "no_auxiliary_losses":
        wanted |= {"aux_every": None}
    assert changed.arguments == complete.arguments | wanted
    given = zoo.recipe("trellisnet_ptb", ablation=ablation, hidden_dropout=0.1)
    assert given.arguments["hidden_dropout"] == 0.1


# With p = 400, 4 d (p + d (2 G - 1)) weights.
@pytest.mark.parametrize(("groups", "width"), [(2, 1231), (3, 965), (4, 820)])
def test_a_mixed_group_kernel_of_the_same_size(groups, width):
    recipe = zoo.recipe("trellisnet_ptb", ablation="mixed_group_kernel", groups=groups)
    assert recipe.arguments["hidden_units"] == groups * width - 400
    sizes = {"depth": 4, "embedding_dim": 4, "hidden_units": 3 * groups - 4, "vocabulary_size": 9}
    backbone = recipe.replace(**sizes).build().backbone
    assert (backbone.kernel_structure, backbone.groups) == ("mixed_group", [3] * groups)


def test_published_clusters_end_with_the_vocabulary():
    recipe = zoo.recipe("trellisnet_wt103")
    assert recipe.arguments["cutoffs"] == WIKITEXT103_CUTOFFS
    assert recipe.replace(vocabulary_size=33_278).arguments["cutoffs"] == (2_800, 20_000)
    assert recipe.replace(vocabulary_size=2_800).arguments["cutoffs"] == ()
    model = zoo.trellisnet_wt103(depth=2, hidden_units=4, vocabulary_size=50, cutoffs=(9, 20))
    assert isinstance(model.head, AdaptiveSoftmax)
    assert model.head.embedding is model.embedding and model.head.div_value == 1
    with pytest.raises(ValueError, match=r"vocabulary_size - 1 = 99\D.*cutoffs=\[10, 200\]"):
        recipe.replace(cutoffs=[10, 200], vocabulary_size=100)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tcn_adding", {"T": 0}, "`T` must be positive"),
        ("tcn_adding", {"T": 63}, "T=63 is too short: .* has the dilation 64. .* at most 6"),
        ("tcn_copy_memory", {"T": 107}, "T=107 is too short: sequences have the length 127"),
        ("tcn_adding", {"T": 9999}, "widest sees 3571 steps"),
        ("tcn_adding", {"activation": "tanh"}, "`activation` must be one of glu, relu"),
        ("tcn_jsb", {"dropout_kind": "some"}, "`dropout_kind` must be one of"),
        ("tcn_jsb", {"depth": 2**63}, "`depth` must be at most 40"),
        ("tcn_ptb", {"initial_embedding": "zero"}, "`initial_embedding` must be one of"),
        ("tcn_ptb", {"cutoffs": [10_000]}, "vocabulary_size - 1 = 9999"),
        ("tcn_seq_mnist", {"size": "70k"}, "`size` must be one of 37k, 67k"),
        ("trellisnet_seq_mnist", {"size": "1m"}, "`size` must be one of 140k, 8m"),
        ("trellisnet_seq_mnist", {"dilations": [1, 0]}, "`dilations` must be numbers of 1"),
        ("trellisnet_ptb", {"ablation": "no_bias"}, "`ablation` must be one of injection_every_10"),
        ("trellisnet_ptb", {"groups": 0}, "`groups` must be positive"),
        ("trellisnet_ptb", {"groups": 3, "hidden_units": 999}, "a divisor of the 1399 hidden"),
        ("trellisnet_ptb", {"latent_dropout": 0.1}, "Without a mixture of softmaxes"),
        ("trellisnet_ptb", {"output_units": 9}, "Without a mixture of softmaxes"),
        ("trellisnet_ptb_mos", {"cutoffs": [100]}, r"`cutoffs` must be \(\) with a mixture"),
        ("trellisnet_ptb", {"depth": 8, "aux_every": 9}, "`aux_every` must be at most `depth`, 8"),
        ("trellisnet_char", {"aux_every": 4}, "need both .* aux_every=4, aux_weight=0"),
        ("trellisnet_char", {"aux_weight": 0.3}, "need both .* aux_every=None, aux_weight=0.3"),
        ("trellisnet_ptb", {"depth": 4, "aux_weight": 0.3}, "need both .* aux_every=None"),
        ("lstm_jsb", {"size": "equal"}, "`size` must be one of matched, paper"),
        ("lstm_ptb", {"embedding_dim": 5}, "`embedding_dim` must be `hidden_units`"),
        ("lru_char_ptb", {"variant": "full"}, "`variant` must be one of ps, rg, ug"),
        ("grid_lstm_text8", {"convention": "mine"}, "`convention` must be one of"),
        ("lru_char_ptb", {"size": "5m"}, "`size` must be one of 10m, 1m, 24m"),
    ],
)
def test_wrong_arguments(name, options, message):
    with pytest.raises(ValueError, match=message):
        zoo.recipe(name, **options)


# A step of training

SMALL = {"filters": 4, "hidden_units": 4, "depth": 2, "dilations": (1, 2), "T": 12}
SMALL |= {"vocabulary_size": 9, "embedding_dim": 4, "experts": 2, "output_units": 4}


def small_recipe(name):
    """A small net of any of the models, and random examples of its benchmark's kind."""
    arguments = zoo.recipe(name).arguments
    wanted = {k: v for k, v in SMALL.items() if arguments.get(k) is not None}
    recipe = zoo.recipe(name, **wanted)
    if recipe.reads_text:
        context = 0 if recipe.stateful else 2
        recipe = recipe.replace(sequence_length=6, context_length=context)
    recipe = recipe.replace(batch_size=2, jit_compile=False)
    rng = np.random.RandomState(0)
    if recipe.reads_text:
        return recipe, rng.randint(0, 9, 30)
    if recipe.metric == "mse":
        return recipe, zoo.datasets.adding_examples(12, 4, 0)
    if recipe.metric == "cross_entropy":
        return recipe, zoo.datasets.copy_memory_examples(12, 4, 0)
    if recipe.data in ("series", "labelled_series"):
        return recipe, _own_windows(recipe, rng)
    if recipe.metric == "accuracy":
        x = rng.rand(4, 12, recipe.entry.channels).astype("float32")
        return recipe, (x, rng.randint(0, 10, 4))
    return recipe, [rng.randint(0, 2, (frames, 88)) for frames in (5, 9)]


def _own_windows(recipe, rng):
    series, window = forecasting.TimeSeries(rng.rand(400, 1)), recipe.arguments["window"]
    if recipe.data == "labelled_series":
        labels = np.repeat([0, 1], 200).astype("int32")
        return forecasting.LabelledWindows(series, labels, window, 50, [0])
    return series.split(window, recipe.arguments["horizon"], stride=40)[0]


@pytest.mark.parametrize(
    "name", slow_but(zoo.list_models(), "trellisnet_ptb_mos", "tcn_jsb", "lru_text8")
)
def test_a_step(name):
    recipe, part = small_recipe(name)
    model = recipe.build()
    if hasattr(part, "rows"):
        model.adapt(part.rows())
    before = [weight.copy() for weight in model.get_weights()]
    options = {"steps_per_epoch": 1} if recipe.reads_text else {"shuffle": False}
    history = model.fit(recipe.stream(part), **options, verbose=0).history
    assert np.isfinite(history["loss"][0])
    if recipe.reads_text or recipe.metric in ("mse", "accuracy", "frame_nll"):
        assert np.isfinite(history.get(recipe.metric, history["loss"])[0])
    assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))


def test_the_net_of_each_kind():
    mixture = small_recipe("trellisnet_ptb_mos")[0].build()
    assert (mixture.head.experts, mixture.head.latent_dropout.rate) == (2, 0.29)
    tcn, trellis = (small_recipe(n)[0].build() for n in ("tcn_ptb", "trellisnet_ptb"))
    assert type(tcn.input_dropout).__name__ == "Dropout" and tcn.input_dropout.rate == 0.25
    assert type(trellis.input_dropout).__name__ == "VariationalDropout"
    cells = zoo.lru_text8(hidden_units=4, variant="rg", convention="authors").backbone.cells
    assert {cell.convention for cell in cells} == {"authors"}
    grid = zoo.grid_lstm_text8(hidden_units=4, convention="authors", share_depth_weights=False)
    cell = grid.backbone.layers[0].cell
    assert (cell.update, cell.share_depth_weights) == ("sequential", False)
    bias = zoo.rhn_enwik8(hidden_units=6, transform_bias=-3.0).backbone.get_weights()[-1]
    np.testing.assert_array_equal(bias, np.repeat([0.0, -3.0], 6))


def test_two_papers_models_of_one_name():
    tcn_paper = zoo.gru_char_ptb(hidden_units=4)
    lru_paper = zoo.gru_char_ptb(setting="lru_paper", hidden_units=4)
    assert (tcn_paper.embedding_dim, lru_paper.embedding_dim) == (120, 4)
    assert not tcn_paper.backbone.stateful and lru_paper.backbone.stateful
    recipe = zoo.recipe("gru_char_ptb", setting="lru_paper")
    assert (recipe.metric, recipe.training.batch_size) == ("cross_entropy", 250)
    assert recipe.data_options == {"split": [0.9, 0.05, 0.05]}
    assert registry.recipe_from_dict(recipe.to_dict()) == recipe
    with pytest.raises(ValueError, match="no option 'variant'"):
        zoo.gru_char_ptb(setting="lru_paper", variant="ug")
