"""The zoo's cards: what a model is, its results or what they would cost, and how to use it.

    python -m trellis_keras.zoo.cards

writes all of them anew: those of published runs from their `results.json`, those of the models that
have not been trained from their recipes and from `costs.json`, which `python -m
benchmarks.zoo_costs` measures.
"""

import pathlib

from trellis_keras.files import atomic_write
from trellis_keras.zoo import card_sections as sections
from trellis_keras.zoo import registry
from trellis_keras.zoo.assets import all_results, assets_folder, cost_of, read_costs

CARD = "card.md"


def write_all(folder=None):
    """Writes the card of every published run, and of every model that has none.

    Args:
        folder: The zoo's folder. Default: `assets_folder()`.

    Raises:
        ValueError: A `results.json` is damaged, or `costs.json` lacks a model.
    """
    folder = assets_folder() if folder is None else pathlib.Path(folder)
    for name, text in all_cards(folder).items():
        (folder / name).mkdir(exist_ok=True)
        with atomic_write(folder / name / CARD) as temporary:
            temporary.write_text(text, encoding="utf-8")


def all_cards(folder):
    """Returns {name of a folder: text of its card}. Arguments as `write_all`."""
    runs, costs = all_results(folder), read_costs(folder)
    cards = {path.name: trained(results, path.name) for path, results in runs}
    names = untrained_models([results for _, results in runs])
    return cards | {name: untrained(name, costs) for name in names}


def untrained_models(runs):
    """Returns the models whose benchmark no run has been published of, a list of names.

    Runs with other settings, for which nothing or something else is published, do not count.

    Args:
        runs: What the `results.json` of all published runs hold.
    """
    done = {(results["model"], results["published"]) for results in runs}
    recipes = map(registry.recipe, registry.list_models())
    return [r.name for r in recipes if (r.name, r.training.published) not in done]


def trained(results, folder):
    """Returns the card of a published run.

    Args:
        results: What `results.json` holds.
        folder: Name of its folder in the zoo.
    """
    recipe = registry.recipe(results["model"], **results["settings"])
    return _card(
        sections.title(results),
        registry.describe(recipe.name),
        sections.figures(recipe, sections.ours(results), results["published"]),
        sections.run(results),
        sections.paragraph(results["note"]),
        "![Learning curve](curve.png)",
        "## Recipe",
        sections.recipe(recipe, results["settings"]),
        "## Data",
        sections.data(recipe, results["data_checksum"]),
        "## Train it",
        sections.train(recipe, results, folder),
        "## Use it",
        sections.use(recipe, results, folder),
        "## Limits",
        sections.limits(recipe, results),
    )


def untrained(name, costs):
    """Returns the card of a model that has not been trained, with what training it would cost.

    Args:
        name: Of the model.
        costs: What `costs.json` holds.
    """
    recipe = registry.recipe(name)
    return _card(
        name,
        registry.describe(name),
        sections.figures(recipe, "not trained here", recipe.training.published),
        sections.cost(recipe, cost_of(name, costs), costs["machine"]),
        "## Recipe",
        sections.recipe(recipe),
        "## Data",
        sections.data(recipe),
        "## Train it",
        sections.train(recipe, {}, name),
        "## Use it",
        sections.use(recipe, {}, name),
        "## Limits",
        sections.limits(recipe, {}),
    )


def _card(head, *parts):
    return "\n\n".join([f"# {head}", *filter(None, parts)]) + "\n"


if __name__ == "__main__":
    write_all()
