"""Evaluates published language models with dynamic evaluation and the neural cache.

    python -m tools.adapting zoo/trellisnet_char  # with the weights in the zoo
    python -m tools.adapting runs/tcn_ptb         # published without weights

writes `test_time` to the model's results.json, with hyper-parameters chosen on the validation
split. `python -m tools.pages` shows it in docs/results.md.
"""

import json
import pathlib
import sys
from typing import Annotated

import typer

from keras_streams.files import atomic_write
from tools.publish import is_published, read_any_recipe, zoo_folder
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.adapting import evaluate_cache, evaluate_dynamic
from trellis_keras.zoo.results import RESULTS


def main(
    folder: Annotated[pathlib.Path, typer.Argument(help="Published run, or its run's folder.")],
    data_dir: Annotated[str | None, typer.Option(help="Local copies of the data.")] = None,
):
    """Evaluate a language model that adapts at test time, and update its results.json."""
    recipe = read_any_recipe(folder)
    if not recipe.reads_text:
        raise ValueError(f"{recipe.name} is not a language model.")
    path = (folder if is_published(folder) else zoo_folder(recipe)) / RESULTS
    results = json.loads(path.read_text(encoding="utf-8"))
    recipe = recipe.replace(data_dir=data_dir) if data_dir else recipe
    loaded = recipe.load_data()
    if is_published(folder):
        model = recipe.build("pretrained", loaded.vocabulary)
    else:
        model = runs.load_best(folder)
    results["test_time"] = {
        "dynamic": evaluate_dynamic(recipe, model, loaded, show=typer.echo),
        "cache": evaluate_cache(recipe, model, loaded, show=typer.echo),
    }
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
