"""A test double of TensorFlow Serving, which answers as its REST and gRPC APIs are documented.

It loads the SavedModels with TensorFlow, so that clients and exported models are tested against
each other where the server itself cannot run. It has what the example clients use: `predict` in
columns, metadata and status, the two highest versions (new ones are picked up while it runs), and
the server's error messages and status codes. It is not a server for anything else.
"""

import http.server
import json
import pathlib
import re
import threading
from concurrent import futures

import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from tensorflow.core.protobuf import saved_model_pb2

VERSIONS = 2  # that are served at a time
# gRPC's codes, and HTTP's statuses for them.
INVALID_ARGUMENT, NOT_FOUND = 3, 5
STATUS = {INVALID_ARGUMENT: 400, NOT_FOUND: 404}


class Refused(Exception):
    def __init__(self, message, code=INVALID_ARGUMENT):
        super().__init__(message)
        self.code = code


class Double:
    """A server of one model, without the network.

    Args:
        folder: The model's folder, with one folder per version.
        name: The model's name.
    """

    def __init__(self, folder, name):
        self.folder, self.name = pathlib.Path(folder), name
        self._loaded, self._lock = {}, threading.Lock()

    def versions(self):
        """The versions that are served, the newest one first."""
        numbers = [int(path.name) for path in self.folder.glob("*") if path.name.isdecimal()]
        return sorted(numbers, reverse=True)[:VERSIONS]

    def model(self, name, version=None):
        """Returns a version's number, its SavedModel, and its signatures as protobufs."""
        versions = self.versions()
        number = (versions or [None])[0] if version is None else int(version)
        if name != self.name or number not in versions:
            wanted = f"Latest({name})" if version is None else f"Specific({name}, {version})"
            raise Refused(f"Servable not found for request: {wanted}", NOT_FOUND)
        with self._lock:
            if number not in self._loaded:
                path = self.folder / str(number)
                content = (path / "saved_model.pb").read_bytes()
                signatures = saved_model_pb2.SavedModel.FromString(content).meta_graphs[0]
                model = tf.saved_model.load(str(path))
                self._loaded[number] = model, dict(signatures.signature_def)
        return number, *self._loaded[number]

    def status(self, name):
        if name != self.name or not self.versions():
            raise Refused(f"Could not find any versions of model {name}", NOT_FOUND)
        available = {"state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        status = [{"version": str(number), **available} for number in self.versions()]
        return {"model_version_status": status}

    def input_specs(self, name, endpoint, version=None):
        _, model, _ = self.model(name, version)
        if endpoint not in model.signatures:
            raise Refused(f'Serving signature name: "{endpoint}" not found in signature def')
        return model.signatures[endpoint].structured_input_signature[1]

    def predict(self, name, endpoint, inputs, version=None):
        """Returns output arrays by name; `inputs` are arrays by name."""
        specs = self.input_specs(name, endpoint, version)
        if inputs.keys() != specs.keys():
            raise Refused(f"The inputs must be {sorted(specs)}. Received: {sorted(inputs)}")
        for key, spec in specs.items():
            if not spec.shape.is_compatible_with(np.shape(inputs[key])):
                raise Refused(f"Input {key} must have shape {spec.shape}")
        tensors = {key: tf.constant(inputs[key], spec.dtype) for key, spec in specs.items()}
        try:
            outputs = self.model(name, version)[1].signatures[endpoint](**tensors)
        except tf.errors.OpError as error:
            message = error.message.split("<stack traces unavailable>\n")[-1]
            raise Refused(message, error.error_code) from error
        return {key: tensor.numpy() for key, tensor in outputs.items()}

    # REST

    def respond(self, method, path, body=b""):
        """Answers a request: returns the status of HTTP, and JSON in bytes."""
        pattern = r"/v1/models/([^/:]+)(?:/versions/(\d+))?(:predict|/metadata)?"
        name, version, action = re.fullmatch(pattern, path).groups()
        try:
            if (method, action) == ("GET", None):
                answer = self.status(name)
            elif action == "/metadata":
                answer = self._metadata(name, version)
            else:
                answer = self._predict_json(name, version, json.loads(body))
        except Refused as error:
            return STATUS[error.code], json.dumps({"error": str(error)}).encode()
        # A text's bytes are passed on as they are, whether they are UTF-8 or not.
        return 200, json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogateescape")

    def _metadata(self, name, version):
        number, _, signatures = self.model(name, version)
        options = {
            "preserving_proto_field_name": True,
            "always_print_fields_with_no_presence": True,
        }
        described = {k: json_format.MessageToDict(s, **options) for k, s in signatures.items()}
        return {
            "model_spec": {"name": name, "signature_name": "", "version": str(number)},
            "metadata": {"signature_def": {"signature_def": described}},
        }

    def _predict_json(self, name, version, request):
        endpoint = request.get("signature_name", "serving_default")
        specs, inputs = self.input_specs(name, endpoint, version), {}
        for key, value in request["inputs"].items():
            array = np.array(value)
            if key in specs and not _of_type(array, specs[key].dtype):
                raise Refused(f"JSON Value: {value} is not of expected type: {specs[key].dtype}")
            inputs[key] = array
        outputs = self.predict(name, endpoint, inputs, version)
        values = {
            key: np.vectorize(lambda text: text.decode("utf-8", "surrogateescape"))(array).tolist()
            if array.dtype == object
            else array.tolist()
            for key, array in outputs.items()
        }
        # The name of a single output is omitted.
        return {"outputs": next(iter(values.values())) if len(values) == 1 else values}


def _of_type(array, dtype):
    kinds = "U" if dtype == tf.string else "i" if dtype.is_integer else "if"
    return array.dtype.kind in kinds or not array.size


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # persistent connections
    disable_nagle_algorithm = True

    def do_GET(self):
        self._send(*self.server.double.respond("GET", self.path))

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(*self.server.double.respond("POST", self.path, body))

    def _send(self, status, content):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


def start_rest(double):
    """Serves a `Double` at a free port of this machine. Returns the server and the port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads, server.double = True, double
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, server.server_address[1]


def start_grpc(double):
    """As `start_rest`, with the services of tensorflow-serving-api."""
    import grpc
    from tensorflow_serving.apis import (
        get_model_metadata_pb2,
        get_model_status_pb2,
        model_service_pb2_grpc,
        predict_pb2,
        prediction_service_pb2_grpc,
    )

    codes = {code.value[0]: code for code in grpc.StatusCode}

    def version_of(spec):
        return spec.version.value if spec.HasField("version") else None

    def refusing(method):
        def call(self, request, context):
            try:
                return method(request, request.model_spec.name, version_of(request.model_spec))
            except Refused as error:
                context.abort(codes[error.code], str(error))

        return call

    @refusing
    def predict(request, name, version):
        endpoint = request.model_spec.signature_name
        specs = double.input_specs(name, endpoint, version)
        for key, proto in request.inputs.items():
            if key in specs and proto.dtype != specs[key].dtype.as_datatype_enum:
                raise Refused(f"Input {key} must have type {specs[key].dtype.name}")
        inputs = {key: tf.make_ndarray(proto) for key, proto in request.inputs.items()}
        response = predict_pb2.PredictResponse(model_spec=request.model_spec)
        for key, array in double.predict(name, endpoint, inputs, version).items():
            response.outputs[key].CopyFrom(tf.make_tensor_proto(array))
        return response

    @refusing
    def get_model_metadata(request, name, version):
        signatures = get_model_metadata_pb2.SignatureDefMap()
        for key, signature in double.model(name, version)[2].items():
            signatures.signature_def[key].CopyFrom(signature)
        response = get_model_metadata_pb2.GetModelMetadataResponse()
        response.metadata["signature_def"].Pack(signatures)
        return response

    @refusing
    def get_model_status(request, name, version):
        response = get_model_status_pb2.GetModelStatusResponse()
        return json_format.ParseDict(double.status(name), response)

    predictions = type(
        "Predictions",
        (prediction_service_pb2_grpc.PredictionServiceServicer,),
        {"Predict": predict, "GetModelMetadata": get_model_metadata},
    )
    models = type(
        "Models",
        (model_service_pb2_grpc.ModelServiceServicer,),
        {"GetModelStatus": get_model_status},
    )
    server = grpc.server(futures.ThreadPoolExecutor(8))
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(predictions(), server)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(models(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port
