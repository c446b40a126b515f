"""Recipes: overrides, what follows from them, and what is refused."""

import json

import numpy as np
import pytest

from trellis_keras import zoo
from trellis_keras.training import ASGD, ASGDSwitch
from trellis_keras.zoo.language import WIKITEXT103_CUTOFFS


def test_a_shallower_net_gets_a_horizon_and_auxiliary_losses_that_fit():
    recipe = zoo.recipe("trellisnet_ptb", depth=8, hidden_units=256, embedding_dim=128)
    assert recipe.horizon == 8
    assert recipe.segment == 110
    assert recipe.model.aux_every == 4
    shown = json.loads(recipe.to_json())
    assert shown["model"]["aux_every"] == 4
    assert shown["derived"] == {"output_units": 128, "units": 384, "segment": 110, "horizon": 8}


@pytest.mark.parametrize(("depth", "aux_every"), [(7, None), (9, 4), (31, 15), (200, 16)])
def test_aux_every_follows_the_depth(depth, aux_every):
    recipe = zoo.recipe("trellisnet_ptb", depth=depth, segment=300)
    assert recipe.model.aux_every == aux_every


def test_a_given_aux_every_stays():
    recipe = zoo.recipe("trellisnet_ptb", depth=8, aux_every=7).replace(vocabulary_size=9)
    assert recipe.model.aux_every == 7


def test_the_horizon_covers_the_receptive_field():
    assert zoo.recipe("trellisnet_ptb", depth=8, kernel_size=3).horizon == 16
    assert zoo.recipe("trellisnet_ptb", horizon=3).horizon == 3
    assert zoo.recipe("trellisnet_char_ptb").horizon == 0
    assert zoo.recipe("trellisnet_char_ptb", depth=9).segment == 9


def test_json_round_trip():
    recipe = zoo.recipe(
        "trellisnet_char", depth=5, clip_norm=None, decay_epochs=[1, 2, 3], seed=None, l2=1
    )
    again = zoo.recipe("trellisnet_char").from_json(recipe.to_json())
    assert again == recipe
    assert again.training.decay_epochs == (1, 2, 3)
    assert isinstance(again.model.l2, float)


def test_json_keeps_left_out_auxiliary_losses():
    recipe = zoo.recipe("trellisnet_ptb", depth=6)
    assert zoo.recipe("trellisnet_ptb").from_json(recipe.to_json()) == recipe


def test_numpy_values_and_paths_are_taken(tmp_path):
    recipe = zoo.recipe(
        "trellisnet_char",
        depth=np.int64(5),
        learning_rate=np.float32(0.5),
        data="text",
        data_options={"path": tmp_path / "a.txt"},
    )
    assert json.loads(recipe.to_json())["training"]["data_options"] == {
        "path": str(tmp_path / "a.txt")
    }
    assert recipe.model.learning_rate == 0.5


def test_paths_do_not_depend_on_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = zoo.recipe(
        "trellisnet_char", data="text", data_options={"path": "a.txt"}, data_dir="~/data"
    )
    assert recipe.training.data_options == {"path": str(tmp_path / "a.txt")}
    assert recipe.training.data_dir == str(tmp_path / "data")


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="'deep'.*It has:.* depth, .*epochs"):
        zoo.recipe("trellisnet_ptb", deep=8)
    with pytest.raises(
        ValueError, match="'trellisnet'.*tcn_adding, .*trellisnet_char, trellisnet_char_ptb"
    ):
        zoo.recipe("trellisnet")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("depth", "8", "must be an integer"),
        ("depth", 8.0, "must be an integer"),
        ("depth", True, "must be an integer"),
        ("depth", None, "must be an integer"),
        ("epochs", [3], "must be an integer"),
        ("l2", "small", "must be a number"),
        ("l2", False, "must be a number"),
        ("clip_norm", "none", "must be a number or none"),
        ("jit_compile", 1, "must be true or false"),
        ("optimizer", 3, "must be text"),
        ("data_options", "my.txt", 'must be a mapping such as {"path"'),
        ("decay_epochs", 2, r"must be a list such as \[2, 3\]"),
        ("decay_epochs", [1, 2.5], "must be a list"),
    ],
)
def test_wrong_types_are_refused(field, value, message):
    with pytest.raises(ValueError, match=f"`{field}` {message}"):
        zoo.recipe("trellisnet_char", **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("depth", 0, "positive"),
        ("depth", -4, "positive"),
        ("kernel_size", 0, "positive"),
        ("learning_rate", 0.0, "positive"),
        ("learning_rate", float("nan"), "positive"),
        ("clip_norm", -1.0, "positive"),
        ("l2", -1e-6, "0 or more"),
        ("seed", -1, "0 or more"),
        ("dtype_policy", "bf16", "must be one of .*mixed_bfloat16"),
        ("hidden_dropout", 1.0, r"in \[0, 1\)"),
        ("weight_dropout", -0.1, r"in \[0, 1\)"),
        ("output_units", 65, "`embedding_dim`, 64"),
        ("history", "both", r"\['chop', 'repackage'\]"),
        ("optimizer", "adamw", r"\['adam', 'asgd', 'rmsprop', 'sgd'\]"),
        ("metric", "accuracy", r"\['bpc', 'cross_entropy', 'perplexity'\]"),
        ("data", "ptb_word", "pydoc"),
        ("decay_rule", "never", "best_before"),
        ("decay_factor", 2.0, "`decay_...` make no rule: .*factor"),
        ("decay_epochs", [], "`decay_...` make no rule: .*epochs"),
        ("decay_epochs", [3, 2], "`decay_...` make no rule: .*rising"),
        ("batch_size", 0, "1 or more"),
        ("epochs", 0, "1 or more"),
        ("segment", 0, "1 or more"),
        ("horizon", -1, "0 or more"),
    ],
)
def test_values_out_of_range_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        zoo.recipe("trellisnet_char", **{field: value})


