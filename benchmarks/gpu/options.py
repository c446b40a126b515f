"""Command line options that the scripts share."""

import time
from typing import Annotated

import typer

Output = Annotated[str, typer.Option(help="Folder for all state and results.")]
Minutes = Annotated[float, typer.Option(help="Time limit of this call.")]


def end_of_call(minutes):
    """Returns when a call that starts now must end, by `time.monotonic`."""
    if not minutes > 0:
        raise typer.BadParameter(f"--minutes must be positive. Received: {minutes}")
    return time.monotonic() + 60 * minutes
