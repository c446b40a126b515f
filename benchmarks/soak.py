"""Trains while being killed, and compares what is left with a run that nothing disturbed.

    python -m benchmarks.soak

A tiny model is trained by the command line, again and again in the same folder, and the process is
killed: while it starts, compiles, trains or validates, while it writes its records or a checkpoint,
and when it has just finished. No program can prepare for the signal that is sent. Where the process
is can be seen from outside: on its progress bar, and by the temporary names in its folder.
"""

import dataclasses
import io
import json
import os
import pathlib
import pty
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from typing import Annotated

import h5py
import typer

from benchmarks.__main__ import machine, write
from trellis_keras.training import checkpoint

EPOCHS = 6
# Every source of randomness, and a history carried from batch to batch.
SETTINGS = {
    "depth": 4,
    "hidden_units": 4,
    "embedding_dim": 4,
    "batch_size": 4,
    "sequence_length": 12,
    "stateful": "true",
    "aux_every": 2,
    "aux_weight": 0.1,
    "embedding_dropout": 0.1,
    "input_dropout": 0.1,
    "hidden_dropout": 0.2,
    "output_dropout": 0.1,
    "weight_dropout": 0.3,
    "weight_norm": "true",
    "jit_compile": "false",
    "epochs": EPOCHS,
    "sample_length": 0,
}
# How many of 30 kills are aimed at what.
AIMS = {
    "starting": 3,
    "compiling": 3,
    "training": 6,
    "validating": 5,
    "writing records": 5,
    "writing a checkpoint": 6,
    "finished": 2,
}
RECORDS = ["history.csv", "best.keras"]
_STYLE, _BACK = re.compile(r"\x1b\[[0-9;]*m"), re.compile(r"[\b\r]+")
_DESCRIBED = " parameters, "