def test_fields_that_do_not_fit_each_other_are_refused():
    with pytest.raises(ValueError, match="horizon=110, segment=110"):
        zoo.recipe("trellisnet_ptb", horizon=110)
    with pytest.raises(ValueError, match="horizon=110, segment=110"):
        zoo.recipe("trellisnet_ptb", depth=110)
    with pytest.raises(ValueError, match="`aux_every` must be .* at most `depth`, 8. Received: 9"):
        zoo.recipe("trellisnet_ptb", depth=8, aux_every=9)
    with pytest.raises(ValueError, match='`horizon` belongs to history="chop"'):
        zoo.recipe("trellisnet_char_ptb", horizon=3)


def test_other_data_than_those_of_the_checksum_are_refused():
    with pytest.raises(ValueError, match="'pydoc' have changed since the run began"):
        zoo.recipe("trellisnet_char", data_checksum="0" * 64).load_data()


def test_a_recipe_streams_its_data():
    recipe = zoo.recipe("trellisnet_char")
    corpus = recipe.load_data()
    x, y, _ = recipe.stream(corpus.valid)[0]
    assert (x.shape, y.shape) == ((32, 74), (32, 64))
    assert len(recipe.stream(corpus.train)) > 100


@pytest.mark.parametrize(
    ("rule", "callbacks"),
    [(None, []), ("steps", ["StepDecay"]), ("best_before", ["PlateauDecay"])],
)
def test_the_decay_rule_becomes_a_callback(rule, callbacks):
    recipe = zoo.recipe("trellisnet_char", decay_rule=rule)
    assert [type(callback).__name__ for callback in recipe.callbacks()] == callbacks


def test_averaging_takes_the_place_of_decay():
    recipe = zoo.recipe("trellisnet_ptb", optimizer="asgd", decay_rule="average")
    (switch,) = recipe.callbacks()
    assert isinstance(switch, ASGDSwitch) and switch.window == 10
    optimizer = recipe.model.make_optimizer()
    assert isinstance(optimizer, ASGD) and not optimizer.has_start
    assert (optimizer.l2, optimizer.clip_norm) == (1e-6, 0.225)
    assert zoo.recipe("trellisnet_ptb").from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decay_rule": "average"}, "needs optimizer=\"asgd\".*'sgd'"),
        ({"optimizer": "asgd", "decay_rule": "average", "decay_window": 0}, "1 or more"),
    ],
)
def test_averaging_needs_its_optimizer_and_a_window(changes, message):
    with pytest.raises(ValueError, match=message):
        zoo.recipe("trellisnet_ptb", **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("trellisnet_ptb", {"data": "pydoc"}),
        ("tcn_ptb", {"metric": "bpc"}),
        ("tcn_lambada", {"data": "text", "data_options": {"path": "novels.txt"}}),
        ("tcn_adding", {"T": 200}),
        ("tcn_jsb", {"activation": "glu"}),
    ],
)
def test_a_published_result_is_none_of_another_task(name, changes):
    assert zoo.recipe(name).training.published is not None
    assert zoo.recipe(name, **changes).training.published is None
    assert zoo.recipe(name, epochs=3).training.published is not None


GATED = {"activation": "glu"}


