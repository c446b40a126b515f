"""The card of a zoo run, as Markdown."""

import json
import pathlib
import re
import shlex
import textwrap

from tools.description import described
from trellis_keras.zoo.datasets import info
from trellis_keras.zoo.pretrained import differences

CARD = "card.md"
# Larger weights are not kept in the repository.
LARGEST_WEIGHTS = 5_000_000  # bytes

_WITH_UNKNOWN_WORDS = {"ptb", "wt2", "wt103"}
_IN_THE_LINE = ("optimizer", "learning_rate", "batch_size", "epochs")


def card(one):
    """Returns the card of a `Description`."""
    summary, _, _ = one.recipe.entry.function.__doc__.partition("\n\n")
    if "T" in one.recipe.data_options:
        summary = re.sub(r"\bT=\d+", f"T={one.recipe.data_options['T']}", summary)
    parts = [
        f"# {_plain(one.run.title)}",
        re.sub(r", [\d.]+[KM] parameters", "", " ".join(summary.split())),  # the table has them
        _figures(one),
        _paragraph(_plain(" ".join(_sentences(one)))),
        _paragraph(_without_html(one.results["note"])),
        "![Learning curve](curve.png)",
        "## Recipe",
        _recipe(one.recipe),
        "## Data",
        _data(one),
        *(("## Train it", _train(one)) if _has_data_of_the_zoo(one.recipe) else ()),
        "## Use it",
        _use(one),
        "## Limits",
        _limits(one),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _has_data_of_the_zoo(recipe):
    return recipe.data == recipe.entry.data


def _figures(one):
    apart = "" if one.value is None else f" ({one.difference})"
    rows = [
        f"| | {one.recipe.metric} on the test split | parameters |",
        "|---|---|---|",
        f"| ours | {one.ours}{apart} | {one.results['parameters']:,} |",
    ]
    if one.value is None:
        return "\n".join([*rows, "| published | none with these settings | |"])
    value = f"{one.value.value:g} | {one.value.parameters}"
    rows += [f"| published ({one.value.source}) | {value} |", f"| verdict | {one.verdict} | |"]
    return "\n".join(rows)


def _sentences(one):
    """Yields how the result was reached: epoch, seeds, time, machine, test evaluations."""
    recipe, results = one.recipe, one.results
    unit = " nats" if recipe.metric in ("bpc", "perplexity") else ""  # differs from the metric's
    epochs = str(results["epochs"])
    if not results["finished"]:
        epochs += f" so far (the recipe has {recipe.training.epochs})"
    yield (
        f"Epoch {results['epoch']} of {epochs}, chosen by validation loss "
        f"({results['validation_loss']:.6g}{unit}), not by the test split."
    )
    seconds, commit = results["wall_time_s"], results["commit"]
    took = "" if seconds is None else f"{seconds / 60:.0f} minutes "
    software = results["backend"] + ("" if commit is None else f", commit {commit}")
    yield f"Seed {recipe.seed}, {took}on {results['hardware']} ({software}, {results['date']})."
    processes = [
        f"from epoch {process['from_epoch']} in {process['dtype_policy']} on "
        f"{process['hardware']} ({process['backend']})"
        for process in results.get("processes", ())
    ]
    if len(processes) > 1:
        yield f"Trained in several sessions: {'; '.join(processes)}."
    other = {k: v for k, v in results["test_metrics"].items() if k != recipe.metric}
    numbers = (f"{k} {v:,}" if isinstance(v, int) else f"{k} {v:.6g}" for k, v in other.items())
    yield f"Other test metrics: {', '.join(numbers)}."
    yield _of_seeds(one)
    yield f"Evaluations of the test split, all experiments included: {one.test_runs}."


def _of_seeds(one):
    if len(one.run.seeds) == 1:
        return "One seed."
    losses = sorted(seed["validation_loss"] for seed in one.run.seeds)
    rank = 1 + losses.index(one.results["validation_loss"])
    others = ", ".join(f"seed {s['seed']} {s['test']:.6g}" for s in one.results["other_seeds"])
    stored = " Its weights are stored." if "weights_sha256" in one.results else ""
    return (
        f"Test result of this seed {one.results['test']:.6g}, of the others: {others}. This seed "
        f"ranks {rank} of {len(losses)} by validation loss.{stored}"
    )


def _recipe(recipe):
    """Lists arguments and training options, and changes to the zoo's recipe."""
    training = recipe.training.options()
    chosen = {k: v for k, v in recipe.arguments.items() if v is not None and k != "seed"}
    rest = {k: v for k, v in training.items() if k not in _IN_THE_LINE}
    changes = {name: value for name, value in recipe.changes().items() if name != "seed"}
    lines = [
        _assignments(chosen),
        f"{training['optimizer']}, learning rate {training['learning_rate']:g}, batch size "
        f"{training['batch_size']}, at most {training['epochs']} epochs",
        _assignments(rest),
        changes and f"changed from the zoo's default recipe: {_assignments(changes)}",
    ]
    return _list(filter(None, lines))


def _assignments(options):
    return ", ".join(_code(f"{name}={_literal(value)}") for name, value in options.items())


def _data(one):
    """Describes the data, their license, and how to load them."""
    recipe = one.recipe
    options = dict(recipe.data_options)
    if "path" in options:  # without the run's folder
        options["path"] = pathlib.PurePath(options["path"]).name
    call = ", ".join([repr(recipe.data), *(f"{key}={value!r}" for key, value in options.items())])
    known = recipe.data_checksum
    checksum = "" if known is None else f" Checksum: {_code(f'{known[:16]}...')}."
    about = info(recipe.data)
    files = (
        " `help(trellis_keras.zoo.datasets.load)` explains where to put local copies of the files."
    )
    described = _paragraph(
        f"{_code(f'trellis_keras.zoo.datasets.load({call})')}: {about.citation}; {about.license}."
        f"{'' if about.source is None else files}{checksum}"
    )
    return described if one.remark is None else f"{described}\n\n{_paragraph(one.remark)}"


def _train(one):
    """Returns the commands that repeat the run."""
    words = [one.run.model, *filter(None, [one.run.variant])]
    name = "runs/" + "_".join(words).replace("=", "_").replace(",", "_")

    def command(backend, seed, folder):
        variable = "KERAS_BACKEND=jax " if backend.startswith("jax") else ""
        train = f"trellis-keras train {shlex.join(words)} --repeat{seed}"
        return f"{variable}{train} --output {shlex.quote(folder)}"

    lines = [command(one.results["backend"], "", name)]
    for other in one.results["other_seeds"]:
        seed, backend = other["seed"], other.get("backend", one.results["backend"])
        lines.append(command(backend, f" --seed {seed}", f"{name}_seed_{seed}"))
    return "\n".join(["```sh", *lines, "```"])


def _use(one):
    """Returns code that builds the model, with its weights if they are stored, and uses it."""
    own = {*one.recipe.arguments, *one.recipe.data_options, "setting", "dtype_policy"} - {"seed"}
    own |= {"data", "data_options"}
    changes = {name: value for name, value in one.recipe.changes().items() if name in own}
    words = [_literal(one.recipe.name), *(f"{k}={_literal(v)}" for k, v in changes.items())]
    given = ", ".join(words)
    has_weights = "weights_sha256" in one.results
    weights, comment = ('weights="pretrained"', "") if has_weights else ("", "  # untrained")
    if len(given) > 96:
        given = "".join(f"\n    {word}," for word in words) + "\n"
    elif len(given) >= 80:
        given = f"\n    {given}\n"
    lines = [f"recipe = zoo.recipe({given})", f"model = recipe.build({weights}){comment}"]
    if has_weights and one.recipe.reads_text:
        lines.append('print(model.generate("The ", max_length=200))')
    elif has_weights:
        test = "recipe.batches(recipe.load_data().test)"
        lines.append(f"print(model.evaluate({test}, return_dict=True))")
    return "\n".join(["```python", "from trellis_keras import zoo", "", *lines, "```"])


def _limits(one):
    recipe, lines = one.recipe, []
    if recipe.reads_text:
        own = recipe.data_options.get("unknown")  # of a user's text
        unknown = "<unk>" if recipe.data in _WITH_UNKNOWN_WORDS else own
        read = "raise an error" if unknown is None else f"are read as {_code(unknown)}"
        lines.append(f"The vocabulary comes from the data; unknown tokens {read}.")
    if "T" in recipe.data_options:
        lines.append(
            f"Trained only on sequences of the benchmark's length (T={recipe.data_options['T']})."
        )
    if "weights_sha256" in one.results:
        half = one.results["weights_dtype"] == "float16"
        lines += [
            "The weights are released under the package's license. They were trained on the "
            "benchmark's training split only, and are meant for its task only.",
            "The file stores them in half precision, which changes no printed digit of the result."
            if half
            else "The file stores them in single precision: half would change the printed result.",
        ]
    else:
        lines.append(f"The trained weights are not stored: {_why_no_weights(one)}.")
    lines.append("The last digits of results differ between backends and machines.")
    return _list(lines)


def _why_no_weights(one):
    """Returns the reason why a run has no weights in the zoo, as text."""
    if not _has_data_of_the_zoo(one.recipe):
        return "the zoo keeps weights for its own data only"
    if one.recipe.metric == "perplexity":
        return "their vocabulary of words would contain parts of the text"
    for other in described():
        same = other.run.model == one.run.model and not differences(
            one.recipe.to_dict(), other.run.recipe
        )
        if same and "weights_sha256" in other.results:
            return (
                f"{_code(other.run.title)} trains the same network to {other.ours} "
                f'{one.recipe.metric}, and `weights="pretrained"` loads those weights'
            )
    size = one.results["parameters"] * 2 / 1e6
    if size > LARGEST_WEIGHTS / 1e6:
        return f"they take {size:.0f} MB in half precision, and the zoo keeps files under 5 MB"
    return f"they were saved in single precision, {2 * size:.1f} MB; the zoo keeps files under 5 MB"


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
