"""Writes docs/results.md: the tables of the papers, compared with the zoo's results.

python -m tools.results_page
"""

import itertools

from keras_streams.files import atomic_write
from tools.cards import difference, ours, verdict
from tools.table import cost_of, coverage, readable_time, training_seconds
from trellis_keras import zoo
from trellis_keras.zoo import registry
from trellis_keras.zoo.results import all_runs, assets_folder, published

PAPERS = {
    "TrellisNet": "Bai, Kolter, Koltun 2019, [Trellis Networks for Sequence "
    "Modeling](https://arxiv.org/abs/1810.06682)",
    "TCN": "Bai, Kolter, Koltun 2018, [An Empirical Evaluation of Generic Convolutional and "
    "Recurrent Networks for Sequence Modeling](https://arxiv.org/abs/1803.01271)",
    "LRU": "Ahuja, Morency 2018, [Lattice Recurrent Unit: Improving Convergence and Statistical "
    "Efficiency for Sequence Modeling](https://arxiv.org/abs/1710.02254)",
}
HEADER = (
    "| model | metric | published | parameters | ours | parameters | difference | verdict "
    "| training | test runs |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)
_LONG = 10 * 86_400  # seconds of one core; longer trainings need a GPU

_INTRODUCTION = """\
# Results

The tables of the three papers, beside our results (`trellis-keras train MODEL --as-published`
repeats one, mostly with fewer epochs than the paper), for {trained} of {everything} values:
{verdicts}.
A "fast" row is the same network trained with a recipe of this zoo (`trellis-keras train MODEL
SETTING --as-published`, as in the row's card), {fast[trained]} of the values: {fast[verdicts]}.
Taking the better of the two, {either[trained]} values: {either[verdicts]}.
"Within 2 %" compares losses, or error rates if the metric is an accuracy. "At
the floor" is the loss of a network that has learned nothing: the paper's network fails there too,
so agreement is not informative.

Accuracies are fractions; cross-entropies and frame NLLs are in nats. Results over several seeds are
given as mean and standard deviation, and come from the epoch with the lowest validation loss. The
test sets of the adding problem and copy memory are random samples: the values after the semicolon
are the mean and standard deviation of the same weights on ten other samples, which the difference
and the verdict use ([tools/fresh_test_sets.py](../tools/fresh_test_sets.py)). *Test runs* is the
number of times the test split was evaluated, including experiments that are not shown ("-": not
recorded); no choice was based on these evaluations. Each name links to a card with the recipe, the
learning curve, the command, and known reasons for the gap to the paper. For models that were not
trained, the table gives the estimated time on one core, from [zoo/costs.json](../zoo/costs.json).
"""

_TEST_TIME = """\
## At test time

Language models of the zoo, adapting to the text they read ([how](scoring.md)).
`trellis-keras evaluate RUN --dynamic --cache` chooses the
hyper-parameters on the first 20,000 tokens of the validation text, and scores the test text once.

| model | metric | unadapted | dynamic evaluation | neural cache | chosen hyper-parameters |
|---|---|---|---|---|---|
"""

_FIGURES = """\
## Learning curves

The validation losses of all published runs, by epoch:

![Learning curves](learning_curves.png)

## Studies

[examples/studies](../examples/studies/README.md) has a command for each figure of the papers
(memory horizon, gradient norms, statistical efficiency, epochs to converge, convergence, ablation)
and the results of those that were run: the memory horizon of networks with 10,000 parameters
(TCN paper, Fig. 5), and the test loss by epoch of recurrent units of equal size (LRU paper, Figs. 3
and 4).

![Accuracy of recall by delay](../examples/studies/results/memory_horizon/memory_horizon.png)

![Test loss by epoch](../examples/studies/results/lattice_comparison/lattice_comparison.png)
"""


def page():
    """Returns the page as Markdown."""
    runs = {}
    for run in all_runs():
        value = registry.published_value(registry.recipe_from_dict(run.recipe))
        if value is not None:
            runs.setdefault(_key(value), []).append(run)
    parts = [_introduction()]
    tables = itertools.groupby(sorted(published(), key=_place), lambda value: value.source)
    for paper, of_paper in itertools.groupby(
        ((source, list(values)) for source, values in tables), lambda pair: pair[0].split()[0]
    ):
        parts.append(f"## {paper}\n\n{PAPERS[paper]}.\n")
        for source, values in of_paper:
            rows = [_row(value, run) for value in values for run in _runs_of(value, runs)]
            parts.append(f"### {source}\n\n{HEADER}{''.join(rows)}")
    parts += [_at_test_time(), _not_trained(runs)]
    return "\n".join([*parts, _FIGURES])


def _introduction():
    fast, either = coverage("fast"), coverage(None, "fast")
    return _INTRODUCTION.format(**coverage(None), fast=fast, either=either)


def _runs_of(value, runs):
    """Returns the runs of a value, after a None if none of them has the paper's recipe."""
    found = runs.get(_key(value), [])
    by_paper = any(registry.recipe_from_dict(run.recipe).setting is None for run in found)
    return found if by_paper else [None, *found]


def _place(value):
    paper, _, number = value.source.split()
    return list(PAPERS).index(paper), int(number)


def _key(value):
    return value.model, str(value.setting)


def _name(value, setting=None):
    words = [f"{name}={given}" for name, given in value.setting.items()]
    words += filter(None, [setting])
    return f"{value.model} ({', '.join(words)})" if words else value.model


def _row(value, run):
    theirs = [f"{value.value:.4g}", value.parameters]
    if run is None:
        cells = [_name(value), value.metric, *theirs, "-", "-", "-", "-", _expected(value), "-"]
    else:
        results, recipe = run.results, registry.recipe_from_dict(run.recipe)
        link = f"../zoo/{run.model}/{run.setting}/card.md" if run.setting else None
        cells = [
            f"[{_name(value, recipe.setting)}]({link or f'../zoo/{run.model}/card.md'})",
            value.metric,
            *theirs,
            ours(results),
            f"{results['parameters']:,}",
            difference(results, value),
            verdict(recipe, results, value),
            _epochs(recipe, results),
            str(results.get("test_runs", "-")),
        ]
    return f"| {' | '.join(cells)} |\n"


def _epochs(recipe, results):
    """Returns the epochs of a run as text, with the setting's epochs if the run is shorter."""
    training = zoo.recipe(recipe.name, setting=recipe.setting).training
    is_shorter = results["epochs"] < training.epochs and not training.stop_patience
    return f"{results['epochs']}{f' of {training.epochs}' if is_shorter else ''} epochs"


def _seconds(value):
    """Returns the time of a training in seconds of one core, or None if not measured."""
    if value.source.startswith("LRU") and value.parameters == "24M":
        return None
    cost = cost_of(value.model)
    return cost and training_seconds(zoo.recipe(value.model), cost)


def _expected(value):
    seconds = _seconds(value)
    return "not trained" if seconds is None else f"not trained ({readable_time(seconds)})"


def _at_test_time():
    rows = [_test_time_row(run) for run in all_runs() if "test_time" in run.results]
    return _TEST_TIME + "".join(rows)


def _test_time_row(run):
    metric, found = run.recipe["metric"], run.results["test_time"]
    chosen = {
        "dynamic": ("rule", "learning_rate", "decay", "segment_length"),
        "cache": ("size", "theta", "mix"),
    }
    settings = "; ".join(
        ", ".join(f"{name}={_short(found[kind][name])}" for name in names)
        for kind, names in chosen.items()
    )
    values = [run.results["test"], *(found[kind][metric] for kind in chosen)]
    cells = [run.title, metric, *(f"{value:.4g}" for value in values), settings]
    return f"| {' | '.join(cells)} |\n"


def _short(value):
    return value if isinstance(value, (str, int)) else f"{value:.2g}"


def _not_trained(runs):
    rest = [value for value in published() if _key(value) not in runs]
    long = sum((_seconds(value) or 0) > _LONG for value in rest)
    return (
        "## Missing results\n\n"
        f"Of the {len(rest)} values not trained here, {long} take more than ten days on\n"
        "one core each (the word-level and character TrellisNets, WikiText-103, LAMBADA, text8\n"
        "and enwik8), and 24M-parameter models take longer than 10M-parameter models. They need a\n"
        "GPU; [benchmarks/gpu](../benchmarks/gpu) queues `trellisnet_ptb` and\n"
        "`trellisnet_char_ptb`.\n"
    )


def main():
    path = assets_folder().parent / "docs" / "results.md"
    with atomic_write(path) as temporary:
        temporary.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
