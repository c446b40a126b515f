"""examples/keywords: speech, nets, and the program in C, which hears what Keras hears."""

import shutil
import subprocess

import keras
import numpy as np
import pytest

from tests.support.processes import ROOT

EXAMPLE = ROOT / "examples" / "keywords"

pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="one backend")


@pytest.fixture(autouse=True)
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.mark.skipif(
    None in (shutil.which("espeak-ng"), shutil.which("make"), shutil.which("cc")),
    reason="needs espeak-ng, make and a C compiler",
)
def test_from_speech_to_c(tmp_path):
    import keywords

    keywords.main(["--minutes=1", "--epochs=1", "--nets=ds_cnn", f"--output={tmp_path}"])
    model = keras.saving.load_model(tmp_path / "ds_cnn" / "spotter.keras")
    samples = np.fromfile(tmp_path / "test.raw", "<i2")
    (y,) = model.predict(keywords.blocks(samples[None]), verbose=0)
    # In the widest gap between frames, so that no rounding takes one across.
    frames = np.sort(np.max(y[:, 1:], axis=1))[len(y) // 4 : -len(y) // 4]
    widest = np.argmax(np.diff(frames))
    threshold = round(float(np.mean(frames[widest : widest + 2])), 6)
    keywords.write_settings(tmp_path / "ds_cnn", threshold)
    command = ["make", "-s", "-C", EXAMPLE, "NET=ds_cnn", f"BUILD={tmp_path}"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [line.split() for line in found.splitlines()]
    expected = keywords.heard(y, threshold)
    assert len(expected) > 2
    assert [word for *_, word in found] == [keywords.speech.WORDS[w - 1] for _, w in expected]
    seconds = [keywords.sample_of(frame) / keywords.speech.RATE for frame, _ in expected]
    np.testing.assert_allclose([float(time) for time, *_ in found], seconds, atol=0.006)
