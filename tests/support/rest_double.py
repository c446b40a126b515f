"""A test double of TensorFlow Serving: a small server that answers as its REST API documents.

    python tests/serving/rest_double.py FOLDER NAME [--grpc] [--batching]

It is no part of the package and nothing to serve with. It loads the SavedModels with TensorFlow,
so that the clients and what is exported are tested against each other where the server itself
cannot be run. What it does like the server:

* `POST /v1/models/NAME[/versions/N]:predict` in row ("instances") and columnar ("inputs") form,
  `GET /v1/models/NAME[/versions/N]` and `GET .../metadata`; errors as `{"error": message}` with
  the server's statuses and, where a client meets them often, its messages;
* the two highest versions are served, the highest one unless a request names one; new ones
  are picked up while it runs;
* `--batching`: it refuses what the server refuses with `--enable_batching`.

What it does unlike the server: it refuses bodies of more than `MAX_BYTES` and answers of more than
`MAX_VALUES`, quotes only the beginning of a value in a message, loads a version while a request
waits, and never joins requests. There are no labels, `classify`, `regress` and monitoring.
"""

import argparse
import http.server
import json
import pathlib
import re
import threading

import tensorflow as tf
from google.protobuf import json_format
from tensorflow.core.protobuf import saved_model_pb2

from tests.support.rest_json import (
    INTERNAL,
    MAX_BYTES,
    NOT_FOUND,
    RESOURCE_EXHAUSTED,
    Refused,
    as_columns,
    as_rows,
    named_columns,
    parsed,
    quoted,
    rows_to_columns,
    to_array,
)

MAX_VALUES = 2**22
VERSIONS = 2  # how many are served at a time

# The statuses of HTTP that the server makes of the codes of errors.
STATUS = {1: 499, 2: 500, 3: 400, 4: 504, 5: 404, 6: 409, 7: 403, 8: 429, 9: 400, 10: 409}
STATUS |= {11: 400, 12: 501, 13: 500, 14: 503, 15: 500, 16: 401}

PREDICT = re.compile(r"(?i)/v1/models/([^/:]+)(?:/versions/(\d{1,18}))?:predict")
ABOUT = re.compile(r"(?i)/v1/models/([^/:]+)(?:/versions/(\d{1,18}))?(/metadata)?")


