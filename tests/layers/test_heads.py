"""Output heads: one protocol, the equations of each, and language models around them.

The authors' numbers of a mixture are in tests/models/test_language_model_golden.py.
"""

import contextlib
import json

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.golden import family, floats, nll_of
from tests.support.gradients import value_and_gradients
from tests.support.layer_checks import at_once
from tests.support.parameters import SLOW_ON_JAX, slow_but
from trellis_keras import kernels
from trellis_keras.layers import AdaptiveSoftmax, DenseHead, Head, MixtureOfSoftmaxes
from trellis_keras.models import LanguageModel

pytestmark = pytest.mark.both_backends

V, CUTOFFS, CHANNELS = 40, (5, 12, 25), 8

# {name: (class, options, whether it is tied)}
HEADS = {
    "dense": (DenseHead, {}, False),
    "dense, tied": (DenseHead, {}, True),
    "mixture": (MixtureOfSoftmaxes, {"experts": 3, "latent_units": 5}, False),
    "mixture, tied": (MixtureOfSoftmaxes, {"experts": 3, "epsilon": 1e-3}, True),
    "adaptive": (AdaptiveSoftmax, {"cutoffs": CUTOFFS}, False),
    "adaptive, tied": (AdaptiveSoftmax, {"cutoffs": CUTOFFS}, True),
    "adaptive, projected": (AdaptiveSoftmax, {"cutoffs": CUTOFFS, "div_value": 2}, False),
    "adaptive, no tails": (AdaptiveSoftmax, {"cutoffs": ()}, True),
}
every_head = pytest.mark.parametrize("name", HEADS)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """The mixtures' logits exist for 2 steps of 3 rows at once."""
    monkeypatch.setattr("trellis_keras.layers.heads.LOGITS_AT_ONCE", 3 * 3 * V * 2)


def make(name, **more):
    """A head of random weights of order 1/2."""
    cls, options, tied = HEADS[name]
    head = cls(V, **{**options, **more})
    rng = np.random.default_rng(1)
    if tied:
        embedding = keras.layers.Embedding(V, CHANNELS)
        embedding.build()
        embedding.set_weights([rng.normal(scale=0.5, size=(V, CHANNELS))])
        head.tie(embedding)
    head.build((None, None, CHANNELS))
    for weight in head.trainable_weights:
        weight.assign(rng.normal(scale=0.5, size=weight.shape))
    return head


def random_hidden(*shape, seed=0):
    return floats(np.random.default_rng(seed).normal(size=(*shape, CHANNELS)))


def random_targets(*shape):
    return np.random.default_rng(2).integers(0, V, shape).astype("int32")


# The protocol


@pytest.mark.slow_elsewhere
@pytest.mark.float64
@every_head
def test_protocol(name, assert_close):
    """`loss` follows from `call`, with kernels and without them."""
    head, hidden, targets = make(name), random_hidden(2, 3, 4), random_targets(2, 3, 4)
    log_p = np.asarray(head(hidden))
    if getattr(head, "epsilon", None) is None:
        np.testing.assert_allclose(np.exp(log_p).sum(axis=-1), 1, rtol=1e-5)
    nll = nll_of(log_p, targets)
    assert_close(head.loss(hidden, targets), nll, "output")
    with kernels.disabled():
        assert_close(head(hidden), log_p, "output")
        assert_close(head.loss(hidden, targets), nll, "output")


@pytest.mark.slow_elsewhere
@every_head
def test_gradients_and_half_precision(name):
    """Gradients are those of the plain equations; in half precision they are near them."""
    hidden, targets = random_hidden(5, 6), random_targets(5, 6)

    def results(**more):
        head = make(name, **more)
        (_, nll), gradients, _ = value_and_gradients(
            lambda x: (ops.mean(nll := head.loss(x, targets)), nll),
            head.trainable_variables,
            hidden,
        )
        assert {keras.backend.standardize_dtype(x.dtype) for x in (nll, head(hidden))} == {
            "float32"
        }
        return [np.asarray(ops.cast(x, "float32")) for x in (nll, *gradients)]

    with kernels.disabled():
        plain = results()
    for exact, half, reference in zip(
        results(), results(dtype="mixed_bfloat16"), plain, strict=True
    ):
        scale = np.abs(reference).max()
        np.testing.assert_allclose(exact / scale, reference / scale, atol=1e-5)
        np.testing.assert_allclose(half / scale, reference / scale, atol=0.04)


