"""Train models that recognize ten words in an audio stream, and export them as C.

python examples/keywords/keywords.py        # needs espeak-ng: apt-get install espeak-ng
make -C examples/keywords                   # words from held-out voices
arecord -q -t raw -f S16_LE -r 16000 | examples/keywords/build/tcn/spot
"""

import argparse
import pathlib
import time

import keras
import numpy as np
import speech
from keras import layers, ops

from trellis_keras.export import export
from trellis_keras.layers import TCN

BUILD = pathlib.Path(__file__).resolve().parent / "build"
BLOCK = 128  # samples that come at once: 8 ms
HOP = 2 * BLOCK  # samples from one frame to the next
BANDS = 32
FRAMES = speech.MINUTE // HOP
SMOOTHING = 10  # frames
PAUSE = 30  # frames after a word before the next one
CLASSES = 1 + len(speech.WORDS)


# Features: the logarithm of the power in bands of frequencies


@keras.saving.register_keras_serializable("keywords")
def mel_waves(shape, dtype=None):
    """Returns a kernel (block, sample, 2 * bands): cosine and sine of each band, under a window."""
    taps = shape[0] * shape[1]
    mel = np.linspace(*(2595 * np.log10(1 + np.array([60, 7600]) / 700)), shape[2] // 2 + 2)
    hertz = 700 * (10 ** (mel / 2595) - 1)
    time = (np.arange(taps) - (taps - 1) / 2)[:, None]
    width = np.clip(2 * speech.RATE / (hertz[2:] - hertz[:-2]), taps / 2, taps)
    window = np.cos(np.pi * np.clip(time / width, -0.5, 0.5)) ** 2
    window /= np.sum(window, axis=0)
    phase = 2 * np.pi * hertz[1:-1] / speech.RATE * time
    kernel = np.stack([window * np.cos(phase), window * np.sin(phase)], axis=-1)
    return ops.convert_to_tensor(kernel.reshape(shape), dtype)


@keras.saving.register_keras_serializable("keywords")
def pair_sums(shape, dtype=None):
    """Returns a kernel (tap, 2 * bands, bands) that adds cosines and sines over the taps."""
    taps, _, bands = shape
    return ops.convert_to_tensor(np.tile(np.repeat(np.eye(bands), 2, axis=0), (taps, 1, 1)), dtype)


def blocks(samples):
    """Returns int16 samples (batch, time) as model inputs (batch, time / BLOCK, BLOCK)."""
    return samples.reshape(len(samples), -1, BLOCK) / np.float32(2**15)


def features():
    """Returns a model of blocks of samples (batch, time, BLOCK) to frames (batch, time / 2, BANDS).

    Two blocks are a window of 16 ms, which moves by a block; a frame is the sum of two windows.
    """
    fixed = {"padding": "causal", "use_bias": False, "trainable": False}
    samples = keras.Input((None, BLOCK))
    x = layers.Conv1D(2 * BANDS, 2, kernel_initializer=mel_waves, name="waves", **fixed)(samples)
    x = ops.square(x)
    x = layers.Conv1D(BANDS, 2, strides=2, kernel_initializer=pair_sums, name="power", **fixed)(x)
    return keras.Model(samples, ops.log(x + 1e-8), name="features")


# Nets: from features to a logit for each word, at each frame


def net(*more):
    """Returns a model from features to logits. During training some bands are dropped."""
    first = [layers.BatchNormalization(), layers.SpatialDropout1D(0.1)]
    return keras.Sequential([keras.Input((None, BANDS)), *first, *more, layers.Dense(CLASSES)])


def ds_cnn():
    """Returns a model of depthwise-separable convolutions with a receptive field of 65 frames."""
    more = [layers.Conv1D(64, 5, padding="causal", use_bias=False)]
    for dilation in (1, 2, 4, 8):
        more += [
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.ZeroPadding1D((4 * dilation, 0)),  # causal
            layers.DepthwiseConv1D(5, dilation_rate=dilation, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.1),
            layers.Conv1D(64, 1, use_bias=False),
        ]
    return net(*more, layers.BatchNormalization(), layers.ReLU())


def gru():
    """Returns a recurrent model, which reads all frames."""
    return net(layers.GRU(80, return_sequences=True), layers.Dropout(0.2))


def tcn():
    """Returns a TCN with a receptive field of 125 frames."""
    return net(TCN(32, kernel_size=3, depth=5, dropout=0.05))


NETS = {make.__name__: make for make in (ds_cnn, gru, tcn)}


# Training


def targets(events):
    """Returns the word that each frame should say, and the weight of each frame in the loss.

    A word is said for a quarter of a second after its end. The frames before and afterwards may say
    it or not: they do not count.
    """
    y = np.zeros((len(events), FRAMES), "int32")
    weight = np.ones_like(y, "float32")
    for row, words in enumerate(events):
        for word, start, end in words:
            start, end = start // HOP, end // HOP
            weight[row, start : end + 25] = 0
            weight[row, end + 2 : end + 18] = 1
            y[row, end + 2 : end + 18] = word
    return y, weight


def train(net, x, events, epochs):
    """Trains a model on features of recordings, split into segments of four seconds."""
    y, weight = targets(events)
    pieces = (len(x) * 15, FRAMES // 15)
    x, y, weight = x.reshape(*pieces, BANDS), y.reshape(pieces), weight.reshape(pieces)
    weight[:, :16] = 0  # what was heard before is cut off
    batch = 16
    rate = keras.optimizers.schedules.CosineDecay(4e-3, epochs * -(-len(x) // batch))
    net.compile(
        keras.optimizers.AdamW(rate, weight_decay=0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    net.fit(x, y, sample_weight=weight, batch_size=batch, epochs=epochs, verbose=2)


# Listening


def smoothed(net):
    """Returns a model of features to the probabilities of the words, each a mean over frames."""
    x = layers.Activation("softmax")(net.outputs[0])
    x = layers.AveragePooling1D(SMOOTHING, strides=1)(x)
    return keras.Model(net.inputs, x, name=net.name)


def sample_of(frame):
    """Returns the number of samples when the n-th mean over frames is known."""
    return (frame + SMOOTHING - 1) * HOP + BLOCK


def heard(probabilities, threshold):
    """Returns the words in probabilities (frames, CLASSES), as spot.c says them: frame and word."""
    words, last = [], -np.inf
    for frame in np.flatnonzero(np.max(probabilities[:, 1:], axis=1) > threshold):
        if frame - last > PAUSE:
            words.append((int(frame), 1 + int(np.argmax(probabilities[frame, 1:]))))
            last = frame
    return words


def score(probabilities, events, threshold):
    """Returns the numbers of words that are heard right, heard wrong, and of false alarms."""
    right = wrong = alarms = 0
    for row, spoken in zip(probabilities, events, strict=True):
        said = [(sample_of(frame), word) for frame, word in heard(row, threshold)]
        for word, start, end in spoken:
            near = [w for time, w in said if start <= time <= end + speech.RATE // 2]
            right += near[:1] == [word]
            wrong += bool(near) and near[0] != word
            said = [(t, w) for t, w in said if not start <= t <= end + speech.RATE // 2]
        alarms += len(said)
    return right, wrong, alarms


def choose_threshold(probabilities, events):
    """Returns the lowest threshold with a false alarm in two minutes."""
    for threshold in np.arange(0.3, 1, 0.01):
        if score(probabilities, events, threshold)[-1] <= len(events) / 2:
            break
    return round(float(threshold), 2)


# From training to C


def write_settings(folder, threshold):
    """Writes the additional files that spot.c needs."""
    names = ", ".join(f'"{word}"' for word in speech.WORDS)
    (folder / "settings.h").write_text(
        f"#define WORDS {names}\n#define THRESHOLD {threshold}f\n"
        f"#define PAUSE {PAUSE} /* frames */\n#define RATE {speech.RATE}\n",
        encoding="utf-8",
    )


def main(arguments=None):
    """Makes recordings, trains the models, and exports them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", choices=["espeak", "speech_commands"], default="espeak")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--minutes", type=int, default=60, help="of recordings to train on")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--output", type=pathlib.Path, default=BUILD)
    options = parser.parse_args(arguments)

    start, front = time.perf_counter(), features()
    speakers = getattr(speech, options.data)

    def record(part, minutes, seed, share=0.5):
        waves, events = speech.recordings(speakers, part, minutes, seed, share)
        return front.predict(blocks(waves), batch_size=4, verbose=0), events, waves

    third = -(-options.minutes // 3)
    x_train, events_train, _ = record("train", options.minutes, 0)
    x_valid, events_valid, _ = record("valid", third, 1, share=0)
    x_test, events_test, waves = record("test", third, 4)
    x_other, events_other, _ = record("test", 2 * third, 5, share=0)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "test.raw").write_bytes(waves[0].tobytes())
    print(f"Recordings and features: {time.perf_counter() - start:.0f} seconds")

    for name in options.nets:
        keras.utils.set_random_seed(0)
        start, net = time.perf_counter(), NETS[name]()
        train(net, x_train, events_train, options.epochs)
        seconds = time.perf_counter() - start
        reader = smoothed(net)
        threshold = choose_threshold(reader.predict(x_valid, verbose=0), events_valid)
        right, wrong, _ = score(reader.predict(x_test, verbose=0), events_test, threshold)
        alarms = score(reader.predict(x_other, verbose=0), events_other, threshold)[-1]
        model = keras.Model(front.input, reader(front.output), name=name)
        folder = options.output / name
        export(model, folder / "spotter.c", overwrite=True)
        model.save(folder / "spotter.keras")
        write_settings(folder, threshold)
        total = sum(map(len, events_test))
        print(
            f"{name}: {net.count_params():,} parameters, {seconds:.0f} seconds; of {total} words "
            f"{right / total:.1%} right, {wrong / total:.1%} wrong; "
            f"{alarms * 60 / len(x_other):.1f} false alarms an hour"
        )


if __name__ == "__main__":
    main()
