"""The mixture of softmaxes: its equations, its blocks, its dropout, and models around it.

(The authors' numbers are in tests/models/test_language_model_golden.py.)
"""

import math
import re

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.gradients import value_and_gradients
from trellis_keras.layers import MixtureOfSoftmaxes, TrellisLayer
from trellis_keras.layers.heads import DenseHead
from trellis_keras.models import LanguageModel

both_backends = pytest.mark.both_backends
float64 = pytest.mark.float64

V, CHANNELS = 11, 4


def built(embedding_dim=None, seed=1, **options):
    """A head whose experts differ: all weights are of order 1."""
    head = MixtureOfSoftmaxes(V, **{"experts": 3, "seed": seed, **options})
    if embedding_dim is not None:
        embedding = keras.layers.Embedding(V, embedding_dim)
        embedding.build((None, None))
        head.tie(embedding)
    head.build((None, None, CHANNELS))
    rng = np.random.RandomState(seed)
    head.set_weights([rng.normal(size=w.shape) for w in head.get_weights()])
    return head


def random_inputs(*shape, seed=0):
    rng = np.random.RandomState(seed)
    hidden = rng.normal(size=(*shape, CHANNELS)).astype(keras.config.floatx())
    return hidden, rng.randint(0, V, shape)


def softmax(x):
    exp = np.exp(x - x.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def reference(head, hidden, mask=1.0):
    """The mixture's probabilities, in NumPy, with an explicit loop over experts."""
    prior_kernel, prior_bias, kernel, bias = (
        np.asarray(ops.convert_to_numpy(weight), "float64")
        for weight in (head.prior_kernel, head.prior_bias, head.latent_kernel, head.latent_bias)
    )
    if head.embedding is None:
        matrix = ops.convert_to_numpy(head.kernel).astype("float64")
    else:
        matrix = ops.convert_to_numpy(head.embedding.embeddings).astype("float64").T
    prior = softmax(hidden @ prior_kernel + prior_bias)
    latents = np.split(np.tanh((hidden @ kernel + bias) * mask), head.experts, axis=-1)
    logits = [latent @ matrix + ops.convert_to_numpy(head.bias) for latent in latents]
    return sum(prior[..., [k]] * softmax(z) for k, z in enumerate(logits))


# Its equations


@pytest.mark.slow_elsewhere
@both_backends
@float64
@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 5), (5,)])
@pytest.mark.parametrize("options", [{"embedding_dim": 6}, {"latent_units": 5}, {}])
@pytest.mark.parametrize("block_steps", ["auto", 2])
def test_equations(shape, options, block_steps, assert_close):
    head = built(block_steps=block_steps, **options)
    hidden, targets = random_inputs(*shape)
    wanted = np.log(reference(head, hidden))
    log_p = head(hidden)
    assert_close(log_p, wanted, "output")
    np.testing.assert_allclose(np.exp(log_p).sum(axis=-1), 1, rtol=1e-5)
    of_targets = np.take_along_axis(wanted, targets[..., None], axis=-1)[..., 0]
    assert_close(head.loss(hidden, targets), -of_targets, "output")
    assert head.compute_output_shape(hidden.shape) == log_p.shape


@pytest.mark.slow_elsewhere
@both_backends
@float64
def test_epsilon(assert_close):
    head = built(epsilon=0.01)
    hidden, targets = random_inputs(2, 5)
    wanted = np.log(reference(head, hidden) + 0.01)
    assert_close(head(hidden), wanted, "output")
    of_targets = np.take_along_axis(wanted, targets[..., None], axis=-1)[..., 0]
    assert_close(head.loss(hidden, targets), -of_targets, "output")


@pytest.mark.slow_elsewhere
@both_backends
@float64
def test_one_expert_is_a_dense_head_behind_a_projection(assert_close):
    head = built(experts=1, latent_units=5)
    dense = DenseHead(V)
    dense.build((None, None, 5))
    dense.set_weights([head.kernel, head.bias])
    hidden, targets = random_inputs(2, 5)
    projected = np.tanh(hidden @ np.asarray(head.latent_kernel) + np.asarray(head.latent_bias))
    assert_close(head(hidden), dense(projected), "output")
    assert_close(head.loss(hidden, targets), dense.loss(projected, targets), "output")