@pytest.mark.slow_elsewhere
@pytest.mark.parametrize("name", ["dense", "mixture", "adaptive"])
def test_predictions_have_the_loss_that_is_trained_in_half_precision(name):
    head = make(name, dtype="mixed_bfloat16")
    head.bias.assign(np.random.default_rng(0).uniform(-8, 8, V))
    hidden, targets = random_hidden(3, 4).astype("float32"), random_targets(3, 4)
    # Products are rounded alike; biases rounded to 8 bits would be off by up to 0.016.
    np.testing.assert_allclose(nll_of(head(hidden), targets), head.loss(hidden, targets), atol=2e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_many_blocks_in_half_precision(tied, monkeypatch):
    """Those of the output matrix add up in float32 within a model, too."""
    tokens, half = np.full((2, 300), 7), {"dtype": "mixed_bfloat16"}

    def update(steps):
        monkeypatch.setattr("trellis_keras.layers.heads.LOGITS_AT_ONCE", 2 * 2 * V * steps)
        head = MixtureOfSoftmaxes(V, 2, seed=1, **half)
        backbone = keras.layers.Dense(CHANNELS, kernel_initializer="identity", **half)
        model = LanguageModel(V, CHANNELS, backbone, head=head, tie_embeddings=tied, seed=1, **half)
        model.compile(keras.optimizers.SGD(1.0))
        model.build(tokens.shape)
        matrix = model.embedding.embeddings if tied else head.kernel
        before = ops.convert_to_numpy(matrix)
        model.train_on_batch(tokens, tokens)
        return ops.convert_to_numpy(matrix) - before

    whole, blocks = update(300), update(1)
    np.testing.assert_allclose(blocks, whole, atol=0.01 * np.abs(whole).max())


@pytest.mark.both_backends(slow=True)
@every_head
def test_config_and_symbolic_outputs(name):
    cls, options, _ = HEADS[name]
    options = options if cls is DenseHead else {"seed": 4, **options}
    head = cls(V, kernel_initializer=keras.initializers.RandomNormal(seed=3), **options)
    clone = cls.from_config(json.loads(json.dumps(head.get_config())))
    assert clone.get_config() == head.get_config()
    hidden = random_hidden(2, 3)
    clone.loss(hidden, random_targets(2, 3))  # builds it
    np.testing.assert_array_equal(clone(hidden), head(hidden))  # equal seeds
    for policy in ("float32", "mixed_bfloat16"):
        head = cls(V, dtype=policy, **options)
        symbolic, real = head(keras.Input((4, CHANNELS))), head(random_hidden(2, 4))
        assert symbolic.dtype == keras.backend.standardize_dtype(real.dtype) == "float32"
        assert symbolic.shape == (None, 4, V) and tuple(real.shape) == (2, 4, V)


@keras.saving.register_keras_serializable("test_heads")
class UniformHead(Head):
    """A head with only what a subclass must define."""

    def call(self, hidden, training=False):
        return ops.zeros((*ops.shape(hidden)[:-1], V)) - np.log(V)


def test_a_head_needs_only_a_call():
    head = UniformHead(V)
    np.testing.assert_allclose(head.loss(random_hidden(2, 3), random_targets(2, 3)), np.log(V))
    model = LanguageModel(V, 6, keras.layers.Dense(8), head=head, tie_embeddings=False)
    model.compile("sgd")
    tokens = random_targets(2, 5)
    assert model.evaluate(tokens, tokens, verbose=0) == pytest.approx(np.log(V))


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("dense", "vocabulary_size", 0),
        ("mixture", "experts", 2.0),
        ("mixture", "latent_units", 0),
        ("mixture", "epsilon", 0.0),
        ("mixture", "epsilon", float("inf")),
        ("adaptive", "cutoffs", (12, 5)),
        ("adaptive", "cutoffs", (5, V)),
        ("adaptive", "cutoffs", 5),
        ("adaptive", "div_value", 4),
    ],
)
def test_wrong_arguments(name, argument, value):
    cls, options, _ = HEADS[name]
    with pytest.raises(ValueError, match=argument):
        cls(**{"vocabulary_size": V, **options, argument: value}).build((None, CHANNELS))


def test_wrong_ties():
    with pytest.raises(ValueError, match="vocabulary_size"):
        DenseHead(V).tie(keras.layers.Embedding(30, CHANNELS))
    with pytest.raises(ValueError, match="div_value"):
        AdaptiveSoftmax(V, CUTOFFS, div_value=2).tie(keras.layers.Embedding(V, CHANNELS))
    mixture = MixtureOfSoftmaxes(V, 3, latent_units=5)
    for head in (DenseHead(V), AdaptiveSoftmax(V, CUTOFFS), mixture):
        head.tie(keras.layers.Embedding(V, 6))
        with pytest.raises(ValueError, match="embedding_dim=6"):
            head.build((None, CHANNELS))


def test_a_tied_embedding_that_was_quantized():
    head = make("dense, tied")
    head.embedding.quantize("int8")
    with pytest.raises(ValueError, match="cannot be quantized"):
        head(random_hidden(2))


# MixtureOfSoftmaxes


