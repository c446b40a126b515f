"""Small models of the kinds that papers publish, one a kind: their streams equal them."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from streams import outputs_of

from keras_streams import to_stream
from keras_streams.c_export import fixed_source, proven_source
from keras_streams.exported_stream import exported_stream
from keras_streams.native_stream import find_compiler

pytestmark = pytest.mark.both_backends(slow=True)


MODELS = {}


def published(**options):
    """Registers a function that makes a model, and the options with which it streams."""

    def register(make):
        MODELS[make.__name__] = make, options
        return make

    return register


def conv2d(x, filters, size, **options):
    x = layers.Conv2D(filters, size, use_bias=False, **options)(x)
    return layers.ReLU()(layers.BatchNormalization()(x))


@published()
def ds_cnn():
    """Keyword spotting by depthwise separable convolutions over time and frequency."""
    x = keras.Input((20, 10, 1))
    y = conv2d(x, 4, (10, 4), strides=(2, 2), padding="same")
    for _ in range(2):
        y = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(y)
        y = conv2d(layers.ReLU()(layers.BatchNormalization()(y)), 4, 1)
    y = layers.GlobalAveragePooling2D()(layers.Dropout(0.2)(y))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


@published()
def bc_resnet():
    """Broadcast residuals: two-dimensional blocks plus averages over frequency."""
    x = keras.Input((None, 8, 1))
    y = conv2d(x, 4, 5, strides=(1, 2), padding="same")
    two = layers.DepthwiseConv2D((1, 3), padding="same")(y)
    two = layers.BatchNormalization()(two)
    one = ops.mean(two, axis=2, keepdims=True)
    one = layers.DepthwiseConv2D((3, 1), padding="same")(one)
    one = layers.Conv2D(4, 1)(layers.Activation("silu")(one))
    y = layers.ReLU()(y + two + one)
    y = layers.SeparableConv2D(4, 3, padding="same")(y)
    return keras.Model(x, layers.GlobalMaxPooling2D()(y))


@published()
def denoiser():
    """Two-dimensional encoder and decoder with transposed convolutions along frequency."""
    x = keras.Input((None, 8, 2))
    a = layers.ZeroPadding2D(((2, 0), (1, 1)))(x)
    a = layers.PReLU(shared_axes=[1, 2])(layers.Conv2D(4, 3, strides=(1, 2))(a))
    b = layers.Conv2DTranspose(2, (1, 4), strides=(1, 2), padding="same")(a)
    c = layers.Conv2DTranspose(2, (2, 3), strides=(1, 2), padding="valid")(a)
    c = layers.Cropping2D(((0, 1), (1, 0)))(c)
    up = layers.UpSampling2D((1, 2))(layers.AveragePooling2D((1, 2), padding="same")(x))
    return keras.Model(x, [layers.Multiply()([b, x]), layers.Concatenate()([c, up, x])])


def conv(x, filters, size, **options):
    x = layers.Conv1D(filters, size, use_bias=False, **options)(x)
    return layers.Activation("relu")(layers.BatchNormalization()(x))


@published()
def wave_net():
    """Gated causal convolutions with skip connections."""
    x = keras.Input((None, 1))
    y, skips = layers.Conv1D(4, 2, padding="causal")(x), []
    for rate in (1, 2, 4, 8):
        options = {"dilation_rate": rate, "padding": "causal"}
        gates = [layers.Conv1D(4, 2, activation=a, **options)(y) for a in ("tanh", "sigmoid")]
        z = layers.Multiply()(gates)
        skips.append(layers.Conv1D(3, 1)(z))
        y = layers.Add()([y, layers.Conv1D(4, 1)(z)])
    y = layers.ReLU()(layers.Add()(skips))
    return keras.Model(x, layers.Conv1D(8, 1, activation="softmax")(y))


@published()
def temporal_convolutional_network():
    """Residual blocks of two dilated causal convolutions."""
    x = y = keras.Input((None, 3))
    for rate in (1, 2, 4):
        z = y
        for _ in range(2):
            z = layers.Conv1D(4, 3, dilation_rate=rate, padding="causal")(z)
            z = layers.SpatialDropout1D(0.1)(layers.ReLU()(layers.LayerNormalization()(z)))
        y = layers.ReLU()(layers.Add()([z, y if y.shape[-1] == 4 else layers.Conv1D(4, 1)(y)]))
    return keras.Model(x, layers.Dense(2)(y))


@published()
def ecg_resnet():
    """Arrhythmias: strides and pooled shortcuts in every other block."""
    x = keras.Input((128, 1))
    y = conv(x, 4, 7, padding="same")
    for block in range(4):
        stride = 2 if block % 2 else 1
        z = layers.Dropout(0.2)(layers.ReLU()(layers.BatchNormalization()(y)))
        z = layers.Conv1D(4, 7, strides=stride, padding="same")(z)
        z = layers.Conv1D(4, 7, padding="same")(layers.ReLU()(layers.BatchNormalization()(z)))
        y = layers.Add()([z, layers.MaxPooling1D(stride)(y) if stride > 1 else y])
    return keras.Model(x, layers.Dense(4, activation="softmax")(y))


@published(window=24)
def deep_conv_lstm():
    """Activities: convolutions over the time of each sensor, then recurrent layers."""
    x = keras.Input((24, 4, 1))
    y = layers.Conv2D(3, (5, 1), activation="relu")(x)
    y = layers.Conv2D(3, (5, 1), activation="relu")(y)
    y = layers.Reshape((16, 12))(y)
    return keras.Model(x, layers.Dense(3, activation="softmax")(layers.LSTM(4)(y)))


@published(window=24)
def activity_cnn():
    """Activities: convolutions, pooling, and dense layers on the joined window."""
    x = keras.Input((24, 3))
    y = layers.Conv1D(4, 3, activation="relu")(layers.Conv1D(4, 3, activation="relu")(x))
    y = layers.Flatten()(layers.MaxPooling1D(2)(layers.Dropout(0.5)(y)))
    return keras.Model(x, layers.Dense(3, activation="softmax")(layers.Dense(8)(y)))


@published(window=20)
def x_vector():
    """Speakers: dilated valid convolutions, then mean and deviation over the window."""
    x = keras.Input((20, 5))
    y = conv(conv(conv(x, 4, 5), 4, 3, dilation_rate=2), 4, 1)
    y = ops.concatenate([ops.mean(y, axis=1), ops.std(y, axis=1)], axis=-1)
    return keras.Model(x, layers.Dense(3)(y))


@published(window=16)
def n_beats():
    """Forecasts: residual blocks of dense layers on a window."""
    x = keras.Input((16, 1))
    rest, forecast = layers.Flatten()(x), 0.0
    for _ in range(2):
        z = layers.Dense(6, activation="relu")(layers.Dense(6, activation="relu")(rest))
        rest, forecast = rest - layers.Dense(16)(z), layers.Dense(4)(z) + forecast
    return keras.Model(x, forecast)


@published(window=16)
def bidirectional_tagger():
    """Both directions of a window."""
    x = keras.Input((16, 3))
    y = layers.Bidirectional(layers.GRU(3))(conv(x, 4, 3))
    return keras.Model(x, layers.Dense(2, activation="sigmoid")(y))


@published()
def conv_tas_net():
    """Speech separation: a learned transform, masks, and its inverse."""
    x = keras.Input((None, 1))
    code = layers.Conv1D(6, 4, strides=2, padding="valid", activation="relu")(x)
    y = layers.Conv1D(4, 1)(layers.LayerNormalization()(code))
    for rate in (1, 2):
        z = layers.PReLU(shared_axes=[1])(layers.Conv1D(5, 1)(y))
        z = layers.ZeroPadding1D((2 * rate, 0))(layers.LayerNormalization()(z))
        z = layers.DepthwiseConv1D(3, dilation_rate=rate)(z)
        y = y + layers.Conv1D(4, 1)(layers.PReLU(shared_axes=[1])(z))
    mask = layers.Conv1D(6, 1, activation="sigmoid")(y)
    return keras.Model(x, layers.Conv1DTranspose(1, 4, strides=2)(code * mask))


@published()
def causal_demucs():
    """A recurrent layer between strided convolutions and their inverses."""
    x = keras.Input((None, 1))
    a = layers.Conv1D(4, 4, strides=2, activation="relu")(x)
    b = layers.Conv1D(6, 4, strides=2, activation="relu")(a)
    y = layers.LSTM(6, return_sequences=True)(b) + b
    y = layers.Conv1DTranspose(4, 4, strides=2, activation="relu")(y)
    y = layers.Conv1DTranspose(1, 4, strides=2)(y)
    return keras.Model(x, y)


@published()
def rnnoise():
    """Noise suppression by gated layers that read one another's outputs."""
    x = keras.Input((None, 6))
    dense = layers.Dense(4, activation="tanh")(x)
    activity = layers.GRU(3, return_sequences=True)(dense)
    noise = layers.GRU(4, return_sequences=True)(layers.Concatenate()([dense, activity, x]))
    both = layers.Concatenate()([activity, noise, x])
    gains = layers.Dense(5, activation="sigmoid")(layers.GRU(5, return_sequences=True)(both))
    return keras.Model(x, [gains, layers.Dense(1, activation="sigmoid")(activity)])


