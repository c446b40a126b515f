"""The environment of a run: hardware, versions, commit, precision."""

import json
import os
import pathlib
import platform
import subprocess
from typing import Any

import keras

import trellis_keras
from keras_streams.files import atomic_write
from trellis_keras.files import read_json

_FIELDS = {"hardware": str, "backend": str, "trellis_keras": str, "commit": str | None}
_PROCESS_FIELDS = {"from_epoch": int, **_FIELDS, "dtype_policy": str}


def environment() -> dict[str, str | None]:
    """Returns hardware, backend, versions and commit of this process."""
    backend = keras.backend.backend()
    return {
        "hardware": ", ".join([f"{cores()} of {processor()}", *accelerators()]),
        "backend": f"{backend} {__import__(backend).__version__}, keras {keras.__version__}",
        "trellis_keras": trellis_keras.__version__,
        "commit": commit(),
    }


def record(path: pathlib.Path, dtype_policy: str | None, epochs: int, batches: int = 0) -> None:
    """Records this process as the one that now trains a run, in `environment.json`.

    The file contains the `environment()` of the newest process and `processes`: a list of the
    processes whose environment differs from that of the previous one, each with its first epoch,
    counted from 1.

    Args:
        path: Path of the file.
        dtype_policy: String, or `None` for Keras' default.
        epochs: Integer >= 0, number of epochs that the run has finished.
        batches: Integer >= 0, number of batches of the next epoch that it has finished.
    """
    now = environment()
    policy = dtype_policy or keras.config.dtype_policy().name
    process = {"from_epoch": epochs + 1, **now, "dtype_policy": policy}
    processes = read(path)["processes"] if path.exists() else []
    # Without finished batches, an earlier process began the next epoch in vain.
    newest = epochs + 1 if batches else epochs
    processes = [before for before in processes if before["from_epoch"] <= newest]
    if not processes or processes[-1] | {"from_epoch": epochs + 1} != process:
        processes.append(process)
    with atomic_write(path) as temporary:
        text = json.dumps({**now, "processes": processes}, indent=2) + "\n"
        temporary.write_text(text, encoding="utf-8")


def read(path: pathlib.Path) -> dict[str, Any]:
    """Returns the fields written by `record`, and no others.

    Raises:
        ValueError: If a field is missing or has the wrong type.
        FileNotFoundError: If there is no file.
    """
    found = read_json(path, "a record of how a run was computed")
    try:
        processes = [_fields(process, _PROCESS_FIELDS) for process in found["processes"]]
        return {**_fields(found, _FIELDS), "processes": processes}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a record of how a run was computed: {error!r}") from error


def _fields(found, types):
    for name, kinds in types.items():
        if isinstance(found[name], bool) or not isinstance(found[name], kinds):
            raise ValueError(f"{name} is {found[name]!r}")
    return {name: found[name] for name in types}


def processor() -> str:
    """Returns the processor's name."""
    return cpu_info("model name") or platform.processor() or platform.machine()


def cores() -> str:
    """Returns the number of cores that this process may use, such as "2 cores"."""
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return "1 core" if number == 1 else f"{number} cores"


def vector_units() -> list[str]:
    """Returns the processor's vector units, which determine the speed of matrix products."""
    flags = cpu_info("flags").split()
    return [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if unit in flags]


def cpu_info(field):
    """Returns the value of a field of /proc/cpuinfo, or "" if it is missing."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith(field):
                return line.split(":", 1)[1].strip()
    return ""


def accelerators() -> list[str]:
    """Returns the names of the backend's devices other than CPUs."""
    if keras.backend.backend() == "jax":
        import jax

        return [device.device_kind for device in jax.devices() if device.platform != "cpu"]
    if keras.backend.backend() == "torch":
        import torch

        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    import tensorflow as tf

    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    return [found.get("device_name", "GPU") for found in details]


def has_bfloat16_units() -> bool:
    """Whether bfloat16 matrix products are faster than float32 products on this machine.

    They are on accelerators, and on processors with AMX or AVX512_BF16: in TensorFlow's graph mode,
    and on JAX in the layers of this package (`kernels.products_jax`).
    """
    if accelerators():
        return True
    has_units = not {"amx_bf16", "avx512_bf16"}.isdisjoint(vector_units())
    return keras.backend.backend() != "torch" and has_units


def commit() -> str | None:
    """Returns the commit of the running checkout, marked if modified, or None outside of one."""
    root = pathlib.Path(trellis_keras.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
