"""Spectrograms and frames as streams, with the hop as their rate."""

import keras
import pytest
from keras import layers, ops
from random_graphs import noise
from streams import check_equal

from keras_streams import to_stream

pytestmark = pytest.mark.both_backends


def test_a_spectrogram():
    sound = keras.Input((None, 1))
    frames = layers.STFTSpectrogram("stft", frame_length=16, frame_step=4, fft_length=16)(sound)
    model = keras.Model(sound, layers.GRU(3, return_sequences=True)(frames))
    stream = check_equal(model, [noise(1, 40, 1)])
    assert (stream.delay, stream.rate) == (15, 4)


def test_frames_of_samples_without_channels():
    sound = keras.Input((None,))
    frames = ops.extract_sequences(sound, 8, 4)
    real, imaginary = ops.rfft(frames)
    model = keras.Model(sound, layers.Dense(2)(ops.sqrt(real**2 + imaginary**2 + 1e-3)))
    stream = check_equal(model, [noise(2, 24)])
    assert (stream.delay, stream.rate) == (7, 4)


@pytest.mark.parametrize("stride, length, center", [(5, 12, True), (20, 16, False)])
def test_short_time_fourier_transforms(stride, length, center):
    sound = keras.Input((None,))
    real, imaginary = ops.stft(sound, length, stride, 16, center=center)
    model = keras.Model(sound, [real, layers.Dense(2)(imaginary)])
    stream = check_equal(model, [noise(2, 61)])
    assert (stream.delay[0], stream.rate[0]) == (8 if center else 15, stride)


def test_mel_spectrograms():
    sound = keras.Input((None,))
    options = {"min_freq": 1, "max_freq": 50, "sampling_rate": 100, "power_to_db": False}
    layer = layers.MelSpectrogram(fft_length=16, sequence_stride=4, num_mel_bins=5, **options)
    y = ops.log(layers.Permute((2, 1))(layer(sound)) + 1e-3)
    model = keras.Model(sound, layers.GRU(3, return_sequences=True)(y))
    stream = check_equal(model, [noise(2, 60)])
    assert (stream.delay, stream.rate) == (8, 4)


def test_what_depends_on_the_end_is_refused():
    sound = keras.Input((None,))
    net = keras.Model(sound, layers.MelSpectrogram(fft_length=16, sequence_stride=4)(sound))
    with pytest.raises(ValueError, match="mel_spectrogram.*power_to_db=False"):
        to_stream(net)


def test_a_spectrogram_that_pads_at_both_ends():
    sound = keras.Input((None, 1))
    layer = layers.STFTSpectrogram(frame_length=16, frame_step=4, fft_length=16, padding="same")
    check_equal(keras.Model(sound, layer(sound)), [noise(2, 40, 1)])
