"""Models of many words: their sizes, their adaptive softmax, and what is refused."""

import keras
import numpy as np
import pytest

from trellis_keras import data, serving, zoo
from trellis_keras.layers import AdaptiveSoftmax, TrellisLayer
from trellis_keras.models import LanguageModel, Perplexity
from trellis_keras.training import SGD
from trellis_keras.zoo import runs

WIKITEXT103 = 267_735
LARGE = ("trellisnet_wt103", "tcn_wt103", "tcn_lambada")


def trellisnet_core(embedding_dim, units):
    """By TABLES: two kernels of two taps, a bias, and weight norm's gains."""
    return 8 * units * (embedding_dim + units) + 4 * units + 8 * units


def tcn_core(widths, kernel_size):
    """By TABLES: k w (a + w) + 4 w a block, and a shortcut where widths differ."""
    total = 0
    for a, w in zip(widths, widths[1:], strict=False):
        total += kernel_size * w * (a + w) + 4 * w + (a * w + w) * (a != w)
    return total


def parameters(core, words, embedding_dim, tails):
    return core + words * (embedding_dim + 1) + tails * (embedding_dim + 1)


CORES = {
    "trellisnet_wt103": trellisnet_core(512, 2000),
    "tcn_wt103": tcn_core([400, 1000, 1000, 1000, 1000, 400], 3),
    "tcn_lambada": tcn_core([500] * 6, 4),
}
COUNTS = {
    "trellisnet_wt103": 177_565_594,
    "tcn_wt103": 132_061_938,
    "tcn_lambada": 56_710_715,
}


@pytest.mark.parametrize("name", LARGE)
def test_parameters(name):
    """Built with fewer words; the words' share is linear."""
    config = zoo.recipe(name).model
    shape = (config.embedding_dim, len(config.cutoffs))
    assert parameters(CORES[name], config.vocabulary_size, *shape) == COUNTS[name]
    assert f"{COUNTS[name]:,}" in getattr(zoo, name).__doc__
    cutoffs = config.cutoffs and (2, 4, 7)
    few = zoo.get_model(name, vocabulary_size=10, cutoffs=cutoffs)
    assert few.count_params() == parameters(CORES[name], 10, *shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_parameters_at_full_size(name):
    assert zoo.get_model(name).count_params() == COUNTS[name]


def test_settings_of_wt103():
    recipe = zoo.recipe("trellisnet_wt103")
    assert (recipe.segment, recipe.horizon, recipe.training.published) == (70, 0, 29.19)
    assert recipe.model.derived()["units"] == 2000
    assert "1488 hidden + 512 output units, softmax in 4 clusters" in recipe.model.summary()
    model = zoo.trellisnet_wt103(depth=2, hidden_units=4, vocabulary_size=50, cutoffs=(9, 20))
    assert isinstance(model.head, AdaptiveSoftmax)
    assert model.head.embedding is model.embedding and model.head.div_value == 1
    assert recipe.model.vocabulary_size == zoo.recipe("tcn_wt103").model.vocabulary_size


def test_published_clusters_end_with_the_vocabulary():
    recipe = zoo.recipe("trellisnet_wt103")
    assert recipe.replace(vocabulary_size=33_278).model.cutoffs == (2_800, 20_000)
    assert recipe.replace(vocabulary_size=2_800).model.cutoffs == ()
    # Those that somebody chose do not give way.
    with pytest.raises(ValueError, match=r"vocabulary_size - 1 = 99\D.*cutoffs=\[10, 200\]"):
        recipe.replace(cutoffs=[10, 200]).replace(vocabulary_size=100)
    both = {"vocabulary_size": 100, "cutoffs": recipe.model.cutoffs}
    with pytest.raises(ValueError, match="`cutoffs` must be increasing"):
        zoo.recipe("tcn_wt103", **both)


def test_a_run_goes_on_whose_vocabulary_has_cut_the_clusters(tmp_path):
    (tmp_path / "text.txt").write_text("the cat and the dog \n" * 60)
    recipe = zoo.recipe(
        "tcn_wt103",
        **{"embedding_dim": 4, "filters": 4, "depth": 2, "batch_size": 2, "jit_compile": False},
        **{"segment": 16, "horizon": 6, "epochs": 1, "learning_rate": 0.1},
        data="text",
        data_options={"path": tmp_path / "text.txt", "unit": "word"},
    )
    for epochs in (1, 2):
        runs.train(recipe.replace(epochs=epochs), tmp_path / "run", verbose=0)
    assert runs.epochs_done(tmp_path / "run") == 2
    assert runs.read_recipe(tmp_path / "run").model.cutoffs == ()
    with pytest.raises(ValueError, match="other settings: cutoffs .* there, .2, 3. here"):
        runs.train(recipe.replace(cutoffs=(2, 3)), tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("trellisnet_wt103", {"cutoffs": [20, 10]}, r"increasing .*cutoffs=\[20, 10\]"),
        ("tcn_wt103", {"cutoffs": [0, 10]}, "between 1 and"),
        ("tcn_ptb", {"cutoffs": [10_000]}, "vocabulary_size - 1 = 9999"),
        ("tcn_ptb", {"cutoffs": 100}, r"`cutoffs` must be a list such as \[2, 3\]"),
        ("trellisnet_wt103", {"div_value": 4}, "`div_value` must be 1, or more with `cutoffs` and"),
        ("lstm_ptb", {"tie_embeddings": False, "div_value": 2}, "Received: 2.0"),
        ("trellisnet_ptb_mos", {"cutoffs": [100]}, r"`cutoffs` must be \(\) with a mixture"),
        ("trellisnet_ptb_mos", {"experts": 0}, "`experts` must be positive"),
        ("tcn_ptb", {"activation_reg": -1.0}, "`activation_reg` must be 0 or more"),
    ],
)
def test_wrong_settings(name, fields, message):
    with pytest.raises(ValueError, match=message):
        zoo.recipe(name, **fields)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_an_adaptive_softmax_over_recurrent_layers(tie_embeddings):
    fields = {"hidden_units": 8, "layers": 1, "vocabulary_size": 30, "cutoffs": [5, 12]}
    fields |= {"embedding_dim": 8, "div_value": 1 if tie_embeddings else 2}
    config = zoo.recipe("lstm_ptb", tie_embeddings=tie_embeddings, **fields).model
    assert config.summary() == "1 layer of 8 LSTM units, softmax in 3 clusters"
    head = config.build().head
    assert head.div_value == fields["div_value"]
    assert (head.embedding is None) != tie_embeddings


