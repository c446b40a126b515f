"""Writes the cards of the zoo's published runs from their results.json.

python -m tools.cards
"""

import json
import math
import pathlib
import re
import shlex
import textwrap

from keras_streams.files import atomic_write
from trellis_keras.zoo import registry
from trellis_keras.zoo.datasets import info
from trellis_keras.zoo.pretrained import differences
from trellis_keras.zoo.results import all_runs, assets_folder

CARD = "card.md"
# Larger weights are not kept in the repository.
LARGEST_WEIGHTS = 5_000_000  # bytes

# Benchmarks without a training text.
_NO_TRAINING_TEXT = {"lambada"}
_WITH_UNKNOWN_WORDS = {"ptb", "wt2", "wt103"}
# Options of the run, not of the model.
_OF_THE_RUN = {"seed", "jit_compile"}


def main(folder: pathlib.Path | None = None):
    """Writes all cards."""
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
        _limits(run, recipe),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def ours(results):
    """Returns a run's test result, with mean and standard deviation over several seeds.

    For generated tasks, those over other test sets follow; see `tools.fresh_test_sets`.
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
    """Returns the mean over fresh test sets if they were evaluated, otherwise over seeds."""
    sets = results.get("test_sets")
    return spread(results)[0] if sets is None else sets["mean"]


VERDICTS = ("better", "within 2 %", "within 5 %", "apart", "at the floor")


def verdict(recipe, results, published):
    """Returns how a result compares with the published one, one of `VERDICTS`.

    Accuracies are compared as error rates. "At the floor" means the loss of a net that has learned
    nothing, so that agreement is not informative.
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
    """Returns the loss of the best constant prediction, or None if unknown."""
    if recipe.data == "adding":
        return 1 / 6  # variance of the sum of two uniform numbers
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
        rows.append(f"| ours, published weights (seed {recipe.seed}) | {results['test']:.6g} | |")
    if published is None:
        rows.append("| published | none with these settings | |")
    else:
        value = f"{published.value:g} | {published.parameters}"
        rows.append(f"| published ({published.source}) | {value} |")
    return "\n".join(rows)


def _run(recipe, results):
    """Describes how the result was reached: epoch, seeds, time, machine."""
    other = {k: v for k, v in results["test_metrics"].items() if k != recipe.metric}
    seconds, commit = results["wall_time_s"], results["commit"]
    took = "" if seconds is None else f"{seconds / 60:.0f} minutes "
    software = results["backend"] + ("" if commit is None else f", commit {commit}")
    epochs = str(results["epochs"])
    if not results["finished"]:
        epochs += f" so far (the recipe has {recipe.training.epochs})"
    sentences = [
        f"Epoch {results['epoch']} of {epochs}, chosen by validation loss "
        f"({results['validation_loss']:.6g}{_unit(recipe)}), not by the test split.",
        f"Seed {recipe.seed}, {took}on {results['hardware']} ({software}, {results['date']}).",
        *_processes(results),
        f"Other test metrics: {', '.join(f'{k} {_number(v)}' for k, v in other.items())}.",
        *_seeds(results),
    ]
    return _paragraph(_plain(" ".join(sentences)))


def _unit(recipe):
    """Returns the unit of the loss if it differs from the metric's."""
    return " nats" if recipe.metric in ("bpc", "perplexity") else ""


def _number(value):
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _processes(results):
    """Describes the processes of an interrupted run."""
    processes = results.get("processes", ())
    if len(processes) < 2:
        return []
    parts = [
        f"from epoch {process['from_epoch']} in {process['dtype_policy']} on "
        f"{process['hardware']} ({process['backend']})"
        for process in processes
    ]
    return [f"Trained in several sessions: {'; '.join(parts)}."]


def _seeds(results):
    others = results["other_seeds"]
    if not others:
        return []
    mean, deviation, number = spread(results)
    each = ", ".join(f"seed {other['seed']} {other['test']:.6g}" for other in others)
    return [
        f"The seed was also chosen by validation loss. Test results of the other seeds: {each}. "
        f"Mean over {number} seeds: {mean:.4g}, standard deviation {deviation:.2g}."
    ]


def _recipe(recipe):
    """Lists arguments and training options, and changes to the zoo's recipe."""
    chosen = {k: v for k, v in recipe.arguments.items() if v is not None and k != "seed"}
    training, written = recipe.training, recipe.to_dict()["training"]
    rest = {k: v for k, v in written.items() if v and k not in _IN_THE_LINE}
    lines = [
        ", ".join(_code(f"{name}={_literal(value)}") for name, value in chosen.items()),
        f"{training.optimizer}, learning rate {training.learning_rate:g}, batch size "
        f"{training.batch_size}, at most {training.epochs} epochs",
        ", ".join(_code(f"{name}={_literal(value)}") for name, value in rest.items()),
    ]
    changes = {name: value for name, value in recipe.changes().items() if name != "seed"}
    if changes:
        named = ", ".join(_code(f"{name}={_literal(value)}") for name, value in changes.items())
        lines.append(f"changed from the zoo's default recipe: {named}")
    return _list(filter(None, lines))


