"""Updates the table of models in zoo/README.md and the numbers of results in README.md.

`python -m tools.results_page` writes docs/results.md, with the tables of the papers.

python -m tools.table
"""

import collections
import re

from keras_streams.files import atomic_write
from tools.cards import VERDICTS, difference, ours, verdict
from trellis_keras import zoo
from trellis_keras.zoo import registry
from trellis_keras.zoo.results import all_runs, assets_folder, read_costs
from trellis_keras.zoo.results import published as published_values

START, END = "<!-- table -->\n", "<!-- end of the table -->\n"
HEADER = (
    "| model | data | metric | published | parameters | ours | parameters | difference | verdict "
    "| training |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)


def table():
    """Returns Markdown with a row per published run, and a row per model without runs."""
    runs = {}
    for run in all_runs():
        runs.setdefault(run.model, []).append(run)
    rows = []
    for name in zoo.list_models():
        if zoo.recipe(name).data.endswith("series"):
            continue  # for the user's own data
        own = runs.get(name, [])
        if all(run.setting for run in own):  # the default has not been trained
            rows.append(_untrained(name))
        rows += [_trained(run) for run in own]
    return HEADER + _markdown(rows)


def coverage(*settings):
    """Counts the papers' values, those trained here, and their verdicts.

    Args:
        settings: The settings that count: None for the papers' recipes, `"fast"`, or both. A value
            with several runs counts once, with the best verdict.

    Returns:
        A dict of `trained`, `everything` and `verdicts`, such as "5 better, 8 within 2 %".
    """
    best = {}
    for run in all_runs():
        recipe = registry.recipe_from_dict(run.recipe)
        value = registry.published_value(recipe)
        if value is not None and recipe.setting in settings:
            key = value.model, str(value.setting)
            rank = VERDICTS.index(verdict(recipe, run.results, value))
            best[key] = min(rank, best.get(key, rank))
    everything = {(v.model, str(v.setting)) for v in published_values()}
    counts = collections.Counter(best.values())
    verdicts = ", ".join(f"{counts[rank]} {name}" for rank, name in enumerate(VERDICTS))
    return {"trained": len(best), "everything": len(everything), "verdicts": verdicts}


def with_coverage(text):
    """Returns a page with updated numbers of results.

    These are in three lines: "20 of the papers' 121 results: 5 better, ..." for the papers'
    recipes, "8 results by fast recipes: ...", and "24 results by the better of the two: ...".
    """
    for found, settings in (
        ("{trained} of the papers' {everything} results: {verdicts}", [None]),
        ("{trained} results by fast recipes: {verdicts}", ["fast"]),
        ("{trained} results by the better of the two: {verdicts}", [None, "fast"]),
    ):
        words = found.format(trained=r"\d+", everything=r"\d+", verdicts=".*")
        text = re.sub(words, found.format(**coverage(*settings)), text)
    return text


def replace_table(text, new):
    """Returns a page with a new table between its two markers.

    Raises:
        ValueError: The page lacks a marker.
    """
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"The page must contain the lines {START!r} and {END!r}.")
    return before + start + new + end + after


def _trained(run):
    recipe, results = registry.recipe_from_dict(run.recipe), run.results
    published = registry.published_value(recipe)
    seconds = results["wall_time_s"]
    took = "" if seconds is None else f", {seconds / 60:.0f} min"
    whole = "" if results["finished"] else f" of {recipe.training.epochs}"
    link = f"{run.model}/{run.setting}" if run.setting else run.model
    return [
        f"[{run.title}]({link}/card.md)",
        recipe.data,
        recipe.metric,
        *(["-", "-"] if published is None else [f"{published.value:.4g}", published.parameters]),
        ours(results),
        f"{results['parameters']:,}",
        *(
            ["-", "-"]
            if published is None
            else [difference(results, published), verdict(recipe, results, published)]
        ),
        f"{results['epochs']}{whole} epochs{took}",
    ]


def _untrained(name):
    recipe, cost = zoo.recipe(name), cost_of(name)
    published = registry.published_value(recipe)
    return [
        name,
        recipe.data,
        recipe.metric,
        *(["-", "-"] if published is None else [f"{published.value:.4g}", published.parameters]),
        "-",
        f"{cost['parameters']:,}" if cost else "-",
        "-",
        "-",
        _expected(recipe, cost),
    ]


def _expected(recipe, cost):
    """Returns the cost of training a model as text."""
    if cost is None:
        return "-"
    upper = "at most " if recipe.training.stop_patience else ""
    return f"not trained ({upper}{readable_time(training_seconds(recipe, cost))} of one core)"


def cost_of(name):
    """Returns the measured costs of a model, a dict, or None."""
    return read_costs()["models"].get(name)


def training_seconds(recipe, cost):
    """Returns the time of a recipe's training in seconds of one core."""
    return recipe.training.epochs * cost["steps_per_epoch"] * cost["step_core_s"]


def readable_time(seconds):
    """Returns a time as text in a suitable unit."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60), ("seconds", 1)):
        if seconds >= 2 * length or unit == "seconds":
            value = seconds / length
            return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def _markdown(rows):
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _replace_in(page, new):
    text = replace_table(page.read_text(encoding="utf-8"), new)
    with atomic_write(page) as temporary:
        temporary.write_text(text, encoding="utf-8")


def main():
    """Writes both again."""
    folder = assets_folder()
    _replace_in(folder / "README.md", table())
    front = folder.parent / "README.md"
    text = front.read_text(encoding="utf-8")
    with atomic_write(front) as temporary:
        temporary.write_text(with_coverage(text), encoding="utf-8")


if __name__ == "__main__":
    main()
