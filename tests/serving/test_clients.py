"""The example clients against a test double of TensorFlow Serving."""

import contextlib
import importlib.util
import re
import runpy
import shutil
import sys

import numpy as np
import pytest

from tests.support.processes import ROOT, run_script
from tests.support.served import scores, scores_so_far
from tests.support.serving_double import Double, start_grpc, start_rest
from trellis_keras.data import Vocabulary

EXAMPLES = ROOT / "examples" / "serving"
sys.path.insert(0, str(EXAMPLES))

import load  # noqa: E402
import rest_client  # noqa: E402
import serving_client as client  # noqa: E402

NAME, SENSORS = "tiny", "sensors"
HAS_GRPC = importlib.util.find_spec("tensorflow_serving") is not None
needs_grpc = pytest.mark.skipif(not HAS_GRPC, reason="needs trellis-keras[serving]")
TRANSPORTS = ["rest", pytest.param("grpc", marks=needs_grpc)]


@pytest.fixture(scope="module")
def model(exported):
    return exported("trellisnet")[0]


@pytest.fixture(scope="module")
def folder(exported, tmp_path_factory):
    """The folder of a model's versions, with the first one."""
    folder = tmp_path_factory.mktemp("models") / NAME
    shutil.copytree(exported("trellisnet")[1], folder / "1")
    return folder


@contextlib.contextmanager
def serving(folder, name):
    """The ports of a double, by transport."""
    double = Double(folder, name)
    rest, rest_port = start_rest(double)
    grpc, grpc_port = start_grpc(double) if HAS_GRPC else (None, None)
    yield {"rest": rest_port, "grpc": grpc_port}
    rest.shutdown()
    rest.server_close()
    if grpc:
        grpc.stop(None)


@contextlib.contextmanager
def connecting(ports, name):
    """`connect(kind)`: a new transport to a double."""
    opened = []

    def connect(kind="rest", name=name):
        if kind == "rest":
            transport = rest_client.RestTransport(f"http://localhost:{ports['rest']}", name)
        else:
            from grpc_client import GrpcTransport

            transport = GrpcTransport(f"localhost:{ports['grpc']}", name)
        opened.append(transport)
        return transport

    yield connect
    for transport in opened:
        transport.close()


@pytest.fixture(scope="module")
def ports(folder):
    with serving(folder, NAME) as ports:
        yield ports


@pytest.fixture(scope="module")
def connect(ports):
    with connecting(ports, NAME) as connect:
        yield connect


@pytest.fixture(scope="module")
def sensor_ports(exported, tmp_path_factory):
    """Those of a model of two channels."""
    folder = tmp_path_factory.mktemp("models") / SENSORS
    shutil.copytree(exported("regressor")[1], folder / "1")
    with serving(folder, SENSORS) as ports:
        yield ports


def random_tokens(*shape):
    return np.random.default_rng(shape[-1]).integers(0, 7, shape).astype("int32")


def log_probabilities(model, tokens):
    return scores(model, tokens)[1]


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_session_gives_the_models_scores(connect, model, kind):
    tokens = random_tokens(2, 9)
    wanted = log_probabilities(model, tokens)
    transport = connect(kind)
    session, stepwise = client.Session(transport, 2), client.Session(transport, 2)
    np.testing.assert_allclose(session.read(tokens[:, :4]), wanted[:, 3], atol=1e-5)
    np.testing.assert_allclose(session.read(tokens[:, 4:6]), wanted[:, 5], atol=1e-5)
    for time in range(6, 9):
        np.testing.assert_allclose(session.step(tokens[:, time]), wanted[:, time], atol=1e-5)
    for time in range(9):
        np.testing.assert_allclose(stepwise.step(tokens[:, time]), wanted[:, time], atol=1e-5)
    for name, array in session.cache.items():
        assert array.dtype == "float32"
        np.testing.assert_allclose(array, stepwise.cache[name], atol=1e-5)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_texts_are_scored(connect, model, kind):
    texts = ["abcd é", "a", "dd\nb", ""]
    rows = [model.vocabulary.encode(text) for text in texts]
    sums, counts = client.score_texts(connect(kind), texts)
    assert counts.tolist() == [5, 0, 3, 0]
    for row, log_probability in zip(rows, sums, strict=True):
        n = max(0, len(row) - 1)
        wanted = log_probabilities(model, row[None])[0, range(n), row[1:]].sum() if n else 0.0
        np.testing.assert_allclose(log_probability, wanted, atol=1e-5)
    as_tokens = client.score_tokens(connect(kind), rows)
    np.testing.assert_allclose(as_tokens[0], sums, atol=1e-5)
    np.testing.assert_array_equal(as_tokens[1], counts)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_texts_are_continued(connect, model, kind):
    transport = connect(kind)
    draws = [client.generate_texts(transport, ["ab", "é c"], 12, 1.0, seed) for seed in (5, 5, 6)]
    assert draws[0] == draws[1] != draws[2]
    assert [len(text) for text in draws[0]] == [14, 15]
    assert [text[:2] for text in draws[0]] == ["ab", "é "]
    likeliest = client.generate_texts(transport, ["ab"], 12, 0.0, 0)[0]
    session = client.Session(transport)
    first = session.read(model.vocabulary.encode("ab")[None])
    drawn = client.continue_stream(session, first, 12, 0, None)
    assert "ab" + model.vocabulary.decode([t[0] for t in drawn]) == likeliest


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_session_of_sensors_gives_the_models_outputs(sensor_ports, exported, kind):
    model = exported("regressor")[0]
    numbers = np.random.default_rng(0).normal(size=(3, 6, 2)).astype("float32")
    with connecting(sensor_ports, SENSORS) as connect:
        session = client.SensorSession(connect(kind), 3)
        found = [session.read(numbers[:, :2])]
        found += [session.step(numbers[:, time]) for time in range(2, 6)]
        wanted = scores_so_far(model, numbers, range(2, 7))
        np.testing.assert_allclose(np.stack(found, 1), wanted, atol=1e-5)
        with pytest.raises(client.ServerError, match="inputs"):
            session.step(numbers[:, 0, :1])
        with pytest.raises(client.ServerError, match="use SensorSession"):
            client.Session(connect(kind)).step([1])