_IN_THE_LINE = ("optimizer", "learning_rate", "batch_size", "epochs")


def _data(recipe):
    """Describes the data, their licence, and how to load them."""
    options = dict(recipe.data_options)
    if "path" in options:  # without the run's folder
        options["path"] = pathlib.PurePath(options["path"]).name
    call = ", ".join([repr(recipe.data), *(f"{key}={value!r}" for key, value in options.items())])
    known = recipe.data_checksum
    checksum = "" if known is None else f" Checksum: {_code(f'{known[:16]}...')}."
    about = info(recipe.data)
    return _paragraph(
        f"{_code(f'trellis_keras.zoo.datasets.load({call})')}: {about.citation}; {about.licence}. "
        "The data are not part of the package; `help(trellis_keras.zoo.datasets.load)` explains "
        f"where to put local copies.{checksum}"
    )


def _train(run, recipe):
    """Returns the commands that repeat the run."""
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
    """Returns code that builds the model, with its weights if they are published, and uses it."""
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
    given = ", ".join([_literal(recipe.name), *of_recipe])
    recipe_line = f"recipe = zoo.recipe({given})"
    if len(recipe_line) > 100:
        recipe_line = f"recipe = zoo.recipe(\n    {given}\n)"
    if recipe.setting is not None:  # the function would load the weights of the paper's recipe
        lines = [recipe_line, f"model = recipe.build({', '.join(weights)}){comment}"]
    if has_weights and recipe.reads_text:
        lines.append('print(model.generate("The ", max_length=200))')
    elif has_weights:
        lines += [recipe_line] * (recipe_line not in lines)
        lines.append(
            "print(model.evaluate(recipe.stream(recipe.load_data().test), return_dict=True))"
        )
    return "\n".join(["```python", "from trellis_keras import zoo", "", *lines, "```"])


def _limits(run, recipe):
    lines = []
    if recipe.data in _NO_TRAINING_TEXT:
        lines.append(
            "The benchmark has no training text. Results with a text other than the paper's are "
            "not comparable with the published result."
        )
    if recipe.reads_text:
        lines.append(
            "The vocabulary comes from the data; unknown words are read as `<unk>`."
            if recipe.data in _WITH_UNKNOWN_WORDS
            else "The vocabulary comes from the data; unknown tokens raise an error."
        )
    if "T" in recipe.data_options:
        lines.append(
            f"Trained only on sequences of the benchmark's length (T={recipe.data_options['T']})."
        )
    if "weights_sha256" in run.results:
        lines.append(
            "The weights are released under the package's licence. They were trained on the "
            "benchmark's training split only, and are meant for its task only."
        )
        lines.append(_precision(run.results))
    else:
        lines.append(f"The trained weights are not published: {_why_no_weights(run, recipe)}.")
    lines.append("The last digits of results differ between backends and machines.")
    return _list(lines)


def _precision(results):
    if results["weights_dtype"] == "float16":
        return (
            "The file stores the weights in half precision, with which the test result is the same "
            "to the printed digit."
        )
    return (
        "The file stores the weights in single precision: half would change the last printed digit "
        "of the test result."
    )


def _why_no_weights(run, recipe):
    """Returns the reason why a run has no weights in the zoo, as text."""
    if recipe.metric == "perplexity":
        return "their vocabulary of words would contain parts of the text"
    if (better := _replacement(run, recipe)) is not None:
        return (
            f"{_code(better.title)} trains the same network to {ours(better.results)} "
            f'{recipe.metric}, and `weights="pretrained"` loads those weights'
        )
    size = run.results["parameters"] * 2 / 1e6
    if size > LARGEST_WEIGHTS / 1e6:
        return f"they take {size:.0f} MB in half precision, and the zoo keeps files under 5 MB"
    return f"they were saved in single precision, {2 * size:.1f} MB; the zoo keeps files under 5 MB"


def _replacement(run, recipe):
    """Returns the run with weights of the same network as a run's, or None."""
    return next(
        (
            other
            for other in all_runs()
            if other.model == run.model
            and "weights_sha256" in other.results
            and not differences(recipe, other.recipe)
        ),
        None,
    )


def _without_html(text):
    """Returns Markdown with HTML escaped."""
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _plain(text):
    """Returns text as Markdown that displays it literally, without links, images, code or HTML."""
    return _without_html(re.sub(r"[\\`*|\[\]]", r"\\\g<0>", text))


def _code(text):
    """Returns text as a Markdown code span, even if it contains backticks."""
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
