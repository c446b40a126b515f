"""AdaptiveSoftmax against the authors' split cross-entropy and a plain dense computation."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.golden import family, floats
from tests.support.gradients import value_and_gradients
from trellis_keras.layers import AdaptiveSoftmax
from trellis_keras.models import LanguageModel
from trellis_keras.training import Adam

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]

V, CUTOFFS, CHANNELS = 40, (5, 12, 25), 8


def compiled(function):
    """The function compiled by XLA: with XLA's limits on loops and shapes."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function, jit_compile=True)


def quick(function):
    """The function as it is on TensorFlow; compiled on JAX, which is slow otherwise."""
    return compiled(function) if keras.backend.backend() == "jax" else function


def random_hidden(*shape, seed=1):
    return floats(np.random.default_rng(seed).normal(size=shape))


def random_targets(*shape, words=(0, V)):
    return np.random.default_rng(2).integers(*words, shape).astype("int32")


def head_of(tied=False, channels=CHANNELS, **options):
    """A head whose weights are all random; `tied` to an embedding, or with weights of its own."""
    random = keras.initializers.RandomNormal(stddev=0.5, seed=3)
    options = {"cluster_initializer": random, "bias_initializer": random, "seed": 4} | options
    head = AdaptiveSoftmax(V, options.pop("cutoffs", CUTOFFS), kernel_initializer=random, **options)
    if tied:
        embedding = keras.layers.Embedding(V, channels, embeddings_initializer=random)
        embedding.build()
        head.tie(embedding)
    head.build((None, channels))
    return head


KINDS = {"tied": {"tied": True}, "own": {}, "projected": {"div_value": 2}}


