"""A client over REST (port 8501): streams, scores and generates text, watches sensors.

    python examples/serving/rest_client.py stream VOCABULARY
    python examples/serving/rest_client.py score FILE
    python examples/serving/rest_client.py generate "The "
    python examples/serving/rest_client.py --model MODEL watch < measurements.csv

Needs NumPy and typer; see README.md beside this file.
"""

import http.client
import json
import urllib.parse

import numpy as np
from serving_client import ServerError

DTYPES = {
    "DT_FLOAT": "float32",
    "DT_DOUBLE": "float64",
    "DT_INT32": "int32",
    "DT_INT64": "int64",
    "DT_BOOL": "bool",
    "DT_STRING": "object",
}


class RestTransport:
    """TensorFlow Serving's REST API over one persistent connection. For one thread.

    Args:
        address: Such as `"http://localhost:8501"`.
        model: Name of the model on the server.
        timeout: Seconds. Defaults to 30.
    """

    def __init__(self, address, model, timeout=30.0):
        url = urllib.parse.urlsplit(address)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if url.scheme not in kinds or not url.hostname:
            raise ValueError(f"`address` must be like http://localhost:8501. Received: {address!r}")
        self._connection = kinds[url.scheme](url.hostname, url.port, timeout=timeout)
        self._root = f"{url.path.rstrip('/')}/v1/models/{urllib.parse.quote(model, safe='')}"
        self._known = {}

    def newest_version(self):
        status = self._request("GET", self._root)["model_version_status"]
        versions = [int(item["version"]) for item in status if item["state"] == "AVAILABLE"]
        if not versions:
            raise ServerError(f"No version is ready: {status}")
        return max(versions)

    def endpoints(self, version=None):
        return set(self._signatures(version))

    def predict(self, endpoint, inputs, version=None):
        # In columns: rows would need the same batch size for all inputs, scalars included.
        columns = {name: np.asarray(array).tolist() for name, array in inputs.items()}
        content = {"signature_name": endpoint, "inputs": columns}
        outputs = self._request("POST", self._path(version) + ":predict", content)["outputs"]
        dtypes = self._signatures(version)[endpoint]
        if len(dtypes) == 1:  # the server omits the name of a single output
            outputs = dict.fromkeys(dtypes, outputs)
        return {name: np.array(value, dtypes[name]) for name, value in outputs.items()}

    def close(self):
        self._connection.close()

    def _path(self, version):
        return self._root if version is None else f"{self._root}/versions/{version}"

    def _signatures(self, version):
        """{endpoint: {output: dtype}}"""
        if version not in self._known:
            answer = self._request("GET", self._path(version) + "/metadata")
            signatures = answer["metadata"]["signature_def"]["signature_def"]
            self._known[version] = {
                endpoint: {n: DTYPES.get(o["dtype"]) for n, o in signature["outputs"].items()}
                for endpoint, signature in signatures.items()
            }
        return self._known[version]

    def _request(self, method, path, content=None):
        body = None if content is None else json.dumps(content).encode()
        try:
            status, answer = self._exchange(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServerError(f"{method} {path}: {error!r}") from error
        # The server sends the bytes of a text unchanged, half a character included.
        text = answer.decode("utf-8", "replace")
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {"error": text[:200]}
        if status != 200:
            raise ServerError(f"{method} {path}: {status} {answer.get('error')}")
        return answer

    def _exchange(self, method, path, body):
        idle = self._connection.sock is not None
        try:
            return self._once(method, path, body)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            # The server closed an idle connection. Repeating a request is safe: none of them
            # changes anything there.
            self._connection.close()
            if not idle:
                raise
            return self._once(method, path, body)

    def _once(self, method, path, body):
        self._connection.request(method, path, body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        return response.status, response.read()


if __name__ == "__main__":
    from serving_commands import make_app

    make_app(RestTransport, "http://localhost:8501")()
