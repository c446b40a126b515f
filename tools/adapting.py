"""Evaluates published language models with dynamic evaluation and the neural cache.

    python -m tools.adapting                # the models with weights in the zoo
    python -m tools.adapting runs/tcn_ptb   # published runs without weights in the zoo

writes `test_time` to the results.json of each model, with hyper-parameters chosen on the validation
split. `python -m tools.pages` shows it in docs/results.md.
"""

import json
import sys
from typing import Annotated

import typer

from keras_streams.files import atomic_write
from tools.publish import zoo_folder
from trellis_keras.zoo import read_recipe
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.adapting import evaluate_cache, evaluate_dynamic
from trellis_keras.zoo.registry import recipe_from_dict
from trellis_keras.zoo.results import RESULTS, all_runs


def main(
    run: Annotated[list[str] | None, typer.Argument(help="Folders of published runs.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Local copies of the data.")] = None,
):
    """Evaluate language models that adapt at test time, and update their results.json."""
    if run:
        found = [(zoo_folder(read_recipe(one)), read_recipe(one), one) for one in run]
    else:
        published = [
            (one.folder, recipe_from_dict(one.recipe)) for one in all_runs() if one.has_weights
        ]
        found = [(folder, recipe, None) for folder, recipe in published if recipe.reads_text]
    for folder, recipe, _ in found:
        if not recipe.reads_text:
            raise ValueError(f"{recipe.name} is not a language model.")
        if not (folder / RESULTS).exists():
            raise ValueError(f"{folder} has no {RESULTS}: publish the run first.")
    for folder, recipe, path in found:
        if data_dir is not None:
            recipe = recipe.replace(data_dir=data_dir)
        loaded = recipe.load_data()
        model = runs.load_best(path) if path else recipe.build("pretrained", loaded.vocabulary)
        typer.echo(recipe.name)
        better = {
            "dynamic": evaluate_dynamic(recipe, model, loaded, show=typer.echo),
            "cache": evaluate_cache(recipe, model, loaded, show=typer.echo),
        }
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        results["test_time"] = better
        with atomic_write(folder / RESULTS) as temporary:
            temporary.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        typer.echo(json.dumps(better))


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
