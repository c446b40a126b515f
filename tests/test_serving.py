"""Exported SavedModels: what they compute, what is in their graph, and refused exports."""

import keras
import numpy as np
import pytest
from backends import run_script

from trellis_keras import serving, zoo

tf = pytest.importorskip("tensorflow")

TINY = {
    "vocabulary_size": 11,
    "depth": 3,
    "hidden_units": 4,
    "embedding_dim": 4,
    "input_dropout": 0.1,
    "hidden_dropout": 0.2,
    "weight_dropout": 0.2,
}
MODELS = {
    "chop": TINY,
    "stateful": TINY | {"history": "repackage", "weight_norm": True},
    "auxiliary": TINY | {"aux_every": 1, "aux_weight": 0.1},
}
SHAPES = [(1, 1), (3, 17), (2, 40)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """`exported(name)`: a model as it comes from a `.keras` file, and its SavedModel."""
    folder = tmp_path_factory.mktemp("exported")
    made = {}

    def export(name):
        if name not in made:
            model = zoo.trellisnet_char(**MODELS[name])
            for index, weight in enumerate(model.trainable_weights):
                weight.assign(np.random.default_rng(index).normal(size=weight.shape, scale=0.5))
            model.save(folder / f"{name}.keras")
            model = keras.saving.load_model(folder / f"{name}.keras")
            made[name] = model, serving.export(model, folder / name / "1")
        return made[name]

    return export


def tokens(shape):
    return np.random.default_rng(shape[1]).integers(0, 11, shape).astype("int32")


def scores(model, array):
    """What Keras computes, from an empty history."""
    return keras.ops.convert_to_numpy(serving.without_history(model)(array, training=False))


@pytest.mark.parametrize("name", MODELS)
def test_a_process_with_tensorflow_alone_gets_the_same_scores(exported, name, tmp_path):
    model, path = exported(name)
    source = """
import sys
import numpy as np
import tensorflow as tf
serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
print(sorted(serve.structured_input_signature[1]), sorted(serve.structured_outputs))
results = {}
for name, array in np.load(sys.argv[2]).items():
    results[name] = serve(tokens=tf.constant(array))["log_probabilities"].numpy()
    again = serve(tokens=tf.constant(array))["log_probabilities"].numpy()
    assert np.array_equal(results[name], again)
np.savez(sys.argv[3], **results)
"""
    inputs = {f"{batch}x{time}": tokens((batch, time)) for batch, time in SHAPES}
    np.savez(tmp_path / "in.npz", **inputs)
    files = tmp_path / "in.npz", tmp_path / "out.npz"
    output = run_script(source, path, *files, block=("keras", "trellis_keras"))
    assert output.split("\n")[0] == "['tokens'] ['log_probabilities']"
    with np.load(tmp_path / "out.npz") as results:
        for key, array in inputs.items():
            assert results[key].dtype == "float32"
            np.testing.assert_allclose(results[key], scores(model, array), rtol=0, atol=1e-5)


def operations(path):
    """The types of all operations that a request runs, those in library functions included."""
    graph = tf.saved_model.load(str(path)).signatures["serving_default"].graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return {node.op for node in nodes}


@pytest.mark.parametrize("name", MODELS)
def test_no_request_leaves_a_trace_or_draws_a_number(exported, name):
    found = operations(exported(name)[1])
    assert "ReadVariableOp" in found
    assert not {op for op in found if "Assign" in op or "Random" in op}


def test_the_signature_takes_any_batch_and_length(exported):
    serve = tf.saved_model.load(str(exported("chop")[1])).signatures["serving_default"]
    spec = serve.structured_input_signature[1]["tokens"]
    assert spec.dtype == tf.int32
    assert spec.shape.as_list() == [None, None]
    assert serve.structured_outputs["log_probabilities"].shape.as_list() == [None, None, 11]


def test_exporting_changes_nothing_in_the_model(exported):
    model, _ = exported("stateful")
    assert model.backbone.stateful
    history = [model.predict(tokens((2, 8)), batch_size=2, verbose=0) for _ in range(2)]
    np.testing.assert_array_equal(*history)


def test_an_existing_path_is_refused(exported, tmp_path):
    model, _ = exported("chop")
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="exists already"):
            serving.export(model, path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_export_leaves_nothing(exported, tmp_path, monkeypatch):
    def write_half(trackable, folder, **kwargs):
        folder.mkdir()
        (folder / "saved_model.pb").touch()
        raise OSError("disk full")

    monkeypatch.setattr(tf.saved_model, "save", write_half)
    with pytest.raises(OSError, match="disk full"):
        serving.export(exported("chop")[0], tmp_path / "1")
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_not_built_is_refused(exported, tmp_path):
    built, _ = exported("chop")
    model = type(built).from_config(built.get_config())
    with pytest.raises(ValueError, match="Build the model before exporting it"):
        serving.export(model, tmp_path / "1")


def test_jax_is_told_how_to_export(tmp_path):
    source = """
import sys
from trellis_keras import serving, zoo
model = zoo.trellisnet_char(depth=1, hidden_units=1, embedding_dim=1)
try:
    serving.export(model, sys.argv[1])
except ValueError as error:
    print(error)
"""
    assert "KERAS_BACKEND=tensorflow" in run_script(source, tmp_path / "1", backend="jax")
    assert not list(tmp_path.iterdir())
