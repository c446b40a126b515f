"""A client of TensorFlow Serving or Triton over HTTP: scores and generates text, reads streams.

    python examples/serving/client.py score FILE
    python examples/serving/client.py generate "The "
    python examples/serving/client.py --model MODEL watch < measurements.csv
    python examples/serving/client.py --triton --address http://localhost:8000 watch < ...

It needs NumPy and typer, neither TensorFlow nor trellis_keras. See README.md beside this file.
"""

import functools
import json
import sys
import urllib.error
import urllib.request
from typing import Annotated

import numpy as np
import typer


class ServerError(Exception):
    """The server rejected a request, or did not respond."""


class TensorFlowServing:
    """A model on TensorFlow Serving, by its REST API.

    Args:
        address: String, such as `"http://localhost:8501"`.
        model: String, name of the model on the server.
        version: Integer. Defaults to the newest version that the server serves.
    """

    def __init__(self, address, model, version=None):
        self.url = f"{address}/v1/models/{model}"
        if version is None:
            states = _ask(self.url)["model_version_status"]
            ready = [int(one["version"]) for one in states if one["state"] == "AVAILABLE"]
            version = _newest(ready, model)
        self.version = version
        self.url += f"/versions/{version}"
        signatures = _ask(self.url + "/metadata")["metadata"]["signature_def"]["signature_def"]
        self.outputs = {name: list(one["outputs"]) for name, one in signatures.items()}

    def predict(self, endpoint, **inputs):
        """Returns the outputs of an endpoint, a dict of arrays."""
        # In columns: rows would need the same batch size for all inputs, scalars included.
        columns = {name: np.asarray(array).tolist() for name, array in inputs.items()}
        content = {"signature_name": endpoint, "inputs": columns}
        outputs = _ask(self.url + ":predict", content)["outputs"]
        if len(self.outputs[endpoint]) == 1:  # the server omits the name of a single output
            outputs = {self.outputs[endpoint][0]: outputs}
        return {name: np.array(value) for name, value in outputs.items()}


class Triton:
    """A model on Triton, one model per endpoint as written by triton/repository.py (KServe v2)."""

    TYPES = {"int32": "INT32", "float32": "FP32", "object": "BYTES"}

    def __init__(self, address, model, version=None):
        self.url = f"{address}/v2/models/{model}"
        ready = _ask(f"{address}/v2/repository/index", {"ready": True})
        versions = {}
        for one in ready:
            name, _, endpoint = one["name"].rpartition("-")
            if name == model:
                versions.setdefault(endpoint, set()).add(int(one["version"]))
        # Endpoints are loaded one after another: take a version that all of them have.
        common = set.intersection(*versions.values()) if versions else ()
        self.version = version or _newest(common, model)
        self.outputs = versions

    def predict(self, endpoint, **inputs):
        """Returns the outputs of an endpoint, a dict of arrays."""
        tensors = []
        for name, value in inputs.items():
            array = np.atleast_1d(value)  # Triton has no scalars
            tensor = {"name": name, "datatype": self.TYPES[array.dtype.name]}
            tensors.append({**tensor, "shape": array.shape, "data": array.ravel().tolist()})
        url = f"{self.url}-{endpoint}/versions/{self.version}/infer"
        outputs = _ask(url, {"inputs": tensors})["outputs"]
        return {one["name"]: np.reshape(one["data"], one["shape"]) for one in outputs}


class Session:
    """One stream of a model, or several in parallel. The server keeps nothing of it.

    The cache travels with every step: the server returns it, and the session sends it back. A cache
    belongs to the weights that made it, so a session stays with the version it started with.

    Args:
        server: `TensorFlowServing` or `Triton`.
        batch_size: Integer, number of streams. Defaults to 1.
    """

    def __init__(self, server, batch_size=1):
        self.server = server
        self.cache = server.predict("initial_cache", batch_size=np.int32(batch_size))

    def step(self, values):
        """Reads one step of each stream and returns the model's output.

        Args:
            values: Integer token ids of shape (batch,), or float numbers of shape
                (batch, channels).
        """
        values = np.asarray(values)
        if values.ndim == 1:
            inputs = {"tokens": values.astype("int32")}
        else:
            inputs = {"inputs": values.astype("float32")}
        cache = {
            # JSON does not tell float32 from float64, nor int32 from int64.
            name: array.astype("float32" if array.dtype.kind == "f" else "int32")
            for name, array in self.cache.items()
        }
        outputs = self.server.predict("step", **inputs, **cache)
        self.cache = {name: outputs.pop(name) for name in self.cache}
        (output,) = outputs.values()
        return output


def _newest(versions, model):
    if not versions:
        raise ServerError(f"The server has no version of {model!r} ready. Check --model, or wait.")
    return max(versions)


def _ask(url, content=None):
    body = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        message = error.read().decode("utf-8", "replace")
        raise ServerError(f"{url}: {error.code} {message}") from error
    except OSError as error:
        raise ServerError(f"{url}: {error}") from error


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main(
    context: typer.Context,
    address: Annotated[str, typer.Option(help="The server.")] = "http://localhost:8501",
    model: Annotated[str, typer.Option(help="Name of the model.")] = "trellisnet_char",
    triton: Annotated[bool, typer.Option("--triton", help="The server is Triton.")] = False,
):
    """A client of a served model: of text, or with `watch` of numbers."""
    # Called by the commands: their help needs no server.
    context.obj = functools.partial(Triton if triton else TensorFlowServing, address, model)


@app.command()
def score(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="Text file with a document per line.")],
):
    """Print the log-probability of each line in nats, and its number of scored tokens, as CSV."""
    server = context.obj()
    print("line,log_probability,num_tokens")
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            text = np.array([line.rstrip("\n")], dtype=object)
            scores = server.predict("score_text", text=text)
            print(f"{number},{scores['log_probability'][0]:.6f},{scores['num_tokens'][0]}")


@app.command()
def generate(
    context: typer.Context,
    prompts: Annotated[list[str], typer.Argument(help="Texts to continue.")],
    length: Annotated[int, typer.Option(min=1, help="Number of tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most probable.")] = 0.8,
    seed: Annotated[int, typer.Option(help="The same seed draws the same text.")] = 0,
):
    """Continue texts by tokens that the server samples, in one request."""
    texts = context.obj().predict(
        "generate_text",
        text=np.array(prompts, dtype=object),
        max_new_tokens=np.int32(length),
        temperature=np.float32(temperature),
        seed=np.int32(seed),
    )["text"]
    print(*texts, sep="\n")


@app.command()
def watch(context: typer.Context):
    """Read measurements as they arrive, a line of numbers per step, and print the outputs."""
    session = Session(context.obj())
    for line in sys.stdin:
        outputs = session.step([[float(number) for number in line.split(",")]])
        print(",".join(f"{number:.6g}" for number in outputs.ravel()), flush=True)


if __name__ == "__main__":
    try:
        app()
    except (ServerError, OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
