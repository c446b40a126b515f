"""The parts of a zoo model's card, each as Markdown. `cards` puts them together."""

import json
import math
import pathlib
import shlex
import textwrap

from trellis_keras.data import info
from trellis_keras.zoo import registry
from trellis_keras.zoo.assets import WEIGHTS_KEPT

# Settings of the run, not of the model that one builds.
_OF_THE_RUN = {"seed", "jit_compile"}
# Settings that say which of a model's benchmarks it is, in titles.
_VARIANTS = ("T", "size", "variant")
# A benchmark without a training text of its own.
_TRAINED_ON_A_TEXT_OF_YOURS = {"lambada"}
_WITH_UNKNOWN_WORDS = {"ptb", "wt2", "wt103"}


def title(results):
    """Returns the name of a run's model, with what tells it from others of that name."""
    settings = results["settings"]
    named = ", ".join(f"{name}={settings[name]}" for name in _VARIANTS if name in settings)
    return results["model"] + (f" ({named})" if named else "")


def paragraph(text):
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)


def figures(recipe, ours, published):
    """The table of our result and the published one."""
    where = f"published ({recipe.training.source})" if recipe.training.source else "published"
    rows = [
        f"| | {recipe.model.metric} on the test split |",
        "|---|---|",
        f"| ours | {ours} |",
        f"| {where} | {'none for these settings' if published is None else f'{published:g}'} |",
    ]
    return "\n".join(rows)


def ours(results):
    """A run's test result, with its difference from the published one."""
    text = f"{results['test']:.6g}"
    if results["published"] is not None:
        text += f" ({results['test'] - results['published']:+.3g})"
    return text


def run(results):
    """How a run came to its result: epoch, seeds, time, machine."""
    other = {k: v for k, v in results["test_metrics"].items() if k != results["metric"]}
    seconds, commit = results["wall_time_s"], results["commit"]
    took = "" if seconds is None else f"{seconds / 60:.0f} minutes on "
    software = results["backend"] + ("" if commit is None else f", commit {commit}")
    sentences = [
        f"Epoch {results['epoch']} of {_epochs(results)}, chosen by the validation loss "
        f"({results['validation_loss']:.6g}); the test split played no part in that.",
        f"Seed {results['seed']}, {results['parameters']:,} parameters, {took}"
        f"{results['hardware']} ({software}, {results['date']}).",
        *_processes(results),
        f"Also measured: {', '.join(f'{k} {_number(v)}' for k, v in other.items())}.",
        *_seeds(results),
    ]
    return paragraph(" ".join(sentences))


def _epochs(results):
    if results.get("finished", True):
        return str(results["epochs"])
    return f"{results['epochs']} so far (the recipe has {results['recipe_epochs']})"


def _number(value):
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _processes(results):
    """What was not the same for all epochs of a run that was interrupted."""
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
    others = results.get("other_seeds", ())
    if not others:
        return []
    mean, deviation, number = spread(results)
    each = ", ".join(f"seed {other['seed']} {other['test']:.6g}" for other in others)
    return [
        f"The seed was chosen by the validation loss too. On the test split, the others: {each}; "
        f"mean and standard deviation of all {number}: {mean:.4g} and {deviation:.2g}."
    ]


def spread(results):
    """Returns (mean, standard deviation, number) of the test results of all seeds of a run."""
    values = [results["test"], *(other["test"] for other in results.get("other_seeds", ()))]
    mean = sum(values) / len(values)
    deviations = sum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(deviations / max(len(values) - 1, 1)), len(values)


def cost(recipe, cost, machine):
    """What training a model would cost that has not been trained."""
    steps, epochs = cost["steps_per_epoch"], recipe.training.epochs
    epoch = steps * cost["step_core_s"]
    upper = "at most " if recipe.training.stop_patience else ""
    levels = cost.get("levels_measured")
    how = "" if levels is None else f", extrapolated from {levels[0]} and {levels[1]} levels"
    return paragraph(
        f"Not trained here, so it has no weights. Expected cost: a training step takes "
        f"{time(cost['step_core_s'])} of processor time and the process {cost['memory_gib']:.1f} "
        f"GiB ({machine['hardware']}, {machine['backend']}, float32, without XLA{how}). With "
        f"{steps:,} steps an epoch takes {time(epoch)} of one core, its validation not counted, "
        f"and the recipe's {upper}{epochs:,} epochs {time(epoch * epochs)}."
    )


def time(seconds):
    """A time in a unit that can be read."""
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60), ("seconds", 1)):
        if seconds >= 2 * length or unit == "seconds":
            value = seconds / length
            return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def recipe(recipe, settings=None):
    """The most important fields of a recipe, and where it differs from the zoo's."""
    model, training = recipe.model, recipe.training
    clip = "" if model.clip_norm is None else f", gradients clipped to the norm {model.clip_norm:g}"
    lines = [
        model.summary(),
        f"optimizer {model.optimizer}, learning rate {model.learning_rate:g}{clip}"
        + (f", weight decay {model.l2:g}" if model.l2 else ""),
        f"batches of {training.batch_size}, at most {training.epochs} epochs{_decay(training)}"
        + _stopping(training),
    ]
    changed = {name: value for name, value in (settings or {}).items() if name != "seed"}
    if changed:
        named = ", ".join(f"`{name}={value!r}`" for name, value in changed.items())
        lines.append(f"differs from the zoo's recipe of that name in {named}")
    shown = f"`trellis-keras recipe {recipe.name}{_options(settings)}`"
    every = paragraph(f"{shown} shows every field, each an option of `train`.")
    return f"{_list(lines)}\n\n{every}"


