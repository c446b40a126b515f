"""Gives every loader damaged files for some minutes, and prints what came of it.

    python -m tests.fuzz --minutes 5
    python -m tests.fuzz --minutes 60 --only png,mat --seed 1

A loader accepts a file, or refuses it by a ValueError or OSError that names it, within bounded
memory. Each has a process of its own: a file that ends it is a finding too. Inputs that are
findings are kept in the folder `--keep`.
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

MEMORY = 2**30  # bytes beside those that the process has when the loader begins
SLOW = 10.0  # seconds for one small file
ENDLESS = 600  # seconds after which a process is ended


class Finding(AssertionError):
    """A loader let another library's error through, or took more memory than it may."""


def attempt(target):
    """Returns whether a loader accepts its file; a `Finding` where it neither does nor refuses."""
    try:
        with _bounded_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.load()
        return True
    except (ValueError, OSError) as error:
        if target.path.name in str(error) or target.path.parent.name in str(error):
            return False
        raise Finding(f"{type(error).__name__} does not name the file: {error}") from error
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {error}") from error


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


def fuzz(name, seconds, seed, keep):
    """Tries one loader; returns the counts, and {what was found: the file that shows it}."""
    generator, counts, findings = random.Random(seed), {"accepted": 0, "refused": 0}, {}
    with tempfile.TemporaryDirectory() as folder, TARGETS[name](pathlib.Path(folder)) as target:
        os.chdir(folder)
        if target.path.exists():
            assert attempt(target), f"{target.path} is not damaged yet"
        end = time.monotonic() + seconds
        while (begin := time.monotonic()) < end:
            content = target.inputs(generator)
            (keep / f"{name}.last").write_bytes(content)
            target.put(content)
            faulthandler.dump_traceback_later(ENDLESS, exit=True)
            found = None
            try:
                counts["accepted" if attempt(target) else "refused"] += 1
            except Finding as finding:
                found = str(finding)[:60]
            if time.monotonic() - begin > SLOW:
                found = "slow"
            if found and found not in findings:
                findings[found] = f"{name}.{len(findings)}"
                (keep / findings[found]).write_bytes(content)
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
    parser.add_argument("--keep", type=pathlib.Path, default=pathlib.Path("fuzz-findings"))
    arguments = parser.parse_args()
    keep = arguments.keep.resolve()
    keep.mkdir(parents=True, exist_ok=True)
    names = arguments.only.split(",") if arguments.only else list(TARGETS)
    seconds = 60 * arguments.minutes / len(names)
    fork, failed = multiprocessing.get_context("fork"), False
    for name in names:
        receiver, sender = fork.Pipe(duplex=False)

        def run(name=name, sender=sender):
            sender.send(fuzz(name, seconds, arguments.seed, keep))

        process = fork.Process(target=run)
        process.start()
        process.join()
        if process.exitcode:
            print(f"{name}: ended with status {process.exitcode} at {keep / name}.last", flush=True)
            failed = True
            continue
        counts, findings = receiver.recv()
        print(f"{name}: {counts['accepted']:,} accepted, {counts['refused']:,} refused", flush=True)
        for kind, file in findings.items():
            print(f"  {keep / file}: {kind}", flush=True)
        failed |= bool(findings)
    sys.exit(failed)


if __name__ == "__main__":
    main()
