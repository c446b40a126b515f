"""The zoo's models: sizes, arguments that follow from others, a step of training of each kind."""

import dataclasses
import inspect
import pydoc

import keras
import numpy as np
import pytest

from tests.support.parameters import slow_but
from trellis_keras import zoo
from trellis_keras.data import Vocabulary
from trellis_keras.models import SequenceRegressor
from trellis_keras.zoo import evaluation, registry, results

TINY = {"depth": 3, "hidden_units": 4, "embedding_dim": 4}


def tcn_parameters(widths, kernel_size):
    """By TABLES: k w (a + w) + 4 w a block, and a shortcut where widths differ."""
    total = 0
    for a, w in zip(widths, widths[1:], strict=False):
        total += kernel_size * w * (a + w) + 4 * w + (a * w + w) * (a != w)
    return total


# The registry


def test_list_models():
    modules = zoo.trellisnet, zoo.tcn, zoo.recurrent_baselines, zoo.lru
    assert zoo.list_models() == sorted(name for module in modules for name in module.__all__)
    assert zoo.list_models("trellisnet_*_ptb") == ["trellisnet_char_ptb"]
    assert zoo.list_models("transformer_*") == []
    assert "tcn_jsb" in zoo.list_models(pretrained=True)
    assert "tcn_ptb" not in zoo.list_models(pretrained=True)


def test_help_shows_every_published_value():
    parameters = inspect.signature(zoo.trellisnet_ptb).parameters
    open_ones = ["groups", "experts", "vocabulary", "weights", "dtype_policy", "jit_compile"]
    assert [name for name, p in parameters.items() if p.default is None] == open_ones
    assert (parameters["hidden_units"].default, parameters["aux_weight"].default) == (1000, 0.05)
    for name in zoo.list_models():
        text = pydoc.plain(pydoc.render_doc(getattr(zoo, name)))
        assert "parameters" in text or name == "trellisnet_char", name
        assert "seed: int | None = 0" in text, name
        assert max(map(len, getattr(zoo, name).__doc__.splitlines())) <= 100, name


def test_a_function_of_ones_own_is_a_model():
    @zoo.register(
        data="adding",
        data_options={"T": 9},
        metric="mse",
        channels=2,
        training=zoo.Training(optimizer=keras.optimizers.Adam(), batch_size=2, epochs=1),
    )
    def my_model(units: int = 3, seed: int | None = 0):
        """A model of a test."""
        return SequenceRegressor(keras.layers.GRU(units), seed=seed)

    try:
        assert my_model(units=2).backbone.units == 2
        assert zoo.recipe("my_model").build().backbone.units == 3
        assert zoo.recipe("my_model", T=5).data_options == {"T": 5}
        assert registry.published_value(zoo.recipe("my_model")) is None
        with pytest.raises(ValueError, match="no metric 'accuracy'. Received: .*mae"):
            metrics = {"metric": "accuracy", "metrics": lambda: ["mae"]}
            entry = dataclasses.replace(zoo.recipe("my_model").entry, **metrics)
            small = {"train": 2, "valid": 2, "test": 2}
            other = zoo.recipe("my_model", data_options=small)
            other = dataclasses.replace(other, entry=entry, metric="accuracy")
            evaluation.evaluate(other, my_model(units=2))
        for wrong in (lambda units, seed=0: None, lambda units=3: None):
            with pytest.raises(ValueError, match="need defaults, and one must be `seed`"):
                zoo.register(data="adding", metric="mse", training=None)(wrong)
        with pytest.raises(ValueError, match="The zoo already has a model 'my_model'"):
            zoo.register(data="adding", metric="mse", training=None)(my_model)
    finally:
        del registry._ENTRIES["my_model"]


def test_the_vocabulary_sets_the_size():
    vocabulary = Vocabulary(["a", "b", "c"], unit="character")
    model = zoo.trellisnet_char(vocabulary=vocabulary, **TINY)
    assert model.vocabulary_size == 3 and model.vocabulary == vocabulary
    with pytest.raises(ValueError, match="vocabulary has 3 tokens, but vocabulary_size=4"):
        zoo.trellisnet_char(vocabulary=vocabulary, vocabulary_size=4, **TINY)


