"""A client over gRPC (port 8500): streams, scores and generates text, watches sensors.

    python examples/serving/grpc_client.py stream VOCABULARY
    python examples/serving/grpc_client.py score FILE
    python examples/serving/grpc_client.py generate "The "
    python examples/serving/grpc_client.py --model MODEL watch < measurements.csv

Needs the extra `serving` (tensorflow-serving-api and grpcio); see README.md beside this file.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import grpc  # noqa: E402
import tensorflow as tf  # noqa: E402
from serving_client import ServerError, as_text  # noqa: E402
from tensorflow_serving.apis import (  # noqa: E402
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

# A cache can exceed gRPC's default limit of 4 MB.
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class GrpcTransport:
    """TensorFlow Serving's gRPC API.

    Args:
        address: Such as `"localhost:8500"`.
        model: Name of the model on the server.
        timeout: Seconds. Defaults to 30.
    """

    def __init__(self, address, model, timeout=30.0):
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)
        self._predictions = prediction_service_pb2_grpc.PredictionServiceStub(self._channel)
        self._model = model
        self._timeout = timeout

    def newest_version(self):
        request = get_model_status_pb2.GetModelStatusRequest(model_spec=self._spec())
        status = self._call(self._models.GetModelStatus, request).model_version_status
        ready = get_model_status_pb2.ModelVersionStatus.AVAILABLE
        versions = [item.version for item in status if item.state == ready]
        if not versions:
            raise ServerError(f"No version is ready: {status}")
        return max(versions)

    def endpoints(self, version=None):
        request = get_model_metadata_pb2.GetModelMetadataRequest(
            model_spec=self._spec(version), metadata_field=["signature_def"]
        )
        answer = self._call(self._predictions.GetModelMetadata, request)
        signatures = get_model_metadata_pb2.SignatureDefMap()
        answer.metadata["signature_def"].Unpack(signatures)
        return set(signatures.signature_def)

    def predict(self, endpoint, inputs, version=None):
        request = predict_pb2.PredictRequest(model_spec=self._spec(version, endpoint))
        for name, array in inputs.items():
            request.inputs[name].CopyFrom(tf.make_tensor_proto(array))
        outputs = self._call(self._predictions.Predict, request).outputs
        return {name: as_text(tf.make_ndarray(proto)) for name, proto in outputs.items()}

    def close(self):
        self._channel.close()

    def _spec(self, version=None, endpoint=""):
        spec = model_pb2.ModelSpec(name=self._model, signature_name=endpoint)
        if version is not None:
            spec.version.value = version
        return spec

    def _call(self, method, request):
        try:
            return method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise ServerError(f"{error.code().name}: {error.details()}") from error


if __name__ == "__main__":
    from serving_commands import make_app

    make_app(GrpcTransport, "localhost:8500")()