def main(
    kills: Annotated[int, typer.Option(min=1, help="How often a process is killed.")] = 30,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    output: Annotated[str, typer.Option(help="Folder of the results.")] = "runs/benchmarks",
):
    """Print a table and write it as JSON and Markdown; the status is 1 if anything went wrong.

    KERAS_BACKEND chooses the backend.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = soak(pathlib.Path(folder), kills, seed)
    table = markdown(results)
    typer.echo(table)
    stem = pathlib.Path(output) / f"soak-{results['machine']['backend']}"
    stem.parent.mkdir(parents=True, exist_ok=True)
    write(stem.with_suffix(".json"), json.dumps(results, indent=2) + "\n")
    write(stem.with_suffix(".md"), table)
    sys.exit(bool(results["lost"] or results["different"]))


def soak(folder, kills, seed):
    """Kills processes of as many runs as it takes, and compares each with an undisturbed one.

    Returns:
        A dict: `kills`, a list of dicts; `runs`, how many were killed and then finished; `lost`
        and `different`, lists of what should not have happened.
    """
    rng = random.Random(seed)
    text = folder / "text.txt"
    text.write_text("".join(rng.choices("abc de\n", [9, 5, 3, 4, 2, 2, 1], k=6000)))
    whole = folder / "undisturbed"
    clock = _finish(whole, text)
    found, lost, different, runs = [], [], [], 0
    aims = _aims(rng, kills)
    while aims:
        run = folder / f"run-{runs}"
        runs += 1
        saved = 0
        while aims and _epochs_saved(run)[0] < EPOCHS:
            kill = _kill(run, text, aims[-1], rng, clock)
            if kill is None:  # it was faster, and has finished
                break
            aims.pop()
            kill["epochs_saved"], damage = _epochs_saved(run)
            typer.echo(json.dumps(kill))
            if damage or kill["epochs_saved"] < saved:
                lost.append({**kill, "damage": damage})
            saved = kill["epochs_saved"]
            found.append({"run": runs, **kill})
        _finish(run, text)
        different += [f"run {runs}: {name}" for name in differences(run, whole)]
    return {
        "machine": machine(),
        "seed": seed,
        "settings": SETTINGS,
        "runs": runs,
        "kills": found,
        "lost": lost,
        "different": different,
    }


def _aims(rng, kills):
    aims = []
    while len(aims) < kills:
        bag = [aim for aim, number in AIMS.items() for _ in range(number)]
        rng.shuffle(bag)
        aims += bag
    return aims[:kills]


@dataclasses.dataclass
class Process:
    """A training process on its own terminal, which shows how far it is."""

    run: pathlib.Path
    text: pathlib.Path

    def __enter__(self):
        words = ["train", "trellisnet_char", "--text", self.text, "--output", self.run]
        for name, value in SETTINGS.items():
            words += [f"--{name.replace('_', '-')}", value]
        self.shown, self.times = "", {}
        self._validation = self.run / "tensorboard" / "validation"
        self._terminal, end = pty.openpty()
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trellis_keras", *map(str, words)],
            stdin=end,
            stdout=end,
            stderr=end,
            env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "COLUMNS": "200"},
        )
        os.close(end)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(self, *_):
        self.kill()
        self._reader.join()
        os.close(self._terminal)

    def _read(self):
        while True:
            try:
                block = os.read(self._terminal, 2**16)
            except OSError:  # the process has ended
                return
            plain = _STYLE.sub("", block.decode(errors="replace"))
            self.shown += _BACK.sub("\n", plain)
            self.times.setdefault(self.phase(), self.seconds())

    def seconds(self):
        return time.monotonic() - self._began

    def lives(self):
        return self._process.poll() is None

    def kill(self):
        if self.lives():
            os.kill(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def wait(self):
        return self._process.wait()

    def epochs(self):
        """Returns the numbers of the epochs that this process has begun, from 1."""
        return [int(number) for number in re.findall(rf"Epoch (\d+)/{EPOCHS}\b", self.shown)]

    def bar(self):
        """Returns (batches done, batches) of the epoch, (0, 1) before the bar is there."""
        bars = re.findall(r"(\d+)/(\d+) ━", re.split(r"Epoch \d+/\d+", self.shown)[-1])
        return tuple(map(int, bars[-1])) if bars else (0, 1)

    def phase(self):
        if not self.epochs():
            return "compiling" if _DESCRIBED in self.shown else "starting"
        return "training" if self.bar()[0] or len(self.epochs()) > 1 else "compiling"

    def has_validated(self):
        """Whether it has begun to validate: TensorBoard's file of that is made then."""
        return any(str(self._process.pid) in name for name in _names(self._validation))

    def writes(self, record=None):
        """Whether it is writing a record of this name, or without one a checkpoint."""
        if record is None:
            names = _names(self.run / "checkpoints")
            return any(name.startswith(".writing-") for name in names)
        names = _names(self.run)
        return any(name.startswith(".writing-") and name.endswith(record) for name in names)


def _names(folder):
    return os.listdir(folder) if folder.is_dir() else []


def _finish(run, text):
    """Trains to the end; returns {phase: seconds after the start} of its first moment."""
    with Process(run, text) as process:
        if process.wait():
            raise RuntimeError(f"Training ended with an error:\n{process.shown[-3000:]}")
        return process.times


def _kill(run, text, aim, rng, clock):
    """Starts a process and kills it at a moment of the aimed kind.

    Returns:
        A dict of what was seen of it, or None if it had ended before.
    """
    before = _unfinished(run)
    with Process(run, text) as process:
        _wait_for(process, aim, rng, clock)
        moment = {
            "aim": aim,
            "seconds": round(process.seconds(), 2),
            "epoch": max(process.epochs(), default=None),
            "batch": "{}/{}".format(*process.bar()) if process.epochs() else None,
        }
        status = process.kill()
    clock.update(process.times)  # it depends on what else the machine does
    if status == 0:
        return None
    if status != -signal.SIGKILL:
        raise RuntimeError(f"Training ended with an error:\n{process.shown[-3000:]}")
    after = _unfinished(run)
    left = [re.sub(r"-\w{8}", "-*", after[name]) for name in after if name not in before]
    return {**moment, "left": left}


def _wait_for(process, aim, rng, clock):
    """Returns at the moment for the kill, or when the process has ended."""
    if aim == "starting":
        time.sleep(rng.uniform(0, clock["compiling"]))
    elif aim == "compiling":
        _until(process, lambda: _DESCRIBED in process.shown)
        time.sleep(rng.uniform(0, max(1, clock["training"] - clock["compiling"])))
    elif aim == "finished":
        _until(process, _last(process.run).exists)
        time.sleep(rng.uniform(0, 0.5))
    else:
        _wait_in_an_epoch(process, aim, rng)


