"""Processes that run one variant each and answer commands with figures.

The parent alternates between several of these, so that all variants see the same load of the
machine.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

from tools.process import peak_memory

HERE = pathlib.Path(__file__).resolve().parent.parent


class Worker:
    """A process that answers each command with a dict.

    Args:
        *words: Its module and arguments.
        checkout: The checkout whose modules it imports.
    """

    def __init__(self, *words, checkout=HERE):
        path = os.pathsep.join([str(checkout), str(checkout / "packages" / "keras_streams")])
        self.words = words
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.words} exited with status {self.process.wait()}.")
        return json.loads(line)

    def kill(self):
        self.process.kill()
        self.process.wait()


def serve(**commands):
    """Answers each command on standard input with a line of JSON on standard output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps other output out of the answers
    for line in sys.stdin:
        print(json.dumps(commands[line.strip()]()), file=out)


def timed(step):
    """Runs a step and returns its seconds and amount."""
    started = time.perf_counter()
    amount = step()
    return time.perf_counter() - started, amount


def main(case, variant):
    # Workers share a GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    step = None

    def begin():
        nonlocal step
        from benchmarks.cases import CASES

        step = CASES[case].variants[variant]()
        seconds, _ = timed(step)
        step()  # a warm-up step
        return {"first_call_s": seconds}

    def run():
        seconds, amount = timed(step)
        return {"step_s": seconds, "amount": amount}

    serve(begin=begin, step=run, end=device)


def device():
    """Returns the device and its peak memory; on a CPU, that of this process."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        device = jax.devices()[0]
        statistics = device.memory_stats()
        if statistics:
            peak = statistics["peak_bytes_in_use"] / 2**30
            return {"device": device.device_kind, "peak_gib": peak}
    return {"device": "cpu", "peak_gib": peak_memory() / 2**30}


if __name__ == "__main__":
    main(*sys.argv[1:])