@published()
def convolutional_recurrent_network():
    """Speech enhancement: an encoder of frequencies, a recurrent layer, and a decoder."""
    x = keras.Input((None, 9, 1))
    a = layers.ELU()(layers.Conv2D(2, (1, 3), strides=(1, 2))(x))
    b = layers.ELU()(layers.Conv2D(3, (1, 2), strides=(1, 2))(a))
    y = layers.LSTM(6, return_sequences=True)(layers.Reshape((-1, 6))(b))
    y = layers.Concatenate()([layers.Reshape((-1, 2, 3))(y), b])
    y = layers.ELU()(layers.Conv2DTranspose(2, (1, 2), strides=(1, 2))(y))
    y = layers.Concatenate()([y, a])
    return keras.Model(x, layers.Conv2DTranspose(1, (1, 3), strides=(1, 2))(y))


@published()
def voice_activity():
    """A spectrogram, a convolution and a recurrent layer."""
    x = keras.Input((None, 1))
    y = layers.STFTSpectrogram(frame_length=16, frame_step=8, fft_length=16)(x)
    y = layers.GRU(4, return_sequences=True)(conv(y, 4, 3, padding="causal"))
    return keras.Model(x, layers.Dense(1, activation="sigmoid")(y))


@published()
def svdf():
    """Keyword spotting by filters of features, then of time, of low rank."""
    x = keras.Input((None, 6))
    y = layers.ZeroPadding1D((4, 0))(layers.Dense(8, use_bias=False)(x))
    y = layers.DepthwiseConv1D(5, use_bias=False)(y)
    y = layers.ReLU()(ops.sum(layers.Reshape((-1, 4, 2))(y), axis=-1))
    return keras.Model(x, layers.Dense(3)(y))


