"""TensorBoard on a run of the command line, opened in a browser."""

import importlib.util
import subprocess
import sys

import pytest

from tests.support.processes import ROOT, child_environment

pytestmark = pytest.mark.slow


@pytest.fixture
def drawing(monkeypatch):
    """docs/draw_tensorboard.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import draw_tensorboard

    if importlib.util.find_spec("playwright") is None:
        pytest.skip("Playwright is not installed.")
    if draw_tensorboard.chromium() is None:
        pytest.skip("There is no Chromium.")
    return draw_tensorboard


def test_tensorboard_shows_a_run(drawing, tmp_path):
    words = "trellisnet_char --depth 4 --hidden-units 16 --embedding-dim 16 --epochs 2".split()
    command = [sys.executable, "-m", "trellis_keras", "train", *words, "--output", tmp_path / "run"]
    subprocess.run(list(map(str, command)), env=child_environment(), cwd=ROOT, check=True)
    # It waits for curves, heatmap, text and graph, and fails where one does not appear.
    drawing.main(tmp_path / "run", tmp_path / "tensorboard.png")
    assert 20_000 < (tmp_path / "tensorboard.png").stat().st_size < 500_000
