"""The table of all models in `zoo/README.md`: published results, ours, and what they took.

    python -m trellis_keras.zoo.table zoo/README.md

writes it anew from the recipes and the `results.json` of the published runs.
"""

import pathlib
import sys

from trellis_keras.files import replacing
from trellis_keras.zoo import registry
from trellis_keras.zoo.assets import RESULTS, assets_folder, read_results

BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"
HEADER = (
    "| model | data | metric | published | ours | difference | parameters | training | machine |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)


def table(parameters):
    """Returns the table as Markdown: a row per published run, and one per model without any.

    Runs with other settings, for which nothing is published, do not count as the model's.

    Args:
        parameters: Function from a model's name to its number of parameters.
    """
    runs = _runs()
    rows = []
    for name in registry.list_models():
        recipe, found = registry.recipe(name), runs.get(name, [])
        rows += [_trained(folder, results) for folder, results in found]
        if not any(results["published"] == recipe.training.published for _, results in found):
            rows.append(_untrained(recipe, parameters(name)))
    return HEADER + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def replace_table(text, new):
    """Returns a page with another table between its two marks.

    Raises:
        ValueError: The page has not both marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"The page must have the lines {BEGIN!r} and {END!r}.")
    return before + begin + new + end + after


def count_parameters(name):
    """Returns the number of parameters of a zoo model, by building it."""
    return registry.get_model(name).count_params()


def _runs():
    """Returns {model's name: [(folder's name, results), ...]}."""
    runs = {}
    for path in sorted(assets_folder().glob(f"*/{RESULTS}")):
        results = read_results(path)
        runs.setdefault(results["model"], []).append((path.parent.name, results))
    return runs


def _trained(folder, results):
    published, ours = results["published"], results["test"]
    minutes = results["wall_time_s"]
    return [
        f"[{folder}]({folder}/card.md)",
        results["data"],
        results["metric"],
        _number(published),
        _number(ours),
        "-" if published is None else f"{ours - published:+.3g}",
        f"{results['parameters']:,}",
        f"{results['epochs']} epochs" + ("" if minutes is None else f", {minutes / 60:.0f} min"),
        results["hardware"],
    ]


def _untrained(recipe, parameters):
    training = recipe.training
    published = _number(training.published)
    return [
        recipe.name, training.data, recipe.model.metric, published, "-", "-", f"{parameters:,}",
        "-", "-",
    ]  # fmt: skip


def _number(value):
    return "-" if value is None else f"{value:.4g}"


def main(path):
    page = pathlib.Path(path)
    text = replace_table(page.read_text(encoding="utf-8"), table(count_parameters))
    with replacing(page) as temporary:
        temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