@published()
def onset_detector():
    """Music: convolutions over spectrograms, pooled over frequencies."""
    x = keras.Input((None, 16, 2))
    y = layers.MaxPooling2D((1, 3))(layers.Conv2D(3, (7, 3), activation="tanh")(x))
    y = layers.MaxPooling2D((1, 2))(layers.Conv2D(3, 3, activation="tanh")(y))
    y = layers.TimeDistributed(layers.Flatten())(y)
    return keras.Model(x, layers.Dense(1, activation="sigmoid")(layers.Dense(4)(y)))


@published(ignore_masks=True)
def text_cnn():
    """Sentences by convolutions and maxima, trained with padding."""
    x = keras.Input((None,), dtype="int32")
    y = layers.Embedding(11, 4, mask_zero=True)(x)
    y = [layers.GlobalMaxPooling1D()(layers.Conv1D(3, n, padding="causal")(y)) for n in (2, 3)]
    return keras.Model(x, layers.Dense(2)(layers.Concatenate()(y)))


@published(max_context=300)
def decoder_of_tokens():
    """Blocks of causal attention and dense layers."""
    x = keras.Input((None,), dtype="int32")
    y = layers.Embedding(11, 6)(x)
    z = layers.LayerNormalization()(y)
    y = y + layers.MultiHeadAttention(2, 3)(z, z, use_causal_mask=True)
    z = layers.LayerNormalization()(y)
    y = y + layers.Dense(6)(layers.Dense(12, activation="gelu")(z))
    return keras.Model(x, layers.Dense(11)(y))


@published()
def causal_conformer():
    """Attention to a sliding window between convolutions."""
    x = keras.Input((None, 6))
    z = layers.LayerNormalization()(x)
    y = x + layers.MultiHeadAttention(2, 3, sliding_window=8)(z, z, use_causal_mask=True)
    z = layers.Conv1D(12, 1)(layers.LayerNormalization()(y))
    z = layers.ZeroPadding1D((4, 0))(z[..., :6] * ops.sigmoid(z[..., 6:]))
    z = layers.Activation("silu")(layers.BatchNormalization()(layers.DepthwiseConv1D(5)(z)))
    return keras.Model(x, layers.LayerNormalization()(y + layers.Conv1D(6, 1)(z)))


@published()
def patches_of_a_series():
    """Joined steps as tokens of causal attention."""
    x = keras.Input((None, 2))
    y = layers.Dense(6)(layers.Reshape((-1, 8))(x))
    z = layers.LayerNormalization()(y)
    y = y + layers.MultiHeadAttention(2, 3, sliding_window=6)(z, z, use_causal_mask=True)
    return keras.Model(x, layers.Dense(4)(y))