def plain_log_probabilities(head, hidden):
    """The factorisation written out, every cluster for every token."""
    bounds = [0, *head.cutoffs, head.vocabulary_size]
    bias = ops.convert_to_tensor(head.bias)
    if head.embedding is not None:
        matrix = ops.convert_to_tensor(head.embedding.embeddings)
        kernels = [matrix[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    else:
        kernels = [ops.convert_to_tensor(kernel) for kernel in head.kernels]
    words = bounds[1]
    of_words = ops.matmul(hidden, ops.transpose(kernels[0])) + bias[:words]
    of_tails = ops.matmul(hidden, ops.transpose(head.cluster_kernel)) + head.cluster_bias
    log_head = ops.log_softmax(ops.concatenate([of_words, of_tails], axis=-1))
    parts = [log_head[..., :words]]
    for i, kernel in enumerate(kernels[1:]):
        h = ops.matmul(hidden, head.projections[i]) if head.div_value > 1 else hidden
        logits = ops.matmul(h, ops.transpose(kernel)) + bias[bounds[i + 1] : bounds[i + 2]]
        parts.append(log_head[..., words + i, None] + ops.log_softmax(logits))
    return ops.concatenate(parts, axis=-1)


def plain_loss(head, hidden, targets):
    one_hot = ops.one_hot(targets, head.vocabulary_size, dtype=head.dtype)
    return -ops.sum(plain_log_probabilities(head, hidden) * one_hot, axis=-1)


@pytest.mark.parametrize("case", ["no_split", "one_split", "two_splits", "three_splits"])
def test_the_authors_split_cross_entropy(case, golden, assert_close):
    arrays = golden(f"splitcross_{case}")
    config, weights = arrays["meta"]["config"], family(arrays, "param")
    embedding = keras.layers.Embedding(config["V"], config["H"])
    embedding.build()
    head = AdaptiveSoftmax(config["V"], config["splits"], capacity=3)
    head.tie(embedding)
    head.build((None, config["H"]))
    variables = {"weight": embedding.embeddings, "bias": head.bias}
    if config["splits"]:
        variables |= {"tail_vectors": head.cluster_kernel, "tail_bias": head.cluster_bias}

    def order(name, array):
        """The authors count the tails' tokens from the last tail."""
        return array[::-1] if name.startswith("tail") else array

    for name, variable in variables.items():
        variable.assign(order(name, weights[name]))

    def mean_loss(hidden):
        return ops.sum(head.loss(hidden, arrays["in.targets"])) / config["N"], ()

    hidden = floats(arrays["in.hiddens"])
    (loss, _), gradients, (by_hidden,) = value_and_gradients(
        mean_loss, list(variables.values()), hidden
    )
    assert_close(loss, arrays["out.loss_f64"], "output", "loss")
    if config["splits"]:
        assert_close(head(hidden), arrays["out.logprob_f64"], "output", "log-probabilities")
    reference = family(arrays, "grad")
    assert_close(by_hidden, reference["hiddens"], "gradient", "hidden")
    for name, gradient in zip(variables, gradients, strict=True):
        assert_close(gradient, order(name, reference[name]), "gradient", name)


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_sum_to_one(kind):
    log_p = head_of(**KINDS[kind])(random_hidden(3, 7, CHANNELS))
    assert log_p.shape == (3, 7, V)
    np.testing.assert_allclose(np.sum(np.exp(log_p), axis=-1), 1, atol=1e-6)


# {name: capacity, range of the targets}; 30 tokens
BATCHES = {
    "default": (None, (0, V)),
    "overflow": (2, (0, V)),
    "each tail its own": ([1, 64, 3], (0, V)),
    "one tail takes all": (4, (12, 25)),
    "no tail": (4, (0, 5)),
}


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize(
    "kind, batch",
    [*((kind, batch) for kind in ("tied", "projected") for batch in BATCHES), ("own", "overflow")],
)
def test_loss_and_gradients_are_the_dense_ones(kind, batch, assert_close):
    capacity, words = BATCHES[batch]
    head = head_of(capacity=capacity, **KINDS[kind])
    hidden, targets = random_hidden(5, 6, CHANNELS), random_targets(5, 6, words=words)
    weight = random_hidden(5, 6, seed=5)  # another upstream gradient for each token
    variables = head.trainable_variables

    def total(loss):
        def function(hidden):
            nll = loss(hidden)
            return ops.sum(nll * weight), nll

        return value_and_gradients(function, variables, hidden)

    dense, dense_gradients, dense_by_hidden = total(lambda h: plain_loss(head, h, targets))
    ours, gradients, by_hidden = total(lambda h: head.loss(h, targets))
    assert_close(ours[1], dense[1], "output", "loss")
    assert_close(by_hidden[0], dense_by_hidden[0], "gradient", "hidden")
    assert len(variables) == {"tied": 4, "own": 7, "projected": 10}[kind]
    for variable, a, b in zip(variables, gradients, dense_gradients, strict=True):
        assert_close(a, b, "gradient", variable.path)


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize("kind", KINDS)
def test_log_prob_and_call_agree(kind, assert_close):
    head = head_of(capacity=2, **KINDS[kind])
    hidden, targets = random_hidden(9, CHANNELS), random_targets(9)
    log_p = np.take_along_axis(np.asarray(head(hidden)), targets[:, None], axis=-1)[:, 0]
    assert_close(quick(head.log_prob)(hidden, targets), log_p, "output")
    assert_close(head(hidden), plain_log_probabilities(head, hidden), "output")


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_loss(kind, assert_close):
    """Hidden states with one axis more, as a model's auxiliary loss hands them over."""
    head = head_of(capacity=3, **KINDS[kind])
    hidden, targets = random_hidden(2, 3, 4, CHANNELS), random_targets(2, 3, 4)
    assert_close(
        compiled(head.loss)(ops.convert_to_tensor(hidden), ops.convert_to_tensor(targets)),
        plain_loss(head, hidden, targets),
        "output",
    )


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize("k", [4, 9, V])
@pytest.mark.parametrize("kind", KINDS)
def test_top_k_is_that_of_all_log_probabilities(kind, k, assert_close):
    head = head_of(capacity=2, **KINDS[kind])
    hidden = 3 * random_hidden(4, 3, CHANNELS)
    log_p, words = quick(lambda h: head.top_k(h, k))(hidden)
    everything = np.asarray(head(hidden))
    assert_close(log_p, -np.sort(-everything, axis=-1)[..., :k], "output")
    assert_close(np.take_along_axis(everything, np.asarray(words), axis=-1), log_p, "output")
    assert all(len(set(row)) == k for row in np.asarray(words).reshape(-1, k))
    assert np.array_equal(quick(head.predict)(hidden), np.argmax(everything, axis=-1))


@pytest.mark.slow_elsewhere
def test_compiled_top_k():
    head = head_of(capacity=2)
    hidden = ops.convert_to_tensor(random_hidden(7, CHANNELS))
    log_p, words = compiled(lambda h: head.top_k(h, 6))(hidden)
    np.testing.assert_allclose(log_p, head.top_k(hidden, 6)[0], rtol=1e-5)
    assert np.array_equal(words, head.top_k(hidden, 6)[1])


@pytest.mark.slow_elsewhere
def test_top_k_leaves_out_tails_that_cannot_hold_a_word():
    """What is not looked at can be NaN without harm."""
    head = head_of()
    head.cluster_bias.assign([0.0, -50.0, -50.0])
    for kernel in head.kernels[2:]:
        kernel.assign(np.full(kernel.shape, np.nan))
    log_p, _ = head.top_k(random_hidden(6, CHANNELS), 4)
    assert np.all(np.isfinite(log_p))


@pytest.mark.slow_elsewhere
def test_mixed_precision():
    head = head_of(dtype="mixed_bfloat16", capacity=3)
    hidden, targets = random_hidden(30, CHANNELS).astype("float32"), random_targets(30)

    def mean(loss):
        def function(hidden):
            nll = loss(head, hidden, targets)
            return ops.mean(nll), nll

        return value_and_gradients(function, head.trainable_variables, hidden)

    (loss, nll), gradients, _ = mean(AdaptiveSoftmax.loss)
    (exact, _), references, _ = mean(plain_loss)
    for tensor in (nll, *gradients, quick(head)(hidden)):
        assert keras.backend.standardize_dtype(tensor.dtype) == "float32"
    assert float(loss) == pytest.approx(float(exact), rel=1e-2)
    for gradient, reference in zip(gradients, references, strict=True):
        scale = np.max(np.abs(reference))
        np.testing.assert_allclose(gradient / scale, reference / scale, atol=3e-2)


def language_model(words=V, channels=CHANNELS, jit_compile=True, **options):
    head = options.pop("head", None) or AdaptiveSoftmax(words, CUTOFFS, capacity=4)
    backbone = options.pop("backbone", None) or keras.layers.Dense(CHANNELS, "tanh")
    model = LanguageModel(words, channels, backbone, head=head, seed=6, **options)
    model.build((None, None))
    model.compile(Adam(5e-2), jit_compile=jit_compile)
    return model


def text(rows, time):
    """Words that can be predicted from the one before."""
    start = np.random.default_rng(0).integers(0, V, (rows, 1))
    return (start + 7 * np.arange(time)) % V


@pytest.mark.slow_elsewhere
def test_language_model_in_a_graph(tmp_path):
    """Own weights; fits, evaluates, predicts, is saved and loaded."""
    head = AdaptiveSoftmax(V, CUTOFFS, div_value=2, capacity=4, seed=8)
    jit_compile = keras.backend.backend() == "jax"  # it is slow otherwise
    model = language_model(head=head, tie_embeddings=False, jit_compile=jit_compile)
    tokens = text(21, 10)
    x, y = tokens[:, :-1], tokens[:, 1:]
    # Batches of 8, 8 and 5 rows: the batch size is unknown in the graph.
    losses = model.fit(x, y, batch_size=8, epochs=15, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    log_p = model.predict(x, verbose=0)
    mean = -np.mean(np.take_along_axis(log_p, y[..., None], axis=-1))
    assert model.evaluate(x, y, verbose=0) == pytest.approx(mean, rel=1e-5)

    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.head.get_config() == model.head.get_config()
    assert loaded.head.embedding is None
    np.testing.assert_allclose(loaded.predict(x, verbose=0), log_p, rtol=1e-5)
    assert loaded.train_on_batch(x, y) == pytest.approx(model.train_on_batch(x, y), rel=1e-4)


@pytest.mark.slow_elsewhere
def test_language_model_under_xla(tmp_path):
    """Tied weights; the batches' size is unknown until they are there."""
    model = language_model()
    tokens = text(21, 10)
    x, y = tokens[:, :-1], tokens[:, 1:]
    losses = model.fit(x, y, batch_size=8, epochs=15, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert model.head.embedding is model.embedding
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.head.embedding is loaded.embedding
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-5)


@pytest.mark.slow_elsewhere
def test_config_round_trip():
    head = head_of(div_value=2, capacity=[1, 2, 3], name="head")
    clone = AdaptiveSoftmax.from_config(head.get_config())
    assert clone.get_config() == head.get_config()
    clone.build((None, CHANNELS))
    hidden = random_hidden(3, CHANNELS)
    np.testing.assert_array_equal(clone(hidden), head(hidden))  # equal seeds
    symbolic = head(keras.Input((None, CHANNELS)))
    assert symbolic.shape == (None, None, V)


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize(
    "options, message",
    [
        ({"cutoffs": (12, 5)}, "cutoffs.*increasing.*12, 5"),
        ({"cutoffs": (5, 5)}, "cutoffs.*increasing"),
        ({"cutoffs": (5, V)}, "between 1 and vocabulary_size - 1 = 39"),
        ({"cutoffs": (0, 5)}, "between 1 and"),
        ({"cutoffs": (5.5,)}, "integers"),
        ({"div_value": 0.5}, "div_value.*at least 1.*0.5"),
        ({"div_value": "4"}, "div_value.*at least 1"),
        ({"div_value": 4}, "div_value=4 leaves tail 2 of 3 no width.*8 channels"),
        ({"capacity": 0}, "capacity.*positive"),
        ({"capacity": [1, 2]}, "one for each of the 3 tails"),
        ({"capacity": [1, 2, 0]}, r"capacity\[2\].*positive"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        head_of(**options)


def test_the_seed_is_that_of_all_initializers():
    names = ("cluster_initializer", "bias_initializer", "kernel_initializer")

    def weights():
        head = AdaptiveSoftmax(V, CUTOFFS, seed=3, **dict.fromkeys(names, "random_normal"))
        head.build((None, CHANNELS))
        return head.get_weights()

    for one, other in zip(weights(), weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    bias, cluster_bias = [w for w in weights() if w.ndim == 1]
    assert not np.allclose(bias[: len(cluster_bias)], cluster_bias)


@pytest.mark.slow_elsewhere
def test_wrong_ties_and_k():
    with pytest.raises(ValueError, match="embedding has 30 tokens.*vocabulary_size=40"):
        head_of().tie(keras.layers.Embedding(30, CHANNELS))
    with pytest.raises(ValueError, match="div_value=1.*tie_embeddings=False"):
        LanguageModel(V, 8, keras.layers.Dense(8), head=AdaptiveSoftmax(V, CUTOFFS, div_value=2))
    with pytest.raises(ValueError, match="embedding_dim=6.*8 channels"):
        language_model(channels=6)
    for k in (0, V + 1):
        with pytest.raises(ValueError, match=f"k.*Received: k={k}"):
            head_of().top_k(random_hidden(2, CHANNELS), k)
