"""The zoo's page: its table is the one of the published results."""

import json
import re

import pytest

from trellis_keras import zoo
from trellis_keras.zoo import assets
from trellis_keras.zoo.table import BEGIN, END, replace_table, table

ROW = re.compile(r"^\| \[?(\w+_\w+)\]?.*?\| ([\d,]+) \| [^|]* \| [^|]* \|$", re.MULTILINE)


def test_the_readme_has_the_table_of_all_models():
    page = (assets.assets_folder() / "README.md").read_text(encoding="utf-8")
    # Building every model takes minutes: the page is believed how many parameters they have.
    # (What the papers' settings give is asserted in test_published_models.py.)
    parameters = {name: int(count.replace(",", "")) for name, count in ROW.findall(page)}
    assert replace_table(page, table(parameters.__getitem__)) == page
    for name in zoo.list_models():
        assert re.search(rf"^\| \[?{name}", page, re.MULTILINE)


def test_a_run_takes_the_place_of_its_untrained_model(tmp_path, monkeypatch):
    results = {
        "model": "tcn_adding", "data": "adding", "metric": "mse", "published": None, "test": 2e-4,
        "parameters": 58051, "epochs": 10, "wall_time_s": 240.0, "hardware": "2 cores of X",
    }  # fmt: skip
    jsb = {"model": "tcn_jsb", "data": "jsb", "metric": "frame_nll", "published": 8.1, "test": 8.2}
    for folder, changes in (("tcn_adding_200", {}), ("tcn_jsb", jsb)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "results.json").write_text(json.dumps(results | changes))
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path))
    rows = [row for row in table(lambda name: 1).splitlines() if "adding" in row]
    assert (
        "| [tcn_adding_200](tcn_adding_200/card.md) | adding | mse | - | 0.0002 | - | 58,051 | "
        "10 epochs, 4 min | 2 cores of X |"
    ) in rows
    # T=200 is not what the model's published result is of.
    assert any(row.startswith("| tcn_adding | adding | mse | 5.8e-05 | - |") for row in rows)
    assert "| tcn_jsb |" not in table(lambda name: 1)
    assert any(row.startswith("| lstm_adding | adding | mse | 0.164 | - |") for row in rows)


def test_a_page_without_marks_is_refused():
    assert replace_table(f"a {BEGIN}old\n{END}b", "new\n") == f"a {BEGIN}new\n{END}b"
    with pytest.raises(ValueError, match="must have the lines"):
        replace_table("no table", "new")
