"""The examples in docstrings and on the pages run."""

import doctest
import pathlib
import re

import numpy as np
import pandas as pd
import pytest

import trellis_series
from trellis_keras.layers import TCN
from trellis_series import forecaster, forecasts, quantiles, rocket, stream

ROOT = pathlib.Path(__file__).resolve().parents[3]
MODULES = [forecaster, forecasts, quantiles, rocket, stream]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_in_docstrings_show_what_they_say(module):
    public = {name: getattr(trellis_series, name) for name in trellis_series.__all__}
    has = {"np": np, "pd": pd, "TCN": TCN, **public}
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found, runner = doctest.DocTestFinder(recurse=True), doctest.DocTestRunner(optionflags=flags)
    tests = [test for test in found.find(module, globs=has) if test.examples]
    assert tests
    for test in tests:
        runner.run(test)
    assert not runner.failures


PAGES = ["docs/forecasting.md", "docs/classification.md", "packages/trellis_series/README.md"]


@pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="the pages are in the repository")
@pytest.mark.parametrize("page", PAGES)
def test_examples_on_pages_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text(encoding="utf-8")
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), {})
