"""The examples of docs/extend.md run, one after another."""

import re

from tests.support.processes import ROOT


def test_a_gate_a_cell_and_a_layer_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(block, "docs/extend.md", "exec"), names)
    source = (tmp_path / "model.c").read_text()
    assert "smoothing" in source and "leaky_cell_kernel" in source
