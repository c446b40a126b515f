"""The requests that TensorFlow Serving tries out before it offers a version."""

import sys

import pytest

from tests.support.served import small_model
from trellis_keras import serving

tf = pytest.importorskip("tensorflow")


def test_the_requests_can_be_answered(tmp_path):
    prediction_log_pb2 = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    path = serving.export(small_model("lru_char_ptb"), tmp_path / "lru", warmup=True)
    signatures = tf.saved_model.load(path).signatures
    file = path / "assets.extra" / "tf_serving_warmup_requests"
    asked = set()
    for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
        log = prediction_log_pb2.PredictionLog.FromString(record)
        request = log.predict_log.request
        assert request.model_spec.name == "lru"
        endpoint = request.model_spec.signature_name
        given = {name: tf.constant(tf.make_ndarray(t)) for name, t in request.inputs.items()}
        assert signatures[endpoint](**given)
        asked.add(endpoint)
    assert asked == set(signatures)


def test_without_the_package_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_serving", None)
    with pytest.raises(ImportError, match="pip install tensorflow-serving-api"):
        serving.export(small_model("tcn_adding"), tmp_path / "model", warmup=True)
    assert not list(tmp_path.iterdir())
