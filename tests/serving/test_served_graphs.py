"""What is in an exported graph, and the requests that it refuses."""

import json

import keras
import numpy as np
import pytest

from tests.support.served import KINDS, inputs, small_model
from trellis_keras import serving
from trellis_keras.layers import TCN, StackedRNN, TrellisLayer
from trellis_keras.models import LanguageModel, SequenceClassifier
from trellis_keras.serving.state import State

tf = pytest.importorskip("tensorflow")


def read_graph(path):
    """Returns the graph and the signatures in a SavedModel's file."""
    from tensorflow.core.protobuf import saved_model_pb2

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


@pytest.mark.parametrize("name", KINDS)
def test_no_request_leaves_a_trace_and_only_seeds_draw_numbers(exported, name):
    graph, signatures = read_graph(exported(name)[1])
    for endpoint, signature in signatures.items():
        found = operations(graph, signature)
        if endpoint != "initial_state":
            assert "ReadVariableOp" in found
        # Not every server has XLA's own operations.
        assert not {op for op in found if "Assign" in op or op.startswith("Xla")}
        random = {op for op in found if "Random" in op or "Multinomial" in op}
        assert all(op.startswith("StatelessRandom") for op in random)
        assert bool(random) == endpoint.startswith("generate")


@pytest.mark.parametrize("name", KINDS)
def test_the_signature_file_says_what_the_signatures_are(exported, name):
    path = exported(name)[1]
    described = json.loads((path / "assets.extra" / "signatures.json").read_text())
    signatures = read_graph(path)[1]
    assert sorted(described) == sorted(signatures)
    for endpoint, signature in signatures.items():
        for side in ("inputs", "outputs"):
            fields, tensors = described[endpoint][side], dict(getattr(signature, side))
            assert sorted(fields) == sorted(tensors)
            for key, tensor in tensors.items():
                assert fields[key]["dtype"] == tf.as_dtype(tensor.dtype).name
                sizes = [size.size for size in tensor.tensor_shape.dim]
                said = [-1 if isinstance(size, str) else size for size in fields[key]["shape"]]
                assert sizes == said


def test_which_endpoints_there_are():
    streaming = ["generate", "initial_state", "prefill", "serving_default", "step"]
    model = small_model("lru_char_ptb", vocabulary=None)
    assert sorted(serving.endpoints_of(model)) == streaming
    model = small_model("lru_char_ptb")
    assert sorted({*streaming, "generate_text", "score_text"}) == sorted(
        serving.endpoints_of(model)
    )
    # Keras' own layers do not stream.
    model = LanguageModel(7, 4, keras.layers.LSTM(4, return_sequences=True))
    model.build((None, None))
    assert list(serving.endpoints_of(model)) == ["serving_default"]
    model = SequenceClassifier(keras.layers.LSTM(4), 3)
    model.build((None, None, 2))
    assert list(serving.endpoints_of(model)) == ["serving_default"]


def test_a_layer_that_draws_in_inference_is_refused(tmp_path):
    lstm = keras.layers.LSTM(4, return_sequences=True, return_state=True, dropout=0.1)
    model = LanguageModel(7, 4, StackedRNN([lstm]))
    model.build((None, None))
    serving.export(model, tmp_path / "stacked")
    lstm = keras.layers.LSTM(4, return_sequences=True, dropout=0.1)
    model = LanguageModel(7, 4, lstm)
    model.build((None, None))
    with pytest.raises(ValueError, match="draws random numbers.*put these into a StackedRNN"):
        serving.export(model, tmp_path / "alone")
    assert [path.name for path in tmp_path.iterdir()] == ["stacked"]


def test_noise_from_a_seed_of_its_own_is_refused(tmp_path):
    class Noise(keras.layers.Layer):
        def call(self, x):
            return x + keras.random.normal(keras.ops.shape(x), seed=3)

        def compute_output_shape(self, input_shape):
            return input_shape

    model = LanguageModel(7, 4, Noise())
    model.build((None, None))
    with pytest.raises(
        ValueError, match="would not follow from the request alone.*StatelessRandom"
    ):
        serving.export(model, tmp_path / "noise")


def test_exporting_changes_nothing_in_the_model(exported):
    model, _ = exported("trellisnet_char")
    assert model.backbone.stateful
    tokens = inputs(model, 2, 8)[1]
    first, second = (model.predict(tokens, batch_size=2, verbose=0) for _ in range(2))
    assert (first == second).all()