@published()
def sequence_autoencoder():
    """Anomalies: the last state, repeated, and decoded."""
    x = keras.Input((None, 2))
    y = layers.RepeatVector(5)(layers.LSTM(3)(x))
    y = layers.TimeDistributed(layers.Dense(2))(layers.LSTM(3, return_sequences=True)(y))
    return keras.Model(x, y)


@published()
def convolutional_lstm():
    """Rain: convolutions between states."""
    x = keras.Input((None, 5, 5, 1))
    y = layers.ConvLSTM2D(2, 3, padding="same", return_sequences=True)(x)
    return keras.Model(x, layers.Conv3D(1, (1, 3, 3), padding="same", activation="sigmoid")(y))


@published()
def muscle_gestures():
    """Two inputs at the same rate, each with its branch, and two outputs."""
    a, b = keras.Input((None, 4)), keras.Input((None, 2))
    y = layers.Maximum()([conv(a, 4, 5, padding="same"), conv(b, 4, 3, padding="causal")])
    recurrent = layers.SimpleRNN(3, activation="sigmoid", return_sequences=True)(y)
    return keras.Model([a, b], [layers.Dense(2)(recurrent), layers.AveragePooling1D(4)(y)])


@published(time_axis=2)
def eeg_net():
    """Brain signals: filters of time, then of the electrodes, with time on the second axis."""
    x = keras.Input((4, None, 1))
    y = layers.BatchNormalization()(layers.Conv2D(2, (1, 8), padding="same", use_bias=False)(x))
    y = layers.DepthwiseConv2D((4, 1), depth_multiplier=2, use_bias=False)(y)
    y = layers.AveragePooling2D((1, 4))(layers.ELU()(layers.BatchNormalization()(y)))
    y = layers.ELU()(layers.SeparableConv2D(4, (1, 4), padding="same", use_bias=False)(y))
    return keras.Model(x, layers.Dense(2)(layers.GlobalAveragePooling2D()(y)))


@published(max_context=300)
def temporal_fusion():
    """Forecasts: static inputs that gate a sequence, then causal attention."""
    x, static = keras.Input((None, 4)), keras.Input((3,))
    context = layers.Dense(6, activation="elu")(static)
    y = layers.Dense(6)(x) + layers.Dense(6, use_bias=False)(context)[:, None]
    y = layers.LSTM(6, return_sequences=True)(y, initial_state=[context, layers.Dense(6)(static)])
    y = layers.LayerNormalization()(y)
    y = y + layers.MultiHeadAttention(2, 3)(y, y, use_causal_mask=True)
    return keras.Model([x, static], [layers.Dense(1)(y) for _ in range(2)])


@published()
def keywords_of_sound():
    """Keyword spotting with the mel spectrogram inside."""
    x = keras.Input((None,))
    options = {"num_mel_bins": 4, "sampling_rate": 100, "min_freq": 1, "max_freq": 50}
    y = layers.MelSpectrogram(16, 8, power_to_db=False, **options)(x)
    y = layers.Permute((2, 1))(ops.log(y + 1e-3))[..., None]
    y = layers.TimeDistributed(layers.Flatten())(conv2d(y, 2, 3))
    return keras.Model(x, layers.Dense(3)(layers.GRU(3)(y)))


def stream_of(name):
    """A model's stream, with random weights, statistics and scales."""
    make, options = MODELS[name]
    model, rng = make(), np.random.default_rng(0)
    for weight in model.weights:
        if weight.dtype.startswith("float"):
            values = rng.normal(size=weight.shape) / np.sqrt(max(weight.shape or (1,)))
            weight.assign(np.abs(values) + 0.5 if "variance" in weight.name else values)
    return to_stream(model, **options)


@pytest.mark.parametrize("name", MODELS)
def test_it_streams(name):
    stream = stream_of(name)
    assert stream.proof.difference < 1e-5
    rng, signals = np.random.default_rng(0), stream.plan.inputs
    shapes = [(1, *([] if s.is_static else [40]), *s.shape) for s in signals]
    xs = [
        rng.integers(1, 9, shape) if s.dtype == "int32" else rng.normal(size=shape)
        for s, shape in zip(signals, shapes, strict=True)
    ]
    outputs_of(stream, xs)


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", MODELS)
def test_its_step_is_c(name):
    source, _, _ = proven_source(stream_of(name), "model")  # raises where it differs from Keras
    assert source.outputs > 0


INTEGERS = ["ds_cnn", "causal_conformer", "onset_detector"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in INTEGERS]


@pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", [*INTEGERS, *SLOW])
def test_its_step_is_of_integers(name):
    stream = exported_stream(stream_of(name))
    x = stream.random_inputs(200)
    source = fixed_source(stream, "model", "int8", x)  # raises where it differs from Keras
    assert source.real == "int16_t"
