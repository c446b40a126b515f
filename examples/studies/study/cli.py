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
UsualSeeds = Annotated[
    list[int] | None,
    typer.Option("--seed", min=0, help="May be given several times. Default: the study's."),
]
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
# Of the LRU paper's studies.
Nets = Annotated[
    list[str] | None,
    typer.Option("--net", help="May be given several times: lru, rg_lru, ps_lru, gru, lstm, ..."),
]
Corpora = Annotated[
    list[str] | None,
    typer.Option(
        "--corpus",
        help="May be given several times: char_ptb, war_and_peace, enwik8, text8, pydoc.",
    ),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option("--size", help="Parameters, may be given several times: 250k, 1m, 10m, 24m."),
]
Percents = Annotated[
    list[int] | None,
    typer.Option(
        "--percent",
        min=1,
        max=100,
        help="Share of the training part that is used, in %. May be given several times.",
    ),
]
Characters = Annotated[
    int | None, typer.Option(min=1, help="Only the beginning of a corpus, split as a whole is.")
]
WholeEpochs = Annotated[
    int | None, typer.Option("--epochs", min=1, help="The most epochs, in place of the usual 60.")
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="In place of the paper's 250.")]
Policy = Annotated[
    str | None,
    typer.Option("--dtype-policy", help="Such as mixed_bfloat16, where the processor has units."),
]
Layers = Annotated[int | None, typer.Option(min=1, help="The paper: 2 or 4. RHN has one.")]


def folder(output, name, quick):
    """The folder of a study."""
    return output or f"runs/studies/{name}{'-quick' if quick else ''}"


def settings(quick, scale, epochs):
    """A study's settings: those of its scale, with the epochs of the command line if given."""
    return changed(quick, scale, epochs=epochs)


def changed(quick, scale, **given):
    """Returns a study's settings: those of its scale, overridden by the command line's."""
    return {"quick": quick, **scale, **{k: v for k, v in given.items() if v is not None}}


def run(main):
    """Runs a script's `main` with the options of the command line."""

    @functools.wraps(main)  # typer reads the options from the signature
    def command(**options):
        try:
            main(**options)
        except (ValueError, OSError, FloatingPointError) as error:
            print(f"Error: {error}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:  # caught here, because typer would exit silently
            print("\nInterrupted. The same command resumes from here.", file=sys.stderr)
            sys.exit(130)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    app()
