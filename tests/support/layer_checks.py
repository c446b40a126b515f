"""The check that every layer for sequences passes, and its parts.

    check_layer(functools.partial(TCN, 8, 3, depth=2), (2, 9, 4))

A layer's test file holds its check, its golden cases, and what is particular to it. All parts work
in the floatx of the test, on either backend.
"""

import inspect
import json
import pathlib
import tempfile
import warnings

import keras
import numpy as np
import pytest
from keras import ops

from keras_streams.protocol import step_through
from tests.support.gradients import value_and_gradients
from trellis_keras import kernels

TENSORFLOW = keras.backend.backend() == "tensorflow"

# Largest error divided by max|reference|.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


def check_layer(make, input_shape, *, streams=True, masks=True, **call):
    """Asserts what every layer for sequences promises.

    Its config and file give the same layer; sizes of 0, rates of 1, and inputs of another rank or
    width are refused; static, symbolic and actual shapes agree; it trains in a compiled `fit`,
    unless it is frozen; half precision stays near float32, and float64 is kept whatever floatx is;
    outputs depend on no later inputs, and on `receptive_field` earlier ones; kernels compute what
    the equations say; streaming equals the forward pass; padding with a mask changes nothing, nor
    does NaN in masked steps. Errors name the inputs, states and caches that do not fit.

    Args:
        make: Function (**options) that returns the layer; options are `dtype` and `name`. Seeds
            must be given, so that two layers draw the same dropout masks.
        input_shape: (batch, time, channels) of the input.
        streams: Whether it follows the protocol of `keras_streams.StreamingMixin`.
        masks: Whether it takes a mask.
        **call: Arguments of every call.
    """
    check_config(make)
    check_sizes(make)
    check_inputs(make, input_shape)
    check_shapes(make, input_shape)
    check_fit_and_file(make, input_shape)
    check_frozen(make, input_shape)
    check_half_precision(make, input_shape)
    check_float64(make, input_shape, streams)
    check_causality(make, input_shape)
    check_kernels(make, input_shape, **call)
    if streams:
        check_streaming(made(make, input_shape), noise(*input_shape))
        check_bad_streams(make, input_shape)
    if masks:
        check_mask(make, input_shape)


def check_config(make):
    """The config holds the constructor's arguments as JSON, and gives an equal layer."""
    layer = make()
    config = layer.get_config()
    assert set(config) == _constructor_arguments(type(layer))
    json.dumps(config)
    assert type(layer).from_config(config).get_config() == config


def check_sizes(make):
    """Sizes of 0 and rates of 1 are refused, by the argument's name."""
    layer = make()
    config = layer.get_config()
    for name, value in config.items():
        if type(value) in (int, float) and name != "seed":
            wrong = {name: 0 if type(value) is int else 1.0}
            named = name if type(value) is int else f"{name}|rate"
            with pytest.raises(ValueError, match=named):
                type(layer)(**config | wrong)


def _constructor_arguments(cls):
    """The names of all arguments, those that are handed on as **kwargs included."""
    names = set()
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(base.__init__).parameters.values()
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            break
        if base is keras.layers.Layer:
            break
    return names - {"self", "activity_regularizer", "autocast"}


def check_inputs(make, input_shape):
    """Inputs without steps, and of another rank or width, are refused by the layer or by Keras."""
    batch, time, channels = input_shape
    layer = made(make, input_shape)
    for each in (make(), layer):
        with pytest.raises(ValueError, match="expected ndim=3, found ndim=2"):
            each(noise(batch, channels))
    for wrong in (channels - 1, 2 * channels):  # a convolution in groups would take a multiple
        with pytest.raises(ValueError, match=rf"value {channels}, but received .* {wrong}\)"):
            layer(noise(batch, time, wrong))
    with pytest.raises(ValueError, match="at least one time step"):
        layer(noise(batch, 0, channels))


