"""What is printed at the start and at the end of a run."""

import math
import pathlib
import shlex
from typing import Any

import keras

from trellis_keras.training.history import read_history
from trellis_keras.zoo.run.folder import BEST, FILES, HISTORY

_UNIFORM_NLL = {"perplexity": float, "bpc": math.log2, "cross_entropy": math.log}


def describe(recipe: Any, model: keras.Model, loaded: Any) -> str:
    """Returns a summary of a run in lines: model, data, batches, training, arithmetic."""
    training, options = recipe.training, recipe.training.options()
    sizes = ", ".join(f"{split} {size:,}" for split, size in loaded.sizes.items())
    if recipe.reads_text:
        size = len(loaded.vocabulary)
        guess = _UNIFORM_NLL[recipe.metric](size)
        data_line = (
            f"{recipe.data}: {sizes} {loaded.vocabulary.unit}s, vocabulary {size:,} "
            f"(a uniform guess: {recipe.metric} {guess:.4g})"
        )
        batches = f"{training.batch_size} x {options['sequence_length']} tokens, " + (
            "carrying the state over"
            if recipe.stateful
            else f"the first {options['context_length']} of each row context"
        )
    else:
        data_line = f"{recipe.data}: {sizes} sequences"
        batches = f"{training.batch_size} sequences, in a new order in each epoch"
    training_lines = [
        f"batches of {batches}",
        f"{options['optimizer']} {options['learning_rate']:g}, up to epoch {training.epochs}",
        *_describe_cycle(recipe, loaded),
    ]
    chosen = ", ".join(f"{k}={v}" for k, v in recipe.arguments.items() if v not in (None, 0, ()))
    lines = [
        f"{recipe.name}: {model.count_params():,} parameters ({chosen})",
        data_line,
        *training_lines,
        _describe_arithmetic(recipe, model),
    ]
    return "\n".join(lines)


def _describe_cycle(recipe, loaded):
    """Returns a warning if the cycle of the learning rate does not end with the last epoch."""
    options = recipe.training.options()
    if "decay_steps" not in options:
        return []
    warmup = options.get("warmup_steps", 0)
    steps, cycle = (
        recipe.training.epochs * len(recipe.stream(loaded.train)),
        warmup + options["decay_steps"],
    )
    if steps == cycle:
        return []
    return [
        f"WARNING: the learning rate falls to 0 in {cycle:,} steps, but the run has {steps:,}: "
        f"set --decay-steps {max(steps - warmup, 1)}"
    ]


def _describe_arithmetic(recipe, model):
    """Describes the precision of a step, its compiler, and who chose the compiler."""
    compiler = "compiled by XLA" if model.jit_compile else "without XLA"
    why = "as requested" if recipe.jit_compile is not None else "chosen for model and machine"
    return f"{model.backbone.compute_dtype}, {compiler} ({why})"


def describe_end(recipe: Any, folder: pathlib.Path) -> str:
    """Returns lines that say what a run has reached and written, and how to continue."""
    rows = read_history(folder / HISTORY)
    losses = [float(row["val_loss"]) for row in rows]
    best = rows[losses.index(min(losses))]
    reached = (f"{k} {float(v):.4g}" for k, v in best.items() if k.startswith("val_"))
    others = sorted(path.name for path in folder.iterdir() if path.name in FILES - {BEST})
    commands = ["evaluate {}", *["generate {}"] * recipe.reads_text, "export {} {}/serving"]
    quoted = shlex.quote(str(folder))
    next_steps = "\n      ".join(f"trellis-keras {c.format(quoted, quoted)}" for c in commands)
    return (
        f"Best epoch: {best['epoch']} of {len(rows)}, {', '.join(reached)}\n"
        f"{folder} has its model, {BEST}, and {', '.join(others)}.\nNext: {next_steps}"
    )
