"""Time and memory of a training step of TCN, LSTM and GRU of equal size, as a function of T.

    python examples/studies/cost.py --quick

The TCN paper's section 3.5 (Bai et al. 2018): a TCN processes all steps in parallel, a recurrent
network sequentially; a TCN may need less memory in training. The task is copy memory, with targets
at all steps. Each cell runs in its own process; `study/step.py` describes what is measured. Run
this on an otherwise idle machine.
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Annotated

import typer
from study import cli

COLUMNS = [
    "net", "T", "seed", "parameters", "device", "first_call_s", "step_s", "idle_mib", "peak_mib",
]  # fmt: skip
NETS = ["tcn", "lstm", "gru"]
FULL = {"size": 70_000, "kernel_size": 8, "batch_size": 32, "steps": 20}
QUICK = {"size": 10_000, "kernel_size": 8, "batch_size": 32, "steps": 5}
DELAYS = [250, 1000, 4000]
QUICK_DELAYS = [50, 200]


def main(
    quick: cli.Quick = False,
    output: cli.Output = None,
    seed: cli.Seeds = (0,),
    T: Annotated[list[int] | None, typer.Option("--delay", min=1, help="T, in steps.")] = None,
):
    """Time and memory of a training step against T (section 3.5)."""
    settings = {"quick": quick, **(QUICK if quick else FULL)}
    delays = T or (QUICK_DELAYS if quick else DELAYS)
    run(cli.folder(output, "cost", quick), settings, delays, seed)


def run(folder, settings, delays, seeds, nets=NETS):
    """The study: every net at every delay."""
    from study.table import Study

    study = Study("cost", folder, settings, COLUMNS)
    for seed in seeds:
        for T in delays:
            for net in nets:
                cell = {"net": net, "T": T, "seed": seed}
                study.run(cell, lambda work, cell=cell: measure(settings, **cell))
    plot(study)
    return study


def measure(settings, **cell):
    """Runs `study/step.py` in a fresh process: nothing of other cells is in its memory."""
    folder = str(pathlib.Path(__file__).parent)
    path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    # JAX would take most of a GPU's memory at once.
    environment = {**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "study.step", json.dumps({**settings, **cell})]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{cell} failed:\n{done.stderr[-3000:]}")
    row = json.loads(done.stdout.splitlines()[-1])
    memory = row["peak_mib"] - row["idle_mib"]
    print(f"{cell}: {row['step_s']:.3g} s a step, {memory:.0f} MiB", flush=True)
    return [row]


def plot(study):
    """Draws time (left) and memory (right) against T."""
    from study import figures
    from study.nets import LABELS

    rows = study.rows()
    figure, (time, memory) = figures.panels(2)
    for net in dict.fromkeys(row["net"] for row in rows):
        here = sorted((row for row in rows if row["net"] == net), key=lambda row: row["T"])
        delays = [row["T"] for row in here]
        style = {"color": figures.COLORS[net], "marker": figures.MARKERS[net]}
        time.plot(delays, [row["step_s"] for row in here], label=LABELS[net], **style)
        used = [row["peak_mib"] - row["idle_mib"] for row in here]
        memory.plot(delays, used, label=LABELS[net], **style)
    time.set(ylabel="Seconds a training step", title="Time")
    memory.set(ylabel="MiB above the idle process", title="Peak memory of training")
    memory.set_ylim(0, 1.1 * memory.get_ylim()[1])
    time.set_yscale("log")
    for axis in (time, memory):
        axis.set(xlabel="Delay T in steps", xscale="log")
        delays = sorted({row["T"] for row in rows})
        axis.set_xticks(delays, [str(T) for T in delays])
        axis.set_xticks([], minor=True)
        axis.legend()
    figures.save(figure, study)


if __name__ == "__main__":
    cli.run(main)
