"""The examples of pages of the documentation run, one after another, and assert what they claim."""

import re

import pytest

from tests.support.processes import ROOT


@pytest.fixture
def run_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(name):
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        names = {}
        for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
            exec(compile(block, name, "exec"), names)

    return run


def test_a_gate_a_cell_and_a_layer_of_ones_own(run_page, tmp_path):
    run_page("extend.md")
    source = (tmp_path / "model.c").read_text()
    assert "smoothing" in source and "leaky_cell_kernel" in source


@pytest.mark.parametrize("name", ["padding.md", "training.md"])
def test_pages_run(run_page, name):
    run_page(name)


@pytest.mark.slow  # pages about trellis_series run with its tests
@pytest.mark.parametrize("name", ["edge.md", "theorem1.md"])
def test_longer_pages_run(run_page, name):
    run_page(name)
