"""Recordings of speech with their words, without a corpus: espeak-ng speaks in many voices.

A recording is a minute: words and phrases of different speakers, one after another, in a room and
with noise. The same seed makes the same recordings.
"""

import functools
import os
import pydoc_data.topics
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

RATE = 16_000  # samples a second
MINUTE = 60 * RATE
WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
SOUND_ALIKE = {"know", "write"}

DIALECTS = "en-us en-us-nyc en-gb en-gb-x-rp en-gb-x-gbclan en-gb-x-gbcwmd en-029".split()
# Voices that sound alike are in the same part.
VOICES = {
    "train": "m1 m2 m3 m4 m5 m6 f1 f2 f3 f4 Alex Andy Denis Gene Gene2 Hugo Jacky Lee Marco Mario "
    "Mike Mr RicishayMax anika antonio belinda benjamin boris croak david edward edward2 gustave "
    "iven iven2 john klatt klatt2 klatt3 linda marcelo max michel pablo quincy rob steph steph2 "
    "travis victor zac".split(),
    "valid": "m7 f5 Alicia Diogo Nguyen aunty ed norbert klatt4".split(),
    "test": "m8 Andrea Annie Henrique Michael Storm adam announcer caleb grandma grandpa "
    "kaukovalta klatt5 miguel paul robert sandro shelby".split(),
}

Utterance = tuple[np.ndarray, int]  # samples, and the place in WORDS plus one, or 0
Event = tuple[int, int, int]  # word, start, end: in samples


# Utterances


def espeak(part: str, rng: np.random.Generator, share: float) -> Iterator[Utterance]:
    """Yields utterances that espeak-ng speaks: a word, or a phrase of other words.

    Args:
        part: "train", "valid" or "test". Each has voices and phrases of its own.
        rng: Random numbers.
        share: Part of the utterances that are one of the words.
    """
    if shutil.which("espeak-ng") is None:
        raise FileNotFoundError(
            "espeak-ng, which speaks the words, is not installed: apt-get install espeak-ng. Or "
            "use --data speech_commands, which needs tensorflow-datasets."
        )
    text = _text(part)
    while True:
        word = int(rng.integers(len(WORDS))) + 1 if rng.random() < share else 0
        start, length = rng.integers(len(text) - 8), rng.choice([1, 1, 2, 3, 5])
        phrase = WORDS[word - 1] if word else " ".join(text[start : start + length])
        voice = f"{rng.choice(DIALECTS)}+{rng.choice(VOICES[part])}"
        speed, pitch = rng.integers(110, 230), rng.integers(20, 80)
        command = ["espeak-ng", "-v", voice, "-s", f"{speed}", "-p", f"{pitch}", "--stdout", phrase]
        wave = subprocess.run(command, check=True, capture_output=True).stdout[44:]  # a header
        # espeak-ng has 22,050 samples a second; a tenth more or less is a shorter or longer throat.
        size = len(wave) / 2 * RATE / 22_050 * rng.uniform(0.9, 1.1)
        yield _resample(np.frombuffer(wave, "<i2") / 32768, int(size)), word


@functools.cache
def _text(part):
    """Returns the words of a third of Python's help pages, without the WORDS."""
    pages = sorted(pydoc_data.topics.topics)[list(VOICES).index(part) :: 3]
    words = re.findall("[a-z]+", " ".join(pydoc_data.topics.topics[page] for page in pages))
    return [word for word in words if len(word) > 1 and word not in {*WORDS, *SOUND_ALIKE}]


