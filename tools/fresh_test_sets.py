"""Evaluates published weights of generated tasks on ten other test sets.

    python -m tools.fresh_test_sets

A test set of 1,000 sequences is only a sample, so this generates the adding problem and copy memory
with seeds 1 to 10. Mean and standard deviation go to each run's results.json; `tools.cards`,
`tools.table` and `tools.results_page` show them.
"""

import json
import statistics

import typer

from keras_streams.files import atomic_write
from trellis_keras.zoo import datasets, registry
from trellis_keras.zoo.results import RESULTS, WEIGHTS, all_runs

SEEDS = range(1, 11)


def main():
    """Evaluate all published weights of generated tasks."""
    for run in all_runs():
        if run.recipe["data"] in ("adding", "copy_memory") and run.has_weights:
            values = evaluate(run)
            found = {
                "seeds": list(SEEDS),
                "mean": statistics.mean(values),
                "deviation": statistics.stdev(values),
            }
            path = run.folder / RESULTS
            with atomic_write(path) as temporary:
                text = json.dumps(run.results | {"test_sets": found}, indent=2) + "\n"
                temporary.write_text(text, encoding="utf-8")
            typer.echo(f"{run.title}: {found['mean']:.4g} ± {found['deviation']:.2g}")


def evaluate(run, seeds=SEEDS):
    """Returns a run's metric on the test set of each seed."""
    recipe = registry.recipe_from_dict(run.recipe).replace(batch_size=250)
    model = recipe.build(weights=run.folder / WEIGHTS)
    values = []
    for seed in seeds:
        # The test split does not depend on the size of the others.
        options = recipe.data_options | {"seed": seed, "train": 1, "valid": 1}
        test = datasets.load(recipe.data, **options).test
        logs = model.evaluate(recipe.stream(test), verbose=0, return_dict=True)
        values.append(logs.get(recipe.metric, logs["loss"]))
    return values


if __name__ == "__main__":
    typer.run(main)
