"""Writes trellis_keras_cli/index.json, from which the command line answers without Keras.

python -m tools.index
"""

import json

from tools.cards import spread
from trellis_keras import zoo
from trellis_keras.files import atomic_write
from trellis_keras.zoo import registry, results
from trellis_keras_cli import index


def make():
    """Returns the index, see `trellis_keras_cli.index.read`."""
    models = {}
    for name in zoo.list_models():
        recipe = zoo.recipe(name)
        models[name] = {"options": sorted(recipe.entry.options), "recipe": recipe.to_dict()}
    return {"rows": list(_rows()), "models": models}


def _rows():
    """A row per model and per published run."""
    runs = {}
    for run in results.all_runs():
        runs.setdefault(run.model, []).append(run)
    parameters = results.read_costs()["models"]
    for name in zoo.list_models():
        own = runs.get(name, [])
        recipes = {run.setting: registry.recipe_from_dict(run.recipe) for run in own}
        if "" not in recipes:
            recipes = {"": zoo.recipe(name), **recipes}
        for label, recipe in recipes.items():
            run = next((run for run in own if run.setting == label), None)
            known = run.results if run else parameters.get(name, {})
            value = registry.published_value(recipe)
            yield [
                f"{name} {label}".strip(),
                recipe.data,
                f"{known['parameters']:,}" if "parameters" in known else "-",
                recipe.metric,
                f"{value.value:.4g}" if value else "-",
                f"{spread(run.results)[0]:.4g}" if run else "-",
                "yes" if run and run.has_weights else "-",
            ]


def main():
    with atomic_write(index.PATH) as temporary:
        temporary.write_text(json.dumps(make(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
