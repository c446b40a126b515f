"""Why a training ended, in one line, and what is left of it."""

import contextlib
import re
import shlex
import sys

from trellis_keras.training import latest


def resuming(folder):
    """Returns the command with which the run in `folder` goes on, for a shell.

    Example:

    >>> resuming("runs/my first")
    "trellis-keras train --output 'runs/my first'"
    """
    return f"trellis-keras train --output {shlex.quote(str(folder))}"


@contextlib.contextmanager
def explained(folder):
    """Adds to the error that ends a training where its run stands and how it goes on.

    Args:
        folder: The run's folder.

    Raises:
        FloatingPointError: For one: the training has diverged.
        OSError: For one, and for TensorFlow's own errors from writing logs and reading data.
    """
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(
            f"{error} {_saved(folder)} From there the run would go on to the same end: train "
            "anew in another folder, with a smaller learning rate or clip norm."
        ) from error
    except Exception as error:
        reason = _reason(error, folder)
        if reason is None:
            raise
        raise OSError(
            f"{reason}. {_saved(folder)} When that is put right, go on with: {resuming(folder)}"
        ) from error


def _saved(folder):
    try:
        checkpoint = latest(folder / "checkpoints")
    except (OSError, ValueError):  # the same disk may be the reason of both
        return "What was saved before cannot be read now either."
    return "No epoch was saved." if checkpoint is None else f"The last good state is {checkpoint}."


def _reason(error, folder):
    """What went wrong with the world outside, or None for an error of another kind."""
    if isinstance(error, OSError):
        return str(error)
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or not isinstance(error, tensorflow.errors.OpError):
        return None
    # TensorFlow runs out of memory by the same class of error as out of room for its logs.
    written = re.search(rf"({re.escape(str(folder))}[^;\n]*); ([^\n\[]*\w)", error.message)
    if written:
        return f"{written[1]} could not be written: {written[2]}"
    # Python code in its graph reads the data.
    read = re.search(r"PyFunc.*\n(\w+: [^\n]+)\nTraceback", error.message, re.DOTALL)
    return f"The data could not be read: {read[1]}" if read else None
