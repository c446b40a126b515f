"""Evaluates models on a split, as they are or while they adapt to the text that they read."""

import math
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from trellis_keras.data import PianoRollStream, SequenceStream, TokenStream
from trellis_keras.layers.checks import check_choice
from trellis_keras.models import DynamicEvaluation, LanguageModel, NeuralCache
from trellis_keras.scoring import METRICS
from trellis_keras.zoo.datasets.registry import SPLITS, Dataset
from trellis_keras.zoo.registry import Recipe
from trellis_keras.zoo.run import load_best

_COUNTED = {TokenStream: "targets", PianoRollStream: "frames", SequenceStream: "sequences"}
_LOSSES = ("mse", "cross_entropy", "frame_nll")  # published figures that are the loss


def evaluate(
    recipe: Recipe,
    model: keras.Model | str | os.PathLike,
    split: str = "test",
    *,
    target_counting: str = "all",
    loaded: Dataset | None = None,
    verbose: str | int = 0,
) -> dict[str, float]:
    """Evaluates the best model of a run, or another model of its recipe.

    Args:
        recipe: The run's recipe, see `zoo.read_recipe`. `data_dir` may differ.
        model: The run's folder, or a model, which is compiled by the recipe.
        split: `"train"`, `"valid"` or `"test"`.
        target_counting: For text: `"all"` counts each target once, `"original"` follows the
            authors' code, see `data.TokenStream`.
        loaded: The result of `recipe.load_data()`. Defaults to `None`, which loads the data.
        verbose: As in `keras.Model.evaluate`.

    Returns:
        A dict of the metrics, including the published one, and the number of items that they
        average over: `targets` for text, `frames` for music, otherwise `sequences`.

    Raises:
        ValueError: If the split or the counting is unknown, the data have changed, or a file
            is damaged.
        FileNotFoundError: If there is no run, it has not finished an epoch, or the data are
            missing.
    """
    check_choice("split", split, SPLITS)
    model = model if isinstance(model, keras.Model) else load_best(model)
    recipe.compile(model)
    loaded = recipe.load_data() if loaded is None else loaded
    stream = recipe.batches(getattr(loaded, split), target_counting)
    results = model.evaluate(stream, return_dict=True, verbose=verbose)
    if recipe.metric in _LOSSES:
        results.setdefault(recipe.metric, results["loss"])
    elif recipe.metric not in results:
        raise ValueError(f"{recipe.name} has no metric {recipe.metric!r}. Received: {[*results]}")
    return {**results, _COUNTED[type(stream)]: stream.targets_counted}


def representative_data(recipe: Recipe, rows: int = 32) -> np.ndarray:
    """Returns inputs from the whole training data, for quantization in `export`.

    An array (rows, steps, channels), or tokens (rows, steps) for text, with at most `rows` rows.
    """
    stream = recipe.batches(recipe.load_data().train)
    places = np.unique(np.linspace(0, len(stream) - 1, rows, dtype="int64"))
    batches = [stream[int(place)][0] for place in places]
    steps = min(x.shape[1] for x in batches)
    # A row of a text's batches is always from the same part of the text.
    return np.stack([x[i % len(x), :steps] for i, x in enumerate(batches)])


# Adapting at test time, without further training. Hyper-parameters are chosen on the start of the
# validation split; the other split is scored once.

_CHOICE_TOKENS = 20_000  # of the validation split
_STATISTICS_BATCHES = 100  # of the training split, for the rule "rms"
_DECAYS = (0.003, 0.03)
_SIZES = (500, 8000)
_MIXES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


