"""What is in an exported graph, and the requests that it refuses."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from tests.support.parameters import slow_but
from tests.support.served import MODELS
from trellis_keras.data import Vocabulary
from trellis_keras.export import export
from trellis_keras.layers import StackedRNN
from trellis_keras.models import LanguageModel, SequenceClassifier


def read_graph(path):
    """Returns the graph and the signatures in a SavedModel's file."""
    file = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    signatures = dict(file.meta_graphs[0].signature_def)
    signatures.pop("__saved_model_init_op")
    return file.meta_graphs[0].graph_def, signatures


def operations(graph, signature):
    """The types of all operations that a request to a signature runs."""
    functions = {function.signature.name: function for function in graph.library.function}
    outputs = {tensor.name.split(":")[0] for tensor in signature.outputs.values()}
    nodes, seen, found = [n for n in graph.node if n.name in outputs], set(), set()
    while nodes:
        node = nodes.pop()
        found.add(node.op)
        for value in node.attr.values():
            for name in {value.func.name, *(f.name for f in value.list.func)} - seen:
                seen.add(name)
                nodes += functions[name].node_def if name in functions else []
    return found


@pytest.mark.parametrize("name", slow_but(MODELS, "trellisnet", "regressor"))
def test_requests_change_nothing_and_only_seeds_draw_numbers(exported, name):
    graph, signatures = read_graph(exported(name)[1])
    for endpoint, signature in signatures.items():
        found = operations(graph, signature)
        # A server may lack XLA's operations.
        assert not {op for op in found if "Assign" in op or op.startswith("Xla")}
        random = {op for op in found if "Random" in op or "Multinomial" in op}
        assert all(op.startswith("StatelessRandom") for op in random)
        assert bool(random) == endpoint.startswith("generate")


@pytest.mark.parametrize("name", slow_but(MODELS, "trellisnet", "regressor"))
def test_the_signature_file_agrees_with_the_signatures(exported, name):
    path = exported(name)[1]
    described = json.loads((path / "assets.extra" / "signatures.json").read_text())
    signatures = read_graph(path)[1]
    assert sorted(described) == sorted(signatures)
    for endpoint, signature in signatures.items():
        assert described[endpoint]["description"].endswith(".")
        for side in ("inputs", "outputs"):
            fields, tensors = described[endpoint][side], dict(getattr(signature, side))
            assert sorted(fields) == sorted(tensors)
            for key, tensor in tensors.items():
                assert fields[key]["dtype"] == tf.as_dtype(tensor.dtype).name
                sizes = [size.size for size in tensor.tensor_shape.dim]
                shape = [-1 if isinstance(size, str) else size for size in fields[key]["shape"]]
                assert sizes == shape


def endpoints(path):
    return sorted(json.loads((path / "assets.extra" / "signatures.json").read_text()))


def test_which_endpoints_a_model_has(exported, tmp_path):
    streaming = ["generate", "initial_cache", "prefill", "serving_default", "step"]
    assert endpoints(exported("lru")[1]) == streaming
    model, path = exported("trellisnet")
    assert endpoints(path) == sorted([*streaming, "generate_text", "score_text"])
    vocabulary = Vocabulary.load(path / "assets.extra" / "vocabulary.json")
    assert vocabulary == model.vocabulary
    assert endpoints(exported("regressor")[1]) == ["initial_cache", "serving_default", "step"]
    classifier = SequenceClassifier(keras.layers.Bidirectional(keras.layers.LSTM(4)), 3)
    classifier.build((None, None, 2))
    with pytest.warns(UserWarning, match="only for whole sequences, without `step`.*Bidirec"):
        assert endpoints(export(classifier, tmp_path / "lstm")) == ["serving_default"]


