"""Time and memory of a training step, in the process that this module is: see `cost.py`.

The time is the median of several steps on one batch, after those that compile. The memory is the
peak during these steps. On a GPU that is what its allocator counts; elsewhere the resident memory
of the process, where that before the model was built is `idle_mib`. Compiling needs more memory
than training does, so the peak is set back after it; what the compiled step itself occupies stays
in.
"""

import ctypes
import json
import pathlib
import statistics
import sys
import time

WARM_UP = 3


def main(settings):
    """Prints a row as JSON on the last line of standard output."""
    import keras

    from study import nets, tasks
    from study.table import hardware
    from trellis_keras.zoo.datasets.synthetic import COPIED

    T, kernel_size, batch_size = (settings[key] for key in ("T", "kernel_size", "batch_size"))
    depth = nets.depth(T + 2 * COPIED, kernel_size)
    task = tasks.copy_memory(T, kernel_size=kernel_size, depth=depth, batch_size=batch_size)
    splits = tasks.load(task, train=batch_size)
    x, y = task.stream(splits, "train", settings["seed"])[0][:2]
    memory = device_memory() or ProcessMemory()
    idle = memory.now()
    model = nets.build(settings["net"], task, size=settings["size"], seed=settings["seed"])
    first, *_ = [_timed(model, x, y) for _ in range(WARM_UP)]
    memory.reset()
    seconds = [_timed(model, x, y) for _ in range(settings["steps"])]
    row = {
        "parameters": model.count_params(),
        "device": "gpu" if keras.distribution.list_devices("gpu") else "cpu",
        "first_call_s": round(first, 3),
        "step_s": statistics.median(seconds),
        "idle_mib": round(idle / 2**20, 1),
        "peak_mib": round(memory.peak() / 2**20, 1),
        "hardware": hardware(),
    }
    print("\n" + json.dumps(row))


def _timed(model, x, y):
    started = time.perf_counter()
    model.train_on_batch(x, y)  # returns floats, so the step has finished
    return time.perf_counter() - started


class ProcessMemory:
    """Resident memory of this process, in bytes (Linux)."""

    def now(self):
        return self._status("VmRSS")

    def reset(self):
        """Sets the peak back to what is in use now."""
        ctypes.CDLL(None).malloc_trim(0)  # releases memory that compiling has freed
        pathlib.Path("/proc/self/clear_refs").write_text("5")

    def peak(self):
        return self._status("VmHWM")

    def _status(self, name):
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise ValueError(f"This system does not say {name}.")


class TensorFlowMemory:
    """Memory that TensorFlow has allocated on the first GPU, in bytes."""

    def __init__(self):
        import tensorflow as tf

        self._config = tf.config.experimental

    def now(self):
        return self._config.get_memory_info("GPU:0")["current"]

    def reset(self):
        self._config.reset_memory_stats("GPU:0")

    def peak(self):
        return self._config.get_memory_info("GPU:0")["peak"]


class JaxMemory:
    """Memory that JAX has allocated on the first GPU, in bytes. Its peak cannot be reset."""

    def __init__(self):
        import jax

        self._device = jax.devices()[0]

    def now(self):
        return self._device.memory_stats()["bytes_in_use"]

    def reset(self):
        pass

    def peak(self):
        return self._device.memory_stats()["peak_bytes_in_use"]


def device_memory():
    """The memory of the GPU, or None on a machine without one."""
    import keras

    if not keras.distribution.list_devices("gpu"):
        return None
    return JaxMemory() if keras.backend.backend() == "jax" else TensorFlowMemory()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
