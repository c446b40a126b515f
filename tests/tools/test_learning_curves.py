"""The picture of the learning curves."""

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from tests.support.processes import ROOT
from trellis_keras import zoo
from trellis_keras.zoo.results import Run, all_runs


@pytest.fixture
def script(monkeypatch):
    """docs/draw_learning_curves.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import draw_learning_curves

    return draw_learning_curves


def drawn(script, values, model="tcn_seq_mnist", metric="accuracy", column="val_accuracy"):
    history = [{"epoch": str(i + 1), column: str(v)} for i, v in enumerate(values)]
    recipe = zoo.recipe(model).to_dict() | {"metric": metric}
    results = {"recipe": recipe, "epoch": 2, "test": values[1]}
    axes = Figure().subplots()
    script.draw(axes, "data", [(Run(None, "", results), history)])
    return axes


def test_a_panel_shows_a_run_its_result_and_the_published_one(script):
    axes = drawn(script, [0.2, 0.9, 0.95])
    curve, result, published = axes.get_lines()
    assert curve.get_xydata().tolist() == [[1, 0.2], [2, 0.9], [3, 0.95]]
    assert result.get_xydata().tolist() == [[2, 0.9]]
    assert set(published.get_ydata()) == {0.99}
    # Of an accuracy the upper end is what matters.
    assert axes.get_ylim()[0] == pytest.approx(0.85) and axes.get_yscale() == "linear"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epoch", "accuracy")


@pytest.mark.slow
def test_all_runs_of_default_settings_are_drawn(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "PICTURE", tmp_path / "curves.png")
    drawn = []
    monkeypatch.setattr(script, "draw", lambda axes, _, runs: drawn.extend(r for r, _ in runs))
    script.main()
    assert {run.title for run in drawn} == {run.title for run in all_runs() if not run.setting}
    height, width, _ = matplotlib.image.imread(tmp_path / "curves.png").shape
    assert width > 1000 and height < width