@pytest.mark.slow_elsewhere
@both_backends
def test_improbable_tokens_have_finite_losses_and_gradients():
    head = built(block_steps=2)
    head.bias.assign(np.eye(V)[0] * 1000)
    hidden, targets = random_inputs(2, 5)
    targets[:] = 3
    (loss, _), gradients, _ = value_and_gradients(
        lambda x: (ops.mean(head.loss(x, targets)), 0), head.trainable_variables, hidden
    )
    assert 990 < loss < 1010
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    assert any(np.any(np.asarray(gradient)) for gradient in gradients)


# Its blocks


@both_backends
@float64
@pytest.mark.parametrize("embedding_dim", [None, 6])
def test_blocks_change_nothing(embedding_dim, assert_close):
    """7 steps in blocks of 2 or 3: the last is padded."""
    hidden, targets = random_inputs(2, 3, 7)
    upstream = np.random.RandomState(5).uniform(size=targets.shape).astype(hidden.dtype)

    def results(block_steps):
        head = built(embedding_dim, block_steps=block_steps)
        variables = head.trainable_variables

        def loss(x):
            nll = head.loss(x, targets)
            return ops.sum(nll * upstream), nll

        def of_all_tokens(x):
            log_p = head(x)
            return ops.sum(ops.square(log_p) * upstream[..., None]), log_p

        found = []
        for function in (loss, of_all_tokens):
            (_, values), *gradients = value_and_gradients(function, variables, hidden)
            found += [values, *gradients[0], *gradients[1]]
        return found

    whole = results(None)
    assert len(whole) == 2 * (1 + 6 + 1)
    for block_steps in (2, 3, 100):
        for one, other in zip(results(block_steps), whole, strict=True):
            assert_close(ops.convert_to_numpy(one), ops.convert_to_numpy(other), "gradient")


def compiled_gradient(head, hidden, targets):
    """The program that XLA makes of a gradient of the loss, as text."""
    variables = head.trainable_variables
    if keras.backend.backend() == "jax":
        import jax

        def loss(values):
            with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
                return ops.mean(head.loss(hidden, targets))

        return jax.jit(jax.grad(loss)).lower([v.value for v in variables]).compile().as_text()
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def gradient(hidden):
        with tf.GradientTape() as tape:
            loss = ops.mean(head.loss(hidden, targets))
        sources = [v.value for v in variables]
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, sources)]

    return gradient.experimental_get_compiler_ir(tf.constant(hidden))(stage="optimized_hlo")


@pytest.mark.slow_elsewhere
@both_backends
def test_no_more_logits_than_a_block_has():
    hidden, targets = random_inputs(2, 30)

    def largest_array(block_steps):
        program = compiled_gradient(built(block_steps=block_steps), hidden, targets)
        shapes = re.findall(r"\bf32\[([\d,]+)\]", program)
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    assert largest_array(None) >= 2 * 30 * 3 * V
    # As large as a block of 3 steps, or as all latent vectors.
    assert largest_array(3) <= max(2 * 3 * 3 * V, 2 * 30 * 3 * CHANNELS)


def test_automatic_blocks(monkeypatch):
    """As many steps as have so many logits, at least one; fewer if blocks get equal that way."""
    module = "trellis_keras.layers.mixture_of_softmaxes.AUTOMATIC"
    latent = np.zeros((2, 30, 12), "float32")
    for logits, steps in ((1, 1), (2 * 3 * V * 7, 6), (2 * 3 * V * 30, 30), (10**9, 30)):
        monkeypatch.setattr(module, logits)
        assert built()._blocks(latent).steps == steps


# Its dropout