def evaluate_dynamic(
    recipe: Recipe,
    model: LanguageModel,
    loaded: Dataset,
    split: str = "test",
    show: Callable[[str], Any] = lambda line: None,
) -> dict[str, Any]:
    """Evaluates a model by dynamic evaluation, see `models.DynamicEvaluation`.

    The rule, its learning rate and its decay are chosen on the validation split. A segment has 5
    tokens for word vocabularies, 20 for others.

    Args:
        recipe: The model's recipe.
        model: Its trained model, with a vocabulary, whose backbone streams.
        loaded: Its data, the result of `recipe.load_data()`.
        split: `"train"`, `"valid"` or `"test"`.
        show: Function that is called with a line of text for each choice tried.

    Returns:
        A dict of the chosen hyper-parameters, the metric on the validation split (`"valid"`), and
        the recipe's metric and the loss on the given split.
    """
    segment_length = 5 if model.vocabulary.unit == "word" else 20
    valid = loaded.valid[:_CHOICE_TOKENS]
    found = []
    for rule, learning_rate in (("sgd", 0.1), ("rms", 0.001)):
        dynamic = DynamicEvaluation(model, learning_rate, rule=rule, segment_length=segment_length)
        if rule == "rms":
            batches = recipe.batches(loaded.train)
            dynamic.collect_statistics(batches, min(_STATISTICS_BATCHES, len(batches)))

        def loss_of(learning_rate, decay=0.0, rule=rule, dynamic=dynamic):
            dynamic.learning_rate, dynamic.decay = learning_rate, decay
            loss = _finite(dynamic.evaluate(valid)["loss"])
            chosen = {"rule": rule, "learning_rate": learning_rate, "decay": decay}
            found.append((loss, chosen, dynamic))
            _show(show, recipe, loss, chosen)
            return loss

        best = _climb(loss_of, learning_rate)
        for decay in _DECAYS:
            loss_of(best, decay)
    loss, chosen, dynamic = min(found, key=lambda trial: trial[0])
    dynamic.learning_rate, dynamic.decay = chosen["learning_rate"], chosen["decay"]
    test = dynamic.evaluate(getattr(loaded, split))["loss"]
    return {**chosen, "segment_length": segment_length, **_metrics(recipe, loss, test)}


def evaluate_cache(
    recipe: Recipe,
    model: LanguageModel,
    loaded: Dataset,
    split: str = "test",
    show: Callable[[str], Any] = lambda line: None,
) -> dict[str, Any]:
    """Evaluates a model with a neural cache, see `models.NeuralCache`.

    Its size, theta and mix are chosen on the validation split. Arguments and results as in
    `evaluate_dynamic`.
    """
    valid = loaded.valid[:_CHOICE_TOKENS]
    found = []

    def loss_of(theta, size=2000):
        theta = float(f"{theta:.2g}")
        log_p, log_cache = NeuralCache(model, size, theta).log_probabilities(valid)
        losses = [-np.logaddexp(np.log1p(-m) + log_p, np.log(m) + log_cache).mean() for m in _MIXES]
        loss = _finite(min(losses))
        chosen = {"size": size, "theta": theta, "mix": _MIXES[int(np.argmin(losses))]}
        found.append((loss, chosen))
        _show(show, recipe, loss, chosen)
        return loss

    best = _climb(loss_of, 0.1)
    for size in _SIZES:
        loss_of(best, size)
    loss, chosen = min(found, key=lambda trial: trial[0])
    test = NeuralCache(model, **chosen).evaluate(getattr(loaded, split))["loss"]
    return {**chosen, **_metrics(recipe, loss, test)}


def _finite(loss):
    """Returns the loss, or infinity for NaN, which compares as neither better nor worse."""
    return float(loss) if np.isfinite(loss) else math.inf


def _climb(loss_of, start, factor=3.0):
    """Returns the value with the lowest loss, found by scaling a start value step by step."""
    tiny, lowest, steps = 1e-6 * start, loss_of(start), (factor, 1 / factor)
    while lowest == math.inf and start > tiny:
        start, steps = start / factor, (1 / factor,)
        lowest = loss_of(start)
    best = start
    for step in steps:
        value = start * step
        while (loss := loss_of(value)) < lowest:
            best, lowest = value, loss
            value *= step
    return best


def _metrics(recipe, valid_loss, loss):
    metric = METRICS[recipe.metric]
    return {"valid": float(metric(valid_loss)), recipe.metric: float(metric(loss)), "loss": loss}


def _show(show, recipe, loss, chosen):
    settings = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in chosen.items())
    value = METRICS[recipe.metric](loss)
    show(f"validation {recipe.metric} {value:.4f}: {', '.join(settings)}")
