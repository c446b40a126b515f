"""A client of Triton (KServe v2), over HTTP (port 8000) or gRPC (port 8001).

    python examples/serving/triton_client.py stream VOCABULARY
    python examples/serving/triton_client.py --address grpc://localhost:8001 stream VOCABULARY
    python examples/serving/triton_client.py --model MODEL watch < measurements.csv

Over gRPC it needs tritonclient[grpc]; see triton/README.md beside this file.
"""

import urllib.parse

import numpy as np
from rest_client import RestTransport
from serving_client import ServerError, as_text

# KServe's types and NumPy's.
DTYPES = {"INT32": "int32", "FP32": "float32", "BYTES": "object"}
TYPES = {dtype: name for name, dtype in DTYPES.items()}


def connect(address, model, timeout=30.0):
    """Returns a transport to the models of triton/repository.py, each of which is an endpoint.

    Args:
        address: Such as `"http://localhost:8000"` or `"grpc://localhost:8001"`.
        model: Name of the exported model.
        timeout: Seconds. Defaults to 30.
    """
    scheme, _, host = address.partition("://")
    if scheme == "grpc":
        return GrpcTransport(host, model, timeout)
    return HttpTransport(address, model, timeout)


class KServe:
    """Code shared by the two protocols."""

    def newest_version(self):
        # Endpoints are loaded one after another, so this is the newest version that all have.
        versions = self._versions().values()
        common = set.intersection(*versions) if versions else ()
        if not common:
            raise ServerError(f"No version of {self._model} is ready.")
        return max(common)

    def endpoints(self, version=None):
        return {name for name, has in self._versions().items() if version in {None, *has}}

    def _versions(self):
        """{endpoint: versions that are ready}"""
        found = {}
        for entry in self._index():
            name, _, endpoint = entry["name"].rpartition("-")
            if name == self._model and entry.get("state") == "READY":
                found.setdefault(endpoint, set()).add(int(entry["version"]))
        return found


class HttpTransport(KServe, RestTransport):
    """KServe's v2 protocol as JSON over one persistent connection. For one thread."""

    def __init__(self, address, model, timeout=30.0):
        super().__init__(address, model, timeout)
        self._model = model

    def predict(self, endpoint, inputs, version=None):
        name = urllib.parse.quote(f"{self._model}-{endpoint}", safe="")
        path = f"/v2/models/{name}" + ("" if version is None else f"/versions/{version}")
        tensors = [_described(name, array) for name, array in inputs.items()]
        for tensor in tensors:
            tensor["data"] = tensor["data"].ravel().tolist()
        outputs = self._request("POST", f"{path}/infer", {"inputs": tensors})["outputs"]
        return {
            output["name"]: np.array(output["data"], DTYPES[output["datatype"]]).reshape(
                output["shape"]
            )
            for output in outputs
        }

    def _index(self):
        return self._request("POST", "/v2/repository/index", {"ready": True})


class GrpcTransport(KServe):
    """KServe's v2 protocol over gRPC."""

    def __init__(self, host, model, timeout=30.0):
        from tritonclient import grpc, utils

        self._grpc, self._error = grpc, utils.InferenceServerException
        self._client = grpc.InferenceServerClient(host)
        self._model, self._timeout = model, timeout

    def predict(self, endpoint, inputs, version=None):
        tensors = []
        for name, array in inputs.items():
            tensor = _described(name, array)
            data = tensor.pop("data")
            if data.dtype == object:
                data = np.vectorize(str.encode, otypes=[object])(data)
            tensors.append(self._grpc.InferInput(**tensor))
            tensors[-1].set_data_from_numpy(data)
        answer = self._call(
            self._client.infer,
            f"{self._model}-{endpoint}",
            tensors,
            model_version="" if version is None else str(version),
        )
        return {
            output.name: as_text(answer.as_numpy(output.name))
            for output in answer.get_response().outputs
        }

    def close(self):
        self._client.close()

    def _index(self):
        return self._call(self._client.get_model_repository_index, as_json=True).get("models", [])

    def _call(self, method, *arguments, **options):
        try:
            return method(*arguments, client_timeout=self._timeout, **options)
        except self._error as error:
            raise ServerError(f"{error.status()}: {error.message()}") from error


def _described(name, array):
    array = np.atleast_1d(array)  # Triton has no scalars
    datatype = TYPES.get(array.dtype.name)
    if datatype is None:
        raise ServerError(f"{name} must be one of {', '.join(TYPES)}. Received: {array.dtype}")
    return {"name": name, "shape": list(array.shape), "datatype": datatype, "data": array}


if __name__ == "__main__":
    from serving_commands import make_app

    make_app(connect, "http://localhost:8000")()
