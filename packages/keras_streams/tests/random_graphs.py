"""Random models of Keras' layers, of hypothesis' choices."""

from fractions import Fraction

import keras
import numpy as np
from hypothesis import strategies as st
from keras import layers, ops

ACTIVATIONS = ["linear", "relu", "sigmoid", "tanh", "silu", "softplus"]


def _simple_rnn(units, **options):
    """Not with `tanh`, which returns float32 for float64 on JAX: the layer fails there."""
    return layers.SimpleRNN(units, activation="sigmoid", **options)


class _Tail:
    """A tensor of a graph under construction, its time axis, and when its samples come.

    An image is (batch, time, frequency, channels) or (batch, frequency, time, channels).
    """

    def __init__(self, tensor, period=Fraction(1), axis=1):
        self.tensor, self.period, self.axis = tensor, period, axis

    @property
    def channels(self):
        return self.tensor.shape[-1]

    @property
    def length(self):
        return self.tensor.shape[self.axis]

    @property
    def is_image(self):
        return len(self.tensor.shape) == 4

    @property
    def frequencies(self):
        return self.tensor.shape[3 - self.axis]

    def pair(self, time, frequency):
        """Returns two values in the order of the axes, of an image; else that of time."""
        if not self.is_image:
            return time
        return (time, frequency) if self.axis == 1 else (frequency, time)

    def layer(self, name):
        """Returns the class of a layer for a sequence or an image."""
        return getattr(layers, f"{name}{2 if self.is_image else 1}D")

    def then(self, layer, factor=1):
        return _Tail(layer(self.tensor), self.period * factor, self.axis)


def random_graph(draw, max_calls=7):
    """Returns a functional model, and the layers after its time axis ends, None if it does not.

    The model has the outputs of all its branches. The first of the layers takes the first output,
    and returns what has no time axis.

    Args:
        draw: Function that draws a value of a strategy.
        max_calls: Positive integer, number of layers, about.
    """
    length = draw(st.integers(2 * max_calls, 2 * max_calls + 10))
    inputs = [
        keras.Input((length, draw(st.integers(1, 4)))) for _ in range(draw(st.integers(1, 2)))
    ]
    tails = [_Tail(x) for x in inputs]
    if len(inputs) == 2:
        tails = [_Tail(layers.Concatenate()(inputs)), *tails[1:]]
    for _ in range(draw(st.integers(1, max_calls))):
        at = draw(st.integers(0, len(tails) - 1))
        growers = _IMAGE_GROWERS if tails[at].is_image else _GROWERS
        new = draw(st.sampled_from(growers))(draw, tails[at], tails)
        if new is None or new.length < 3 or not Fraction(1, 4) <= new.period <= 8:
            continue
        if draw(st.booleans()):
            tails[at] = new
        else:
            tails.append(new)
    outputs = [tail.tensor for tail in tails[:3]]
    model = keras.Model(inputs, outputs)
    endings = _IMAGE_ENDINGS if tails[0].is_image else _ENDINGS
    ending = draw(st.sampled_from(endings))() if draw(st.booleans()) else None
    _randomize(model, draw(st.integers(0, 2**16)))
    return model, ending


def _randomize(model, seed):
    """Sets all weights: biases, statistics and scales too."""
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        if not weight.dtype.startswith("float"):
            continue  # the states of seed generators
        values = rng.normal(size=weight.shape) * 0.5
        is_positive = "variance" in weight.name or weight.name.endswith("_g")
        weight.assign(np.abs(values) + 0.5 if is_positive else values)


def noise(*shape, seed=0):
    """Returns random numbers of Keras' floatx."""
    return np.random.default_rng(seed).normal(size=shape).astype(keras.config.floatx())


def _activation(draw):
    return draw(st.sampled_from(ACTIVATIONS))


def _windows(draw, tail, *paddings):
    """Draws the size of windows, options that fit the periods, and the factor of the period."""
    size, stride = draw(st.integers(1, min(4, tail.length))), draw(st.sampled_from([1, 1, 1, 2, 3]))
    block = 1 if tail.period >= 1 else int(1 / tail.period)
    if block % stride and stride % block:
        stride = 1
    frequency = 1, 1
    if tail.is_image:
        frequency = draw(st.integers(1, min(3, tail.frequencies))), draw(st.sampled_from([1, 1, 2]))
    padding = draw(st.sampled_from(["valid", "same", *paddings]))
    options = {"padding": padding, "strides": tail.pair(stride, frequency[1])}
    return tail.pair(size, frequency[0]), options, stride