def _resample(x, size):
    spectrum = np.fft.rfft(x)
    wanted = np.zeros(size // 2 + 1, complex)
    wanted[: len(spectrum)] = spectrum[: len(wanted)]
    return np.fft.irfft(wanted, size) * (size / len(x))


def speech_commands(part: str, rng: np.random.Generator, share: float) -> Iterator[Utterance]:
    """Yields clips of Google's Speech Commands; arguments as `espeak`."""
    clips = _clips(part)
    while True:
        word = int(rng.integers(len(WORDS))) + 1 if rng.random() < share else 0
        yield clips[word][rng.integers(len(clips[word]))] / 32768, word


@functools.cache
def _clips(part):
    """Returns the clips of each word, and of others in the first place."""
    import tensorflow_datasets as tfds

    split = {"train": "train", "valid": "validation", "test": "test"}[part]
    data, info = tfds.load("speech_commands", split=split, with_info=True)
    names = info.features["label"].names
    clips = [[] for _ in (None, *WORDS)]
    for clip in tfds.as_numpy(data):
        name = names[clip["label"]]
        if name != "_silence_":
            clips[WORDS.index(name) + 1 if name in WORDS else 0].append(clip["audio"])
    return clips


# Recordings


def recordings(
    speakers: Callable[..., Iterator[Utterance]],
    part: str,
    minutes: int,
    seed: int,
    share: float = 0.5,
) -> tuple[np.ndarray, list[list[Event]]]:
    """Returns recordings of a minute (minutes, samples), int16, and the words in each of them.

    Args:
        speakers: `espeak` or `speech_commands`.
        part: "train", "valid" or "test".
        minutes: Number of recordings.
        seed: Integer.
        share: Part of the utterances that are one of the WORDS.
    """

    def record(n):
        rng = np.random.default_rng([seed, n])
        return _record(speakers(part, rng, share), rng)

    first = record(0)  # loads the clips, which each thread would load otherwise
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waves, events = zip(first, *pool.map(record, range(1, minutes)), strict=True)
    return np.stack(waves), list(events)


def _record(utterances, rng):
    speech, events = np.zeros(MINUTE), []
    position = int(rng.uniform(0.3, 1) * RATE)
    for wave, word in utterances:
        voiced = np.flatnonzero(np.abs(wave) > 0.02 * np.max(np.abs(wave)))
        if not len(voiced):  # a silent clip
            continue
        wave = wave[voiced[0] : voiced[-1] + 1]
        end = position + len(wave)
        if end + RATE // 2 > MINUTE:
            break
        wave = _in_room(wave, rng) * rng.uniform(0.02, 0.08) / np.sqrt(np.mean(wave**2))
        rest = speech[position : position + len(wave)]
        rest += wave[: len(rest)]
        if word:
            events.append((word, position, end))
        position = end + int(rng.uniform(0.25, 0.75) * RATE)
    x = speech + _noise(speech, rng)
    return (np.clip(x, -1, 1) * 32767).astype("int16"), events


def _in_room(wave, rng):
    """Returns a voice with the echo of a room."""
    time = np.arange(RATE // 5) / RATE
    echo = rng.normal(size=len(time)) * np.exp(-time / rng.uniform(0.01, 0.08))
    echo *= rng.uniform(0, 0.6) / np.sqrt(np.sum(echo**2))
    echo[0] = 1
    size = len(wave) + len(echo)
    return np.fft.irfft(np.fft.rfft(wave, size) * np.fft.rfft(echo, size), size)


def _noise(speech, rng):
    """Returns noise whose color and loudness change, and at times the talk of others."""
    pieces = speech.reshape(10, -1)
    size = pieces.shape[1]
    noise = []
    for _ in pieces:
        spectrum = np.fft.rfft(rng.normal(size=size))
        spectrum /= np.arange(1, len(spectrum) + 1) ** rng.uniform(0, 1)  # white to brown
        hiss = np.fft.irfft(spectrum, size)
        hiss *= 10 ** rng.uniform(-4, -2.3) / np.sqrt(np.mean(hiss**2))
        talk = np.sum(pieces[rng.integers(len(pieces), size=3)], axis=0)
        noise.append(hiss + talk * max(0, rng.uniform(-0.05, 0.05)))
    return np.concatenate(noise)
