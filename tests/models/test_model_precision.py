"""The dtype policy of a model: its parts, its losses, its symbolic outputs, and all in its file."""

import keras
import numpy as np
import pytest

from trellis_keras import zoo
from trellis_keras.layers import TrellisLayer
from trellis_keras.models import (
    FrameLoss,
    LanguageModel,
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)

SEQUENCE_MODELS = [SequenceRegressor, SequenceClassifier, PolyphonicModel]


def language_model(dtype):
    backbone = TrellisLayer(4, 2, dtype=dtype)
    rates = {"embedding_dropout": 0.1, "input_dropout": 0.1, "output_dropout": 0.1}
    return LanguageModel(7, 3, backbone, tie_embeddings=False, seed=1, dtype=dtype, **rates)


def sequence_model(dtype, kind=SequenceRegressor):
    per_step = kind is PolyphonicModel
    backbone = TrellisLayer(4, 2, return_sequences=per_step, dtype=dtype)
    return kind(backbone, 3, dtype=dtype)


def remade(model):
    """A model as one loaded from a file, without its weights."""
    new = type(model).from_config(model.get_config())
    new.compile_from_config(model.get_compile_config())
    return new


def test_all_parts_of_a_language_model_have_its_policy():
    model = language_model("float64")
    model.build((None, None))
    assert {layer.dtype_policy.name for layer in model._flatten_layers()} == {"float64"}
    assert {v.dtype for v in model.trainable_variables} == {"float64"}
    assert keras.backend.standardize_dtype(model(np.zeros((1, 2), "int32")).dtype) == "float64"


def test_a_file_of_the_zoo_keeps_the_policy(tmp_path):
    sizes = {"vocabulary_size": 9, "hidden_units": 4, "embedding_dim": 3, "depth": 3}
    model = zoo.get_model("trellisnet_char", dtype_policy="float64", **sizes)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.embedding.embeddings.dtype == "float64"
    for a, b in zip(model.weights, loaded.weights, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_the_seed_is_that_of_an_untied_head_too():
    kernels = []
    for _ in range(2):
        model = language_model("float32")
        model.build((None, None))
        kernels.append(np.asarray(model.head.kernel))
    np.testing.assert_array_equal(*kernels)
    assert not np.any(np.isin(kernels[0], model.embedding.embeddings))


@pytest.mark.parametrize(
    ("make", "shape"), [(language_model, (None, None)), (sequence_model, (None, None, 3))]
)
def test_a_loss_that_is_not_scaled_stays_so(make, shape, tmp_path):
    model = make("mixed_float16")
    model.build(shape)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), auto_scale_loss=False)
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(3)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.SGD
    assert int(loaded.optimizer.iterations) == 3
    scaled = make("mixed_float16")
    scaled.compile("sgd")
    assert isinstance(remade(scaled).optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.parametrize("kind", SEQUENCE_MODELS)
def test_losses_are_in_the_models_precision(kind):
    for policy, wide in (("float64", "float64"), ("mixed_bfloat16", "float32")):
        model = sequence_model(policy, kind)
        model.compile("sgd")
        assert model.loss.dtype == wide and remade(model).loss.dtype == wide
    assert FrameLoss.from_config(FrameLoss(dtype="float64").get_config()).dtype == "float64"


def test_a_loss_in_float64_sees_what_float32_does_not():
    model = sequence_model("float64")
    model.compile("sgd")
    y = keras.ops.convert_to_tensor(np.full((1, 3), 1e9))
    assert float(model.compute_loss(None, y, y + 1)) == 1


@pytest.mark.both_backends
@pytest.mark.parametrize(
    ("make", "x"),
    [(language_model, np.zeros((1, 4), "int32")), (sequence_model, np.zeros((1, 4, 3), "float32"))],
)
def test_symbolic_outputs_say_the_precision_of_real_ones(make, x):
    model = make("mixed_bfloat16")
    symbolic, real = model(keras.Input(x.shape[1:], dtype=x.dtype.name)), model(x)
    assert symbolic.dtype == keras.backend.standardize_dtype(real.dtype) == "float32"
    assert symbolic.shape[1:] == tuple(real.shape)[1:]
