"""Options that all scripts share, and how they end on an error."""

import functools
import os
import sys
from typing import Annotated

import typer

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

Quick = Annotated[
    bool, typer.Option("--quick", help="Small, under two minutes: shows that it works.")
]
Output = Annotated[
    str | None,
    typer.Option(help="Folder of CSV, PNG and checkpoints. Default: runs/studies/<study>."),
]
Seeds = Annotated[list[int], typer.Option("--seed", min=0, help="May be given several times.")]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", help="May be given several times: adding_600, copy_memory_1000, ..."),
]
Epochs = Annotated[
    float | None, typer.Option(min=0.01, help="Passes over the data, in place of the usual ones.")
]
DataDir = Annotated[
    str | None, typer.Option(help="Folder of local copies of the data (or TRELLIS_KERAS_DATA).")
]


def folder(output, name, quick):
    """The folder of a study."""
    return output or f"runs/studies/{name}{'-quick' if quick else ''}"


def settings(quick, scale, epochs):
    """A study's settings: those of its scale, with the epochs of the command line if given."""
    return {"quick": quick, **scale, **({} if epochs is None else {"epochs": epochs})}


def run(main):
    """Runs a script's `main` with the options of the command line."""

    @functools.wraps(main)  # typer reads the options from the signature
    def command(**options):
        try:
            main(**options)
        except (ValueError, FileNotFoundError) as error:
            print(f"Error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:  # here, as typer would end without a word
            print("\nInterrupted. The same command goes on from here.", file=sys.stderr)
            sys.exit(130)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    app()
