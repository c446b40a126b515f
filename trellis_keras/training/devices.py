"""Data parallelism: every device holds the model and computes its share of a batch's rows.

A single machine uses `keras.distribution` on JAX and `tf.distribute.MirroredStrategy` on
TensorFlow. Several machines run one process each, connected by JAX's runtime.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

# Seconds without a heartbeat after which a process counts as lost, and all others exit.
_HEARTBEAT = 30


def join(coordinator: str, processes: int | None = None, process: int | None = None) -> None:
    """Joins this process to a training run on several machines. Call it before any computation.

    Args:
        coordinator: `"host:port"` of process 0, reachable from all processes, or `"auto"` if JAX
            can detect the launcher: Slurm, Open MPI, Kubernetes or a cloud service.
        processes: Number of processes. `None` with `"auto"`.
        process: Index of this process, from 0. `None` with `"auto"`.
    """
    backend = keras.backend.backend()
    if backend != "jax":
        raise ValueError(
            "Training with several processes needs the JAX backend: set KERAS_BACKEND=jax. "
            f"Received: {backend}"
        )
    numbers = processes, process
    is_automatic = coordinator == "auto"
    if is_automatic:
        is_valid = numbers == (None, None)
    else:
        is_valid = None not in numbers and 0 <= process < processes  # type: ignore[operator]
    if not is_valid:
        raise ValueError(
            "`coordinator` must be host:port with `processes` and `process` (counted from 0), or "
            f"'auto' alone. Received: coordinator={coordinator!r}, processes={processes}, "
            f"process={process}"
        )
    import jax

    address = None if is_automatic else coordinator
    try:
        jax.distributed.initialize(
            address, processes, process, heartbeat_timeout_seconds=_HEARTBEAT
        )
    except ValueError as error:
        raise ValueError(f"JAX does not recognize this process's launcher: {error}") from error


def end_at_once() -> None:
    """Exits immediately after an error in a process that has joined others, and prints the error.

    Otherwise JAX would wait for the other processes at exit, while they wait for this one.
    """
    error = sys.exception()
    jax = sys.modules.get("jax")
    is_joined = jax is not None and jax.distributed.is_initialized()
    status = error.code if isinstance(error, SystemExit) else 1
    if not is_joined or not status:
        return
    if not isinstance(error, SystemExit):
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


def process_count() -> int:
    """Returns the number of processes that train together."""
    if keras.backend.backend() != "jax":
        return 1
    import jax

    return jax.process_count()


def process_index() -> int:
    """Returns the index of this process, from 0. Process 0 writes the run."""
    if process_count() == 1:
        return 0
    import jax

    return jax.process_index()


def broadcast(content: bytes) -> bytes:
    """Returns the content from process 0, in all processes."""
    if process_count() == 1:
        return content
    from jax.experimental.multihost_utils import broadcast_one_to_all

    # Integers of 32 bits: an array has no larger ones by default.
    high, low = broadcast_one_to_all(np.array(divmod(len(content), 2**30), "int32"))
    size = int(high) * 2**30 + int(low)
    # Arrays must have the same size in all processes.
    room = np.zeros(size, "uint8")
    if process_index() == 0:
        room[:] = np.frombuffer(content, "uint8")
    return np.asarray(broadcast_one_to_all(room)).tobytes()


@contextlib.contextmanager
def data_parallel(devices: int | None, batch_size: int) -> Iterator[Any]:
    """Context in which a model trains on several devices.

    Args:
        devices: Positive integer, number of devices on this machine. `None` means one device, or,
            with several processes, all devices of each.
        batch_size: Positive integer, rows per batch.

    Yields:
        The context to build the model in.
    """
    several = process_count() > 1
    if several and devices is not None:
        raise ValueError(
            "Several processes always use all their devices: omit `devices`. "
            f"Received: devices={devices}"
        )
    if not several and devices in (None, 1):
        yield contextlib.nullcontext()
        return
    names = _names()
    if devices is not None and not 1 <= devices <= len(names):
        raise ValueError(
            f"The backend {keras.backend.backend()} has {len(names)} devices: {', '.join(names)}. "
            f"Received: devices={devices}"
        )
    names = names[:devices]
    if batch_size % len(names):
        raise ValueError(
            "`batch_size` must be a multiple of the number of devices. "
            f"Received: batch_size={batch_size}, {len(names)} devices"
        )
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # Outside the scope, callbacks compute as on one device.
        yield tf.distribute.MirroredStrategy(names).scope()
        return
    # Each process reads its own rows of every batch, see `OwnRows`.
    parallel = keras.distribution.DataParallel(devices=names, auto_shard_dataset=False)
    with parallel.scope():
        yield contextlib.nullcontext()


def _names():
    """Returns the names of the backend's devices: accelerators if any, otherwise CPUs."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
        return [device.name.removeprefix("/device:") for device in devices]
    return keras.distribution.list_devices()


class OwnRows(keras.utils.PyDataset):
    """This process's share of the rows of every batch of a stream, the same in all processes."""

    def __init__(self, stream: keras.utils.PyDataset) -> None:
        super().__init__()
        self.stream = stream

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, index: int) -> tuple:
        batch = self.stream[index]
        rows = len(batch[0]) // process_count()
        own = slice(process_index() * rows, (process_index() + 1) * rows)
        return tuple(part[own] for part in batch)

    def on_epoch_begin(self) -> None:
        self.stream.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.stream.on_epoch_end()


def own_rows(stream: keras.utils.PyDataset) -> keras.utils.PyDataset:
    """Returns `OwnRows`, or the stream itself if there is one process."""
    return stream if process_count() == 1 else OwnRows(stream)
