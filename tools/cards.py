"""Writes the cards of the zoo's published runs from their results.json.

python -m tools.cards
"""

import json
import math
import pathlib
import re
import shlex
import textwrap

from trellis_keras.files import atomic_write
from trellis_keras.zoo import registry
from trellis_keras.zoo.datasets import info
from trellis_keras.zoo.pretrained import WEIGHTS_KEPT
from trellis_keras.zoo.results import all_runs, assets_folder

CARD = "card.md"

# Benchmarks without a training text.
_NO_TRAINING_TEXT = {"lambada"}
_WITH_UNKNOWN_WORDS = {"ptb", "wt2", "wt103"}
# Options of the run, not of the model that one builds.
_OF_THE_RUN = {"seed", "jit_compile"}


def main(folder: pathlib.Path | None = None):
    """Writes all cards again."""
    for run in all_runs(assets_folder() if folder is None else folder):
        with atomic_write(run.folder / CARD) as temporary:
            temporary.write_text(card(run), encoding="utf-8")


def card(run):
    """Returns the card of a published run."""
    recipe, results = registry.recipe_from_dict(run.recipe), run.results
    parts = [
        f"# {_plain(run.title)}",
        registry.describe(recipe.name),
        _figures(recipe, results),
        _run(recipe, results),
        _paragraph(_without_html(results["note"])),
        "![Learning curve](curve.png)",
        "## Recipe",
        _recipe(recipe),
        "## Data",
        _data(recipe),
        "## Train it",
        _train(run, recipe),
        "## Use it",
        _use(recipe, results),
        "## Limits",
        _limits(recipe, results),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def ours(results):
    """Returns a run's test result: of several seeds the mean and standard deviation.

    And those over other test sets of a generated task, see `tools.fresh_test_sets`.
    """
    mean, deviation, number = spread(results)
    text = f"{mean:.4g}" if number == 1 else f"{mean:.4g} ± {deviation:.2g} ({number} seeds)"
    sets = results.get("test_sets")
    if sets is None:
        return text
    others = f"{sets['mean']:.4g} ± {sets['deviation']:.2g}"
    return f"{text}; {others} on {len(sets['seeds'])} other test sets"


def difference(results, published):
    """Returns by how much the result is above the published one."""
    return f"{_value(results) - published.value:+.3g}"


def _value(results):
    """The mean over fresh test sets where they were measured, else over seeds."""
    sets = results.get("test_sets")
    return spread(results)[0] if sets is None else sets["mean"]


VERDICTS = ("better", "within 2 %", "within 5 %", "apart", "at the floor")


def verdict(recipe, results, published):
    """Returns how a result compares with the published one, one of `VERDICTS`.

    Of accuracies the shares of wrong answers are compared. "At the floor" is what a net reaches
    that learns nothing: equality shows nothing there.
    """
    found, value = _value(results), published.value
    if recipe.metric == "accuracy":
        found, value = 1 - found, 1 - value
    floor = _floor(recipe)
    if floor is not None and found > 0.95 * floor:
        return "at the floor"
    above = found / value - 1
    if above < 0:
        return "better"
    return next((f"within {n} %" for n in (2, 5) if above <= n / 100), "apart")


def _floor(recipe):
    """The loss of the best constant answer, where it is known."""
    if recipe.data == "adding":
        return 1 / 6  # the variance of a sum of two uniform numbers
    if recipe.data == "copy_memory":
        return 10 * math.log(8) / (recipe.data_options["T"] + 20)  # ten of the digits are guessed
    return None


def spread(results):
    """Returns (mean, standard deviation, number) of the test results of all seeds of a run."""
    values = [results["test"], *(other["test"] for other in results["other_seeds"])]
    mean = sum(values) / len(values)
    deviations = sum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(deviations / max(len(values) - 1, 1)), len(values)


def _figures(recipe, results):
    published = registry.published_value(recipe)
    apart = "" if published is None else f" ({difference(results, published)})"
    rows = [
        f"| | {recipe.metric} on the test split | parameters |",
        "|---|---|---|",
        f"| ours | {ours(results)}{apart} | {results['parameters']:,} |",
    ]
    if results["other_seeds"]:
        rows.append(f"| ours, of the weights (seed {recipe.seed}) | {results['test']:.6g} | |")
    if published is None:
        rows.append("| published | none for these settings | |")
    else:
        value = f"{published.value:g} | {published.parameters}"
        rows.append(f"| published ({published.source}) | {value} |")
    return "\n".join(rows)


def _run(recipe, results):
    """How the result was reached: epoch, seeds, time, machine."""
    other = {k: v for k, v in results["test_metrics"].items() if k != recipe.metric}
    seconds, commit = results["wall_time_s"], results["commit"]
    took = "" if seconds is None else f"{seconds / 60:.0f} minutes "
    software = results["backend"] + ("" if commit is None else f", commit {commit}")
    epochs = str(results["epochs"])
    if not results["finished"]:
        epochs += f" so far (the recipe has {recipe.training.epochs})"
    sentences = [
        f"Epoch {results['epoch']} of {epochs}, chosen by the validation loss "
        f"({results['validation_loss']:.6g}{_unit(recipe)}); the test split played no part in "
        "that.",
        f"Seed {recipe.seed}, {took}on {results['hardware']} ({software}, {results['date']}).",
        *_processes(results),
        f"Also measured: {', '.join(f'{k} {_number(v)}' for k, v in other.items())}.",
        *_seeds(results),
    ]
    return _paragraph(_plain(" ".join(sentences)))


def _unit(recipe):
    """The unit of the loss, where it is not that of the metric."""
    return " nats" if recipe.metric in ("bpc", "perplexity") else ""


def _number(value):
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _processes(results):
    """What differed between the processes of a run that was interrupted."""
    processes = results.get("processes", ())
    if len(processes) < 2:
        return []
    parts = [
        f"from epoch {process['from_epoch']} in {process['dtype_policy']} on "
        f"{process['hardware']} ({process['backend']})"
        for process in processes
    ]
    return [f"It was trained in parts: {'; '.join(parts)}."]


def _seeds(results):
    others = results["other_seeds"]
    if not others:
        return []
    mean, deviation, number = spread(results)
    each = ", ".join(f"seed {other['seed']} {other['test']:.6g}" for other in others)
    return [
        f"The seed was chosen by the validation loss too. Test results of the others: {each}. Over "
        f"all {number} seeds, the mean is {mean:.4g} and the standard deviation {deviation:.2g}."
    ]


def _recipe(recipe):
    """Arguments and training, and where they differ from the zoo's own recipe."""
    chosen = {k: v for k, v in recipe.arguments.items() if v is not None and k != "seed"}
    training, written = recipe.training, recipe.to_dict()["training"]
    rest = {k: v for k, v in written.items() if v and k not in _IN_THE_LINE}
    lines = [
        ", ".join(_code(f"{name}={_literal(value)}") for name, value in chosen.items()),
        f"{training.optimizer}, learning rate {training.learning_rate:g}, batches of "
        f"{training.batch_size}, at most {training.epochs} epochs",
        ", ".join(_code(f"{name}={_literal(value)}") for name, value in rest.items()),
    ]
    changes = {name: value for name, value in recipe.changes().items() if name != "seed"}
    if changes:
        named = ", ".join(_code(f"{name}={_literal(value)}") for name, value in changes.items())
        lines.append(f"differs from the zoo's recipe of that name in {named}")
    return _list(filter(None, lines))


_IN_THE_LINE = ("optimizer", "learning_rate", "batch_size", "epochs")


def _data(recipe):
    """The data, their terms, and how to load them."""
    options = dict(recipe.data_options)
    if "path" in options:  # in whatever folder it was
        options["path"] = pathlib.PurePath(options["path"]).name
    call = ", ".join([repr(recipe.data), *(f"{key}={value!r}" for key, value in options.items())])
    known = recipe.data_checksum
    checksum = "" if known is None else f" Checksum: {_code(f'{known[:16]}...')}."
    about = info(recipe.data)
    return _paragraph(
        f"{_code(f'trellis_keras.zoo.datasets.load({call})')}: {about.citation}; {about.licence}. "
        "The data are no part of the package; `help(trellis_keras.zoo.datasets.load)` says where "
        f"it looks for local copies.{checksum}"
    )


def _train(run, recipe):
    """The commands that repeat the run and publish it."""
    backend = "KERAS_BACKEND=jax " if run.results["backend"].startswith("jax") else ""
    words = [recipe.name, run.setting] if run.setting else [recipe.name]
    command = f"{backend}trellis-keras train {words[0]} --as-published"
    command += "".join(f" {shlex.quote(word)}" for word in words[1:])
    name = "_".join(words).replace("=", "_").replace(",", "_")
    seeds = [other["seed"] for other in run.results["other_seeds"]]
    folders = [f"runs/{name}", *(f"runs/{name}_seed_{seed}" for seed in seeds)]
    lines = [f"{command} --output {shlex.quote(folders[0])}"]
    for seed, folder in zip(seeds, folders[1:], strict=True):
        lines.append(f"{command} --seed {seed} --output {shlex.quote(folder)}")
    return "\n".join(["```sh", *lines, "```"])


def _use(recipe, results):
    """How to build the model, with its weights if they are published, and to serve it."""
    changes = {
        name: f"{name}={_literal(value)}"
        for name, value in recipe.changes().items()
        if name not in _OF_THE_RUN
    }
    net = {*recipe.arguments, "dtype_policy"}
    arguments = [text for name, text in changes.items() if name in net]
    of_recipe = net | {*recipe.data_options, "setting"}
    of_recipe = [text for name, text in changes.items() if name in of_recipe]
    has_weights = "weights_sha256" in results
    weights = ['weights="pretrained"'] if has_weights else []
    comment = "" if weights else "  # with initial weights"
    lines = [f"model = zoo.{recipe.name}({', '.join([*arguments, *weights])}){comment}"]
    recipe_line = f"recipe = zoo.recipe({', '.join([_literal(recipe.name), *of_recipe])})"
    if recipe.setting is not None:  # the function's weights are those of the paper's recipe
        lines = [recipe_line, f"model = recipe.build({', '.join(weights)}){comment}"]
    if has_weights and recipe.reads_text:
        lines.append('print(model.generate("The ", max_length=200))')
    elif has_weights:
        lines += [recipe_line] * (recipe_line not in lines)
        lines.append(
            "print(model.evaluate(recipe.stream(recipe.load_data().test), return_dict=True))"
        )
    return "\n".join(["```python", "from trellis_keras import zoo", "", *lines, "```"])


def _limits(recipe, results):
    lines = []
    if recipe.data in _NO_TRAINING_TEXT:
        lines.append(
            "The benchmark has no training text: with another one than the paper's the result is "
            "not comparable with the published one."
        )
    if recipe.reads_text:
        lines.append(
            "The vocabulary is that of the data. Words that it lacks are read as `<unk>`."
            if recipe.data in _WITH_UNKNOWN_WORDS
            else "The vocabulary is that of the data; other tokens are refused."
        )
    if "T" in recipe.data_options:
        lines.append(
            f"Trained on sequences of the benchmark's length only (T={recipe.data_options['T']})."
        )
    if "weights_sha256" in results:
        lines.append(
            "The weights are under the package's licence. They were trained on the benchmark's "
            "training split alone, for its task alone."
        )
    else:
        lines.append(f"The trained weights are not published: {WEIGHTS_KEPT}.")
    lines.append("Results differ between backends and machines in the last digits.")
    return _list(lines)


def _without_html(text):
    """Return Markdown in which no HTML is left."""
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _plain(text):
    """Return text as Markdown that shows it as it is: no link, image, code or HTML."""
    return _without_html(re.sub(r"[\\`*|\[\]]", r"\\\g<0>", text))


def _code(text):
    """Return text as a code span of Markdown, whatever backticks it has."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"`{text}`" if fence == "`" else f"{fence} {text} {fence}"


def _literal(value):
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _list(lines):
    return "\n".join(
        textwrap.fill(f"- {line}", 100, subsequent_indent="  ", break_on_hyphens=False)
        for line in lines
    )


def _paragraph(text):
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)


if __name__ == "__main__":
    main()
