"""What the scripts have in common on the command line, and the end of a call."""

import time
from typing import Annotated

import typer

Output = Annotated[str, typer.Option(help="Folder of all state and results.")]
Minutes = Annotated[float, typer.Option(help="How long this call may take.")]


def end_of_call(minutes):
    """Returns when a call that begins now is over, by `time.monotonic`."""
    if not minutes > 0:
        raise typer.BadParameter(f"--minutes must be positive. Received: {minutes}")
    return time.monotonic() + 60 * minutes
