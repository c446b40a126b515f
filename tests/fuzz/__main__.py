"""Gives every loader damaged files for some minutes, and prints what came of it.

    python -m tests.fuzz --minutes 5
    python -m tests.fuzz --minutes 60 --only png,mat --seed 1

A loader accepts a file, or refuses it by a ValueError or OSError that names it, within bounded
memory. Each has a process of its own: a file that ends it is a finding too. Inputs that are
findings are kept in the folder `fuzz-findings`.
"""

import argparse
import contextlib
import faulthandler
import multiprocessing
import os
import pathlib
import random
import resource
import sys
import tempfile
import time
import warnings

from tests.fuzz.targets import CANARY, TARGETS

KEEP = pathlib.Path("fuzz-findings").resolve()
MEMORY = 2**30  # bytes beside those that the process has when the loader begins
SLOW = 10.0  # seconds for one small file
ENDLESS = 600  # seconds after which a process is ended


def attempt(target):
    """Returns what is wrong with how a loader takes its file, or whether it accepts it."""
    try:
        with _bounded_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.load()
        return True
    except Exception as error:
        names_file = target.path.name in str(error) or target.path.parent.name in str(error)
        if isinstance(error, (ValueError, OSError)) and names_file:
            return False
        return f"{type(error).__name__}: {error}"[:60]


@contextlib.contextmanager
def _bounded_memory():
    status = pathlib.Path("/proc/self/status").read_text()
    used = 1024 * int(status.split("VmSize:")[1].split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(name, seconds, seed):
    """Tries one loader; returns the counts, and {what was found: the file that shows it}."""
    generator, counts, findings = random.Random(seed), {True: 0, False: 0}, {}
    with tempfile.TemporaryDirectory() as folder, TARGETS[name](pathlib.Path(folder)) as target:
        os.chdir(folder)
        if target.path.exists():
            assert attempt(target) is True, f"{target.path} is not damaged yet"
        end = time.monotonic() + seconds
        while (begin := time.monotonic()) < end:
            content = target.inputs(generator)
            (KEEP / f"{name}.last").write_bytes(content)
            target.put(content)
            faulthandler.dump_traceback_later(ENDLESS, exit=True)
            found = attempt(target)
            if time.monotonic() - begin > SLOW:
                found = "slow"
            if isinstance(found, bool):
                counts[found] += 1
            elif found not in findings:
                findings[found] = f"{name}.{len(findings)}"
                (KEEP / findings[found]).write_bytes(content)
        faulthandler.cancel_dump_traceback_later()
        if pathlib.Path(CANARY).exists():
            findings["code was run"] = f"{name}.last"
        os.chdir("/")
    return counts, findings


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5, help="for all loaders together")
    parser.add_argument("--only", default="", help="loaders, with commas between them")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    KEEP.mkdir(exist_ok=True)
    names = arguments.only.split(",") if arguments.only else list(TARGETS)
    seconds = 60 * arguments.minutes / len(names)
    fork, failed = multiprocessing.get_context("fork"), False
    for name in names:
        receiver, sender = fork.Pipe(duplex=False)

        def run(name=name, sender=sender):
            sender.send(fuzz(name, seconds, arguments.seed))

        process = fork.Process(target=run)
        process.start()
        process.join()
        if process.exitcode:
            print(f"{name}: ended with status {process.exitcode} at {KEEP / name}.last", flush=True)
            failed = True
            continue
        counts, findings = receiver.recv()
        print(f"{name}: {counts[True]:,} accepted, {counts[False]:,} refused", flush=True)
        for kind, file in findings.items():
            print(f"  {KEEP / file}: {kind}", flush=True)
        failed |= bool(findings)
    sys.exit(failed)


if __name__ == "__main__":
    main()
