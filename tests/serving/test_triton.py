"""Exports under a real Triton Inference Server: scores, streams, and a new version.

Skipped unless TRELLIS_KERAS_TRITON is the Python of an environment that has the server;
examples/serving/triton/README.md says how to make one.
"""

import json
import os
import pickle
import runpy
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
            [*map(str, command), "--grpc", str(grpc)], stdout=file, stderr=file
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
import concurrent.futures, pickle, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from client import ServerError, Session, Triton

name, files, address = sys.argv[2], sys.argv[3:5], f"http://localhost:{sys.argv[5]}"
tokens = pickle.load(open(files[0], "rb"))
server = Triton(address, name)

def stream(number):
    session = Session(server)
    return [session.step(tokens[number, t : t + 1])[0] for t in range(tokens.shape[1])]

answers = server.predict("serving_default", tokens=tokens[:3])
answers["version"] = server.version
try:
    server.predict("serving_default", tokens=tokens[:3] + 99)
except ServerError as error:
    answers["refused"] = str(error)
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    answers["streams"] = np.array(list(pool.map(stream, range(len(tokens)))))
pickle.dump(answers, open(files[1], "wb"))
"""


def check_answers(server, folder, model, version):
    """Asks in Triton's environment for whole rows, a wrong request and many streams."""
    tokens = inputs(model, STREAMS, STEPS)[1]
    asked, answered = folder / "asked", folder / "answered"
    asked.write_bytes(pickle.dumps(tokens))
    command = [PYTHON, "-c", CLIENT, EXAMPLES, NAME, asked, answered, server[1]]
    subprocess.run([*map(str, command)], check=True, timeout=300)
    answers = pickle.loads(answered.read_bytes())
    expected = scores(model, tokens)[1]
    np.testing.assert_allclose(answers.pop("streams"), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(answers["log_probabilities"], expected[:3], rtol=0, atol=1e-5)
    assert answers["version"] == version
    assert "Token ids must be in [0, 7)" in answers["refused"]


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs Triton: examples/serving/triton/README.md")
def test_versions_and_streams(models, server, tmp_path):
    first, second, folder = models
    check_answers(server, tmp_path, first, version=1)
    (folder / "next").rename(folder / "2")
    write_repository(models, server[0], "--server", f"localhost:{server[2]}")
    check_answers(server, tmp_path, second, version=2)


@pytest.fixture
def repository():
    return runpy.run_path(str(EXAMPLES / "triton" / "repository.py"))


def test_repositories_refuse_links_in_an_export(repository, tmp_path):
    """A link in a stranger's export would copy another file of this machine."""
    (tmp_path / "tiny" / "1").mkdir(parents=True)
    (tmp_path / "tiny" / "1" / "variables").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="variables is a symbolic link"):
        repository["write"](tmp_path / "tiny", tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


def test_an_interrupted_copy_is_repeated_and_the_newest_version_is_described(
    repository, tmp_path, monkeypatch
):
    export, target = tmp_path / "tiny", tmp_path / "repository" / "tiny-step"
    for version in (2, 10):
        (export / f"{version}" / "assets.extra").mkdir(parents=True)
        inputs = {"x": {"dtype": "float32", "shape": [version]}}
        text = json.dumps({"step": {"inputs": inputs, "outputs": {}}})
        (export / f"{version}" / "assets.extra" / "signatures.json").write_text(text)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.copyfile", interrupt)
        repository["write"](export, tmp_path / "repository", ["step"])
    assert not (target / "2").exists()
    repository["write"](export, tmp_path / "repository", ["step"])
    for version in (2, 10):
        files = {path.name for path in (target / f"{version}").iterdir()}
        assert files == {"export", "model.py", "packages"}
    assert "dims: [10]" in (target / "config.pbtxt").read_text()
    with pytest.raises(ValueError, match="no version"):
        repository["write"](export / "2", tmp_path / "repository", ["step"])


@pytest.mark.parametrize("name", ['b" dims: [1] }\nbackend: "c', "b\n", "", "\u00e9"])
def test_configurations_hold_no_foreign_text(repository, name):
    field = {"dtype": "float32", "shape": ["batch"]}
    for side in ("inputs", "outputs"):
        with pytest.raises(ValueError, match="is not the name of a tensor"):
            repository["config"]("step", {"inputs": {}, "outputs": {}, side: {name: field}})
