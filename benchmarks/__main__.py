"""Runs benchmark cases, each variant in its own process, and writes JSON and Markdown."""

import fnmatch
import pathlib
import statistics
from typing import Annotated

import typer

from benchmarks import classification, edge, forecasts, integers, rivals
from benchmarks.cases import CASES
from benchmarks.results import heading, machine, write, write_figures
from benchmarks.worker import Worker

# Benchmarks that run their variants themselves.
OWN = {
    "edge": (edge, "a step of small nets, as called"),
    "rivals": (rivals, "training and steps of nets of one size"),
    "integers": (integers, "accuracy of integer-only C"),
    "forecasts": (forecasts, "public series, compared with other packages"),
    "classification": (classification, "UCR and UEA archives, accuracy in %"),
}

app = typer.Typer(add_completion=False, help=__doc__)


@app.command("list")
def list_command():
    """List the cases."""
    for name, case in CASES.items():
        typer.echo(f"{name:14} {case.about}: {'; '.join(case.variants)}")
    for name, (module, what) in OWN.items():
        typer.echo(f"{name:14} {what}: {'; '.join(module.VARIANTS)}")


@app.command()
def run(
    names: Annotated[
        list[str] | None, typer.Argument(help="Cases, or patterns such as 'tcn_*'. Default: all.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Timed steps per variant.")] = 5,
    variants: Annotated[
        list[str] | None, typer.Option(help="Only variants with this in the name; can be repeated.")
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
    folder = pathlib.Path(output)
    patterns = names or ["*"]
    for name in OWN.keys() & set(patterns):
        typer.echo(OWN[name][0].run(folder, rounds))
    patterns = [pattern for pattern in patterns if pattern not in OWN]
    unknown = [pattern for pattern in patterns if not fnmatch.filter(CASES, pattern)]
    names = [name for pattern in patterns for name in fnmatch.filter(CASES, pattern)]
    if unknown:
        raise typer.BadParameter(f"Unknown cases {unknown}. Available: {list(CASES)}")
    for name in names:
        parts = variants or [""]
        chosen = [v for v in CASES[name].variants if any(part in v for part in parts)]
        left_out = [v for v in CASES[name].left_out(machine()["backend"]) if v in chosen]
        chosen = [v for v in chosen if v not in left_out]
        products = _products()
        figures = measure(name, chosen, rounds, against)
        results = {"case": name, "machine": machine() | products, "variants": figures}
        results["left_out"] = left_out
        table = markdown(name, results)
        typer.echo(table)
        stem = f"{name}-{results['machine']['backend']}"
        write_figures(folder / f"{stem}.json", results)
        write(folder / f"{stem}.md", table)


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


def markdown(name, results):
    """Returns the results of a case as a Markdown table."""
    case, figures = CASES[name], results["variants"]
    lines = [
        *heading(f"{name}: {case.about}", results["machine"]),
        "| variant | device | step, s (median of steps) | times faster | peak, GiB "
        "| first call - step, s | GFLOP/s of the full computation |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant, f in figures.items():
        base, base_amount = _reference(case, variant, figures)
        # For amounts in tokens, compares the time per token.
        amount = f["amount"] if 0 < f["amount"] < 1e6 else 1
        other = base_amount if 0 < base_amount < 1e6 else 1
        per_unit = f["step_s"] / amount
        ratio = f"{base / other / per_unit:.2f}" if base else ""
        rate = f"{f['amount'] / f['step_s'] / 1e9:.0f}" if f["amount"] >= 1e6 else ""
        lines.append(
            f"| {variant} | {f['device']} | {per_unit:.4g} | {ratio} | {f['peak_gib']:.2f} | "
            f"{f['first_call_s'] - f['step_s']:.1f} | {rate} |"
        )
    if left_out := results.get("left_out"):
        lines += ["", f"Omitted, as Keras on JAX has no graphs without XLA: {'; '.join(left_out)}."]
    return "\n".join(lines) + "\n"


def _reference(case, variant, figures):
    """Returns seconds and amount of the reference: the "before" variant, or the baseline."""
    reference = f"before: {variant}" if f"before: {variant}" in figures else case.baseline
    found = figures.get(reference, {})
    return found.get("step_s"), found.get("amount") or 1


if __name__ == "__main__":
    app()