@pytest.mark.slow_elsewhere
@both_backends
@float64
@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 5)])
def test_one_mask_for_all_steps(shape, assert_close):
    head = built(latent_dropout=0.5, block_steps=2)
    drawn, draw = [], head.latent_dropout.draw
    head.latent_dropout.draw = lambda shape: drawn.append(draw(shape)) or drawn[-1]
    hidden, targets = random_inputs(*shape)
    nll = head.loss(hidden, targets, training=True)
    (mask,) = (ops.convert_to_numpy(mask) for mask in drawn)
    assert mask.shape == (*shape[:-1], 1, 3 * CHANNELS)
    assert set(np.unique(mask)) == {0, 2}
    wanted = np.log(reference(head, hidden, mask))
    of_targets = np.take_along_axis(wanted, targets[..., None], axis=-1)[..., 0]
    assert_close(nll, -of_targets, "output")


@pytest.mark.slow_elsewhere
@both_backends
def test_dropout_in_training_only():
    head, plain = built(latent_dropout=0.5), built()
    hidden, targets = random_inputs(3, 5)
    np.testing.assert_array_equal(head.loss(hidden, targets), plain.loss(hidden, targets))
    np.testing.assert_array_equal(head(hidden), plain(hidden))
    dropped = head.loss(hidden, targets, training=True)
    assert np.any(np.asarray(dropped) != np.asarray(head.loss(hidden, targets)))
    # The seed decides, and the next draw is another.
    again = built(latent_dropout=0.5)
    np.testing.assert_array_equal(again.loss(hidden, targets, training=True), dropped)
    assert np.any(np.asarray(again.loss(hidden, targets, training=True)) != np.asarray(dropped))
    assert not plain.non_trainable_variables


# Models


def language_model(head, aux=True, **options):
    backbone = TrellisLayer(
        units=14,
        depth=2,
        output_units=9,
        aux_every=1 if aux else None,
        return_aux=aux,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.3, seed=1),
        seed=0,
    )
    model = LanguageModel(V, 6, backbone, head=head, aux_weight=0.1 * aux, seed=1, **options)
    model.build((None, None))
    # Quick to compile on TensorFlow; JAX is slow without it.
    model.compile(keras.optimizers.Adam(0.02), jit_compile=keras.backend.backend() == "jax")
    return model


def small_head(**options):
    return MixtureOfSoftmaxes(V, **{"experts": 3, "block_steps": 2, "seed": 1, **options})


@pytest.mark.slow_elsewhere
@both_backends
def test_training():
    """7 rows in batches of 3: on TensorFlow the batch size is unknown."""
    tokens = np.tile(np.arange(20) % V, (7, 1))
    x, y = tokens[:, :-1], tokens[:, 6:]
    model = language_model(small_head(latent_dropout=0.2))
    fit = dict(batch_size=3, epochs=12, verbose=0, validation_data=(x, y))
    losses = model.fit(x, y, **fit).history["val_loss"]
    assert losses[-1] < 0.7 * losses[0]
    # What `predict` says is what was counted.
    log_p = np.take_along_axis(model.predict(x, verbose=0), tokens[:, 1:, None], axis=-1)
    assert losses[-1] == pytest.approx(-np.mean(log_p[:, 5:]), rel=1e-5)