def _wait_in_an_epoch(process, aim, rng):
    if aim == "validating":
        _until(process, process.has_validated)
        time.sleep(rng.uniform(0, 0.1))
        return
    begun, share = rng.choice([1, 1, 2]), rng.random() if aim == "training" else 0.85
    _until(process, lambda: len(process.epochs()) >= begun)
    _until(process, lambda: process.bar()[0] > share * process.bar()[1])
    if aim == "training":
        return
    file = rng.choice(RECORDS) if aim == "writing records" else None
    # A short pause: all of it takes some milliseconds.
    _until(process, lambda: process.writes(file), pause=0.0003)
    time.sleep(rng.choice([0, 0, 0.001, 0.003]))


def _until(process, condition, pause=0.002):
    while process.lives() and not condition():
        time.sleep(pause)


def _unfinished(run):
    """The files under temporary names."""
    found = {}
    for folder in (run, run / "checkpoints"):
        for name in sorted(_names(folder)):
            if name.startswith(".writing-"):
                found[name] = name
    return found


def _epochs_saved(run):
    """Returns the number of the newest whole checkpoint, 0 for none, and what is damaged."""
    with warnings.catch_warnings(record=True) as damage:
        warnings.simplefilter("always")
        number, _ = checkpoint.progress(run / "checkpoints")
    return number, [str(warning.message) for warning in damage]


def differences(run, other):
    """Names what differs, to the bit, between what two finished runs have left."""
    readers = {
        "weights and optimizer": _checkpoint,
        "state": lambda run: checkpoint.read(_last(run))[0],
        "history.csv": lambda run: (run / "history.csv").read_bytes(),
        "best.keras": _best,
    }
    return [name for name, read in readers.items() if read(run) != read(other)]


def _last(run):
    return run / "checkpoints" / f"epoch-{EPOCHS:04d}.npz"


def _checkpoint(run):
    return {name: a.tobytes() for name, a in checkpoint.read(_last(run))[1].items()}


def _best(run):
    """The datasets in the file of the best model's weights."""
    with zipfile.ZipFile(run / "best.keras") as archive:
        content = io.BytesIO(archive.read("model.weights.h5"))
    found = {}
    with h5py.File(content) as file:
        file.visititems(
            lambda name, part: (
                found.update({name: part[()].tobytes()}) if isinstance(part, h5py.Dataset) else None
            )
        )
    return found


def markdown(results):
    """Returns the results as Markdown."""
    machine_line = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    kills = results["kills"]
    lines = [
        f"### soak: {len(kills)} kills, {len(results['lost'])} lost or damaged checkpoints, "
        f"{len(results['different'])} different results",
        "",
        f"{machine_line}, seed {results['seed']}",
        "",
        f"{results['runs']} runs of {EPOCHS} epochs of a tiny `trellisnet_char` were killed, "
        "resumed and finished, and then compared with an undisturbed run, to the bit: weights and "
        "optimizer, callbacks' states, history.csv, best.keras.",
        "",
        "| aimed at | kills | of these with something half written | epochs saved by then |",
        "|---|---|---|---|",
    ]
    for aim in AIMS:
        hits = [kill for kill in kills if kill["aim"] == aim]
        half = sum(bool(kill["left"]) for kill in hits)
        saved = ", ".join(str(kill["epochs_saved"]) for kill in hits)
        lines.append(f"| {aim} | {len(hits)} | {half} | {saved} |")
    lines += [
        "",
        "| run | aimed at | epoch | batch | seconds | half written |",
        "|---|---|---|---|---|---|",
    ]
    for kill in kills:
        shown = [kill[name] or "" for name in ("epoch", "batch", "seconds")]
        left = "; ".join(kill["left"])
        lines.append("| " + " | ".join(map(str, [kill["run"], kill["aim"], *shown, left])) + " |")
    lines += ["", *(f"LOST: {loss}" for loss in results["lost"])]
    lines += [f"DIFFERENT: {difference}" for difference in results["different"]]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    typer.run(main)