class Noise(keras.layers.Layer):
    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x), seed=3)

    def compute_output_shape(self, input_shape):
        return input_shape


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (lambda: keras.layers.LSTM(4, return_sequences=True, dropout=0.1), "layers with dropout"),
        (Noise, "is not a pure function of its inputs: its graph has StatelessRandom"),
    ],
)
def test_a_layer_that_draws_in_inference_is_refused(tmp_path, backbone, message):
    model = LanguageModel(7, 4, backbone())
    model.build((None, None))
    with pytest.raises(ValueError, match=message):
        export(model, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_half_precision_is_exported(tmp_path):
    lstm = keras.layers.LSTM(4, return_sequences=True, return_state=True, dtype="mixed_bfloat16")
    model = LanguageModel(7, 4, StackedRNN([lstm]), dtype="mixed_bfloat16")
    model.build((None, None))
    signatures = tf.saved_model.load(export(model, tmp_path)).signatures
    tokens = tf.constant([[1, 2, 3]])
    answer = signatures["serving_default"](tokens=tokens)["log_probabilities"]
    np.testing.assert_allclose(answer, tf.cast(model(tokens), "float32"), atol=0.02)


# Requests that are refused


@pytest.fixture(scope="module")
def signatures(exported):
    return tf.saved_model.load(exported("trellisnet")[1]).signatures


TOKENS = [[1, 2], [3, 4]]
DRAW = {"temperature": 1.0, "seed": 0}
SAMPLED = {"tokens": TOKENS, "max_length": 9, **DRAW}
REFUSED = [
    ("serving_default", {"tokens": [[1, 7]]}, r"must be in \[0, 7\).*7"),
    ("prefill", {"tokens": [[-1]]}, "must be in"),
    ("prefill", {"tokens": [[], []]}, "at least one token"),
    ("initial_cache", {"batch_size": 2**31 - 1}, r"must be in \[1, 4096\]"),
    ("generate", SAMPLED | {"tokens": [[11]]}, "must be in"),
    ("generate", SAMPLED | {"tokens": np.zeros((0, 2))}, "1 to 1048576 tokens.*0"),
    ("generate", SAMPLED | {"max_length": 2**19 + 3}, "1 to 1048576"),
    ("generate", SAMPLED | {"temperature": float("nan")}, "must be finite"),
    ("score_text", {"text": ["abc", "abz"]}, "no unknown token.*z"),
    ("generate_text", {"text": ["a", ""], "max_new_tokens": 1, **DRAW}, "at least one"),
    ("generate_text", {"text": ["a"], "max_new_tokens": 0, **DRAW}, "1 to 1048576"),
]


@pytest.mark.parametrize(("endpoint", "request_", "message"), REFUSED)
def test_refused_requests(signatures, endpoint, request_, message):
    request = {
        name: tf.constant(value, "int32" if name == "tokens" else None)
        for name, value in request_.items()
    }
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s){message}"):
        signatures[endpoint](**request)


def test_a_sequence_without_steps_is_refused(exported):
    serve = tf.saved_model.load(exported("classifier")[1]).signatures["serving_default"]
    with pytest.raises(tf.errors.InvalidArgumentError, match="(?s)needs at least one step.*0"):
        serve(inputs=tf.zeros((2, 0, 2)))


def test_refused_steps(exported, signatures):
    cache = signatures["initial_cache"](batch_size=tf.constant(2))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be in"):
        signatures["step"](tokens=tf.constant([1, -2]), **cache)
    # An LRU would broadcast the only row of the cache.
    signatures = tf.saved_model.load(exported("lru")[1]).signatures
    cache = signatures["initial_cache"](batch_size=tf.constant(1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows.*3"):
        signatures["step"](tokens=tf.constant([1, 2, 3]), **cache)


def test_draws_have_the_models_probabilities(signatures):
    """Within 4.5 standard deviations of the expected counts of 40,000 draws from 7 tokens."""
    count = 40_000
    log_p = signatures["prefill"](tokens=tf.constant([[3, 1]]))["log_probabilities"][0]
    for temperature in (1.0, 0.5):
        drawn = signatures["generate"](
            tokens=tf.constant([[3, 1]] * count),
            max_length=tf.constant(3),
            temperature=tf.constant(temperature),
            seed=tf.constant(5),
        )["tokens"][:, 2]
        p = tf.nn.softmax(log_p / temperature).numpy()
        shares = tf.math.bincount(drawn, minlength=7).numpy() / count
        assert (abs(shares - p) <= 4.5 * (p * (1 - p) / count) ** 0.5).all()


@pytest.mark.slow
def test_warm_up_requests_are_valid(exported):
    """Those of a model with all endpoints; `exported` asks for them where they can be written."""
    prediction_log_pb2 = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    _, path = exported("adaptive")
    signatures = tf.saved_model.load(path).signatures
    file = path / "assets.extra" / "tf_serving_warmup_requests"
    asked = set()
    for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
        request = prediction_log_pb2.PredictionLog.FromString(record).predict_log.request
        assert request.model_spec.name == "adaptive"
        endpoint = request.model_spec.signature_name
        given = {name: tf.constant(tf.make_ndarray(t)) for name, t in request.inputs.items()}
        assert signatures[endpoint](**given)
        asked.add(endpoint)
    assert asked == set(signatures)
