"""A fresh process that builds one variant of a case and runs a step whenever it is told to.

The parent talks to several of these in turn, so that variants are compared under the same load of
the machine. Lines of JSON go out on standard output, one per command on standard input.
"""

import json
import os
import resource
import sys
import time


def main(case, variant):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed must not mix with the answers

    from benchmarks.cases import CASES

    sys.stdin.readline()  # "begin": the others are waiting
    step = CASES[case].variants[variant]()
    print(json.dumps({"first_call_s": _timed(step)[0]}), file=out)
    print(json.dumps({"warm_s": _timed(step)[0]}), file=out)
    while sys.stdin.readline().strip() == "step":
        seconds, amount = _timed(step)
        print(json.dumps({"step_s": seconds, "amount": amount}), file=out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
    print(json.dumps({"peak_gib": peak}), file=out)


def _timed(step):
    started = time.perf_counter()
    amount = step()
    return time.perf_counter() - started, amount


if __name__ == "__main__":
    main(*sys.argv[1:])
