"""Recipes: routing of options, what follows from them, and what is refused."""

import json
import pathlib

import keras
import numpy as np
import pytest

from trellis_keras import zoo
from trellis_keras.training import ASGD, Adam, ASGDSwitch, PlateauDecay
from trellis_keras.zoo import Training
from trellis_keras.zoo.registry import recipe_from_dict
from trellis_keras.zoo.run_messages import describe


def read_back(recipe):
    return recipe_from_dict(json.loads(recipe.to_json()))


# Routing


def test_options_go_to_the_model_the_training_and_the_recipe():
    recipe = zoo.recipe(
        "trellisnet_char", depth=5, learning_rate=1, metric="perplexity", dtype_policy="float64"
    )
    assert recipe.arguments["depth"] == 5
    assert recipe.training.options()["learning_rate"] == 1.0
    assert (recipe.metric, recipe.dtype_policy) == ("perplexity", "float64")
    again = recipe.replace(depth=6).replace(epochs=9)
    assert again.training.options()["learning_rate"] == 1.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("trellisnet_pbt", {}, "Unknown model 'trellisnet_pbt'. Did you mean"),
        ("trellisnet_ptb", {"dept": 8}, "no option 'dept'. Did you mean 'depth'"),
        ("trellisnet_ptb", {"xyz": 8}, "no option 'xyz'. It has: depth, hidden_units, .*epochs"),
        ("tcn_jsb", {"sequence_length": 9}, "no option 'sequence_length'"),
        ("tcn_jsb", {"setting": "fast", "l2": 0.1}, "no option 'l2'"),
        ("lru_text8", {"schedule_window": 3}, "no option 'schedule_window'"),
        ("gru_adding", {"forget_bias": 2.0}, "no option 'forget_bias'"),
        ("tcn_adding", {"schedule": "StepDecay"}, "`schedule` StepDecay needs `schedule_epochs`"),
        ("tcn_jsb", {"setting": "quick"}, "`setting` must be one of fast. Received: 'quick'"),
        ("tcn_text8", {"setting": "fast"}, "tcn_text8 has no fast recipe"),
        ("lru_text8", {"stopping_against": "first"}, "`stopping_against` must be one of best"),
        ("tcn_adding", {"metric": "accuracy"}, "`metric` must be 'mse'"),
        ("tcn_adding", {"name": "mine"}, "name"),
        ("tcn_adding", {"T": 8, "data_options": {"T": 9}}, "given twice. Received: T=8 and data"),
        ("tcn_adding", {"first": 9}, "no option 'first'"),
        ("tcn_jsb", {"shift": 1}, "no option 'shift'"),
        ("tcn_seq_mnist", {"flip": 0.5}, "no option 'flip'"),
        ("tcn_seq_mnist", {"setting": "fast", "use_ema": True}, "`use_ema` needs `ema_overwrite"),
        ("trellisnet_ptb", {"optimizer": "adam"}, "needs its own `learning_rate`"),
        ("trellisnet_char", {"schedule_factor": 2.0}, "`schedule_factor` must be between 0 and 1"),
        ("trellisnet_char", {"schedule_epochs": 2}, "`schedule_epochs` must be a list .*=2"),
        ("trellisnet_char", {"warmup_steps": 3}, "`warmup_steps` needs `decay_steps`"),
        ("trellisnet_char", {"decay_steps": 3}, "changes a constant learning rate. .*StepDecay"),
        ("trellisnet_char", {"growth_depth": 4}, "`growth` GrowingDepth needs `growth_epochs`"),
        ("trellisnet_char", {"growth_depth": 1, "growth_epochs": 0}, "`growth_epochs` must"),
    ],
)
def test_unknown_models_and_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        zoo.recipe(name, **options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("depth", True),
        ("stateful", "maybe"),
        ("jit_compile", 1),
        ("data_options", "my.txt"),
        ("optimizer", "adagrad"),
        ("schedule", "never"),
        ("learning_rate", 0.0),
        ("learning_rate", "high"),
        ("aux_weight", float("nan")),
        ("l2", "small"),
        ("l2", -1e-6),
        ("beta_2", 1),
        ("epsilon", -1e-8),
        ("clip_norm", 0),
        ("seed", -1),
        ("epochs", 2.5),
        ("dtype_policy", "bf16"),
        ("metric", "accuracy"),
        ("data", "ptb_word"),
        ("sequence_length", None),
        ("stopping", PlateauDecay(factor=0.5, rule="best_before", window=1)),
    ],
)
def test_wrong_values(option, value):
    with pytest.raises(ValueError, match=f"`{option}`|Unknown data set"):
        zoo.recipe("trellisnet_char", **{option: value})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tcn_seq_mnist", {"setting": "fast", "clip_norm": -1}),
        ("tcn_seq_mnist", {"setting": "fast", "clip_norm": 0}),
        ("tcn_seq_mnist", {"setting": "fast", "clip_norm": float("nan")}),
        ("tcn_seq_mnist", {"setting": "fast", "weight_decay": -0.1}),
        ("tcn_seq_mnist", {"setting": "fast", "weight_decay": "small"}),
        ("tcn_seq_mnist", {"setting": "fast", "warmup_steps": -5}),
        ("tcn_seq_mnist", {"setting": "fast", "decay_steps": "few"}),
        ("tcn_seq_mnist", {"setting": "fast", "shift": -1}),
        ("tcn_seq_mnist", {"setting": "fast", "shift": 1.5}),
        ("trellisnet_seq_cifar10", {"setting": "fast", "flip": 2}),
        ("tcn_jsb", {"setting": "fast", "transpose": 2}),
        ("tcn_jsb", {"setting": "fast", "note_dropout": "few"}),
        ("trellisnet_ptb", {"setting": "fast", "context_length": 275}),
        ("trellisnet_ptb", {"setting": "fast", "sequence_length": 9.5}),
        ("lru_char_ptb", {"stopping_patience": "abc"}),
        ("lru_char_ptb", {"stopping_monitor": 3}),
        ("tcn_ptb", {"momentum": float("nan")}),
        ("tcn_ptb", {"nesterov": "no"}),
        ("tcn_ptb", {"schedule_strict": "off"}),
        ("tcn_jsb", {"setting": "fast", "learning_rate": "abc"}),
        ("tcn_jsb", {"transpose": True}),
        ("tcn_jsb", {"setting": "fast", "ema_momentum": "abc"}),
    ],
)
def test_values_are_checked_before_data_are_loaded(name, options):
    with pytest.raises(ValueError, match=f"`{[*options][-1]}` must be"):
        zoo.recipe(name, **options)


