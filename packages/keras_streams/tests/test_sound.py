"""Spectrograms and frames as streams, with the hop as their rate."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from random_graphs import noise

from keras_streams import to_stream

pytestmark = pytest.mark.both_backends


@pytest.mark.parametrize("mode", ["log", "magnitude", "stft", "psd"])
def test_a_spectrogram(mode):
    sound = keras.Input((None, 1))
    frames = layers.STFTSpectrogram(mode, frame_length=16, frame_step=4, fft_length=16)(sound)
    model = keras.Model(sound, layers.GRU(3, return_sequences=True)(frames))
    stream, x = to_stream(model), noise(1, 40, 1)
    assert (stream.delay, stream.rate) == (15, 4)
    found, _ = stream.prefill(x)
    np.testing.assert_allclose(found[:, 15::4], model(x), atol=1e-5)


def test_frames_of_samples_without_channels():
    sound = keras.Input((None,))
    frames = ops.extract_sequences(sound, 8, 4)
    real, imaginary = ops.rfft(frames)
    model = keras.Model(sound, layers.Dense(2)(ops.sqrt(real**2 + imaginary**2 + 1e-3)))
    stream, x = to_stream(model), noise(2, 24)
    assert (stream.delay, stream.rate) == (7, 4)
    found, _ = stream.prefill(x)
    np.testing.assert_allclose(found[:, 7::4], model(x), atol=1e-5)


def test_what_mirrors_the_ends_is_refused():
    sound = keras.Input((None,))
    net = keras.Model(sound, layers.MelSpectrogram(fft_length=16, sequence_stride=4)(sound))
    with pytest.raises(ValueError, match="mel_spectrogram.*STFTSpectrogram"):
        to_stream(net)
    sound = keras.Input((None, 1))
    layer = layers.STFTSpectrogram(frame_length=16, padding="same")
    with pytest.raises(ValueError, match='stft_spectrogram.*padding="valid"'):
        to_stream(keras.Model(sound, layer(sound)))