def test_training_under_xla(monkeypatch):
    monkeypatch.setattr("trellis_keras.layers.mixture_of_softmaxes.AUTOMATIC", 3 * 3 * V * 2)
    tokens = np.random.RandomState(0).randint(0, V, (5, 9))
    losses = []
    for jit_compile in (False, True):
        # Without a number of steps, so that its rule meets the unknown batch size too.
        head = small_head(block_steps="auto")
        backbone = keras.layers.Dense(9, kernel_initializer=keras.initializers.GlorotUniform(1))
        model = LanguageModel(V, 6, backbone, head=head, seed=1)
        model.compile("adam", jit_compile=jit_compile)
        fit = dict(batch_size=3, epochs=2, shuffle=False, verbose=0)
        losses.append(model.fit(tokens[:, :-1], tokens[:, 4:], **fit).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_the_model_tells_its_head_when_it_trains():
    model = language_model(small_head(latent_dropout=0.2))
    calls, loss = [], model.head.loss
    model.head.loss = lambda *args, training=False: calls.append(training) or loss(*args)
    tokens = np.arange(20).reshape(2, 10) % V
    model.train_on_batch(tokens[:, :-1], tokens[:, 1:])
    assert set(calls) == {True}
    calls.clear()
    model.test_on_batch(tokens[:, :-1], tokens[:, 1:])
    assert set(calls) == {False}


@pytest.mark.slow_elsewhere
@both_backends
def test_saving_and_generation(tmp_path):
    model = language_model(small_head(latent_dropout=0.2), aux=False)
    tokens = np.arange(20).reshape(2, 10) % V
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.head.get_config() == model.head.get_config()
    log_p = model.predict(tokens, verbose=0)
    np.testing.assert_array_equal(loaded.predict(tokens, verbose=0), log_p)
    ids = model.generate(tokens[:, :4], max_length=7, sampler="greedy")
    for t in range(4, 7):
        np.testing.assert_array_equal(
            model.predict(ids[:, :t], verbose=0)[:, -1].argmax(axis=-1), ids[:, t]
        )


@pytest.mark.slow_elsewhere
@both_backends
def test_untied():
    model = language_model(small_head(latent_units=5), tie_embeddings=False, aux=False)
    assert tuple(model.head.kernel.shape) == (5, V)
    tokens = np.arange(20).reshape(2, 10) % V
    assert np.isfinite(model.train_on_batch(tokens[:, :-1], tokens[:, 1:]))


@pytest.mark.slow_elsewhere
@both_backends
@pytest.mark.parametrize("block_steps", [None, 2])
def test_half_precision(block_steps):
    """Softmaxes and losses are float32, and gradients near those of float32."""
    hidden, targets = random_inputs(2, 7)

    def results(dtype):
        head = built(6, block_steps=block_steps, dtype=dtype)
        (_, nll), gradients, _ = value_and_gradients(
            lambda x: (ops.mean(nll := head.loss(x, targets)), nll),
            head.trainable_variables,
            hidden,
        )
        assert {keras.backend.standardize_dtype(x.dtype) for x in (nll, head(hidden))} == {
            "float32"
        }
        return [np.asarray(ops.cast(x, "float32")) for x in (nll, *gradients)]

    for half, single in zip(results("mixed_bfloat16"), results("float32"), strict=True):
        np.testing.assert_allclose(half, single, atol=0.03 * np.abs(single).max())


def test_default_initializers():
    head = MixtureOfSoftmaxes(V, 3, 5, seed=2)
    head.build((None, None, 400))
    for kernel in (head.prior_kernel, head.latent_kernel):
        assert np.abs(kernel).max() == pytest.approx(1 / 20, rel=0.01)
    assert 0.09 < np.abs(head.kernel).max() < 0.1
    assert not np.any(head.latent_bias)
    other = MixtureOfSoftmaxes.from_config(head.get_config())
    other.build((None, None, 400))
    for one, same in zip(head.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, same)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 0}, "`experts` must be a positive integer. Received: experts=0"),
        ({"experts": 2.0}, "`experts` must be"),
        ({"latent_units": 0}, "`latent_units` must be"),
        ({"latent_dropout": 1.0}, r"in \[0, 1\). Received: rate=1.0 .layer latent_dropout"),
        ({"epsilon": 0.0}, "`epsilon` must be positive or None"),
        ({"block_steps": 0}, '`block_steps` must be a positive integer, None or "auto"'),
        ({"block_steps": "all"}, "`block_steps` must be"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        small_head(**options)


def test_a_tied_embedding_of_another_width():
    with pytest.raises(ValueError, match="latent_units=5, embedding_dim=6. Leave `latent_units`"):
        built(6, latent_units=5)
    assert built(6, latent_units=6).built
