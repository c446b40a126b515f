"""The zoo's page: its table is the one of the published results."""

import json
import re

import pytest

from trellis_keras import zoo
from trellis_keras.zoo import assets
from trellis_keras.zoo.table import BEGIN, END, replace_table, table


def test_the_readme_has_the_table_of_all_models():
    page = (assets.assets_folder() / "README.md").read_text(encoding="utf-8")
    assert replace_table(page, table()) == page
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
    costs = {"models": {name: {"parameters": 1} for name in zoo.list_models()}}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path))
    rows = [row for row in table().splitlines() if "adding" in row]
    assert (
        "| [tcn_adding_200](tcn_adding_200/card.md) | adding | mse | - | 0.0002 | - | 58,051 | "
        "10 epochs, 4 min | 2 cores of X |"
    ) in rows
    # T=200 is not what the model's published result is of.
    assert any(
        row.startswith("| [tcn_adding](tcn_adding/card.md) | adding | mse | 5.8e-05 | - |")
        for row in rows
    )
    assert table().count("| [tcn_jsb](") == 1
    assert any(
        row.startswith("| [lstm_adding](lstm_adding/card.md) | adding | mse | 0.164 | - |")
        for row in rows
    )


def test_seeds_are_in_the_table(tmp_path, monkeypatch):
    results = {
        "model": "tcn_jsb", "data": "jsb", "metric": "frame_nll", "published": 8.1, "test": 8.2,
        "parameters": 1, "epochs": 10, "wall_time_s": 240.0, "hardware": "X",
        "other_seeds": [{"seed": 2, "test": 8.3}],
    }  # fmt: skip
    costs = {"models": {name: {"parameters": 1} for name in zoo.list_models()}}
    (tmp_path / "tcn_jsb").mkdir()
    (tmp_path / "tcn_jsb" / "results.json").write_text(json.dumps(results))
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    monkeypatch.setenv("TRELLIS_KERAS_ZOO", str(tmp_path))
    assert "| 8.1 | 8.2 (8.25 ± 0.071, 2 seeds) | +0.1 |" in table()


def test_a_page_without_marks_is_refused():
    assert replace_table(f"a {BEGIN}old\n{END}b", "new\n") == f"a {BEGIN}new\n{END}b"
    with pytest.raises(ValueError, match="must have the lines"):
        replace_table("no table", "new")