def _conv(draw, tail, tails):
    size, options, stride = _windows(draw, tail, *([] if tail.is_image else ["causal"]))
    groups = draw(st.sampled_from([g for g in (1, 2, 4) if tail.channels % g == 0]))
    if options["strides"] in (1, (1, 1)):
        dilation = draw(st.integers(1, 3))
        if (np.ravel(size)[tail.axis - 1] - 1) * dilation >= tail.length:
            return None
        options["dilation_rate"] = tail.pair(dilation, 1)
    layer = tail.layer("Conv")(
        groups * draw(st.integers(1, 3)),
        size,
        groups=groups,
        use_bias=draw(st.booleans()),
        activation=_activation(draw),
        **options,
    )
    new = tail.then(layer, stride)
    # TensorFlow 2.21 reads beyond a single channel for strides along an axis of one output.
    has_one = new.is_image and new.frequencies == 1 and tail.channels == groups
    return None if has_one and np.max(options["strides"]) > 1 else new


def _depthwise(draw, tail, tails):
    size, options, stride = _windows(draw, tail)
    if len({*np.ravel(options["strides"])}) > 1:  # TensorFlow has no others
        return None
    if draw(st.booleans()):
        return tail.then(
            tail.layer("SeparableConv")(draw(st.integers(1, 4)), size, **options), stride
        )
    multiplier = draw(st.integers(1, 2)) if tail.channels < 5 else 1
    options |= {"depth_multiplier": multiplier, "activation": _activation(draw)}
    return tail.then(tail.layer("DepthwiseConv")(size, **options), stride)


def _pooling(draw, tail, tails):
    size, options, stride = _windows(draw, tail)
    kind = draw(st.sampled_from(["MaxPooling", "AveragePooling"]))
    return tail.then(tail.layer(kind)(size, **options), stride)


def _transposed(draw, tail, tails):
    stride = _size(draw, tail)
    layer = getattr(layers, f"{tail.layer('Conv').__name__}Transpose")(
        draw(st.integers(1, 3)),
        tail.pair(draw(st.integers(1, 4)), draw(st.integers(1, 3))),
        strides=tail.pair(stride, draw(st.integers(1, 2))),
        padding=draw(st.sampled_from(["valid", "same"])),
        activation=_activation(draw),
    )
    return tail.then(layer, Fraction(1, stride))


def _size(draw, tail):
    """Draws a number of samples that one becomes, which fits the periods."""
    size = draw(st.integers(1, 3))
    period = tail.period / size
    return size if 1 in (period.numerator, period.denominator) else 1


def _up_sampling(draw, tail, tails):
    size = _size(draw, tail)
    return tail.then(tail.layer("UpSampling")(tail.pair(size, 2)), Fraction(1, size))


def _padding(draw, tail, tails):
    """Nothing is cropped from the end, which a stream does not have."""
    pair = st.tuples(st.integers(0, 3), st.integers(0, 2))
    time, frequency = draw(pair), draw(pair)
    if draw(st.booleans()):
        return tail.then(tail.layer("ZeroPadding")(tail.pair(time, frequency)))
    if tail.length < 10 or (tail.is_image and tail.frequencies <= sum(frequency)):
        return None
    return tail.then(tail.layer("Cropping")(tail.pair((time[0], 0), frequency)))


def _slice(draw, tail, tails):
    start = draw(st.integers(0, 3))
    return None if tail.length < 10 else tail.then(lambda x: x[:, start:])


def _recurrent(draw, tail, tails):
    units = draw(st.integers(1, 3))
    kind = draw(st.integers(0, 4))
    if kind == 0:
        cells = [layers.LSTMCell(units), layers.GRUCell(2, reset_after=draw(st.booleans()))]
        return tail.then(layers.RNN(cells, return_sequences=True))
    layer = [_simple_rnn, layers.LSTM, layers.GRU, layers.LSTM][kind - 1]
    return tail.then(layer(units, return_sequences=True, dropout=draw(st.sampled_from([0.0, 0.5]))))


_AT_EACH_STEP = [
    lambda draw, x: layers.Dense(draw(st.integers(1, 4)), activation=_activation(draw))(x),
    lambda draw, x: layers.BatchNormalization()(x),
    lambda draw, x: layers.LayerNormalization(epsilon=0.1)(x),
    lambda draw, x: layers.Activation(draw(st.sampled_from([*ACTIVATIONS, "softmax"])))(x),
    lambda draw, x: layers.TimeDistributed(layers.Dense(2, activation="sigmoid"))(x),
    lambda draw, x: layers.Dropout(0.5)(x),
    lambda draw, x: _by_operations(x),
    lambda draw, x: layers.Reshape((-1, x.shape[-1]))(ops.expand_dims(x, 2)),
    lambda draw, x: layers.Rescaling(0.5, offset=0.1)(x) - 0.25,
]