def test_states_are_what_json_can_hold():
    # One tap: the cache has an array of no steps.
    layer = TrellisLayer(4, 2, kernel_size=1, dtype="mixed_float16")
    layer.build((None, None, 2))
    state = State(layer)
    assert sorted(state.fields) == ["state_states_0_0", "state_states_1_0"]
    x = np.ones((5, 2), "float16")
    y, cache = layer.step(x, layer.initial_cache(5))
    again, _ = layer.step(x, state.cache(state.initial(5), 5))
    np.testing.assert_array_equal(y, again)
    assert {tensor.dtype for tensor in state.flat(cache).values()} == {tf.float32}
    # Half precision in the cache.
    layer = TCN(3, kernel_size=2, depth=1, dtype="mixed_float16")
    layer.build((None, None, 2))
    state = State(layer)
    y, cache = layer.step(x, layer.initial_cache(5))
    assert {leaf.dtype for leaf in keras.tree.flatten(cache)} == {tf.float16}
    assert {field.dtype for field in state.fields.values()} == {"float32"}
    following = state.cache(state.flat(cache), 5)
    np.testing.assert_array_equal(layer.step(x, cache)[0], layer.step(x, following)[0])


# Requests that are refused


@pytest.fixture(scope="module")
def signatures(exported):
    return tf.saved_model.load(exported("trellisnet_char")[1]).signatures


TOKENS = [[1, 2], [3, 4]]
DRAW = {"temperature": 1.0, "seed": 0}
REFUSED = {
    "id too large": ("serving_default", {"tokens": [[1, 11]]}, r"must lie in \[0, 11\).*11"),
    "id below zero": ("serving_default", {"tokens": [[1, -1]]}, r"must lie in \[0, 11\).*-1"),
    "no rows": (
        "generate",
        {"tokens": np.zeros((0, 2)), "max_length": 9, **DRAW},
        "one row or more",
    ),
    "in all": ("generate", {"tokens": [[1]] * 70, "max_length": 60_001, **DRAW}, "4194304 in all"),
    "no state": ("initial_state", {"batch_size": 0}, "1 to 4096.*0"),
    "many rows": ("initial_state", {"batch_size": 2**31 - 1}, "1 to 4096"),
    "id in prefill": ("prefill", {"tokens": [[11]]}, "must lie in"),
    "id in generate": ("generate", {"tokens": [[11]], "max_length": 9, **DRAW}, "must lie in"),
    "no tokens": ("prefill", {"tokens": [[], []]}, "at least one token"),
    "short": ("generate", {"tokens": TOKENS, "max_length": 2, **DRAW}, "1 to 65536 new tokens.*0"),
    "long": ("generate", {"tokens": TOKENS, "max_length": 2**30, **DRAW}, "1 to 65536 new tokens"),
    "temperature": (
        "generate",
        {"tokens": TOKENS, "max_length": 9, "temperature": -0.5, "seed": 0},
        "must be 0 or more.*-0.5",
    ),
    "no number": (
        "generate",
        {"tokens": TOKENS, "max_length": 9, "temperature": float("nan"), "seed": 0},
        "must be 0 or more",
    ),
    "unknown symbol": ("score_text", {"text": ["abc", "abz"]}, "unknown to the vocabulary.*z"),
    "no text": ("generate_text", {"text": ["a", ""], "max_new_tokens": 1, **DRAW}, "at least one"),
    "no length": ("generate_text", {"text": ["a"], "max_new_tokens": 0, **DRAW}, "1 to 65536"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_requests(signatures, case):
    endpoint, request, message = REFUSED[case]
    request = {
        name: tf.constant(value, "int32" if name == "tokens" else None)
        for name, value in request.items()
    }
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s){message}"):
        signatures[endpoint](**request)


def test_a_step_outside_the_vocabulary_is_refused(signatures):
    state = signatures["initial_state"](batch_size=tf.constant(2))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must lie in"):
        signatures["step"](tokens=tf.constant([1, -2]), **state)


def test_a_step_with_the_state_of_other_rows_is_refused(exported):
    # A product of one row and a sum with several would be taken for each of them.
    signatures = tf.saved_model.load(exported("lru_char_ptb")[1]).signatures
    state = signatures["initial_state"](batch_size=tf.constant(1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows.*3"):
        signatures["step"](tokens=tf.constant([1, 2, 3]), **state)


# Drawing


def test_draws_have_the_models_probabilities(signatures):
    """Within 4.5 standard deviations of what 40,000 draws of 11 tokens should give."""
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
        shares = tf.math.bincount(drawn, minlength=11).numpy() / count
        assert (abs(shares - p) <= 4.5 * (p * (1 - p) / count) ** 0.5).all()
