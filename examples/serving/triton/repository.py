"""Writes exported models into a repository of Triton, which has one model per endpoint.

    python repository.py ../models/trellisnet_char repository

Every version of the export that the repository lacks is added, as `trellisnet_char-step/1` and so
on. Run it with the Python that has the server's TensorFlow; README.md beside this file.
"""

import json
import pathlib
import re
import shutil
import sysconfig
from typing import Annotated

import typer

HERE = pathlib.Path(__file__).resolve().parent
TYPES = {"float32": "TYPE_FP32", "int32": "TYPE_INT32", "string": "TYPE_STRING"}
# Each endpoint is a process with its own copy of TensorFlow: half a gigabyte.
DEFAULT = ["initial_cache", "step", "serving_default"]


def write(export, repository, endpoints=DEFAULT):
    """Adds the versions of an export to a repository.

    Args:
        export: Folder of an export, with a numbered folder per version.
        repository: Triton's folder, created if needed.
        endpoints: Names of the endpoints to serve.

    Returns:
        The names of Triton's models: `EXPORT-ENDPOINT`.
    """
    export, repository = pathlib.Path(export), pathlib.Path(repository)
    names = [f"{export.resolve().name}-{endpoint}" for endpoint in endpoints]
    versions = [path for path in export.iterdir() if path.name.isdecimal()]
    if not versions:
        raise ValueError(f"{export} has no version: it must be the folder of an export.")
    for version in sorted(versions, key=lambda path: int(path.name)):
        _check_no_links(version)
        configs = read_configs(version / "assets.extra" / "signatures.json", endpoints)
        for name, endpoint in zip(names, endpoints, strict=True):
            _write_version(repository / name, version, configs[endpoint])
    return names


def read_configs(path, endpoints):
    """Returns Triton's descriptions of endpoints, from a signatures.json that may be damaged.

    Raises:
        ValueError: if it does not describe the endpoints.
    """
    try:
        signatures = json.loads(path.read_text(encoding="utf-8"))
        return {endpoint: config(endpoint, signatures[endpoint]) for endpoint in endpoints}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} does not describe {', '.join(endpoints)}. {problem}") from error


def _check_no_links(version):
    """Links in an export would copy other files of this machine into the repository."""
    for path in version.rglob("*"):
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link; an export has only files and folders.")


def _write_version(folder, version, text):
    target = folder / version.name
    if target.exists():
        return
    writing = folder / f".{version.name}.writing"  # which the server does not read
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    shutil.copytree(version, writing / "export")
    shutil.copyfile(HERE / "model.py", writing / "model.py")
    (writing / "packages").write_text(sysconfig.get_path("purelib"))
    writing.rename(target)
    path = folder / "config.pbtxt"
    if not path.exists() or path.read_text() != text:  # a change would load all versions again
        path.write_text(text)


def config(endpoint, signature):
    """Returns Triton's description of an endpoint, from its entry in signatures.json."""
    lines = ['backend: "python"', "max_batch_size: 0"]
    for kind in ("input", "output"):
        for name, field in signature[f"{kind}s"].items():
            # The name is quoted below, so it must not contain quotes.
            if not re.fullmatch(r"\w+", name, re.ASCII):
                raise ValueError(f"{name!r} is not the name of a tensor.")
            sizes = [_size(size) for size in field["shape"]]
            dtype = TYPES[field["dtype"]]
            # Triton has no scalars.
            lines.append(f'{kind} {{ name: "{name}" data_type: {dtype} dims: {sizes or [1]} }}')
    lines += [
        f'parameters {{ key: "endpoint" value {{ string_value: "{endpoint}" }} }}',
        "instance_group { kind: KIND_CPU count: 1 }",
        # Sessions stay with the version that they started with.
        "version_policy { latest { num_versions: 2 } }",
    ]
    return "\n".join(lines) + "\n"


def _size(size):
    """Returns a size as Triton writes it: -1 for a name such as "batch"."""
    if isinstance(size, str):
        return -1
    if type(size) is not int or not 0 <= size < 2**31:
        raise ValueError(f"{size!r} is not a size.")
    return size


def main(
    export: Annotated[str, typer.Argument(help="Folder of an export, with its versions.")],
    repository: Annotated[str, typer.Argument(help="Folder of Triton's models.")],
    endpoint: Annotated[list[str], typer.Option(help="Endpoint to serve; repeat it.")] = DEFAULT,
    server: Annotated[
        str | None, typer.Option(help="Server to load them, by gRPC, such as localhost:8001.")
    ] = None,
):
    """Add the versions of an export to a repository of Triton."""
    names = write(export, repository, endpoint)
    if server is not None:
        import tritonclient.grpc

        client = tritonclient.grpc.InferenceServerClient(server)
    for name in names:
        if server is not None:
            client.load_model(name)
        typer.echo(name)


if __name__ == "__main__":
    typer.run(main)