@pytest.mark.parametrize(
    ("name", "changes", "published", "table"),
    [
        ("tcn_jsb", GATED | {"filters": 104}, 8.13, 5),
        ("tcn_text8", GATED | {"filters": 364}, 1.485, 5),
        ("tcn_permuted_mnist", GATED | {"filters": 18}, 0.969, 5),
        ("tcn_adding", GATED | {"filters": 17}, 5.6e-5, 5),
        ("tcn_adding", GATED | {"filters": 17, "T": 1000}, None, None),
        ("tcn_ptb", GATED | {"filters": 345, "metric": "bpc"}, None, None),
        ("tcn_jsb", GATED | {"filters": 104, "data": "nottingham"}, None, None),
        ("tcn_seq_mnist", {"data": "permuted_mnist"}, 0.972, 1),
    ],
)
def test_what_is_published_of_tcns(name, changes, published, table):
    training = zoo.recipe(name, **changes).training
    assert training.published == published
    assert training.source.startswith(f"TCN Table {table}" if table else "")
    one_by_one = zoo.recipe(name)
    for field, value in changes.items():
        one_by_one = one_by_one.replace(**{field: value})
    assert one_by_one.training == training


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("tcn_adding", {"T": 400}),
        ("tcn_copy_memory", {"T": 500}),
        ("tcn_ptb", {"data": "pydoc"}),
        ("tcn_jsb", GATED),
        ("lstm_adding", {"T": 400}),
        ("trellisnet_char_ptb", {"data": "pydoc"}),
        ("trellisnet_seq_cifar10", {"data": "seq_mnist"}),
    ],
)
def test_a_published_result_comes_back_with_its_benchmark(name, there):
    recipe = zoo.recipe(name)
    back = {field: recipe.fields()[field] for field in there}
    assert recipe.replace(**there).training.published is None
    assert recipe.replace(**there).replace(**back) == recipe


def test_another_data_set_does_not_keep_the_options_of_the_first():
    recipe = zoo.recipe("lru_char_ptb")
    assert recipe.training.data_options
    assert recipe.replace(data="ptb").training.data_options == {}
    assert recipe.replace(data="char_ptb").training == recipe.training
    options = {"first": 1000}
    assert recipe.replace(data="ptb", data_options=options).training.data_options == options


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("tcn_adding", {"decay_factor": 0.5}, "`decay_rule=None` has no use for `decay_factor`"),
        ("tcn_seq_mnist", {"decay_window": 3}, "`decay_rule='steps'` has no use for"),
        ("lru_text8", {"decay_epochs": [3]}, "'exponential'` has no use for `decay_epochs`"),
        ("trellisnet_ptb", {"decay_epochs": [3]}, "'best_before'` has no use for"),
        ("tcn_adding", {"stop_min_delta": 0.1}, "`stop_patience=None` has no use for"),
        ("trellisnet_char", {"aux_every": 4}, "need both .* aux_every=4, aux_weight=0"),
        ("trellisnet_char", {"aux_weight": 0.3}, "need both .* aux_every=None, aux_weight=0.3"),
        ("trellisnet_ptb", {"depth": 4, "aux_weight": 0.3}, "need both .* aux_every=None"),
        ("trellisnet_char", {"memory": "slow"}, "`memory` must be one of .* Received: 'slow'"),
    ],
)
def test_fields_that_would_be_ignored_are_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        zoo.recipe(name, **fields)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("trellisnet_ptb", {"aux_every": None}),
        ("trellisnet_ptb", {"aux_weight": 0.0}),
        ("trellisnet_char", {"aux_every": 4, "aux_weight": 0.3}),
        ("trellisnet_ptb", {"ablation": "no_auxiliary_losses", "depth": 8}),
        ("trellisnet_ptb", {"decay_rule": None}),
    ],
)
def test_a_recipe_with_fields_that_do_not_matter_is_read_back(name, fields):
    recipe = zoo.recipe(name, **fields)
    assert zoo.recipe(name).from_json(recipe.to_json()) == recipe
    assert zoo.recipe(name, **vars(recipe.model)).model == recipe.model


def test_the_clusters_of_a_recurrent_model_follow_its_vocabulary():
    large = zoo.recipe("lstm_ptb", vocabulary_size=267_735, cutoffs=WIKITEXT103_CUTOFFS)
    small = large.replace(vocabulary_size=50_000, size="table3")
    assert small.model.cutoffs == WIKITEXT103_CUTOFFS[:2]


def test_gates_of_another_size_have_no_published_result():
    gated = zoo.recipe("tcn_jsb", activation="glu", filters=104)
    assert gated.replace(filters=100).training.published is None
    assert gated.replace(filters=100).replace(filters=104) == gated


def test_data_options_are_those_that_a_run_reads_back():
    recipe = zoo.recipe("tcn_char_ptb", data="pydoc", data_options={"split": (0.8, 0.1, 0.1)})
    assert zoo.recipe("tcn_char_ptb").from_json(recipe.to_json()) == recipe