def test_sampling_follows_the_probabilities():
    log_p = np.log(np.tile([[0.6, 0.1, 0.3]], (20_000, 1)))
    drawn = client.sample(log_p, 0.5, np.random.default_rng(0))
    wanted = np.array([0.36, 0.01, 0.09]) / 0.46
    np.testing.assert_allclose(np.bincount(drawn) / len(drawn), wanted, atol=0.02)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_refusals_reach_the_caller(connect, kind):
    transport, elsewhere = connect(kind), connect(kind, "other")
    valid = np.ones((1, 2), "int32")
    for request, message in (
        ((transport, "serving_default", 7 * valid), "must be in"),
        ((transport, "serving_default", 0.5 * valid), "int32"),
        ((transport, "serving_default", valid[0]), "tokens"),
        ((transport, "other", valid), "not found in signature def"),
        ((transport, "serving_default", valid, 77), r"Specific\(tiny, 77\)"),
        ((elsewhere, "serving_default", valid), r"Servable not found.*Latest\(other"),
    ):
        to, endpoint, tokens, *version = request
        with pytest.raises(client.ServerError, match=message):
            to.predict(endpoint, {"tokens": tokens}, *version)
    with pytest.raises(client.ServerError, match="Could not find any versions"):
        elsewhere.newest_version()


def test_connections(connect):
    with pytest.raises(client.ServerError, match="ConnectionRefusedError"):
        rest_client.RestTransport("http://localhost:9", NAME).newest_version()
    with pytest.raises(ValueError, match="must be like http"):
        rest_client.RestTransport("localhost:8501", NAME)
    transport = connect()
    assert transport.newest_version() >= 1
    transport._connection.sock.shutdown(2)  # an idle connection that the server has closed
    assert transport.newest_version() >= 1


@pytest.mark.slow
def test_a_session_stays_with_its_version(folder, connect, exported):
    tokens, transport = random_tokens(1, 5), connect()
    before = transport.predict("serving_default", {"tokens": tokens})["log_probabilities"]
    session = client.Session(transport)
    session.read(tokens[:, :3])
    other, path = exported("lru")
    shutil.copytree(path, folder / "2")
    try:
        after = transport.predict("serving_default", {"tokens": tokens})["log_probabilities"]
        np.testing.assert_allclose(after, log_probabilities(other, tokens), atol=1e-5)
        assert transport.newest_version() == 2
        np.testing.assert_allclose(session.step(tokens[:, 3]), before[:, 3], atol=1e-5)
    finally:
        shutil.rmtree(folder / "2")


@pytest.mark.parametrize("unit", ["word", "character", "byte"])
def test_vocabularies_agree(unit, tmp_path):
    text = "aé b\na  aé\n\nb"
    vocabulary = Vocabulary.from_text(text, unit)
    vocabulary.save(tmp_path / "vocabulary.json")
    read = client.Vocabulary(tmp_path / "vocabulary.json")
    ids = vocabulary.encode(text, final_eos=False)
    np.testing.assert_array_equal(read.encode(text), ids)
    assert read.decode(ids).split() == vocabulary.decode(ids).split()
    if unit != "word":
        assert read.decode(ids) == text
    with pytest.raises(ValueError, match="does not know 'z'"):
        read.encode("a z")
    Vocabulary(vocabulary.tokens, unit, unknown="b").save(tmp_path / "unknown.json")
    np.testing.assert_array_equal(
        client.Vocabulary(tmp_path / "unknown.json").encode("a z"), read.encode("a b")
    )


