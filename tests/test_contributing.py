"""The examples of CONTRIBUTING.md run."""

import re

from tests.support.processes import ROOT, run_script


def test_a_data_set_a_cell_and_a_model_of_ones_own(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    shown = run_script("import os, sys\nos.chdir(sys.argv[1])\n" + block, tmp_path)
    assert "leaky_recall: 17 parameters (units=8)" in shown
    assert (tmp_path / "runs" / "recall" / "best.keras").is_file()
