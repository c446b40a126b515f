"""The test double of TensorFlow Serving's REST API by itself."""

import json
import re

import numpy as np
import pytest

from tests.support.tiny_model import CHARACTERS, NAME

pytest.importorskip("tensorflow")


def random_tokens(*shape):
    return np.random.default_rng(0).integers(0, len(CHARACTERS), shape).astype("int32")


def ask(double, request):
    status, answer = double.handle(request if isinstance(request, bytes) else encode(request))
    return status, json.loads(answer)


def encode(request):
    return json.dumps(request).encode()


def test_rows_and_columns(double):
    tokens = random_tokens(2, 3).tolist()
    status, rows = ask(double, {"instances": tokens})
    assert status == 200 and np.shape(rows["predictions"]) == (2, 3, len(CHARACTERS))
    for request in (
        {"instances": [{"tokens": row} for row in tokens]},
        {"inputs": tokens},
        {"inputs": {"tokens": tokens}, "signature_name": "serving_default"},
    ):
        assert [*ask(double, request)[1].values()] == [*rows.values()]
    texts = ["ab", {"b64": "w6k="}]
    status, rows = ask(double, {"signature_name": "score_text", "instances": texts})
    assert [row["num_tokens"] for row in rows["predictions"]] == [1, 0]
    status, columns = ask(double, {"signature_name": "score_text", "inputs": {"text": texts}})
    assert columns["outputs"]["num_tokens"] == [1, 0]


def state(double, size):
    answer = ask(double, {"signature_name": "initial_state", "inputs": {"batch_size": size}})
    return answer[1]["outputs"]


def test_numbers_that_json_lacks_pass(double):
    inputs = {"tokens": [1], **state(double, 1)}
    name = next(iter(state(double, 1)))
    broken = np.full(np.shape(inputs[name]), np.nan).tolist()
    status, answer = ask(double, {"signature_name": "step", "inputs": inputs | {name: broken}})
    assert status == 200
    assert np.isnan(answer["outputs"]["log_probabilities"]).all()


MALFORMED = {
    b"": "JSON Parse error",
    b"\xff\xfe": "JSON Parse error",
    b"{": "JSON Parse error",
    b"[1]": "Is not object",
    b'{"instances": [1e999]}': "too big",
    b"1" * 5000: "JSON Parse error",
    b"[" * 100_000: "nested too deep",
    b'{"inputs":' + b"[" * 400 + b"]" * 400 + b"}": "has 2 axes.*400",
    b"{}": "Missing 'inputs' or 'instances'",
    b'{"inputs": [[1]], "instances": [[1]]}': "only one of",
    b'{"inputs": [[1]], "signature_name": 3}': "must be a string",
    b'{"inputs": [[1]], "signature_name": "x"}': "not found in signature def",
    b'{"inputs": [1]}': "has 2 axes.*1",
    b'{"inputs": {"other": [[1]]}}': "Missing named input: tokens",
    b'{"inputs": null}': "has 2 axes",
    b'{"inputs": [[1], [1, 2]]}': "unexpected size: 2",
    b'{"inputs": [[1], 2]}': "incorrect level",
    b'{"inputs": [[1, [2]]]}': "not of expected type: int32",
    b'{"inputs": [[1.0]]}': "not of expected type: int32",
    b'{"inputs": [[true]]}': "not of expected type: int32",
    b'{"inputs": [["1"]]}': "not of expected type: int32",
    b'{"inputs": [[2147483648]]}': "not of expected type: int32",
    b'{"inputs": [[99]]}': "must lie in",
    b'{"instances": []}': "No values",
    b'{"instances": {"tokens": [1]}}': "list/array",
    b'{"instances": [{"tokens": [1]}, [1]]}': "a mix",
    b'{"instances": [{"tokens": [1]}, {}]}': "keys must be equal to: tokens",
    b'{"instances": [1], "signature_name": "step"}': "multiple input tensors",
    b'{"inputs": 1, "signature_name": "step"}': "multiple input tensors",
    b'{"instances": ["\\ud800"], "signature_name": "score_text"}': "surrogate",
    b'{"instances": [{"b64": "*"}], "signature_name": "score_text"}': "base64",
    b'{"instances": [1], "signature_name": "score_text"}': "not of expected type: string",
}


@pytest.mark.parametrize("body", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_requests_are_refused(double, body):
    status, answer = ask(double, body)
    assert (status, [*answer]) == (400, ["error"])
    assert re.search(MALFORMED[body], answer["error"])
    assert len(answer["error"]) < 500


def test_floats_that_would_lose_digits_are_refused(double):
    inputs = {"text": ["a"], "max_new_tokens": 1, "seed": 0}
    for value in (2**24, 2**2000, 1e39, "1", True, None):
        request = {"signature_name": "generate_text", "inputs": inputs | {"temperature": value}}
        status, answer = ask(double, request)
        assert status == 400
        assert re.search("loss of precision|not of expected type", answer["error"])


def test_sizes_are_limited(double, monkeypatch):
    from tests.support import rest_double
    from tests.support.rest_json import MAX_BYTES

    assert ask(double, b" " * (MAX_BYTES + 1))[0] == 400
    monkeypatch.setattr(rest_double, "MAX_VALUES", 10)
    status, answer = ask(double, {"inputs": [[1, 2]]})
    assert status == 429 and "14 values" in answer["error"]


def test_addresses(double):
    status, answer = double.respond("GET", f"/v1/models/{NAME}")
    assert status == 200
    assert json.loads(answer)["model_version_status"][0] == {
        "version": "1",
        "state": "AVAILABLE",
        "status": {"error_code": "OK", "error_message": ""},
    }
    status, answer = double.respond("GET", f"/v1/models/{NAME}/versions/1/metadata")
    metadata = json.loads(answer)
    assert metadata["model_spec"] == {"name": NAME, "signature_name": "", "version": "1"}
    signature = metadata["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["inputs"]["tokens"]["dtype"] == "DT_INT32"
    assert [d["size"] for d in signature["inputs"]["tokens"]["tensor_shape"]["dim"]] == ["-1", "-1"]
    for method, path, wanted in (
        ("GET", "/v1/models/other", 404),
        ("GET", f"/v1/models/{NAME}/versions/9", 404),
        ("GET", f"/v1/models/{NAME}/versions/9/metadata", 404),
        ("POST", "/v1/models/other:predict", 404),
        ("POST", f"/v1/models/{NAME}/versions/9:predict", 404),
        ("POST", f"/v1/models/{NAME}", 400),
        ("POST", f"/v1/models/{NAME}:classify", 400),
        ("GET", f"/v1/models/{NAME}/versions/{'9' * 5000}", 400),
        ("DELETE", f"/v1/models/{NAME}", 400),
    ):
        status, answer = double.respond(method, path, b'{"inputs": [[1]]}')
        assert (status, [*json.loads(answer)]) == (wanted, ["error"]), path


def test_the_two_highest_versions_are_served(tmp_path):
    from tests.support.rest_double import Double

    for name in ("3", "12", "7", ".exporting-x", "model.keras"):
        (tmp_path / name).mkdir()
    double = Double(tmp_path, NAME)
    assert double.versions() == [12, 7]
    status, answer = ask(double, {"inputs": [[1]]})
    assert status == 500 and "Version 12 cannot be loaded" in answer["error"]
    assert Double(tmp_path / "none", NAME).versions() == []
