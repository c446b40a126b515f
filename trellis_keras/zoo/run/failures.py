"""Errors that say what a run has saved, and how to continue."""

import contextlib
import pathlib
import re
import sys
from collections.abc import Iterator

from trellis_keras.files import write_error
from trellis_keras.training import devices as parallel
from trellis_keras.training.checkpoint_files import latest
from trellis_keras.zoo.run.folder import CHECKPOINTS, resuming

_NOTHING = "Nothing was saved."


@contextlib.contextmanager
def explained(folder: pathlib.Path) -> Iterator[None]:
    """Adds to an error the last checkpoint of the run and the command that resumes it.

    Args:
        folder: The run's folder.

    Raises:
        FloatingPointError: The training has diverged.
        OSError: A file could not be written or read, including TensorFlow's own errors.
    """
    try:
        yield
    except FloatingPointError as error:
        saved = _saved(folder)
        again = (
            "Resuming would diverge again: train in another folder, with" if saved else "Train with"
        )
        raise FloatingPointError(
            f"{error} {saved or _NOTHING} {again} a smaller learning rate or clip norm."
        ) from error
    except Exception as error:
        reason = _reason(error, folder)
        if reason is None:
            raise
        if parallel.process_count() > 1:
            raise OSError(
                f"{reason}. The same commands in all processes resume from the last checkpoint."
            ) from error
        saved = _saved(folder)
        again = f"resume with: {resuming(folder)}" if saved else "train again."
        raise OSError(f"{reason}. {saved or _NOTHING} When that is fixed, {again}") from error


def _saved(folder):
    """Returns a sentence that names the last checkpoint, or "" without checkpoints."""
    try:
        checkpoint = latest(folder / CHECKPOINTS)
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