def _at_each_step(draw, tail, tails):
    return tail.then(lambda x: draw(st.sampled_from(_AT_EACH_STEP))(draw, x))


def _by_operations(x):
    # In this order: to `add` of Keras 3.15 on TensorFlow, a second operand (1, n, 1) is a bias.
    return ops.mean(x, axis=-1, keepdims=True) + ops.abs(x[..., ::-1]) * 0.5


def _merge(draw, tail, tails):
    """Merges two branches of the same period, cut to the shorter one."""
    others = [t for t in tails if t is not tail and t.period == tail.period and not t.is_image]
    if not others:
        return tail.then(
            lambda x: layers.Add()([x, layers.Conv1D(x.shape[-1], 3, padding="same")(x)])
        )
    other = draw(st.sampled_from(others))
    length = min(tail.length, other.length)

    def cut(x):
        return x if x.shape[1] == length else x[:, x.shape[1] - length :]

    a, b = cut(tail.tensor), cut(other.tensor)
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return _Tail(layers.Concatenate()([a, b]), tail.period)
    a, b = (layers.Dense(2)(x) for x in (a, b))
    merge = [layers.Add, layers.Multiply, layers.Subtract, layers.Average, layers.Maximum][kind - 1]
    return _Tail(merge()([a, b]), tail.period)


def _nested(draw, tail, tails):
    inner = keras.Input((None, tail.channels))
    x = layers.Conv1D(tail.channels, 3, padding=draw(st.sampled_from(["causal", "same"])))(inner)
    model = keras.Model(inner, layers.Add()([inner, x]))
    stack = keras.Sequential([layers.Conv1D(tail.channels, 2, padding="causal"), model])
    return tail.then(stack if draw(st.booleans()) else model)


def _shared(draw, tail, tails):
    kind = draw(st.sampled_from(["conv", "lstm"]))
    if kind == "conv":
        layer = layers.Conv1D(tail.channels, 3, padding="same", activation="tanh")
    else:
        layer = layers.LSTM(tail.channels, return_sequences=True)
    return tail.then(lambda x: layer(layer(x)))


def _to_image(draw, tail, tails):
    if tail.channels < 3:
        return tail.then(layers.Dense(draw(st.integers(3, 5))))
    image = tail.then(layers.Reshape((-1, tail.channels, 1)))
    return _swap(draw, image, tails) if draw(st.booleans()) else image


def _swap(draw, tail, tails):
    swap = layers.Permute((2, 1, 3)) if draw(st.booleans()) else lambda x: ops.swapaxes(x, 1, 2)
    return _Tail(swap(tail.tensor), tail.period, 3 - tail.axis)


def _to_sequence(draw, tail, tails):
    tail = tail if tail.axis == 1 else _swap(draw, tail, tails)
    return tail.then(layers.Reshape((-1, tail.frequencies * tail.channels)))


def _image_step(draw, tail, tails):
    kind, axis = draw(st.integers(0, 3)), 3 - tail.axis
    if kind == 0:
        return tail.then(layers.BatchNormalization())
    if kind == 1:
        return tail.then(lambda x: x - 0.5 * ops.mean(x, axis=axis, keepdims=True))
    if kind == 2:
        return tail.then(layers.Dense(2, activation=_activation(draw)))
    return tail.then(lambda x: layers.Add()([x, layers.Conv2D(x.shape[-1], 3, padding="same")(x)]))


_GROWERS = [
    _conv, _conv, _depthwise, _depthwise, _pooling, _transposed, _up_sampling, _padding, _slice,
    _recurrent, _at_each_step, _at_each_step, _merge, _merge, _nested, _shared, _to_image,
    _to_image, _to_image,
]  # fmt: skip

_IMAGE_GROWERS = [
    _conv, _conv, _depthwise, _pooling, _transposed, _up_sampling, _padding, _image_step, _swap,
    _to_sequence,
]  # fmt: skip

_IMAGE_ENDINGS = [
    lambda: [layers.GlobalAveragePooling2D(), layers.Dense(2, activation="softmax")],
    lambda: [layers.GlobalMaxPooling2D(keepdims=True), layers.Flatten()],
]

_ENDINGS = [
    lambda: [layers.GlobalAveragePooling1D(), layers.Dense(2, activation="softmax")],
    lambda: [layers.GlobalMaxPooling1D(keepdims=True), layers.Flatten()],
    lambda: [layers.LSTM(3), layers.Dense(2)],
    lambda: [lambda x: x[:, -1]],
    lambda: [layers.LSTM(2), layers.Reshape((2, 1)), layers.Flatten()],
]
