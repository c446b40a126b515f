"""Gives every loader many damaged files, and prints what came of it.

    python -m tests.fuzz.fuzz --inputs 10000
    python -m tests.fuzz.fuzz --inputs 10000 --only png,mat

Each loader has a process of its own: a file that ends it is a finding too. Inputs that are findings
are kept in the folder `--keep`.
"""

import argparse
import collections
import faulthandler
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

SLOW = 10.0  # seconds for one small file
ENDLESS = 600  # seconds after which a process is ended


def fuzz(name, inputs, seed, keep):
    """Runs one loader; returns a row of the table."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    from tests.fuzz.fuzz_limits import Finding, attempt
    from tests.fuzz.fuzz_targets import CANARY, TARGETS

    counts, findings, slowest = collections.Counter(), {}, 0.0
    with tempfile.TemporaryDirectory() as folder, TARGETS[name](pathlib.Path(folder)) as target:
        os.chdir(folder)

        @seeded(seed)
        @settings(
            max_examples=inputs,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(target.inputs)
        def run(content):
            nonlocal slowest
            (keep / f"{name}.last").write_bytes(content)
            target.put(content)
            faulthandler.dump_traceback_later(ENDLESS, exit=True)
            begin = time.perf_counter()
            try:
                outcome = "accepted" if attempt(target.load, target.path) else "refused"
            except Finding as finding:
                outcome = "findings"
                kind = str(finding)[:60]
                if kind not in findings:
                    findings[kind] = f"{name}.{len(findings)}"
                    (keep / findings[kind]).write_bytes(content)
            seconds = time.perf_counter() - begin
            if seconds > SLOW:
                findings[f"{seconds:.0f} s"] = f"{name}.slow"
                (keep / f"{name}.slow").write_bytes(content)
            slowest = max(slowest, seconds)
            counts[outcome] += 1

        begin = time.perf_counter()
        run()
        if pathlib.Path(CANARY).exists():
            findings["code was run"] = "?"
        faulthandler.cancel_dump_traceback_later()
        os.chdir("/")
    row = {kind: counts[kind] for kind in ("accepted", "refused", "findings")}
    row |= {"slowest": slowest, "seconds": time.perf_counter() - begin, "kinds": findings}
    return {"loader": name, "inputs": counts.total(), **row}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="files for each loader")
    parser.add_argument("--only", default="", help="loaders, with commas between them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=pathlib.Path, default=pathlib.Path("fuzz-findings"))
    parser.add_argument("--in-this-process", action="store_true", help="for one loader")
    arguments = parser.parse_args()
    keep = arguments.keep.resolve()
    keep.mkdir(parents=True, exist_ok=True)
    if arguments.in_this_process:
        row = fuzz(arguments.only, arguments.inputs, arguments.seed, keep)
        print(json.dumps(row))
        return
    names = arguments.only.split(",") if arguments.only else _names()
    print("| loader | inputs | accepted | refused | findings | slowest | seconds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    found = False
    for name in names:
        command = [sys.executable, "-m", "tests.fuzz.fuzz", "--in-this-process", "--only", name]
        command += ["--inputs", arguments.inputs, "--seed", arguments.seed, "--keep", keep]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
        if done.returncode:
            found = True
            print(f"| {name} | ended with status {done.returncode} at {keep / name}.last |")
            print(done.stderr[-1500:], flush=True)
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        numbers = [row[key] for key in ("inputs", "accepted", "refused", "findings")]
        cells = [name, *(f"{n:,}" for n in numbers), f"{row['slowest']:.2f} s"]
        print(f"| {' | '.join(cells)} | {row['seconds']:.0f} |")
        for kind, file in row["kinds"].items():
            print(f"  {file}: {kind}")
        found |= bool(row["kinds"])
        sys.stdout.flush()
    sys.exit(found)


def _names():
    from tests.fuzz.fuzz_targets import TARGETS

    return list(TARGETS)


if __name__ == "__main__":
    main()