def check_shapes(make, input_shape):
    """Computed, symbolic and actual shapes and dtypes agree, with known and unknown sizes."""
    layer = made(make, input_shape)
    batch, time, channels = input_shape
    outputs = keras.tree.flatten(layer(noise(*input_shape)))
    actual = [tuple(y.shape) for y in outputs]
    assert _flat_shapes(layer.compute_output_shape(input_shape)) == actual
    static = keras.tree.flatten(layer(keras.Input((time, channels), batch_size=batch)))
    assert [tuple(y.shape) for y in static] == actual
    dtypes = [keras.backend.standardize_dtype(y.dtype) for y in outputs]
    assert [y.dtype for y in static] == dtypes
    unknown = keras.tree.flatten(layer(keras.Input((None, channels))))
    for symbolic, shape in zip(unknown, actual, strict=True):
        assert len(symbolic.shape) == len(shape) and symbolic.shape[0] is None
        assert symbolic.shape[-1] == shape[-1]


def _flat_shapes(shapes):
    shapes = [shapes] if isinstance(shapes[0], int) else shapes
    return [tuple(shape) for shape in shapes]


def check_fit_and_file(make, input_shape):
    """A compiled model trains all weights of the layer, and its file gives the same model."""
    layer = made(make, input_shape)
    x = noise(*input_shape)
    inputs = keras.Input((None, input_shape[-1]))
    outputs = keras.tree.flatten(layer(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    before = [np.array(w) for w in layer.trainable_weights]
    model.train_on_batch(x, [np.ones(y.shape) for y in keras.tree.flatten(layer(x))])
    for weight, old in zip(layer.trainable_weights, before, strict=True):
        new = np.asarray(weight)
        assert np.all(np.isfinite(new)) and np.any(new != old), weight.path
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.keras"
        model.save(path)
        loaded = keras.saving.load_model(path)
    for found, expected in zip(*[keras.tree.flatten(m(x)) for m in (model, loaded)], strict=True):
        np.testing.assert_array_equal(found, expected)


def check_frozen(make, input_shape):
    """A layer frozen before it is built has no trainable weights, nor has a clone of its model."""
    layer = make()
    layer.trainable = False
    inputs = keras.Input((None, input_shape[-1]))
    model = keras.Model(inputs, layer(inputs))
    for each in (model, keras.models.clone_model(model)):
        assert each.weights and not each.trainable_weights


def check_half_precision(make, input_shape):
    """With mixed_bfloat16 weights and states stay in float32, and outputs are near theirs."""
    full, half = (made(make, input_shape, dtype=d) for d in ("float32", "mixed_bfloat16"))
    assert {w.dtype for w in half.weights} == {"float32"}
    x = noise(*input_shape).astype("float32")
    both = (outputs_of(layer, x) for layer in (half, full))
    for rough, exact in zip(*both, strict=True):
        assert keras.backend.standardize_dtype(rough.dtype) in ("bfloat16", "float32")
        rough, exact = (np.asarray(ops.cast(y, "float32")) for y in (rough, exact))
        assert np.linalg.norm(rough - exact) < 0.03 * np.linalg.norm(exact)
    outputs = keras.tree.flatten(half(x))
    assert keras.backend.standardize_dtype(outputs[0].dtype) == "bfloat16"
    if hasattr(half, "state_sizes"):
        y, cache = half.step(x[:, 0], half.initial_cache(len(x)))
        assert keras.backend.standardize_dtype(y.dtype) == "bfloat16"
        carried = outputs[-len(half.state_sizes) :] if half.return_state else []
        carried += keras.tree.flatten(cache["states"] if isinstance(cache, dict) else cache)
        assert {keras.backend.standardize_dtype(s.dtype) for s in carried} == {"float32"}


def check_float64(make, input_shape, streams=True):
    """In float64, outputs and a stream's steps are the same whatever floatx is."""
    x = ops.convert_to_tensor(np.random.default_rng(0).normal(size=input_shape))

    def outputs():
        layer = made(make, input_shape, dtype="float64")
        yield from keras.tree.flatten(layer(x))
        if streams:
            cache = layer.initial_cache(x.shape[0])
            yield from keras.tree.flatten(layer.step(x[:, 0], cache))

    floatx = keras.config.floatx()
    try:
        keras.config.set_floatx("float32")
        found = list(outputs())
        keras.config.set_floatx("float64")
        assert_all_close(found, list(outputs()))
    finally:
        keras.config.set_floatx(floatx)


def check_causality(make, input_shape):
    """An output depends on the last `receptive_field` inputs up to its step, and on no others."""
    layer = made(make, input_shape)
    if not getattr(layer, "return_sequences", True) or not getattr(layer, "is_causal", True):
        return
    time = input_shape[1]
    t = time - 3  # of the outputs, which may be fewer than the inputs

    def output(x):
        y = keras.tree.flatten(layer(x))[0]
        return ops.sum(ops.square(y[:, t - time])), ()

    _, _, (gradient,) = value_and_gradients(output, [], noise(*input_shape))
    depends = np.any(np.asarray(gradient) != 0, axis=(0, 2))
    first = max(0, t + 1 - getattr(layer, "receptive_field", time))
    np.testing.assert_array_equal(depends, [first <= s <= t for s in range(time)])


def check_kernels(make, input_shape, how="graph", **call):
    """Outputs and gradients with kernels equal those of the equations as written.

    In training, with dropout masks from the same seeds.

    Args:
        make, input_shape: As in `check_layer`.
        how: "graph", "xla" (both for an unknown batch size on TensorFlow), or "eager".
        **call: Arguments of the call. `initial_state` is differentiated too. The last two outputs
            alone are compared as well where the call takes `output_length`.
    """
    lengths = [call.pop("output_length", None)]
    takes_length = "output_length" in inspect.signature(made(make, input_shape).call).parameters
    layer = made(make, input_shape)
    if takes_length and lengths == [None] and layer.return_sequences and not layer.go_backwards:
        lengths.append(2)
    for length in lengths:
        options = call | ({"output_length": length} if takes_length else {})
        fast = outputs_and_gradients(made(make, input_shape), input_shape, how, **options)
        with kernels.disabled():
            plain = outputs_and_gradients(made(make, input_shape), input_shape, "eager", **options)
        assert_all_close(fast, plain)


def outputs_and_gradients(
    layer, input_shape, how="graph", initial_state=None, training=True, **options
):
    """All outputs of a layer, and the gradients of a function of them.

    With respect to the weights, the input and the initial states, in this order.
    """
    x = noise(*input_shape)
    states = [] if initial_state is None else list(initial_state)

    def loss(x, *states):
        given = {"initial_state": list(states)} if states else {}
        outputs = keras.tree.flatten(layer(x, training=training, **given, **options))
        # Weights that differ from output to output, so that no two errors cancel.
        wide = [ops.cast(y, keras.config.floatx()) for y in outputs]
        return sum(ops.sum(ops.sin(y * (3 + i))) for i, y in enumerate(wide)), outputs

    def everything(x, *states):
        return value_and_gradients(loss, layer.trainable_variables, x, *states)

    if TENSORFLOW and how != "eager":
        import tensorflow as tf

        signature = [tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in (x, *states)]
        everything = tf.function(everything, input_signature=signature, jit_compile=how == "xla")
    (_, outputs), by_weight, by_input = everything(x, *states)
    return [*outputs, *by_weight, *by_input]


def check_streaming(layer, x, steps=None, **initial):
    """A built layer follows the protocol of `keras_streams.StreamingMixin`.

    Prefill, first of one step and then of the others, equals forward; steps and then, from their
    cache, a prefill equal forward; both leave the same cache, each tensor of which has the batch as
    its first axis.

    Args:
        layer: Built layer from (batch, time, channels) to (batch, time, filters).
        x: Array (batch, time, channels).
        steps: Number of steps before the prefill, in 0 < steps < time. Defaults to half.
        **initial: Arguments of both the call and `initial_cache`, such as `initial_state`.
    """
    x = ops.convert_to_tensor(np.asarray(x, keras.config.floatx()))
    steps = x.shape[1] // 2 if steps is None else steps
    start = layer.initial_cache(x.shape[0], **initial)
    for leaf in keras.tree.flatten(start):
        assert leaf.shape[0] == x.shape[0], "the batch is not the first axis of the cache"

    def stream(x, start):
        first, filled = layer.prefill(x[:, :1], start)
        others, filled = layer.prefill(x[:, 1:], filled)
        whole = ops.concatenate([first, others], axis=1)
        stepped, cache = step_through(layer, x[:, :steps], start)
        rest, cache = layer.prefill(x[:, steps:], cache)
        forward = keras.tree.flatten(layer(x, **initial))[0]
        return forward, whole, filled, ops.concatenate([stepped, rest], axis=1), cache

    forward, whole, filled, pieces, cache = at_once(stream)(x, start)
    if not getattr(layer, "return_sequences", True):
        whole, pieces = whole[:, -1], pieces[:, -1]
    length = getattr(layer, "output_length", None) or 0
    assert_close(whole[:, -length:], forward)
    assert_close(pieces[:, -length:], forward)
    keras.tree.assert_same_structure(filled, cache)
    assert_all_close(filled, cache)


def check_bad_streams(make, input_shape):
    """Streams of a layer that is not built, and caches, steps and states that do not fit."""
    layer, (batch, time, channels) = made(make, input_shape), input_shape
    new = make()
    cache = layer.initial_cache(batch)
    for call, message in (
        (lambda: new.initial_cache(batch), f"{new.name} is not built.*build"),
        (lambda: new.step(noise(batch, channels), cache), f"{new.name} is not built.*build"),
        (lambda: layer.initial_cache(0), "batch_size=0"),
        (lambda: layer.step(noise(batch + 1, channels), cache), "does not fit .*batch size"),
        (lambda: layer.step(noise(batch, channels), [cache]), r"does not fit .*Received: \["),
        (lambda: layer.step(noise(batch, channels + 1), cache), r"`x` must have shape .*Received"),
        (lambda: layer.prefill(noise(batch, channels), cache), r"`x` must have shape .*Received"),
    ):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            call()
    sizes = getattr(layer, "state_sizes", [])
    states = [noise(batch, size) for size in sizes]
    for wrong in ([*states, *states], states[1:], [*states[1:], noise(batch, 99)]) if sizes else ():
        for call in (
            layer,
            lambda x, **initial: layer(keras.Input(x.shape[1:]), **initial),
            lambda _, **initial: layer.initial_cache(batch, **initial),
        ):
            with pytest.raises(ValueError, match=f"must hold {len(sizes)} tensors .*Received"):
                call(noise(batch, time, channels), initial_state=wrong)


def check_mask(make, input_shape):
    """Masked steps before or after a sequence change none of its outputs and states."""
    layer = made(make, input_shape)
    batch, time, channels = input_shape
    x, padding = noise(*input_shape), noise(batch, 2, channels, seed=1)
    expected = outputs_of(layer, x)
    sequences = getattr(layer, "return_sequences", True)
    length = getattr(layer, "output_length", None) or time
    for pieces in ([padding, x], [x, padding]):
        # Every output is wanted here: the last ones may be those of masked steps.
        valid = np.concatenate([np.full(p.shape[:2], p is x) for p in pieces], axis=1)
        given = {"output_length": time + 2} if length < time else {}
        together = np.concatenate(pieces, axis=1)
        padded = outputs_of(layer, together, mask=valid, **given)
        given_mask = valid
        if getattr(layer, "go_backwards", False):  # the outputs are in reverse order too
            pieces, valid = pieces[::-1], valid[:, ::-1]
        for found, wanted in zip(padded, expected, strict=True):
            if sequences and len(wanted.shape) > 2:
                found = found[..., 2:, :] if pieces[0] is padding else found[..., :time, :]
                found = found[..., -length:, :]
            assert_close(found, wanted)
        mask = keras.tree.flatten(layer.compute_mask(x, ops.convert_to_tensor(given_mask)))
        if sequences:
            np.testing.assert_array_equal(mask[0], valid[:, -length:] if length < time else valid)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of Keras, where a layer does not support masks
        layer(keras.layers.Masking()(x))
    _check_masked_nan(layer, input_shape)
    _check_attached_mask(layer, x)


def _check_masked_nan(layer, input_shape):
    """NaN in masked steps reaches neither outputs nor gradients."""
    mask = np.broadcast_to(np.arange(input_shape[1]) >= 2, input_shape[:2])
    x = noise(*input_shape)

    def loss(x):
        outputs = keras.tree.flatten(layer(x, mask=ops.convert_to_tensor(mask)))
        return sum(ops.sum(ops.square(ops.cast(y, "float32"))) for y in outputs), outputs

    results = [
        keras.tree.flatten(value_and_gradients(loss, layer.trainable_variables, values))
        for values in (x, np.where(mask[..., None], x, np.nan).astype(x.dtype))
    ]
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


def _check_attached_mask(layer, x):
    """The mask that `inputs` carry counts, for which Keras does not look in calls with states."""
    x[0, x.shape[1] // 2 :] = 0
    sizes = getattr(layer, "state_sizes", None)
    states = [noise(len(x), size, seed=i) for i, size in enumerate(sizes or [])]
    given = {} if sizes is None else {"initial_state": states}
    masked = keras.layers.Masking()(ops.convert_to_tensor(x))
    found = keras.tree.flatten(layer(masked, **given))
    mask = np.any(x != 0, axis=-1)
    assert_all_close(found, outputs_of(layer, x, mask=mask, **given))
    unmasked = outputs_of(layer, x, **given)
    assert np.max(np.abs(np.asarray(found[0]) - np.asarray(unmasked[0]))) > 1e-3


def check_backwards(make, input_shape):
    """With `go_backwards` a layer reads from the end, alone and in `keras.layers.Bidirectional`."""
    x = noise(*input_shape)
    forward, backward = (made(make, input_shape, go_backwards=g) for g in (False, True))
    mask = np.arange(input_shape[1]) < input_shape[1] - 2
    mask = np.broadcast_to(mask, input_shape[:2])
    for options in ({}, {"mask": mask}):
        flipped = {name: value[:, ::-1] for name, value in options.items()}
        assert_all_close(backward(x, **options), forward(x[:, ::-1], **flipped))
    both = keras.layers.Bidirectional(make())
    both.build(input_shape)
    randomize(both)
    y, *states = keras.tree.flatten(both(x))
    first, *first_states = keras.tree.flatten(both.forward_layer(x))
    second, *second_states = keras.tree.flatten(both.backward_layer(x))
    second = second[:, ::-1] if both.return_sequences else second
    assert_close(y, np.concatenate([first, second], axis=-1))
    assert len(states) == len(first_states) + len(second_states)
    with pytest.raises(ValueError, match="go_backwards=True"):
        backward.initial_cache(2)


# Helpers


def made(make, input_shape, **options):
    """A built layer with random weights, the same ones each time."""
    layer = make(**options)
    layer.build((None, None, input_shape[-1]))
    return randomize(layer)


def randomize(layer, stddev=0.5, seed=0):
    """Gives a built layer or model random weights that are large enough for errors to show."""
    random = np.random.default_rng(seed)
    arrays = [random.normal(0, stddev, weight.shape) for weight in layer.weights]
    is_variance = [weight.name == "moving_variance" for weight in layer.weights]
    layer.set_weights([abs(a) if v else a for a, v in zip(arrays, is_variance, strict=True)])
    return layer


def outputs_of(layer, x, **call):
    """All outputs of a layer in a list."""
    return keras.tree.flatten(at_once(lambda x: layer(x, **call))(ops.convert_to_tensor(x)))


def noise(*shape, seed=0):
    """A normally distributed array in this test's floatx."""
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def sigmoid(x):
    """In NumPy."""
    return 1 / (1 + np.exp(-x))


def at_once(function):
    """`function` of tensors, compiled on JAX, which takes much longer op by op."""
    return compiled(function) if keras.backend.backend() == "jax" else function


def compiled(function):
    """`function` of tensors compiled by XLA, on PyTorch as it is."""
    if TENSORFLOW:
        import tensorflow as tf

        return tf.function(function, jit_compile=True)
    if keras.backend.backend() == "torch":
        return function
    import jax

    return jax.jit(function)


def assert_close(actual, expected, tolerance=None):
    """Arrays of this test's floatx agree, relative to the largest value."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype == keras.config.floatx()
    assert actual.shape == expected.shape, f"{actual.shape} != {expected.shape}"
    scale = np.max(np.abs(expected), initial=0.0) or 1.0
    error = np.max(np.abs(actual - expected), initial=0.0) / scale
    limit = tolerance or TOLERANCE[keras.config.floatx()]
    assert error <= limit, f"error {error:.3g} > {limit:.3g}"


def assert_all_close(actual, expected, tolerance=None):
    """The tensors of two structures agree, such as the outputs of a layer."""
    for a, b in zip(*map(keras.tree.flatten, (actual, expected)), strict=True):
        assert_close(a, b, tolerance)
