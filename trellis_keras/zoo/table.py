"""The table of all models in `zoo/README.md`: published results, ours, and what they took.

    python -m trellis_keras.zoo.table

writes it anew from the recipes, `costs.json` and the `results.json` of the published runs, and the
shorter one on the checkout's first page, of the runs that a paper has a result of.
"""

import sys

from trellis_keras.files import atomic_write
from trellis_keras.zoo import registry
from trellis_keras.zoo.assets import all_results, assets_folder, cost_of, read_costs
from trellis_keras.zoo.card_sections import spread
from trellis_keras.zoo.cards import untrained_models

BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"
HEADER = (
    "| model | data | metric | published | ours | difference | parameters | training | machine |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)
FRONT_HEADER = (
    "| model | metric | published | ours | parameters | training |\n|---|---|---|---|---|---|\n"
)


def table():
    """Returns the table as Markdown: a row per published run, and one per model without any."""
    folder = assets_folder()
    runs, costs = all_results(folder), read_costs(folder)
    untrained = untrained_models([results for _, results in runs])
    rows = {}
    for path, results in runs:
        rows.setdefault(results["model"], []).append(_trained(path.name, results))
    for name in untrained:
        rows.setdefault(name, []).append(_untrained(name, cost_of(name, costs)["parameters"]))
    rows = [row for name in sorted(rows) for row in rows[name]]
    return HEADER + _markdown(rows)


def front_table():
    """Returns the first page's table as Markdown: of the runs that a paper has a result of."""
    rows = []
    for path, results in all_results(assets_folder()):
        if results["published"] is not None:
            row = _trained(path.name, results)
            name, _, metric, published, ours, _, parameters, training, _ = row
            name = name.replace(f"({path.name}", f"(zoo/{path.name}")
            rows.append([name, metric, published, ours, parameters, training])
    return FRONT_HEADER + _markdown(rows)


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


def _trained(folder, results):
    published, ours = results["published"], results["test"]
    seconds = results["wall_time_s"]
    took = "" if seconds is None else f", {seconds / 60:.0f} min"
    whole = "" if results.get("finished", True) else f" of {results['recipe_epochs']}"
    return [
        f"[{folder}]({folder}/card.md)",
        results["data"],
        results["metric"],
        _number(published),
        _number(ours) + _seeds(results),
        "-" if published is None else f"{ours - published:+.3g}",
        f"{results['parameters']:,}",
        f"{results['epochs']}{whole} epochs{took}",
        results["hardware"],
    ]


def _seeds(results):
    mean, deviation, number = spread(results)
    return f" ({mean:.4g} ± {deviation:.2g}, {number} seeds)" if number > 1 else ""


def _untrained(name, parameters):
    recipe = registry.recipe(name)
    return [
        f"[{name}]({name}/card.md)",
        recipe.training.data,
        recipe.model.metric,
        _number(recipe.training.published),
        *["-", "-"],
        f"{parameters:,}",
        *["-", "-"],
    ]


def _markdown(rows):
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _number(value):
    return "-" if value is None else f"{value:.4g}"


def main():
    if sys.argv[1:]:
        raise SystemExit(f"It takes no arguments. Received: {' '.join(sys.argv[1:])}")
    folder = assets_folder()
    _replace_in(folder / "README.md", table())
    if (folder.parent / "setup.py").is_file():
        _replace_in(folder.parent / "README.md", front_table())


def _replace_in(page, new):
    text = replace_table(page.read_text(encoding="utf-8"), new)
    with atomic_write(page) as temporary:
        temporary.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
