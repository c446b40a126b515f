"""Trains a list of runs one after another, and publishes each when it has finished.

    python -m tools.queue tools/queue.toml --output runs/queue

The list is a TOML file with a table for each run: `train`, the arguments of `trellis-keras train`,
and `note`, that of `tools.publish`. To resume an interrupted queue, repeat the command: it skips
published runs. A run that fails does not stop the others.
"""

import json
import pathlib
import shlex
import subprocess
import sys
import tomllib
from typing import Annotated, NamedTuple

import typer

from keras_streams.files import atomic_write
from trellis_keras.zoo.run import is_finished

PUBLISHED = "published.json"
_KEYS = {"train", "note"}


class Job(NamedTuple):
    """A run of the list.

    Attributes:
        name: Name of the run's folder.
        train: List of arguments for `trellis-keras train`.
        note: Note for readers of the card.
    """

    name: str
    train: list[str]
    note: str


def main(
    queue: Annotated[pathlib.Path, typer.Argument(help="TOML file with the list of runs.")],
    output: Annotated[pathlib.Path, typer.Option(help="Parent folder of the runs' folders.")],
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of local copies of the data.")
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="Limit for each run; the same command resumes it.")
    ] = None,
):
    """Train a list of runs and publish those that have finished."""
    jobs = read(queue)
    states = {}
    for job in jobs:
        typer.echo(f"== {job.name}: {shlex.join(job.train)}")
        states[job.name] = process(job, output / job.name, data_dir, max_minutes)
    typer.echo("\n".join(f"{name}: {state}" for name, state in states.items()))
    if any("failed" in state for state in states.values()):
        raise typer.Exit(1)


def read(path):
    """Returns the `Job`s of a list.

    Raises:
        ValueError: The file is not TOML, or a table has keys other than `train` and `note`.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    jobs = []
    for name, table in tables.items():
        texts = isinstance(table, dict) and all(isinstance(v, str) for v in table.values())
        if not texts or table.keys() != _KEYS:
            raise ValueError(
                f"{path}: a run must be a table of the strings {sorted(_KEYS)}. Received: {name} = "
                f"{table}"
            )
        jobs.append(Job(name, shlex.split(table["train"]), table["note"]))
    return jobs


def process(job, folder, data_dir=None, max_minutes=None):
    """Trains and publishes a run unless that is done, and returns its status as text."""
    done = folder / PUBLISHED
    if not done.exists():
        data = [] if data_dir is None else ["--data-dir", data_dir]
        limit = [] if max_minutes is None else ["--max-minutes", str(max_minutes)]
        train = ["trellis_keras", "train", *job.train, "--output", str(folder), *data, *limit]
        if run(train) is None:
            return "training failed"
        if not is_finished(folder):
            return "not finished"
        printed = run(["tools.publish", str(folder), "--note", job.note, *data])
        if printed is None:
            return "publishing failed"
        with atomic_write(done) as temporary:
            temporary.write_text(printed.splitlines()[-1], encoding="utf-8")
    results = json.loads(done.read_text(encoding="utf-8"))
    return f"published, {results['test']:.4g} on the test split"


def run(arguments):
    """Runs a module in its own process and returns its output, or None if it failed."""
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return "".join(lines) if process.returncode == 0 else None


if __name__ == "__main__":
    typer.run(main)
