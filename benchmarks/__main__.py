"""Runs benchmark cases, each variant in its own process, and writes JSON and Markdown."""

import fnmatch
import itertools
import os
import pathlib
import statistics
from typing import Annotated

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers share the GPU

import keras
import typer

from benchmarks import classification, edge, forecasts, rivals
from benchmarks.cases import CASES
from benchmarks.results import (
    ROUNDS,
    append_rows,
    heading,
    machine,
    read_rows,
    write,
    write_figures,
)
from benchmarks.worker import Worker
from tools.markdown import table

# Benchmarks that run their variants themselves. TABLES add missing rows to a CSV file.
TABLES = {"forecasts": forecasts, "classification": classification}
OWN = {"edge": edge, "rivals": rivals, **TABLES}

app = typer.Typer(add_completion=False, help=__doc__)


@app.command("list")
def list_command():
    """List the cases."""
    for name, case in CASES.items():
        typer.echo(f"{name:14} {case.about}: {'; '.join(case.variants)}")
    for name, module in OWN.items():
        about, _, _ = module.__doc__.partition(".")
        typer.echo(f"{name:14} {about}: {'; '.join(module.VARIANTS)}")


@app.command()
def run(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Cases, or patterns such as 'tcn_*'. "
            "Default: all; with options, those that take them."
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed steps per variant.")] = None,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            help="Only variants with this in the name, printed and not written; can be repeated."
        ),
    ] = None,
    against: Annotated[
        pathlib.Path | None,
        typer.Option(help="Another checkout to compare with; its variants run in alternation."),
    ] = None,
    output: Annotated[str, typer.Option(help="Folder of the results.")] = "runs/benchmarks",
):
    """Run cases and print a table for each.

    KERAS_BACKEND chooses the backend. With JAX on a GPU, memory is the GPU's.
    """
    options = {"--rounds": rounds, "--variants": variants, "--against": against}
    given = [option for option, value in options.items() if value is not None]
    known = [*CASES] if given and not names else [*CASES, *OWN]
    found = {pattern: fnmatch.filter(known, pattern) for pattern in names or ["*"]}
    if unknown := [pattern for pattern, matching in found.items() if not matching]:
        raise typer.BadParameter(f"Unknown cases {unknown}. Available: {known}")
    chosen = list(dict.fromkeys(itertools.chain(*found.values())))
    if given and (own := [name for name in chosen if name in OWN]):
        raise typer.BadParameter(f"{', '.join(own)} have no {' and '.join(given)}.")
    for name in chosen if variants else ():
        known = [*CASES[name].variants]
        if not any(part in variant for part in variants for variant in known):
            raise typer.BadParameter(f"No variant of {name} matches. It has: {', '.join(known)}.")
    folder = pathlib.Path(output)
    for name in chosen:
        try:
            _run(name, folder, rounds or ROUNDS, variants, against)
        except (SystemExit, ImportError) as error:
            if names:
                raise
            typer.echo(f"{name} is left out: {error}", err=True)


def _run(name, folder, rounds, variants, against):
    stem, results = f"{name}-{keras.backend.backend()}", {"case": name, "machine": machine()}
    if name in TABLES:
        stem, path = name, folder / f"{name}.csv"
        for rows in TABLES[name].missing_rows(read_rows(path)):
            append_rows(path, rows)
        results["rows"] = read_rows(path)
    elif name in OWN:
        results |= OWN[name].measure()
    else:
        results["machine"] |= _products()
        results |= _results(name, rounds, variants, against)
    if not variants and name not in TABLES:  # a part would replace the whole
        write_figures(folder / f"{stem}.json", results)
    table = (OWN[name].markdown if name in OWN else markdown)(results)
    typer.echo(table)
    if not variants:
        write(folder / f"{stem}.md", table)


def _results(name, rounds, parts, against):
    left_out = CASES[name].left_out(keras.backend.backend())
    chosen = [v for v in CASES[name].variants if any(part in v for part in parts or [""])]
    timed = [v for v in chosen if v not in left_out]
    return {
        "variants": measure(name, timed, rounds, against),
        "left_out": [v for v in chosen if v in left_out],
    }


def _products():
    """Returns the GFLOP/s of a large matrix product, measured before each case."""
    figures = measure("gemm", ["float32", "bf16"], rounds=3)
    rates = {kind: f["amount"] / f["step_s"] / 1e9 for kind, f in figures.items()}
    return {f"product in {kind}": f"{rate:.0f} GFLOP/s" for kind, rate in rates.items()}


def measure(name, variants, rounds, against=None):
    """Times the variants of a case in alternation and returns {variant: figures}.

    With `against`, each variant is followed by "before: ...", the same in that checkout.
    """
    workers = {}
    for variant in variants:
        workers[variant] = Worker("benchmarks.worker", name, variant)
        if against is not None:
            before = Worker("benchmarks.worker", name, variant, checkout=against.resolve())
            workers[f"before: {variant}"] = before
    try:
        # One at a time: compiling in parallel would distort the times.
        figures = {variant: worker.ask("begin") for variant, worker in workers.items()}
        steps = [{v: worker.ask("step") for v, worker in workers.items()} for _ in range(rounds)]
        for variant, worker in workers.items():
            times = [answers[variant]["step_s"] for answers in steps]
            figures[variant] |= {"steps_s": times, "step_s": statistics.median(times)}
            figures[variant] |= {"amount": steps[-1][variant]["amount"], **worker.ask("end")}
        return figures
    finally:
        for worker in workers.values():
            worker.kill()


def markdown(results):
    """Returns the results of a case as a Markdown table."""
    name, figures = results["case"], results["variants"]
    case = CASES[name]
    header = ["variant", "device", "step, s (median of steps)", "times faster", "peak, GiB"]
    header += ["first call - step, s", "GFLOP/s of the full computation"]
    rows = []
    for variant, f in figures.items():
        seconds, rate = _seconds(case, f), ""
        reference = f"before: {variant}" if f"before: {variant}" in figures else case.baseline
        base = figures.get(reference)
        ratio = f"{_seconds(case, base) / seconds:.2f}" if base else ""
        if case.unit == "operation" and f["amount"]:
            rate = f"{f['amount'] / f['step_s'] / 1e9:.0f}"
        peak, extra = f"{f['peak_gib']:.2f}", f"{f['first_call_s'] - f['step_s']:.1f}"
        rows.append([variant, f["device"], f"{seconds:.4g}", ratio, peak, extra, rate])
    text = heading(f"{name}: {case.about}", results["machine"]) + table(header, rows)
    if left_out := results.get("left_out"):
        text += f"\nOmitted, as Keras on JAX has no graphs without XLA: {'; '.join(left_out)}.\n"
    return text


def _seconds(case, figures):
    """Returns the time of a step, or of a token."""
    return figures["step_s"] / (figures["amount"] if case.unit == "token" else 1)


if __name__ == "__main__":
    app()
