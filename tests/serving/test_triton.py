"""Exports under a real Triton Inference Server: scores, streams, load, and a new version.

Slow, and skipped unless TRELLIS_KERAS_TRITON is the Python of an environment that has the server;
examples/serving/triton/README.md says how to make one.
"""

import os
import pickle
import socket
import subprocess
import time
import urllib.request

import numpy as np
import pytest

from tests.support.processes import ROOT
from tests.support.served import inputs, scores, small_model
from trellis_keras.export import export

EXAMPLES = ROOT / "examples" / "serving"
PYTHON = os.environ.get("TRELLIS_KERAS_TRITON")
NAME = "tiny"
STREAMS, STEPS = 50, 40

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON, reason="needs Triton: examples/serving/triton/README.md, TRELLIS_KERAS_TRITON"
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two versions of a model, and the folder of its exports, where the second is not 2 yet."""
    first, second = small_model("trellisnet"), small_model("trellisnet")
    second.set_weights([weight * 0.5 for weight in second.get_weights()])
    folder = tmp_path_factory.mktemp("exports") / NAME
    export(first, folder)
    export(second, folder).rename(folder / "next")
    return first, second, folder


def free_ports(number):
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def write_repository(models, repository, *options):
    command = [PYTHON, EXAMPLES / "triton" / "repository.py", models[2], repository, *options]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """(repository, port of HTTP, port of gRPC) of a running server."""
    repository = tmp_path_factory.mktemp("triton") / "repository"
    write_repository(models, repository)
    http, grpc = free_ports(2)
    command = [PYTHON, EXAMPLES / "triton" / "server.py", repository, "--http", http]
    log = repository.with_name("log")
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [*map(str, command), "--grpc", str(grpc)],
            stdout=file,
            stderr=file,
        )
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://localhost:{http}/v2/health/ready").close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()[-3000:]
                time.sleep(0.5)
        else:
            raise AssertionError(log.read_text()[-3000:])
        yield repository, http, grpc
    finally:
        process.terminate()
        process.wait(60)


CLIENT = """
import collections, concurrent.futures, os, pickle, sys
sys.path.insert(0, sys.argv[1])
import load, numpy as np
from serving_client import ServerError, Session, score_texts
from triton_client import connect

name, files = sys.argv[2], sys.argv[3:5]
addresses = {"http": f"http://localhost:{sys.argv[5]}", "grpc": f"grpc://localhost:{sys.argv[6]}"}
what, tokens = pickle.load(open(files[0], "rb"))

def stream(number):
    # Every other one over gRPC.
    transport = connect(list(addresses.values())[number % 2], name)
    session = Session(transport)
    rows = [session.step(tokens[number, t : t + 1])[0] for t in range(tokens.shape[1])]
    transport.close()
    return rows

def ask():
    answers = {}
    for kind, address in addresses.items():
        transport = connect(address, name)
        answers[kind] = transport.predict("serving_default", {"tokens": tokens[:3]})
        answers[kind]["version"] = transport.newest_version()
        try:
            transport.predict("serving_default", {"tokens": tokens[:3] + 99})
        except ServerError as error:
            answers[kind]["refused"] = str(error)
        transport.close()
    return answers

def stream_all():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return np.array(list(pool.map(stream, range(len(tokens)))))

def load_one(kind, endpoint):
    # In rounds, until the test removes the file.
    total = collections.Counter()
    while os.path.exists(files[0]):
        new = lambda: connect(addresses[kind], name)
        result = load.run(new, endpoint, clients=4, seconds=3, length=20, size=7)
        total.update(requests=result["requests"], errors=result["errors"])
        total.update(result["error_messages"])
    return total

def load_all():
    kinds, endpoints = ["http", "grpc"], ["serving_default", "step"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(zip(kinds, pool.map(load_one, kinds, endpoints)))

pickle.dump({"ask": ask, "stream": stream_all, "load": load_all}[what](), open(files[1], "wb"))
"""


def start(what, server, folder, tokens):
    """Starts clients in Triton's environment; returns a function that waits for their answers."""
    asked, answered = folder / "asked", folder / "answered"
    asked.write_bytes(pickle.dumps((what, tokens)))
    command = [PYTHON, "-c", CLIENT, EXAMPLES, NAME, asked, answered, *server[1:]]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE, text=True)

    def wait():
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0, error[-3000:]
        return pickle.loads(answered.read_bytes())

    return wait


def test_whole_rows_and_a_wrong_request(models, server, tmp_path):
    tokens = inputs(models[0], 5, STEPS)[1]
    answers = start("ask", server, tmp_path, tokens)()
    expected = scores(models[0], tokens[:3])[1]
    for answer in answers.values():
        np.testing.assert_allclose(answer["log_probabilities"], expected, rtol=0, atol=1e-5)
        assert answer["version"] == 1
        assert "Token ids must be in [0, 7)" in answer["refused"]


def test_many_streams(models, server, tmp_path):
    tokens = inputs(models[0], STREAMS, STEPS)[1]
    found = start("stream", server, tmp_path, tokens)()
    error = np.abs(found - scores(models[0], tokens)[1]).max()
    print(
        f"{STREAMS} streams, {found.shape[0] * found.shape[1]} steps, worst difference {error:.1e}"
    )
    assert error < 1e-5


def test_a_new_version_under_load(models, server, tmp_path):
    tokens = inputs(models[0], 3, STEPS)[1]
    wait = start("load", server, tmp_path, tokens)
    time.sleep(10)
    (models[2] / "next").rename(models[2] / "2")
    write_repository(models, server[0], "--server", f"localhost:{server[2]}")
    (tmp_path / "asked").unlink()
    for kind, result in wait().items():
        print(kind, result)
        assert result["errors"] == 0 and result["requests"] > 100
    answers = start("ask", server, tmp_path, tokens)()
    for answer in answers.values():
        expected = scores(models[1], tokens)[1]
        np.testing.assert_allclose(answer["log_probabilities"], expected, rtol=0, atol=1e-5)
        assert answer["version"] == 2
