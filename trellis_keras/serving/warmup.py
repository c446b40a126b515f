"""Requests that TensorFlow Serving runs before it offers a version, so that nobody waits for it."""

FILE = "tf_serving_warmup_requests"


def check_installed():
    """Refuses to begin what cannot be finished.

    Raises:
        ImportError: tensorflow-serving-api is not installed.
    """
    try:
        import tensorflow_serving.apis.prediction_log_pb2  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Warm-up requests are written with tensorflow-serving-api. Install it with "
            "`pip install tensorflow-serving-api`, or export without them."
        ) from error


def write(endpoints, name, folder):
    """Writes one small request to each endpoint.

    Args:
        endpoints: What `endpoints_of` found.
        name: The model's name on the server.
        folder: The folder `assets.extra` of the SavedModel.
    """
    import tensorflow as tf
    from tensorflow_serving.apis import model_pb2, predict_pb2, prediction_log_pb2

    with tf.io.TFRecordWriter(str(folder / FILE)) as writer:
        for endpoint in endpoints.values():
            spec = model_pb2.ModelSpec(name=name, signature_name=endpoint.name)
            request = predict_pb2.PredictRequest(model_spec=spec)
            for key, value in endpoint.example().items():
                request.inputs[key].CopyFrom(tf.make_tensor_proto(value))
            log = prediction_log_pb2.PredictLog(request=request)
            writer.write(prediction_log_pb2.PredictionLog(predict_log=log).SerializeToString())
