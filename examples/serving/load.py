"""How many requests a second a server answers, and how long they take.

    python examples/serving/load.py --endpoint step --clients 8 --seconds 10
    python examples/serving/load.py --endpoint serving_default --length 64 --requests 1000

Each client is a thread that sends its next request when the last one is answered. Those of `step`
are sessions, which hold their own state. The first request of each client connects it and is not
counted.
"""

import collections
import itertools
import json
import threading
import time
from typing import Annotated

import numpy as np
import typer
from serving_client import ServerError, Session

PERCENTILES = (50, 90, 95, 99)
ENDPOINTS = ("serving_default", "step")


def run(connect, endpoint, clients, seconds=None, requests=None, batch=1, length=64, size=10):
    """Sends requests until `seconds` are over, or `requests` were sent.

    Args:
        connect: Function that returns a new transport.
        endpoint: `"serving_default"` or `"step"`.
        clients: Number of threads.
        seconds, requests: One of them.
        batch, length: Shape of the tokens; `step` has no length.
        size: Token ids are drawn below it.

    Returns:
        A dict: how many requests were answered and how many failed, with their messages, requests
        a second, and the percentiles and maximum of the latencies in milliseconds.
    """
    if endpoint not in ENDPOINTS:
        raise ValueError(f"`endpoint` is one of {ENDPOINTS}. Received: {endpoint!r}")
    if (seconds is None) == (requests is None):
        raise ValueError("Give either `seconds` or `requests`.")
    tickets = itertools.count() if requests is None else iter(range(requests))
    transports = [connect() for _ in range(clients)]
    senders = [
        _functions(transport, endpoint, batch, length, np.random.default_rng(seed), size)
        for seed, transport in enumerate(transports)
    ]
    for begin, _ in senders:
        begin()
    latencies, errors = [], []  # to append to a list is safe in threads

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


def _functions(transport, endpoint, batch, length, rng, size):
    """Returns two functions that send a request and wait for the answer: the first, and others."""

    def tokens(*shape):
        return rng.integers(0, size, shape).astype("int32")

    if endpoint == "step":
        session = Session(transport, batch)
        return lambda: session.read(tokens(batch, 1)), lambda: session.step(tokens(batch))

    def send():
        transport.predict(endpoint, {"tokens": tokens(batch, length)})

    return send, send


def summary(latencies, errors, elapsed):
    """What `run` returns, from seconds and messages."""
    milliseconds = 1000 * np.array(latencies)
    result = {
        "requests": len(latencies),
        "errors": len(errors),
        "error_messages": dict(collections.Counter(errors)),
        "requests_per_second": len(latencies) / elapsed,
    }
    if latencies:
        # The latency itself that so many requests did not exceed, nothing between two.
        values = np.percentile(milliseconds, PERCENTILES, method="inverted_cdf")
        result |= {f"p{p}_ms": float(v) for p, v in zip(PERCENTILES, values, strict=True)}
        result["max_ms"] = float(milliseconds.max())
    return result


def main(
    endpoint: Annotated[str, typer.Option(help="serving_default or step.")] = "step",
    clients: Annotated[int, typer.Option(min=1, help="That send at the same time.")] = 4,
    seconds: Annotated[float | None, typer.Option(min=0, help="How long to send.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many to send instead.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows a request.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens a row of serving_default.")] = 64,
    size: Annotated[int, typer.Option(min=1, help="Token ids are drawn below it.")] = 10,
    model: Annotated[str, typer.Option(help="Its name on the server.")] = "trellisnet_char",
    address: Annotated[str | None, typer.Option(help="Default: port 8501, gRPC 8500.")] = None,
    grpc: Annotated[bool, typer.Option("--grpc", help="Over gRPC instead of REST.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
):
    """Prints requests a second and percentiles of latency."""
    if grpc:
        from grpc_client import GrpcTransport as Transport
    else:
        from rest_client import RestTransport as Transport
    address = address or ("localhost:8500" if grpc else "http://localhost:8501")
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
        )
    except (ServerError, ValueError) as error:
        raise SystemExit(f"Error: {error}") from error
    typer.echo(json.dumps(result) if as_json else describe(result))


def describe(result):
    """The result as text."""
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
