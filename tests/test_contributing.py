"""The examples of CONTRIBUTING.md run."""

import re

from tests.support.processes import ROOT, run_script


def test_a_data_set_and_a_model_of_ones_own(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        lines = [line for line in block.splitlines() if line and "import" not in line]
        assert len(lines) <= 10
    shown = run_script("import os, sys\nos.chdir(sys.argv[1])\n" + "\n".join(blocks), tmp_path)
    assert re.search(r"gru_recall: \d+ parameters \(units=8\)", shown)
    assert (tmp_path / "runs" / "recall" / "best.keras").is_file()