def test_precision_is_an_argument():
    models = [zoo.tcn_jsb(dtype_policy=p) for p in (None, "mixed_bfloat16", "float64")]
    assert [m.compute_dtype for m in models] == ["float32", "bfloat16", "float64"]
    assert [m.backbone.compute_dtype for m in models] == ["float32", "bfloat16", "float64"]
    assert [str(m.weights[0].dtype) for m in models] == ["float32", "float32", "float64"]
    assert keras.config.dtype_policy().name == "float32"


def test_a_model_of_the_zoo_is_saved_whole(tmp_path):
    sizes = {"hidden_units": 4, "output_units": 4, "embedding_dim": 4, "vocabulary_size": 9}
    model = zoo.trellisnet_ptb(depth=8, aux_every=4, **sizes)
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
        ("trellisnet_ptb_mos", {}, 25_681_735),
        ("trellisnet_char_ptb", {}, 13_464_450),
        ("trellisnet_seq_mnist", {}, 137_910),
        ("trellisnet_seq_cifar10", {}, 139_990),
        ("tcn_adding", {}, 70_369),
        ("tcn_copy_memory", {}, 12_530),
        ("tcn_seq_mnist", {}, 66_910),
        ("tcn_permuted_mnist", {"kernel_size": 6, "filters": 20}, 37_010),
        ("tcn_jsb", {}, 269_938),
        ("tcn_nottingham", {}, 1_053_238),
        ("tcn_char_ptb", {}, 2_222_100),
        ("tcn_text8", {}, 4_129_667),
        ("tcn_ptb", {}, 14_659_600),
        ("lstm_adding", {"layers": 2, "hidden_units": 77}, 72_458),
        ("lstm_copy_memory", {"layers": 3, "hidden_units": 28}, 16_418),
        ("lstm_jsb", {}, 569_688),
        ("lstm_nottingham", {"layers": 3, "hidden_units": 280}, 1_694_648),
        ("lstm_ptb", {}, 18_778_400),
        ("lstm_char_ptb", {}, 4_648_850),
        ("lstm_text8", {}, 4_720_835),
    ],
)
def test_parameters(name, arguments, parameters):
    assert getattr(zoo, name)(**arguments).count_params() == parameters


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
    assert len(arguments.get("cutoffs", ())) == tails
    cutoffs = {"cutoffs": (2, 4, 7)} if tails else {}
    few = getattr(zoo, name)(vocabulary_size=10, **cutoffs)
    assert few.count_params() == core + (10 + tails) * per_word


@pytest.mark.parametrize("size", ["10M", "24M"])
def test_every_model_of_the_lru_paper_has_its_size(size):
    """By TABLES, section 8; L layers of H units have L (a H^2 + b H) parameters."""
    coefficients = {"ug": (12, 6), "rg": (10, 5), "ps": (8, 4), "lstm": (8, 4), "gru": (6, 6)}
    rows = [row for row in results.published() if row.source == "LRU Table 1"]
    rows = [row for row in rows if row.parameters == size]
    assert len(rows) == 7 * 4
    for row in rows:
        arguments = zoo.recipe(row.model, **row.options).arguments
        h, v = arguments["hidden_units"], arguments["vocabulary_size"]
        unit = arguments.get("variant", row.model.split("_")[0])
        if unit in coefficients:
            a, b = (arguments["layers"] * factor for factor in coefficients[unit])
        else:
            a, b = {"grid": (16, 8), "rhn": (12, 10)}[unit]
        parameters = a * h**2 + b * h + 2 * v * h + v
        assert parameters == pytest.approx(1e6 * int(size[:-1]), rel=0.002), row


# Arguments


