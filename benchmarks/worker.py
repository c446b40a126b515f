"""A process that builds one variant of a case and runs a step on request.

The parent alternates between several of these, so that all variants see the same load of the
machine. For each command on standard input, a line of JSON is printed on standard output.
"""

import json
import os
import sys
import time

from tools.process import peak_memory


def main(case, variant):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Workers share a GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps other output out of the answers

    from benchmarks.cases import CASES

    if sys.stdin.readline().strip() != "begin":
        return  # the parent has exited
    step = CASES[case].variants[variant]()
    print(json.dumps({"first_call_s": timed(step)[0]}), file=out)
    print(json.dumps({"warm_s": timed(step)[0]}), file=out)
    while sys.stdin.readline().strip() == "step":
        seconds, amount = timed(step)
        print(json.dumps({"step_s": seconds, "amount": amount}), file=out)
    print(json.dumps(device()), file=out)


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


def timed(step):
    """Runs a step and returns its seconds and amount."""
    started = time.perf_counter()
    amount = step()
    return time.perf_counter() - started, amount


if __name__ == "__main__":
    main(*sys.argv[1:])