def test_carried_states_exclude_context():
    ptb = zoo.recipe("trellisnet_ptb")
    again = ptb.replace(stateful=True).replace(stateful=False)
    assert again.training.stream == ptb.training.stream
    with pytest.raises(ValueError, match="context_length=3"):
        zoo.recipe("trellisnet_char", stateful=True, context_length=3)


def test_numpy_values_and_paths_are_taken(tmp_path, monkeypatch):
    """Paths do not depend on the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = zoo.recipe(
        "trellisnet_char",
        depth=np.int64(5),
        learning_rate=np.float32(0.5),
        data="text",
        data_options={"path": pathlib.Path("a.txt")},
        data_dir="~/data",
    )
    assert recipe.data_options == {"path": str(tmp_path / "a.txt")}
    assert recipe.data_dir == str(tmp_path / "data")
    assert read_back(recipe) == recipe


# Training


def test_objects_become_callbacks():
    (decay,) = zoo.recipe("trellisnet_ptb").training.callbacks()
    assert (decay.rule, decay.factor, decay.window, decay.min_lr) == ("best_before", 0.25, 10, 0.02)
    decay, stopping = zoo.recipe("lru_char_ptb").training.callbacks()
    assert (type(decay).__name__, decay.factor) == ("ExponentialDecay", 0.9)
    assert (stopping.patience, stopping.min_delta, stopping.against) == (3, 1e-4, "previous")
    assert zoo.recipe("trellisnet_char", schedule=None).training.callbacks() == []
    growth, *_ = zoo.recipe("trellisnet_ptb", growth_depth=4, growth_epochs=2).training.callbacks()
    assert (growth.depth, growth.epochs) == (4, 2)


def test_recipe_takes_objects():
    adam = keras.optimizers.Adam(2e-3, global_clipnorm=0.4)
    decay = PlateauDecay(factor=0.5, rule="worst_of_last", window=3)
    recipe = zoo.recipe("tcn_jsb", optimizer=adam, schedule=decay)
    assert type(recipe.training.make_optimizer()) is keras.optimizers.Adam
    assert recipe.training.options()["clip_norm"] == 0.4
    assert recipe.changes() == {"optimizer": "keras_adam"} | {
        "schedule_factor": 0.5, "schedule_strict": False,
    }  # fmt: skip
    again = zoo.recipe("tcn_jsb", **recipe.changes())
    assert again.options() == recipe.options() and read_back(recipe) == recipe


def test_averaging_takes_the_place_of_decay():
    recipe = zoo.recipe("trellisnet_ptb", optimizer="asgd", schedule="ASGDSwitch")
    (switch,) = recipe.training.callbacks()
    assert isinstance(switch, ASGDSwitch) and switch.window == 10
    optimizer = recipe.training.make_optimizer()
    assert isinstance(optimizer, ASGD) and not optimizer.has_start
    assert (optimizer.l2, optimizer.clip_norm) == (1e-6, 0.225)
    assert read_back(recipe) == recipe


def test_a_new_object_keeps_the_arguments_that_it_shares_with_the_old_one():
    training = zoo.recipe("gru_nottingham", schedule="StepDecay", schedule_epochs=[5]).training
    assert (training.schedule.factor, training.schedule.epochs) == (0.1, (5,))
    adamw = zoo.recipe("trellisnet_seq_mnist", optimizer="adamw", weight_decay=0.01).training
    assert adamw.optimizer.global_clipnorm == 0.5
    assert adamw.options()["learning_rate"] == 2e-3
    assert adamw.optimizer.epsilon == keras.optimizers.AdamW().epsilon


def test_training_checks_itself():
    with pytest.raises(ValueError, match="`batch_size` must be a positive integer"):
        Training(optimizer=Adam(1e-3), batch_size=0, epochs=1)
    falling = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    upper = keras.optimizers.schedules.CosineDecay(0.1, 10, alpha=0.5)
    for rate in (-1.0, falling, upper):
        with pytest.raises(ValueError, match="`learning_rate` must be"):
            Training(optimizer=Adam(rate), batch_size=1, epochs=1)


def test_a_recipe_from_others_makes_only_objects_of_listed_classes():
    def refused(expected):
        with pytest.raises(ValueError, match=f"expected {expected}"):
            recipe_from_dict(written)

    for name, part in (
        ("optimizer", keras.optimizers.Ftrl()),
        ("schedule", keras.layers.Lambda(print)),
        ("stopping", keras.layers.Dense(3)),
    ):
        written = zoo.recipe("lru_char_ptb").to_dict()
        written["training"][name] = keras.saving.serialize_keras_object(part)
        refused("trellis_keras>")
    written = zoo.recipe("lru_char_ptb").to_dict()
    adam = written["training"]["optimizer"]["config"]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([2], [0.1, 0.2])
    adam["learning_rate"] = keras.saving.serialize_keras_object(schedule)
    refused("CosineDecay")
    for _ in range(300):
        config = {"initial_learning_rate": adam["learning_rate"]}
        adam["learning_rate"] = {"registered_name": "CosineDecay", "config": config}
    refused("no object")


# This zoo's own training


def test_a_fast_recipe_is_another_training_of_the_same_net():
    recipe = zoo.recipe("tcn_jsb", setting="fast", epochs=3)
    paper = zoo.recipe("tcn_jsb")
    assert recipe.arguments == paper.arguments
    assert type(recipe.training.optimizer) is keras.optimizers.AdamW
    assert recipe.training.epochs == 3
    assert recipe.changes() == {"setting": "fast", "epochs": 3}
    assert read_back(recipe) == recipe
    assert recipe.replace(setting=None) == paper
    assert paper.replace(setting="fast", epochs=3) == recipe


def test_a_fast_recipe_may_set_arguments():
    recipe = zoo.recipe("lstm_seq_mnist", setting="fast")
    assert recipe.arguments["forget_bias"] == "chrono"
    assert recipe.changes() == {"setting": "fast"}
    assert recipe.replace(setting=None) == zoo.recipe("lstm_seq_mnist")
    given = zoo.recipe("lstm_seq_mnist", setting="fast", forget_bias=2.0)
    assert given.arguments["forget_bias"] == 2.0
    run = zoo.run_recipe("lstm_seq_mnist", "fast")
    assert run.replace(seed=recipe.seed) == recipe


def test_a_cycle_that_does_not_end_with_the_last_epoch_is_announced():
    few = {"train": 64, "valid": 1, "test": 1, "T": 8}
    recipe = zoo.recipe("tcn_adding", setting="fast", filters=2, depth=1, data_options=few)
    model, loaded = recipe.build(), recipe.load_data()

    def warnings(is_new=True, **options):
        longer = recipe.replace(epochs=2, **options)
        lines = describe(longer, model, loaded, is_new=is_new).splitlines()
        return [line for line in lines if "WARNING" in line]

    (warning,) = warnings(warmup_steps=1, decay_steps=9)
    assert "falls to 0 in 10 steps, but the run has 4: set --decay-steps 3" in warning
    (warning,) = warnings(is_new=False, warmup_steps=1, decay_steps=9)
    assert "train anew with --decay-steps 3" in warning
    assert warnings(warmup_steps=1, decay_steps=3) == []
    assert warnings(warmup_steps=None, decay_steps=None) == []


def test_only_kernels_decay():
    adamw = {"optimizer": "adamw", "weight_decay": 0.1, "schedule": None}
    for name, size in (("tcn_jsb", {"filters": 3}), ("gru_jsb", {"hidden_units": 3})):
        recipe = zoo.recipe(name, **adamw, **size)
        model = recipe.build()
        variables = model.trainable_variables
        before = [np.array(v) for v in variables]
        model.optimizer.apply([keras.ops.zeros(v.shape) for v in variables], variables)
        kept = 1 - recipe.training.options()["learning_rate"] * 0.1
        for variable, value in zip(variables, before, strict=True):
            factor = kept if variable.name.endswith("kernel") else 1.0
            np.testing.assert_allclose(np.array(variable), factor * value, rtol=1e-6)


def test_the_cosine_rises_and_falls_by_steps():
    def rates(steps, **options):
        training = zoo.recipe("tcn_jsb", setting="fast", **cycle, **options).training
        optimizer = training.make_optimizer()
        for step in steps:
            optimizer.iterations.assign(step)
            yield float(optimizer.learning_rate)

    cycle = {"learning_rate": 0.4, "decay_steps": 100}
    rising = rates([0, 5, 10, 60, 110, 500], warmup_steps=10)
    np.testing.assert_allclose(list(rising), [0, 0.2, 0.4, 0.2, 0, 0], atol=1e-6)
    falling = rates([0, 50, 100], warmup_steps=None)
    np.testing.assert_allclose(list(falling), [0.4, 0.2, 0], atol=1e-6)


def test_the_rates_of_fast_recipes_fall_to_0_when_training_ends():
    # Of 229 and 694 pieces, 55,000 and 45,000 images, 50,000 sums, 10,000 copies, 929,589 words,
    # and 5,059,550, 5,311,931 and 2,876,590 characters. Pieces of similar length share a batch.
    batches = {("jsb", 1): 229, ("jsb", 4): 59, ("nottingham", 1): 694, ("nottingham", 4): 174}
    batches |= {("seq_mnist", 64): 860, ("permuted_mnist", 64): 860, ("seq_cifar10", 64): 704}
    batches |= {("adding", 32): 1_563, ("copy_memory", 32): 313}
    batches |= {("char_ptb", 64): 1_660, ("war_and_peace", 64): 899}
    targets = {("ptb", 16): 929_588, ("char_ptb", 32): 5_059_549}
    fast = [each for each in (zoo.recipe(name).entry for name in zoo.list_models()) if each.fast]
    assert len(fast) >= 17
    for entry in fast:
        training = entry.training_by("fast")
        kind = entry.data, training.batch_size
        if kind in targets:
            scored = training.stream["sequence_length"] - training.stream["context_length"]
            steps = -(-targets[kind] // (training.batch_size * scored)) * training.epochs
        else:
            steps = batches[kind] * training.epochs
        options = training.options()
        assert options["warmup_steps"] + options["decay_steps"] == steps, entry.name


def test_only_training_batches_are_augmented():
    recipe = zoo.recipe("tcn_jsb", setting="fast", note_dropout=0.5)
    rolls = [np.ones((9, 88), dtype="uint8")] * 4
    for shuffle in (False, True):
        x, _, _ = recipe.batches(rolls, shuffle=shuffle)[0]
        assert (x.min() == 1) is not shuffle
    recipe = zoo.recipe("tcn_seq_mnist", setting="fast")
    pixels = np.arange(784, dtype="float32").reshape(1, 784, 1).repeat(9, axis=0)
    for shuffle in (False, True):
        x, _, _ = recipe.batches((pixels, np.zeros(9, "int32")), shuffle=shuffle)[0]
        assert np.array_equal(x[:9], pixels) is not shuffle


# What is written


def test_a_recipe_is_read_back_with_all_arguments():
    recipe = zoo.recipe(
        "trellisnet_char", depth=5, clip_norm=None, schedule_epochs=[1, 2], seed=None
    )
    again = read_back(recipe)
    assert again == recipe and again.training.schedule.epochs == (1, 2)
    written = zoo.recipe("tcn_adding", filters=27).to_dict()
    assert written["arguments"]["filters"] == 27
    assert written["training"]["optimizer"]["class_name"] == "Adam"
    assert written["training"]["optimizer"]["config"]["learning_rate"] == 0.002


def test_options_of_the_data_are_options_of_the_recipe():
    assert zoo.recipe("tcn_adding").data_options == {"T": 600}
    recipe = zoo.recipe("tcn_adding", T=8, data_options={"train": 11})
    assert recipe.data_options == {"T": 8, "train": 11}
    assert zoo.recipe("tcn_adding", data_options={"T": 8, "train": 11}) == recipe
    assert zoo.recipe("tcn_adding", T=8, train=11) == recipe
    recipe = zoo.recipe("trellisnet_char", data="text", path="/a.txt", unit="word", first=9)
    assert recipe.data_options == {"path": "/a.txt", "unit": "word", "first": 9}
    assert read_back(recipe) == recipe


def test_changes_are_the_fewest_options():
    assert zoo.recipe("tcn_adding", T=200, epochs=3).changes() == {"T": 200, "epochs": 3}
    recipe = zoo.recipe("tcn_adding", T=200, filters=30, seed=0)
    assert recipe.changes() == {"T": 200, "filters": 30}
    assert read_back(recipe).changes() == {"T": 200, "filters": 30}
    options = {"schedule": "StepDecay", "schedule_epochs": [5]}
    assert zoo.recipe("gru_nottingham", **options).changes() == options


def test_other_data_do_not_keep_the_options_of_the_first():
    recipe = zoo.recipe("lru_char_ptb")
    assert recipe.data_options
    assert recipe.replace(data="ptb").data_options == {}
    assert recipe.replace(data="char_ptb") == recipe
    options = {"first": 1000}
    assert recipe.replace(data="text8", data_options=options).data_options == options


# Data


def test_a_recipe_streams_its_data():
    recipe = zoo.recipe("trellisnet_char")
    corpus = recipe.load_data()
    x, y, _ = recipe.batches(corpus.valid)[0]
    assert (x.shape, y.shape) == ((32, 74), (32, 64))
    bound = recipe.with_data(corpus)
    assert bound.arguments["vocabulary_size"] == len(corpus.vocabulary)
    assert bound.data_checksum == corpus.checksum


def test_data_that_a_model_cannot_be_trained_on():
    with pytest.raises(ValueError, match="'pydoc' have changed since the run started"):
        zoo.recipe("trellisnet_char", data_checksum="0" * 64).load_data()
    with pytest.raises(ValueError, match="needs separate sequences. Received: .*'pydoc'"):
        zoo.recipe("tcn_jsb", data="pydoc").load_data()
    options = {"T": 8, "train": 2, "valid": 2, "test": 2}
    with pytest.raises(ValueError, match="needs text, .*Received: the data set 'adding'"):
        zoo.recipe("tcn_ptb", data="adding", data_options=options).load_data()
    recipe = zoo.recipe("tcn_seq_mnist", data="adding", data_options=options)
    with pytest.raises(ValueError, match="'adding' has 2 channels, but tcn_seq_mnist reads 1"):
        recipe.batches(recipe.load_data().train)