def command(ports, *arguments, text="/dev/null", name=NAME):
    """Runs the REST client where neither TensorFlow nor this package can be imported."""
    source = """
import runpy, sys
sys.stdin = open(sys.argv[1])
sys.argv = sys.argv[2:]
sys.path.insert(0, sys.argv[0].rsplit("/", 1)[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    address = f"http://localhost:{ports['rest']}"
    script = EXAMPLES / "rest_client.py", "--address", address, "--model", name
    block = ("tensorflow", "keras", "trellis_keras")
    return run_script(source, text, *script, *arguments, block=block, check=False)


def test_the_commands(ports, folder, tmp_path):
    (tmp_path / "typed").write_text("ab\nz\ncd\n")
    (tmp_path / "lines").write_text("abc\n\naé\n")
    vocabulary = folder / "1" / "assets.extra" / "vocabulary.json"
    options = vocabulary, "--top", 2, "--sample", 4
    done = command(ports, "stream", *options, text=tmp_path / "typed")
    lines = done.stdout.split("\n")
    assert re.fullmatch(r"'.+' 0\.\d{3}  '.+' 0\.\d{3}", lines[0])
    assert lines[1].startswith("ab")
    assert "does not know 'z'" in done.stderr
    done = command(ports, "score", tmp_path / "lines", "--batch", 2)
    numbered = [line.split(",") for line in done.stdout.splitlines()]
    assert [(row[0], row[2]) for row in numbered[1:]] == [("1", "2"), ("2", "0"), ("3", "1")]
    assert done.stderr.startswith("3 lines, 3 tokens, ")
    done = command(ports, "generate", "ab", "c", "--length", 3, "--temperature", 0)
    assert done.stdout.startswith("ab")
    done = command(ports, "generate", "xyz")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: POST /v1/models/tiny:predict: 400 ")


def test_sensors_are_watched(sensor_ports, exported, tmp_path):
    rows = np.array([[0.5, -1.0], [0.25, 2.0], [0.0, 0.125]], "float32")
    lines = [",".join(map(str, row)) for row in rows.tolist()]
    wrong = ["no, number", "1,2,3"]
    (tmp_path / "measured").write_text("\n".join([lines[0], *wrong, *lines[1:]]))
    done = command(sensor_ports, "watch", text=tmp_path / "measured", name=SENSORS)
    found = np.array(done.stdout.split(), "float32")
    wanted = scores_so_far(exported("regressor")[0], rows[None], range(1, 4))[0, :, 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert "could not convert string to float" in done.stderr
    assert "expected 2 numbers, received 3. The line was not read." in done.stderr


# Load


@pytest.mark.parametrize("endpoint", load.ENDPOINTS)
def test_load_counts_and_times_requests(connect, sensor_ports, endpoint):
    result = load.run(connect, endpoint, clients=3, requests=10, length=4, size=7)
    assert (result["requests"], result["errors"]) == (10, 0)
    times = [result[f"{name}_ms"] for name in ("p50", "p90", "p95", "p99", "max")]
    assert 0 < times[0] and times == sorted(times)
    with connecting(sensor_ports, SENSORS) as connect:
        result = load.run(connect, endpoint, clients=2, requests=6, length=4, channels=2)
    assert (result["requests"], result["errors"]) == (6, 0)


def test_a_summary_of_load():
    result = load.summary([i / 1000 for i in range(1, 101)], ["full"] * 2, elapsed=2.0)
    assert (result["requests_per_second"], result["error_messages"]) == (50, {"full": 2})
    found = [result[f"{name}_ms"] for name in ("p50", "p90", "p95", "p99", "max")]
    np.testing.assert_allclose(found, [50, 90, 95, 99, 100])


# The configuration


@needs_grpc
def test_the_model_configuration_is_valid():
    from google.protobuf import text_format
    from tensorflow_serving.config import model_server_config_pb2

    text = (EXAMPLES / "models.config").read_text()
    config = text_format.Parse(text, model_server_config_pb2.ModelServerConfig())
    served = config.model_config_list.config[0]
    assert (served.name, served.base_path) == ("trellisnet_char", "/models/trellisnet_char")
    assert served.model_version_policy.latest.num_versions == 2


def test_triton_repositories_refuse_links_in_an_export(tmp_path):
    """A link in a stranger's export would copy another file of this machine."""
    repository = runpy.run_path(str(EXAMPLES / "triton" / "repository.py"))
    (tmp_path / "tiny" / "1").mkdir(parents=True)
    (tmp_path / "tiny" / "1" / "variables").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="variables is a symbolic link"):
        repository["write"](tmp_path / "tiny", tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize("name", ['b" dims: [1] }\nbackend: "c', "b\n", "", "\u00e9"])
def test_triton_configurations_hold_no_foreign_text(name):
    repository = runpy.run_path(str(EXAMPLES / "triton" / "repository.py"))
    field = {"dtype": "float32", "shape": ["batch"]}
    for inputs, outputs in (({name: field}, {}), ({}, {name: field})):
        with pytest.raises(ValueError, match="is not the name of a tensor"):
            repository["config"]("step", {"inputs": inputs, "outputs": outputs})
