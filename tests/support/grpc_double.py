"""A test double of TensorFlow Serving's gRPC API; `rest_double.py` says what that means.

It offers `Predict` and `GetModelMetadata` of the PredictionService and `GetModelStatus` of the
ModelService, from the generated code of tensorflow-serving-api.
"""

from concurrent import futures

import grpc
import tensorflow as tf
from google.protobuf import json_format
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from tests.support.rest_double import Refused, input_specs

CODES = {code.value[0]: code for code in grpc.StatusCode}
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def start(double):
    """Serves a `Double` at a free port of this machine. Returns the server and the port."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=UNLIMITED)
    predictions, models = Predictions(double), Models(double)
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(predictions, server)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(models, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


def refusing(method):
    """Turns `Refused` into the status of the call."""

    def call(self, request, context):
        try:
            return method(self, request)
        except Refused as error:
            context.abort(CODES[error.code], str(error))

    return call


def _version(spec):
    return spec.version.value if spec.HasField("version") else None


def _array(name, proto):
    try:
        return tf.make_ndarray(proto)
    except (TypeError, ValueError) as error:
        raise Refused(f"Input {name} is no tensor: {error}") from error


class Predictions(prediction_service_pb2_grpc.PredictionServiceServicer):
    def __init__(self, double):
        self.double = double

    @refusing
    def Predict(self, request):
        spec = request.model_spec
        self.double.check_name(spec.name, _version(spec))
        number, functions, _ = self.double.model(_version(spec))
        endpoint = spec.signature_name or "serving_default"
        specs = input_specs(functions, endpoint)
        inputs = {}
        for name, proto in request.inputs.items():
            if name in specs and proto.dtype != specs[name].dtype.as_datatype_enum:
                raise Refused(f"Input {name} has the type {specs[name].dtype.name}")
            inputs[name] = _array(name, proto)
        outputs = self.double.predict(endpoint, inputs, number)
        response = predict_pb2.PredictResponse()
        response.model_spec.CopyFrom(spec)
        response.model_spec.version.value = number
        for name, array in outputs.items():
            response.outputs[name].CopyFrom(tf.make_tensor_proto(array))
        return response

    @refusing
    def GetModelMetadata(self, request):
        self.double.check_name(request.model_spec.name, _version(request.model_spec))
        number, _, found = self.double.model(_version(request.model_spec))
        signatures = get_model_metadata_pb2.SignatureDefMap()
        for endpoint, signature in found.items():
            signatures.signature_def[endpoint].CopyFrom(signature)
        response = get_model_metadata_pb2.GetModelMetadataResponse()
        response.model_spec.name = self.double.name
        response.model_spec.version.value = number
        response.metadata["signature_def"].Pack(signatures)
        return response


class Models(model_service_pb2_grpc.ModelServiceServicer):
    def __init__(self, double):
        self.double = double

    @refusing
    def GetModelStatus(self, request):
        status = self.double.status(request.model_spec.name, _version(request.model_spec))
        return json_format.ParseDict(status, get_model_status_pb2.GetModelStatusResponse())