def test_penalties_are_for_all_backbones():
    fields = {"filters": 4, "embedding_dim": 4, "vocabulary_size": 9}
    penalties = {"activation_reg": 2.0, "temporal_activation_reg": 1.0}
    model = zoo.tcn_ptb(**fields, **penalties, jit_compile=False)
    assert {name: getattr(model, name) for name in penalties} == penalties
    assert zoo.recipe("lstm_ptb").model.activation_reg == 0
    assert zoo.recipe("trellisnet_ptb").model.temporal_activation_reg == 1.0


SMALL = {
    "vocabulary_size": 40,
    "cutoffs": (5, 12),
    "embedding_dim": 4,
    "hidden_units": 4,
    "depth": 8,
}


@pytest.fixture(scope="module")
def trained():
    """A small `trellisnet_wt103` with all that it has, after three epochs; and its words."""
    recipe = zoo.recipe("trellisnet_wt103", batch_size=4, **SMALL)
    words = (np.arange(300) * 7) % 40
    model = zoo.trellisnet_wt103(learning_rate=0.02, jit_compile=False, **SMALL)
    assert model.backbone.return_aux and model.backbone.stateful
    stream = recipe.stream(words)
    history = model.fit(stream, validation_data=stream, epochs=3, verbose=0).history
    return model, stream, history, words


def test_it_trains(trained):
    model, stream, history, _ = trained
    assert history["val_loss"][-1] < history["val_loss"][0]
    results = model.evaluate(stream, verbose=0, return_dict=True)
    assert results["perplexity"] == pytest.approx(np.exp(results["loss"]), rel=1e-5)