@pytest.mark.parametrize("name, steps", [("lstm_seq_mnist", 784), ("lstm_copy_memory", 1_020)])
def test_lstms_remember_from_one_to_all_steps(name, steps):
    def biases(layer=0, **options):
        model = getattr(zoo, name)(forget_bias="chrono", **options)
        layers = [each for each in model.backbone.layers if isinstance(each, keras.layers.LSTM)]
        return np.split(layers[layer].get_weights()[2], 4)

    assert np.any(np.sort(biases(layers=2)[1]) != np.sort(biases(layers=2, layer=1)[1]))
    i, f, c, o = biases()
    assert 0 < f.min() < 4 and np.log(steps) - 1 < f.max() < np.log(steps - 1)
    np.testing.assert_array_equal(i, -f)
    assert not c.any() and not o.any()
    np.testing.assert_array_equal(biases()[1], f)
    assert np.any(biases(seed=1)[1] != f)
    with pytest.raises(ValueError, match="must be a number or \"chrono\". Received: 'crono'"):
        getattr(zoo, name)(forget_bias="crono")


TINY_WORDS = {"hidden_units": 4, "output_units": 4, "embedding_dim": 4, "vocabulary_size": 9}


def test_parts_that_the_ablations_take_out():
    model = zoo.trellisnet_ptb(depth=8, aux_weight=0.0, **TINY_WORDS)
    assert not model.backbone.return_aux
    model = zoo.trellisnet_ptb(depth=8, aux_every=4, groups=2, **TINY_WORDS)
    assert (model.backbone.kernel_structure, model.backbone.groups) == ("mixed_group", [4, 4])
    # With p = 400 a mixed-group kernel has 4 d (p + d (2 G - 1)) weights.
    (row,) = (row for row in results.published() if "groups" in row.options)
    chosen = zoo.recipe(row.model, **row.options).arguments
    units = chosen["hidden_units"] + chosen["output_units"]
    d, rest = divmod(units, chosen["groups"])
    assert rest == 0
    dense = 4 * 1400 * 2 * (400 + 1400)
    assert 4 * d * (400 + d * (2 * chosen["groups"] - 1)) == pytest.approx(dense, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("tcn_jsb", {"dropout_kind": "some"}, "`dropout_kind` must be one of"),
        ("tcn_jsb", {"depth": 2**63}, "With kernel_size=3, `depth` must be at most 30"),
        ("tcn_ptb", {"initial_embedding": "zero"}, "`initial_embedding` must be one of"),
        ("trellisnet_char", {"groups": 3, "hidden_units": 99}, "that sum to `units`"),
        ("trellisnet_ptb", {"output_units": 9}, "an embedding as wide as the hidden output"),
        ("trellisnet_ptb", {"depth": 8, "aux_every": 9}, "`aux_every`, at most the depth"),
        ("trellisnet_ptb", {"latent_dropout": 0.1}, "`latent_dropout` needs `experts`"),
        ("trellisnet_wt103", {"experts": 2}, "either `experts` or `cutoffs`"),
        ("lstm_ptb", {"embedding_dim": 5}, "an embedding as wide as the hidden output"),
        ("lru_char_ptb", {"variant": "full"}, "`variant` must be one of"),
        ("grid_lstm_text8", {"convention": "mine"}, "`convention` must be one of"),
    ],
)
def test_wrong_arguments(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(zoo, name)(**options)


# A step of training

SMALL = {"filters": 4, "hidden_units": 4, "depth": 2, "dilations": (1, 2), "aux_every": 1}
SMALL |= {"vocabulary_size": 9, "embedding_dim": 4, "experts": 2, "output_units": 4}
SMALL |= {"cutoffs": (3, 6)}


def small_recipe(name):
    """A small net of any of the models, and random examples of its benchmark's kind."""
    arguments = zoo.recipe(name).arguments
    wanted = {k: v for k, v in SMALL.items() if arguments.get(k)}
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
    if recipe.metric == "accuracy":
        x = rng.rand(4, 12, recipe.entry.channels).astype("float32")
        return recipe, (x, rng.randint(0, 10, 4))
    return recipe, [rng.randint(0, 2, (frames, 88)) for frames in (5, 9)]


@pytest.mark.parametrize(
    "name", slow_but(zoo.list_models(), "trellisnet_ptb_mos", "tcn_jsb", "lru_text8")
)
def test_a_step(name):
    recipe, part = small_recipe(name)
    model = recipe.build()
    model.run_eagerly = True
    before = [weight.copy() for weight in model.get_weights()]
    options = {"steps_per_epoch": 1} if recipe.reads_text else {"shuffle": False}
    history = model.fit(recipe.batches(part), **options, verbose=0).history
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