class Double:
    """A server of one model, without the network.

    Args:
        folder: The model's folder, which holds numbered ones.
        name: The model's name.
        batching: Whether to refuse what the server refuses with `--enable_batching`.
    """

    def __init__(self, folder, name, batching=False):
        self.folder = pathlib.Path(folder)
        self.name = name
        self.batching = batching
        self._loaded = {}
        self._lock = threading.Lock()

    def handle(self, body, version=None):
        """Answers a predict request: bytes in; the status of HTTP and bytes of JSON out."""
        return answered(lambda: self.predict_json(body, self.name, version))

    def respond(self, method, path, body=b""):
        """Answers any request likewise."""
        return answered(lambda: self._route(method, path, body))

    def _route(self, method, path, body):
        if method == "POST" and (match := PREDICT.fullmatch(path)):
            return self.predict_json(body, *match.groups())
        if method == "GET" and (match := ABOUT.fullmatch(path)):
            name, version, metadata = match.groups()
            if metadata:
                self.check_name(name, version)
                return self.metadata(version)
            return self.status(name, version)
        raise Refused(f"Malformed request: {method} {quoted(path)}")

    def check_name(self, name, version=None):
        if name != self.name:
            raise Refused(f"Servable not found for request: {_wanted(name, version)}", NOT_FOUND)

    def versions(self):
        """The versions that are served, the newest one first."""
        numbers = [int(path.name) for path in self.folder.glob("*") if _is_number(path.name)]
        return sorted(numbers, reverse=True)[:VERSIONS]

    def model(self, version=None):
        """Returns the number of a version, its functions by endpoint, and its signatures."""
        with self._lock:
            versions = self.versions()
            number = int(version) if version is not None else next(iter(versions), None)
            if number not in versions:
                wanted = _wanted(self.name, version)
                raise Refused(f"Servable not found for request: {wanted}", NOT_FOUND)
            self._loaded = {n: model for n, model in self._loaded.items() if n in versions}
            if number not in self._loaded:
                self._loaded[number] = _load(self.folder / str(number))
            return number, *self._loaded[number][1:]

    def status(self, name, version):
        versions = self.versions() if name == self.name else []
        if not versions:
            raise Refused(f"Could not find any versions of model {quoted(name)}", NOT_FOUND)
        if version is not None and int(version) not in versions:
            raise Refused(f"Could not find version {version} of model {name}", NOT_FOUND)
        fine = {"state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        wanted = versions if version is None else [int(version)]
        return {"model_version_status": [{"version": str(number), **fine} for number in wanted]}

    def metadata(self, version):
        number, _, signatures = self.model(version)
        described = {
            endpoint: json_format.MessageToDict(
                signature,
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
            )
            for endpoint, signature in signatures.items()
        }
        return {
            "model_spec": {"name": self.name, "signature_name": "", "version": str(number)},
            "metadata": {"signature_def": {"signature_def": described}},
        }

    def predict_json(self, body, name, version):
        request = parsed(body)
        endpoint = request.get("signature_name", "serving_default")
        if not isinstance(endpoint, str):
            raise Refused("'signature_name' key must be a string value.")
        self.check_name(name, version)
        number, functions, _ = self.model(version)
        specs = input_specs(functions, endpoint)
        form = [key for key in ("instances", "inputs") if key in request]
        if len(form) > 1:
            raise Refused("Expecting only one of 'inputs' or 'instances' keys to exist")
        if not form:
            raise Refused("Missing 'inputs' or 'instances' key")
        rows = form == ["instances"]
        values = (rows_to_columns if rows else named_columns)(request[form[0]], specs)
        inputs = {name: to_array(values[name], name, spec) for name, spec in specs.items()}
        outputs = self.predict(endpoint, inputs, number)
        return {"predictions": as_rows(outputs)} if rows else {"outputs": as_columns(outputs)}

    def predict(self, endpoint, inputs, version=None):
        """Returns the outputs, arrays by name, of input arrays by name."""
        _, functions, _ = self.model(version)
        specs = input_specs(functions, endpoint)
        if inputs.keys() != specs.keys():
            raise Refused(f"The inputs must be {sorted(specs)}. Received: {sorted(inputs)}")
        if self.batching:
            check_batch(inputs)
        tensors = {}
        for name, array in inputs.items():
            check_like(array, name, specs[name])
            tensors[name] = tf.constant(array, specs[name].dtype)
        try:
            outputs = functions[endpoint](**tensors)
        except tf.errors.OpError as error:
            # Without what the Python of this process puts before it.
            message = error.message.split("<stack traces unavailable>\n")[-1]
            raise Refused(message, error.error_code) from error
        size = sum(tensor.shape.num_elements() for tensor in outputs.values())
        if size > MAX_VALUES:
            raise Refused(
                f"The answer has {size} values; this server sends {MAX_VALUES}.", RESOURCE_EXHAUSTED
            )
        return {name: tensor.numpy() for name, tensor in outputs.items()}


def answered(function):
    """Returns the status, and the JSON of what the function returned or why it refused."""
    try:
        status, answer = 200, function()
    except Refused as error:
        status, answer = STATUS[error.code], {"error": str(error)}
    # The server passes on a text's bytes as they are, whether they are UTF-8 or not.
    text = json.dumps(answer, ensure_ascii=False)
    return status, text.encode("utf-8", "surrogateescape" if status == 200 else "replace")


def _wanted(name, version):
    return f"Latest({quoted(name)})" if version is None else f"Specific({quoted(name)}, {version})"


def _is_number(name):
    return name.isascii() and name.isdecimal()


def _load(folder):
    """Returns a SavedModel (which must outlive its functions), its functions and signatures."""
    try:
        model = tf.saved_model.load(str(folder))
        proto = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    except (OSError, tf.errors.OpError) as error:
        raise Refused(f"Version {folder.name} cannot be loaded: {error}", INTERNAL) from error
    signatures = dict(proto.meta_graphs[0].signature_def)
    return model, dict(model.signatures), signatures


def input_specs(functions, endpoint):
    """Returns the endpoint's inputs, tf.TensorSpecs by name."""
    if endpoint not in functions:
        raise Refused(f'Serving signature name: "{quoted(endpoint)}" not found in signature def')
    return functions[endpoint].structured_input_signature[1]


def check_like(array, name, spec):
    """Refuses an array of another shape than that of an input."""
    if not spec.shape.is_compatible_with(array.shape):
        raise Refused(f"Input {name} has the shape {spec.shape}. Received: {array.shape}")


def check_batch(inputs):
    """Refuses what the server cannot join with other requests."""
    shapes = [array.shape for array in inputs.values()]
    if () in shapes:
        raise Refused("Batching Run() input tensors must have at least one dimension")
    if len({shape[0] for shape in shapes}) > 1:
        raise Refused("Batching Run() input tensors must have equal 0th-dimension size")


# The network


class Handler(http.server.BaseHTTPRequestHandler):
    """Passes requests to the `Double` of its server."""

    protocol_version = "HTTP/1.1"  # connections stay open
    disable_nagle_algorithm = True
    timeout = 60

    def do_GET(self):
        self._send(*self.server.double.respond("GET", self.path))

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if not _is_number(length):
            self.close_connection = True  # nobody knows where the next request would begin
            self._send(400, b'{"error": "A request needs a Content-Length."}')
            return
        # One byte too many is enough for the refusal, the rest only has to go.
        body = self.rfile.read(min(int(length), MAX_BYTES + 1))
        unread = int(length) - len(body)
        while unread > 0 and (piece := self.rfile.read(min(unread, 2**16))):
            unread -= len(piece)
        self._send(*self.server.double.respond("POST", self.path, body))

    def _send(self, status, content):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        """Says nothing of each request."""


class Server(http.server.ThreadingHTTPServer):
    """Serves a `Double` at a free port of this machine."""

    daemon_threads = True

    def __init__(self, double):
        super().__init__(("127.0.0.1", 0), Handler)
        self.double = double


def main():
    """Serves; prints one line of JSON, the ports, when it is ready."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("name")
    parser.add_argument("--grpc", action="store_true")
    parser.add_argument("--batching", action="store_true")
    options = parser.parse_args()
    double = Double(options.folder, options.name, options.batching)
    server = Server(double)
    ports = {"rest": server.server_address[1]}
    if options.grpc:
        from tests.support import grpc_double

        _grpc_server, ports["grpc"] = grpc_double.start(double)
    print(json.dumps(ports), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