def softmax(x):
    exp = np.exp(x - x.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def mixture(head, hidden, mask=1.0):
    """The mixture's probabilities, in NumPy, with an explicit loop over experts."""
    prior_kernel, prior_bias, kernel, bias = (
        np.asarray(ops.convert_to_numpy(weight), "float64")
        for weight in (head.prior_kernel, head.prior_bias, head.latent_kernel, head.latent_bias)
    )
    if head.embedding is None:
        matrix = ops.convert_to_numpy(head.kernel)
    else:
        matrix = ops.convert_to_numpy(head.embedding.embeddings).T
    prior = softmax(hidden @ prior_kernel + prior_bias)
    latents = np.split(np.tanh((hidden @ kernel + bias) * mask), head.experts, axis=-1)
    logits = [latent @ matrix + ops.convert_to_numpy(head.bias) for latent in latents]
    return sum(prior[..., [k]] * softmax(z) for k, z in enumerate(logits))


@pytest.mark.float64
@pytest.mark.parametrize(("name", "epsilon"), [("mixture", 0), ("mixture, tied", 1e-3)])
def test_equations_of_a_mixture(name, epsilon, assert_close):
    head, hidden = make(name, epsilon=epsilon or None), random_hidden(2, 5)
    assert_close(head(hidden), np.log(mixture(head, hidden) + epsilon), "output")


@pytest.mark.float64
def test_one_mask_of_a_mixture_for_all_steps(assert_close):
    shape = 2, 3, 5
    head = make("mixture", latent_dropout=0.5, seed=1)
    drawn, draw = [], head.latent_dropout.draw
    head.latent_dropout.draw = lambda shape: drawn.append(draw(shape)) or drawn[-1]
    hidden, targets = random_hidden(*shape), random_targets(*shape)
    nll = head.loss(hidden, targets, training=True)
    (mask,) = (ops.convert_to_numpy(mask) for mask in drawn)
    assert mask.shape == (*shape[:-1], 1, 3 * 5)
    assert set(np.unique(mask)) == {0, 2}
    log_p = np.log(mixture(head, hidden, mask))
    assert_close(nll, nll_of(log_p, targets), "output")
    # None in evaluation.
    head.loss(hidden, targets)
    head(hidden)
    assert len(drawn) == 1
    assert not make("mixture").non_trainable_variables


def test_improbable_tokens_have_finite_losses_and_gradients():
    head = make("mixture")
    head.bias.assign(np.eye(V)[0] * 1000)
    hidden, targets = random_hidden(2, 5), np.full((2, 5), 3)
    (loss, _), gradients, _ = value_and_gradients(
        lambda x: (ops.mean(head.loss(x, targets)), 0), head.trainable_variables, hidden
    )
    assert 990 < loss < 1010
    assert all(np.all(np.isfinite(np.asarray(gradient))) for gradient in gradients)
    assert any(np.any(np.asarray(gradient)) for gradient in gradients)


def test_default_initializers_of_a_mixture():
    head = MixtureOfSoftmaxes(V, 3, latent_units=5, seed=2)
    head.build((None, None, 400))
    for kernel in (head.prior_kernel, head.latent_kernel):
        assert np.abs(kernel).max() == pytest.approx(1 / 20, rel=0.01)
    assert 0.09 < np.abs(head.kernel).max() < 0.1
    assert not np.any(head.latent_bias)


# AdaptiveSoftmax

SPLITS = ["one_split", "two_splits"]


@pytest.mark.float64
@pytest.mark.parametrize(
    "case", ["no_split", *(pytest.param(s, marks=SLOW_ON_JAX) for s in SPLITS), "three_splits"]
)
def test_the_authors_split_cross_entropy(case, golden, assert_close):
    arrays = golden(f"splitcross_{case}")
    config, weights = arrays["meta"]["config"], family(arrays, "param")
    embedding = keras.layers.Embedding(config["V"], config["H"])
    embedding.build()
    head = AdaptiveSoftmax(config["V"], config["splits"])
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


@pytest.mark.parametrize("name", slow_but(HEADS, "adaptive", mark=pytest.mark.slow_elsewhere))
def test_targets_outside_the_vocabulary_have_no_loss(name):
    head = make(name)
    hidden = np.random.default_rng(0).normal(size=(2, 3, CHANNELS))
    targets = np.array([[0, V - 1, 4], [V, -1, 30]])
    for context in (contextlib.nullcontext, kernels.disabled):
        with context():
            loss = np.asarray(at_once(head.loss)(hidden, targets))
        np.testing.assert_array_equal(np.isnan(loss), [[False] * 3, [True, True, False]])
        within = np.asarray(at_once(head.loss)(hidden, np.clip(targets, 0, V - 1)))
        np.testing.assert_allclose(loss[0], within[0], rtol=1e-5)


def test_targets_of_another_shape_are_refused():
    for shape in ((3, 2), (2, 3, 1)):
        with pytest.raises(ValueError, match="targets"):
            make("dense").loss(random_hidden(2, 3), np.zeros(shape, int))