def test_it_generates_and_is_saved(trained, tmp_path):
    model, _, _, words = trained
    prompts = words[None, :5]
    text = model.generate(prompts, max_length=9, sampler="greedy")
    assert text.shape == (1, 9) and text.max() < 40
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.head.embedding is loaded.embedding
    log_p = loaded.predict(prompts, verbose=0)
    np.testing.assert_allclose(log_p, model.predict(prompts, verbose=0), atol=1e-5)
    np.testing.assert_allclose(np.sum(np.exp(log_p), axis=-1), 1, atol=1e-5)


@pytest.mark.both_backends
@pytest.mark.slow_elsewhere
def test_training_never_holds_tokens_times_words():
    """Logits of all words would be 75 GiB for the output and 150 GiB for the auxiliary ones."""
    words, rows, time = 5_000_000, 64, 63
    model = LanguageModel(
        words,
        1,
        TrellisLayer(3, 2, output_units=1, aux_every=1, return_aux=True, seed=0),
        head=AdaptiveSoftmax(words, (100,), capacity=2),
        output_dropout=0.1,
        aux_weight=0.1,
        activation_reg=1.0,
        temporal_activation_reg=1.0,
        seed=0,
    )
    model.build((None, None))
    tokens = np.arange(rows * (time + 1)).reshape(rows, time + 1) % 100
    rare = [100, words // 2, words - 1]
    tokens[0, [5, 20, 40]] = rare
    x, y = tokens[:, :-1], tokens[:, 1:]
    for jit_compile in (True, False)[: 2 if keras.backend.backend() == "tensorflow" else 1]:
        model.compile(SGD(0.1), metrics=[Perplexity()], jit_compile=jit_compile)
        before = np.array(model.head.bias)
        fitted = model.fit(x, y, batch_size=rows, verbose=0).history
        assert np.isfinite([fitted["loss"][0], fitted["perplexity"][0]]).all()
        grown = np.flatnonzero(np.asarray(model.head.bias) > before)
        assert grown[grown >= 100].tolist() == rare
    assert np.isfinite(model.evaluate(x, y, batch_size=rows, verbose=0)).all()


@pytest.mark.slow
def test_all_the_words_of_wt103(tmp_path):
    """What needs all log-probabilities takes 1 MiB for each token."""
    model = zoo.trellisnet_wt103(depth=2, hidden_units=4, embedding_dim=8, jit_compile=False)
    tokens = np.random.default_rng(0).integers(0, WIKITEXT103, (2, 6))
    log_p = model.predict(tokens, verbose=0)
    assert log_p.shape == (2, 6, WIKITEXT103)
    np.testing.assert_allclose(np.sum(np.exp(log_p), axis=-1), 1, atol=1e-4)
    _, best = model.head.top_k(model._encode(tokens)["raw"], 5)
    np.testing.assert_array_equal(best[..., 0], np.argmax(log_p, axis=-1))
    for sampler in ("greedy", "top_p", "beam"):
        assert model.generate(tokens, max_length=8, sampler=sampler).shape == (2, 8)
    serving.export(model, tmp_path / "served")


# Vocabularies


def test_a_vocabulary_that_does_not_fit_the_weights(tmp_path):
    vocabulary = data.Vocabulary(["<eos>", *"abcdefghij"])
    small = {"depth": 2, "hidden_units": 4, "embedding_dim": 4, "cutoffs": (3, 6)}
    model = zoo.trellisnet_wt103(vocabulary=vocabulary, **small)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    vocabulary.save(tmp_path / "words.json")
    same = data.Vocabulary.load(tmp_path / "words.json")
    zoo.trellisnet_wt103(vocabulary=same, weights=tmp_path / "model.keras", **small)
    data.Vocabulary(["<eos>", *"abcdefghi"]).save(tmp_path / "words.json")
    shorter = data.Vocabulary.load(tmp_path / "words.json")
    for file in ("model.keras", "model.weights.h5"):
        with pytest.raises(ValueError, match="11 tokens, but the model has vocabulary_size=10"):
            zoo.trellisnet_wt103(vocabulary=shorter, weights=tmp_path / file, **small)
    other = data.Vocabulary(["<eos>", *"abcdefghji"])
    with pytest.raises(ValueError, match="token 9 is 'i' there, 'j' in the model's"):
        zoo.trellisnet_wt103(vocabulary=other, weights=tmp_path / "model.keras", **small)
