"""Starts Triton on a repository, with the program that nvidia-pytriton has installed.

python server.py repository --http 8000 --grpc 8001
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from typing import Annotated

import pytriton
import typer

PACKAGE = pathlib.Path(pytriton.__file__).parent
STUB = "triton_python_backend_stub"


def serve(repository, http, grpc, backends):
    """Runs the server until it is ended; `backends` is an empty folder."""
    triton = PACKAGE / "tritonserver"
    shutil.copytree(triton / "backends" / "python", backends / "python")
    # The interpreter that runs the models, of this version of Python.
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(triton / "python_backend_stubs" / version / STUB, backends / "python" / STUB)
    command = [
        triton / "bin" / "tritonserver",
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        f"--http-port={http}",
        f"--grpc-port={grpc}",
        "--allow-metrics=false",
        # Models are loaded at the start, and again when the server is asked to.
        "--model-control-mode=explicit",
        "--load-model=*",
    ]
    libraries = [PACKAGE.with_name("nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        # Where the interpreter finds this environment.
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
    }
    process = subprocess.Popen([*map(str, command)], env=environment)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    return process.wait()


def main(
    repository: Annotated[str, typer.Argument(help="Folder that repository.py has written.")],
    http: Annotated[int, typer.Option(help="Port of HTTP.")] = 8000,
    grpc: Annotated[int, typer.Option(help="Port of gRPC.")] = 8001,
):
    """Serve the models of a repository until the process is ended."""
    with tempfile.TemporaryDirectory() as backends:
        sys.exit(serve(repository, http, grpc, pathlib.Path(backends)))


if __name__ == "__main__":
    typer.run(main)