def _decay(training):
    if training.decay_rule is None:
        return ""
    if training.decay_rule == "average":
        return '; the weights are averaged from where `decay_rule="average"` says'
    at = f" after the epochs {list(training.decay_epochs)}" if training.decay_epochs else ""
    return f'; decay rule "{training.decay_rule}", factor {training.decay_factor:g}{at}'


def _stopping(training):
    if training.stop_patience is None:
        return ""
    than = "one before" if training.stop_against == "previous" else "best before"
    by = f" by {training.stop_min_delta:g}" if training.stop_min_delta else ""
    return (
        f"; stops after {training.stop_patience} epochs in a row whose validation loss is not lower"
        f"{by} than the {than}"
    )


def data(recipe, checksum=None):
    """The data, their terms, and how to load them."""
    name = recipe.training.data
    options = {**recipe.training.data_options, **recipe.model.data_options()}
    if "path" in options:  # in whatever folder it was
        options["path"] = pathlib.PurePath(options["path"]).name
    about = info(name)
    call = ", ".join([repr(name), *(f"{key}={value!r}" for key, value in options.items())])
    known = "" if checksum is None else f" Checksum: `{checksum[:16]}...`."
    return paragraph(
        f"`trellis_keras.data.load({call})`: {about.citation}; {about.licence}. The data are no "
        "part of the package; `help(trellis_keras.data.load)` says where copies of yours are "
        f"looked for.{known}"
    )


def train(recipe, results, folder):
    """The commands that train the model, and write such a card."""
    backend = "KERAS_BACKEND=jax " if results.get("backend", "").startswith("jax") else ""
    settings = results.get("settings", {})
    command = f"{backend}trellis-keras train {recipe.name}{_options(settings)}{_text(recipe)}"
    seeds = [other["seed"] for other in results.get("other_seeds", ())]
    runs = [f"runs/{folder}", *(f"runs/{folder}_seed_{seed}" for seed in seeds)]
    lines = [f"{command} --output {runs[0]}"]
    for seed, run in zip(seeds, runs[1:], strict=True):
        other = {**settings, "seed": seed}
        lines.append(f"{backend}trellis-keras train {recipe.name}{_options(other)} --output {run}")
    others = "".join(f" --other-seed {run}" for run in runs[1:])
    # A folder named as the model is kept for the benchmark's own data.
    name = f"{folder}_text" if _text(recipe) else folder
    lines.append(f"{backend}trellis-keras publish {runs[0]} runs/published/{name}{others}")
    return "\n".join(["```sh", *lines, "```"])


def _options(settings):
    return "".join(
        f" --{name.replace('_', '-')} {shlex.quote(_word(value))}"
        for name, value in (settings or {}).items()
    )


def _word(value):
    """A setting as a word of the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _text(recipe):
    if recipe.training.data not in _TRAINED_ON_A_TEXT_OF_YOURS:
        return ""
    return ' --text novels.txt --data-options \'{"unit": "word", "unknown": "<unk>"}\''


def use(recipe, results, folder):
    """How to build the model, with its weights where these are published too, and to serve it."""
    arguments = [
        f"{name}={_literal(value)}"
        for name, value in results.get("settings", {}).items()
        if name in vars(recipe.model) and name not in _OF_THE_RUN
    ]
    weights = ['weights="pretrained"'] if "weights_sha256" in results else []
    comment = "" if weights else "  # with the weights as they are before training"
    return f"""```python
from trellis_keras import zoo

model = zoo.{recipe.name}({", ".join([*arguments, *weights])}){comment}
```

A trained run is served from a SavedModel, which `help(trellis_keras.serving.export)` describes
(it is written on TensorFlow):

```sh
trellis-keras export runs/{folder} serving/{recipe.name}
```"""


def _literal(value):
    return f'"{value}"' if isinstance(value, str) else repr(value)


def limits(recipe, results):
    """What the model cannot do."""
    model, lines = recipe.model, []
    if recipe.training.data in _TRAINED_ON_A_TEXT_OF_YOURS:
        lines.append(
            "The benchmark has no training text: with another one than the paper's the result is "
            "not comparable with the published one."
        )
    if registry.reads_text(model):
        lines.append(
            "The vocabulary is that of the data. Words that it lacks are read as `<unk>`."
            if recipe.training.data in _WITH_UNKNOWN_WORDS
            else "The vocabulary is that of the data; other tokens are refused."
        )
    seen = model.derived().get("receptive_field")
    if seen is not None:
        lines.append(f"No output depends on more than the last {seen:,} steps.")
    if results and vars(model).get("T") is not None:
        lines.append(f"Trained on sequences of the benchmark's length only (T={model.T}).")
    if "weights_sha256" in results:
        lines.append(
            "The weights are under the package's licence. They were trained on the benchmark's "
            "training split alone, for its task alone."
        )
    elif results:
        lines.append(f"The trained weights are not published: {WEIGHTS_KEPT}.")
    lines.append("Results differ between backends and machines in the last digits.")
    return _list(lines)


def _list(lines):
    return "\n".join(
        textwrap.fill(f"- {line}", 100, subsequent_indent="  ", break_on_hyphens=False)
        for line in lines
    )
