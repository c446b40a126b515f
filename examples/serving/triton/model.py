"""Triton's Python backend for one endpoint of an exported model. repository.py copies it."""

import os
import sys

# Triton's own interpreter ignores PYTHONPATH. repository.py says where TensorFlow is installed.
with open(os.path.join(os.path.dirname(__file__), "packages")) as _file:
    sys.path.insert(0, _file.read())

import json  # noqa: E402

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import triton_python_backend_utils as triton  # noqa: E402


class TritonPythonModel:
    def initialize(self, args):
        folder = os.path.join(args["model_repository"], args["model_version"], "export")
        parameters = json.loads(args["model_config"])["parameters"]
        self._model = tf.saved_model.load(folder)  # its variables live as long as it does
        self._endpoint = self._model.signatures[parameters["endpoint"]["string_value"]]

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            outputs = self._endpoint(**dict(self._inputs(request)))
        except (ValueError, TypeError, tf.errors.OpError) as error:
            return triton.InferenceResponse(error=triton.TritonError(str(error)))
        tensors = [triton.Tensor(name, value.numpy()) for name, value in outputs.items()]
        return triton.InferenceResponse(tensors)

    def _inputs(self, request):
        for name, spec in self._endpoint.structured_input_signature[1].items():
            array = triton.get_input_tensor_by_name(request, name).as_numpy()
            if not spec.shape.rank:  # Triton has no scalars
                array = np.reshape(array, ())
            yield name, tf.constant(array, spec.dtype)
