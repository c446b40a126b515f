"""Requests per second and latencies of a server under load.

    python examples/serving/load.py --endpoint step --clients 8 --seconds 10
    python examples/serving/load.py --endpoint serving_default --length 64 --requests 1000
    python examples/serving/load.py --model MODEL --channels 3    # a model of numbers

Each client is a thread that sends a request as soon as the previous one is answered; with `step` it
is a session. The first request of each client opens its connection and is not counted.
"""

import collections
import itertools
import json
import threading
import time
from typing import Annotated

import numpy as np
import typer
from serving_client import SensorSession, ServerError, Session

PERCENTILES = (50, 90, 95, 99)
ENDPOINTS = ("serving_default", "step")
# By whether the server is Triton, and whether it is asked over gRPC.
_ADDRESSES = {
    (False, False): "http://localhost:8501",
    (False, True): "localhost:8500",
    (True, False): "http://localhost:8000",
    (True, True): "grpc://localhost:8001",
}


def run(
    connect,
    endpoint,
    clients,
    seconds=None,
    requests=None,
    batch=1,
    length=64,
    size=10,
    channels=None,
):
    """Sends requests for `seconds`, or until `requests` are sent.

    Args:
        connect: Function that returns a new transport.
        endpoint: `"serving_default"` or `"step"`.
        clients: Number of threads.
        seconds, requests: Duration or number of requests; give one of them.
        batch, length: Shape of the tokens or numbers; `step` has no length.
        size: Token ids are drawn from [0, size).
        channels: Numbers per step of a model of numbers. Defaults to `None`, a language model.

    Returns:
        A dict with the number of answered and failed requests, the errors, requests per second, and
        percentiles and maximum of the latency in milliseconds.
    """
    if endpoint not in ENDPOINTS:
        raise ValueError(f"`endpoint` must be one of {ENDPOINTS}. Received: {endpoint!r}")
    if (seconds is None) == (requests is None):
        raise ValueError("Give either `seconds` or `requests`.")
    tickets = itertools.count() if requests is None else iter(range(requests))
    transports = [connect() for _ in range(clients)]
    senders = [
        _functions(
            transport, endpoint, (batch, length), np.random.default_rng(seed), size, channels
        )
        for seed, transport in enumerate(transports)
    ]
    for connect_and_send, _ in senders:
        connect_and_send()
    latencies, errors = [], []  # appending is thread-safe

    def client(send):
        while time.perf_counter() < end and next(tickets, None) is not None:
            sent = time.perf_counter()
            try:
                send()
                latencies.append(time.perf_counter() - sent)
            except ServerError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=client, args=(send,)) for _, send in senders]
    began = time.perf_counter()
    end = began + (float("inf") if seconds is None else seconds)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - began
    for transport in transports:
        transport.close()
    return summary(latencies, errors, elapsed)


def _functions(transport, endpoint, shape, rng, size, channels):
    """Returns two functions that send a request: the first one, and all others."""
    kind = Session if channels is None else SensorSession

    def values(*shape):
        if channels is None:
            return rng.integers(0, size, shape).astype(kind.dtype)
        return rng.normal(size=(*shape, channels)).astype(kind.dtype)

    if endpoint == "step":
        session = kind(transport, shape[0])
        return lambda: session.read(values(shape[0], 1)), lambda: session.step(values(shape[0]))

    def send():
        transport.predict(endpoint, {kind.inputs: values(*shape)})

    return send, send


def summary(latencies, errors, elapsed):
    """Returns what `run` returns, from latencies in seconds and error messages."""
    milliseconds = 1000 * np.array(latencies)
    result = {
        "requests": len(latencies),
        "errors": len(errors),
        "error_messages": dict(collections.Counter(errors)),
        "requests_per_second": len(latencies) / elapsed,
    }
    if latencies:
        # Latencies that were measured, without interpolation.
        values = np.percentile(milliseconds, PERCENTILES, method="inverted_cdf")
        result |= {f"p{p}_ms": float(v) for p, v in zip(PERCENTILES, values, strict=True)}
        result["max_ms"] = float(milliseconds.max())
    return result


def main(
    endpoint: Annotated[str, typer.Option(help="serving_default or step.")] = "step",
    clients: Annotated[int, typer.Option(min=1, help="Number of concurrent clients.")] = 4,
    seconds: Annotated[float | None, typer.Option(min=0, help="Duration. Defaults to 10.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Number of requests instead.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows per request.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens per row of serving_default.")] = 64,
    size: Annotated[int, typer.Option(min=1, help="Token ids are drawn from [0, size).")] = 10,
    channels: Annotated[
        int | None, typer.Option(min=1, help="Numbers per step, of a model of numbers.")
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model.")] = "trellisnet_char",
    address: Annotated[
        str | None, typer.Option(help="Defaults to the server's own port of this machine.")
    ] = None,
    grpc: Annotated[bool, typer.Option("--grpc", help="Use gRPC instead of REST.")] = False,
    triton: Annotated[bool, typer.Option("--triton", help="The server is Triton.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """Print requests per second and percentiles of the latency."""
    if triton:
        from triton_client import connect as Transport
    elif grpc:
        from grpc_client import GrpcTransport as Transport
    else:
        from rest_client import RestTransport as Transport
    address = address or _ADDRESSES[triton, grpc]
    if seconds is None and requests is None:
        seconds = 10.0
    try:
        result = run(
            lambda: Transport(address, model),
            endpoint,
            clients,
            seconds,
            requests,
            batch,
            length,
            size,
            channels,
        )
    except (ServerError, ValueError) as error:
        raise SystemExit(f"Error: {error}") from error
    typer.echo(json.dumps(result) if as_json else describe(result))


def describe(result):
    """Returns the result as text."""
    lines = [
        f"requests    {result['requests']}",
        f"errors      {result['errors']}",
        *(f"  {count} x {message}" for message, count in result["error_messages"].items()),
        f"requests/s  {result['requests_per_second']:.1f}",
    ]
    names = [f"p{p}" for p in PERCENTILES] + ["max"]
    if f"{names[0]}_ms" in result:
        lines.append("latency ms  " + "  ".join(f"{n} {result[f'{n}_ms']:.2f}" for n in names))
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
