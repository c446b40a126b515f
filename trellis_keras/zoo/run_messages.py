"""What a run says: its settings, its end, and what to do after an error."""

import contextlib
import math
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import keras

from trellis_keras.files import write_error
from trellis_keras.scoring import METRICS
from trellis_keras.training import devices as parallel
from trellis_keras.training.checkpoint_files import latest_checkpoint
from trellis_keras.zoo.registry import Recipe
from trellis_keras.zoo.run import BEST, CHECKPOINTS, FILES, best_epoch, finished_epochs, resuming


def describe(recipe: Recipe, model: keras.Model, loaded: Any, *, is_new: bool) -> str:
    """Returns a summary of a run in lines: model, data, batches, training, arithmetic."""
    training, options = recipe.training, recipe.training.options()
    sizes = ", ".join(f"{k} {size:,}" for k, size in loaded.sizes.items())
    if recipe.reads_text:
        size, context = len(loaded.vocabulary), options["context_length"]
        guess = f"a uniform guess: {recipe.metric} {METRICS[recipe.metric](math.log(size)):.4g}"
        data = f"{loaded.vocabulary.unit}s, vocabulary {size:,} ({guess})"
        carried = "carrying the state over"
        rest = carried if recipe.stateful else f"the first {context} of each row context"
        batches = f"{training.batch_size} x {options['sequence_length']} tokens, {rest}"
    else:
        data = "sequences"
        batches = f"{training.batch_size} sequences, in a new order in each epoch"
    chosen = ", ".join(f"{k}={v}" for k, v in recipe.arguments.items() if v not in (None, 0, ()))
    lines = [
        f"{recipe.name}: {model.count_params():,} parameters ({chosen})",
        f"{recipe.data}: {sizes} {data}",
        f"batches of {batches}",
        f"{options['optimizer']} {options['learning_rate']:g}, up to epoch {training.epochs}",
    ]
    if "decay_steps" in options:
        warmup = options.get("warmup_steps", 0)
        cycle, steps = warmup + options["decay_steps"], len(recipe.batches(loaded.train))
        steps *= training.epochs
        if steps != cycle:
            then = "set" if is_new else "train anew with"
            lines.append(
                f"WARNING: the learning rate falls to 0 in {cycle:,} steps, but the run has "
                f"{steps:,}: {then} --decay-steps {max(steps - warmup, 1)}"
            )
    compiler = "compiled by XLA" if model.jit_compile else "without XLA"
    why = "chosen for model and machine" if recipe.jit_compile is None else "as requested"
    return "\n".join([*lines, f"{model.backbone.compute_dtype}, {compiler} ({why})"])


def describe_end(recipe, folder):
    """Returns lines that say what a run has reached and written, and how to continue."""
    rows = finished_epochs(folder)
    best = best_epoch(rows)
    reached = (f"{k} {value:.4g}" for k, value in best.items() if k.startswith("val_"))
    others = sorted(path.name for path in folder.iterdir() if path.name in FILES - {BEST})
    commands = ["evaluate {}", *["generate {}"] * recipe.reads_text, "export {} {}/serving"]
    quoted = shlex.quote(str(folder))
    next_steps = "\n      ".join(f"trellis-keras {c.format(quoted, quoted)}" for c in commands)
    return (
        f"Best epoch: {best['epoch']:.0f} of {len(rows)}, {', '.join(reached)}\n"
        f"{folder} has its model, {BEST}, and {', '.join(others)}.\nNext: {next_steps}"
    )


@contextlib.contextmanager
def explained(folder: pathlib.Path) -> Iterator[None]:
    """Adds to an error the last checkpoint of the run and the command that resumes it.

    Raises:
        FloatingPointError: If the training has diverged.
        OSError: If a file could not be written or read, including TensorFlow's own errors.
    """
    try:
        yield
    except FloatingPointError as error:
        saved = _saved(folder)
        again = "Resuming would diverge again: train in another folder," if saved else "Train"
        raise FloatingPointError(
            f"{error} {saved or 'Nothing was saved.'} {again} with a smaller learning rate or clip "
            "norm."
        ) from error
    except Exception as error:
        reason = _reason(error, folder)
        if reason is None:
            raise
        if parallel.process_count() > 1:
            then = "The same commands in all processes resume from the last checkpoint."
        elif saved := _saved(folder):
            then = f"{saved} When that is fixed, resume with: {resuming(folder)}"
        else:
            then = "Nothing was saved. When that is fixed, train again."
        raise OSError(f"{reason}. {then}") from error


def _saved(folder):
    """Returns a sentence that names the last checkpoint, or "" without checkpoints."""
    try:
        checkpoint = latest_checkpoint(folder / CHECKPOINTS)
    except (OSError, ValueError):  # possibly because of the same disk
        return "The checkpoints cannot be read either."
    return "" if checkpoint is None else f"The last good state is {checkpoint}."


def _reason(error, folder):
    """Returns a description of a failure of the disk or the data, or None for other errors."""
    if isinstance(error, OSError):
        return str(error)
    if parallel.process_count() > 1 and re.search("gloo|nccl|coordination", str(error), re.I):
        return f"Another process of this run has exited or cannot be reached ({error})"
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or not isinstance(error, tensorflow.errors.OpError):
        return None
    written = write_error(error, folder)
    if written:
        return f"{written.filename} could not be written: {written.strerror}"
    # Python code in its graph reads the data.
    read = re.search(r"PyFunc.*\n(\w+: [^\n]+)\nTraceback", error.message, re.DOTALL)
    return f"The data could not be read: {read[1]}" if read else None
