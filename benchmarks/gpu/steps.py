"""Step time, memory and fraction of peak of TrellisNets, in calls of a few minutes each.

    python -m benchmarks.gpu.steps --minutes 9 --peak-float32 TFLOPS --peak-bfloat16 TFLOPS

measures one cell after another (a model in a precision, with the dependency cone or all positions)
while time allows. Each cell is saved at once, so the next call continues with the missing ones.
Every call ends by writing the table `steps.md` and its numbers, `steps.json`.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Annotated

import typer

from benchmarks.__main__ import machine, write
from benchmarks.gpu.options import Minutes, Output, end_of_call
from trellis_keras.files import folder_lock, remove_unfinished

POLICIES = ("float32", "mixed_bfloat16")
# {display name: (zoo model, settings, settings for --quick, whether the cone omits positions)}
_TINY_WORDS = {"hidden_units": 8, "embedding_dim": 4, "output_units": 4, "aux_weight": 0.0}
_TINY_WORDS |= {"vocabulary_size": 20, "batch_size": 2}
_TINY_PIXELS = {"hidden_units": 6, "output_units": 4, "dilations": [1, 2, 4], "batch_size": 2}
MODELS = {
    "trellisnet_ptb": (
        "trellisnet_ptb",
        {},
        _TINY_WORDS | {"depth": 5, "sequence_length": 12, "context_length": 5},
        True,
    ),
    # All outputs count, so the cone contains all positions.
    "trellisnet_char_ptb": (
        "trellisnet_char_ptb",
        {},
        _TINY_WORDS | {"depth": 5, "sequence_length": 5},
        False,
    ),
    "trellisnet_seq_mnist": ("trellisnet_seq_mnist", {}, _TINY_PIXELS, True),
    "trellisnet_seq_cifar10": ("trellisnet_seq_cifar10", {}, _TINY_PIXELS, True),
    "trellisnet_seq_mnist 8m": ("trellisnet_seq_mnist", {"hidden_units": 990}, _TINY_PIXELS, True),
}
UNKNOWN_S = 180.0  # expected time of a cell if none has been measured
MARGIN = 1.3  # factor on the longest time so far


@dataclasses.dataclass(frozen=True)
class Cell:
    """A model of MODELS in a precision, with or without the dependency cone."""

    model: str
    policy: str
    cone: bool

    @property
    def name(self):
        return "-".join([self.model.replace(" ", "_"), self.policy, self.positions])

    @property
    def positions(self):
        return "cone" if self.cone else "all"

    def command(self, steps, quick):
        zoo_model, settings, tiny, _ = MODELS[self.model]
        command = [sys.executable, "-m", "benchmarks.gpu.cell", zoo_model, self.policy]
        command += ["--settings", json.dumps(settings | tiny if quick else settings)]
        command += ["--steps", str(steps), "--quick" if quick else "--no-quick"]
        return command + ["--all-positions"] * (not self.cone)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    output: Output = "runs/gpu",
    minutes: Minutes = 9.0,
    only: Annotated[
        list[str] | None, typer.Option(help="Only cells with this in the name; can be repeated.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps per cell, after 4 for warm-up.")] = 30,
    peak_float32: Annotated[
        float | None, typer.Option(help="The device's TFLOP/s in float32, see --precision.")
    ] = None,
    peak_bfloat16: Annotated[
        float | None, typer.Option(help="The device's TFLOP/s in bfloat16.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="JAX' float32 products: highest (no TF32), tensorfloat32 or bfloat16."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Use tiny models, to try out the script.")
    ] = False,
):
    """Measure the missing cells and write the table of all cells."""
    end = end_of_call(minutes)
    if precision is not None:
        os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = precision
    name = "-".join(["steps", *filter(None, [precision, "quick" if quick else None])])
    folder = pathlib.Path(output).expanduser() / name
    folder.mkdir(parents=True, exist_ok=True)
    cells = [cell for cell in all_cells() if any(part in cell.name for part in only or [""])]
    if not cells:
        raise typer.BadParameter(f"No cell matches. Available: {[c.name for c in all_cells()]}")
    with folder_lock(folder):
        remove_unfinished(folder)
        measure(folder, cells, end, lambda cell, left: run(cell, steps, quick, left))
        peaks = dict(zip(POLICIES, (peak_float32, peak_bfloat16), strict=True))
        results = {"machine": machine(), "peak_tflops": peaks, "cells": finished(folder)}
        write(folder.with_suffix(".json"), json.dumps(results, indent=2) + "\n")
        write(folder.with_suffix(".md"), markdown(results))
    typer.echo(markdown(results))
    typer.echo(conclusion(folder, cells))


def all_cells():
    return [
        Cell(model, policy, cone)
        for model, (*_, leaves_out) in MODELS.items()
        for policy in POLICIES
        for cone in ((True, False) if leaves_out else (True,))
    ]


def measure(folder, cells, end, run, clock=time.monotonic):
    """Measures the cells that have no file, while they are likely to end in time.

    Args:
        folder: Folder of the cells' files.
        cells: List of `Cell`s.
        end: When this call must end, by the clock.
        run: Function of a cell and the seconds left that returns its figures, or None if time ran
            out.
        clock: Function that returns seconds.
    """
    began = False
    for cell in cells:
        path = folder / f"{cell.name}.json"
        if path.exists() and not has_more_time(path, end - clock()):
            typer.echo(f"{cell.name}: {outcome(path)} before")
            continue
        # The first cell always starts: no other call would have more time for it.
        if began and clock() + expected(cell, finished(folder)) > end:
            return
        started = clock()
        figures = run(cell, end - started)
        if figures is None and began:
            return
        if figures is None:
            limit = end - started
            figures = {"error": f"did not end within {limit:.0f} s", "limit_s": limit}
        began = True
        figures = dataclasses.asdict(cell) | figures | {"wall_s": clock() - started}
        write(path, json.dumps(figures, indent=2) + "\n")
        shown = figures.get("error") or f"{figures['step_s']:.4g} s per step"
        typer.echo(f"{cell.name}: {shown}")


def conclusion(folder, cells):
    """Returns a line on what is left to do."""
    paths = {cell.name: folder / f"{cell.name}.json" for cell in cells}
    left = [name for name, path in paths.items() if not path.exists()]
    if left:
        return f"Left: {', '.join(left)}. The same command resumes."
    failed = [name for name, path in paths.items() if outcome(path) == "failed"]
    if failed:
        return (
            f"All is done, but these failed: {', '.join(failed)}. To repeat one that ran out of "
            f"time, pass more --minutes; to repeat another, remove its file in {folder}."
        )
    return "All is done."


def outcome(path):
    """Returns the outcome of a cell from its file: measured or failed."""
    return "failed" if "error" in json.loads(path.read_text(encoding="utf-8")) else "measured"


def has_more_time(path, left):
    """Returns whether a cell that ran out of time now has clearly more."""
    limit = json.loads(path.read_text(encoding="utf-8")).get("limit_s")
    return limit is not None and left > 1.1 * limit


def expected(cell, others):
    """Returns the expected seconds of a cell, from the longest, if possible of the same model."""
    same = [other for other in others if other["model"] == cell.model]
    walls = [other["wall_s"] for other in same or others]
    return MARGIN * max(walls) if walls else UNKNOWN_S


def run(cell, steps, quick, left):
    """Measures a cell in its own process.

    Returns:
        The figures, {"error": ...}, or None if the seconds that are left were not enough.
    """
    environment = {
        # Other processes may use the device, and the memory of a cell is measured.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **os.environ,
    }
    typer.echo(f"{cell.name} ...")
    try:
        done = subprocess.run(
            cell.command(steps, quick),
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=max(left, 1.0),
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return {"error": f"its process exited with status {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def finished(folder):
    """Returns the figures in a folder, in the order of the cells."""
    paths = [folder / f"{cell.name}.json" for cell in all_cells()]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


_NOTES = """
A step is a step of Keras' `fit` on random data in the recipe's shapes; "all" positions means
without the dependency cone. Operations are those of the matrix products, forward and backward:
"done" counts the computed positions, "full" all positions of all levels, computed or not. So "done"
per second is the machine's rate, and "full" per second compares with programs that compute
everything. "% of peak" is relative to --peak-float32 or --peak-bfloat16, "% of product" to a matrix
product of {sizes} in the same process and precision. If all outputs count (trellisnet_char_ptb),
the cone contains all positions.
"""
_COLUMNS = (
    *("model", "precision", "positions", "step, s (median)", "first call, s", "peak memory, GiB"),
    *("full, TFLOP", "done, TFLOP", "done, TFLOP/s", "done, % of peak"),
    *("done, % of product", "full, % of peak", "full, % of product"),
)


def markdown(results):
    """Returns the results as Markdown."""
    cells = results["cells"]
    measured = [cell for cell in cells if "error" not in cell]
    devices = sorted({cell["device"] for cell in measured})
    facts = [f"{key} {value}" for key, value in results["machine"].items()]
    lines = [
        "### steps: training steps of TrellisNets",
        "",
        ", ".join([*(f"device {device}" for device in devices), *facts]),
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|" + "---|" * len(_COLUMNS),
    ]
    for cell in cells:
        row = [cell["model"], cell["policy"], "cone" if cell["cone"] else "all"]
        row += _figures(cell, results["peak_tflops"][cell["policy"]])
        lines.append(f"| {' | '.join(row)} |")
    if measured:
        sizes = " x ".join(map(str, measured[0]["product"]))
        lines += _NOTES.format(sizes=sizes).rstrip().splitlines()
    return "\n".join(lines) + "\n"


def _figures(cell, peak):
    if "error" in cell:
        return [f"failed: {cell['error'][:200].replace('|', '/')}", *[""] * (len(_COLUMNS) - 4)]
    full, done = (cell[f"operations_{name}"] / cell["step_s"] for name in ("full", "done"))
    return [
        f"{cell['step_s']:.4g}",
        f"{cell['first_call_s']:.1f}",
        f"{cell['peak_gib']:.2f}",
        f"{cell['operations_full'] / 1e12:.3g}",
        f"{cell['operations_done'] / 1e12:.3g}",
        f"{done / 1e12:.3g}",
        _percent(done, peak and 1e12 * peak),
        _percent(done, cell["product_rate"]),
        _percent(full, peak and 1e12 * peak),
        _percent(full, cell["product_rate"]),
    ]


def _percent(rate, of):
    return f"{100 * rate / of:.1f}" if of else ""


if __name__ == "__main__":
    app()
