"""Settings at test time: chosen on the validation part, and the other part scored with them."""

import re
import types

import numpy as np
import pytest

from trellis_keras.data import TokenStream, Vocabulary
from trellis_keras.layers import TCN
from trellis_keras.models import DynamicEvaluation, LanguageModel, NeuralCache
from trellis_keras.zoo import evaluation


def test_climbing_leaves_settings_that_diverge():
    tried = []

    def loss_of(value):
        tried.append(value)
        return evaluation._finite((np.log(value) - np.log(0.01)) ** 2 if value < 0.1 else np.nan)

    assert evaluation._climb(loss_of, 1.0) == pytest.approx(1 / 81)
    assert tried == pytest.approx([1, 1 / 3, 1 / 9, 1 / 27, 1 / 81, 1 / 243])
    assert evaluation._finite(np.float32(2)) == 2


@pytest.fixture
def few_trials(monkeypatch):
    monkeypatch.setattr(evaluation, "_climb", lambda loss, start: min((start, 3 * start), key=loss))
    monkeypatch.setattr(evaluation, "_SIZES", (20,))


@pytest.fixture(scope="module")
def trained():
    """What the functions need of a recipe, its model and its data, of nets that compile quickly."""
    tokens = np.random.default_rng(0).choice(5, 242, p=[0.5, 0.2, 0.1, 0.1, 0.1])
    model = LanguageModel(
        5, 4, TCN(4, 2, depth=1), vocabulary=Vocabulary("abcde", unit="character"), seed=0
    )
    model.build((None, None))
    recipe = types.SimpleNamespace(metric="bpc", batches=lambda part: TokenStream(part, 2, 10))
    loaded = types.SimpleNamespace(train=tokens[:80], valid=tokens[80:161], test=tokens[161:])
    return recipe, model, loaded


def best_of(lines):
    return min(float(re.match(r"validation bpc ([\d.]+): ", line)[1]) for line in lines)


@pytest.mark.usefixtures("few_trials")
def test_the_cache(trained):
    lines = []
    found = evaluation.evaluate_cache(*trained, show=lines.append)
    _, model, loaded = trained
    neural = NeuralCache(model, found["size"], found["theta"], found["mix"])
    assert found["loss"] == pytest.approx(neural.evaluate(loaded.test)["loss"])
    assert found["bpc"] == pytest.approx(found["loss"] / np.log(2))
    valid = neural.evaluate(loaded.valid)["loss"] / np.log(2)
    assert found["valid"] == pytest.approx(valid, rel=1e-5)
    assert found["valid"] == pytest.approx(best_of(lines), abs=1e-4)


@pytest.mark.usefixtures("few_trials")
def test_dynamic_evaluation(trained):
    lines = []
    recipe, model, loaded = trained
    found = evaluation.evaluate_dynamic(recipe, model, loaded, "valid", lines.append)
    assert found["valid"] == found["bpc"] == pytest.approx(best_of(lines), abs=1e-4)
    settings = {name: found[name] for name in ("learning_rate", "decay", "rule", "segment_length")}
    dynamic = DynamicEvaluation(model, **settings)
    if found["rule"] == "rms":
        dynamic.collect_statistics(recipe.batches(loaded.train), 100)
    assert found["loss"] == pytest.approx(dynamic.evaluate(loaded.valid)["loss"], rel=1e-5)
    assert {"sgd", "rms"} == {re.search(r"rule=(\w+)", line)[1] for line in lines}
