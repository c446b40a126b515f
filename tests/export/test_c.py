"""Models as C: equal to Keras, without warnings, the same file for the same model."""

import re
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_streams
from keras_streams import compiled
from keras_streams.c import c_source, keras_steps, proven_source
from keras_streams.exported import exported_stream
from tests.export.random_nets import CHANNELS, draw, random_net
from trellis_keras import zoo
from trellis_keras.export import export
from trellis_keras.layers import (
    LRU,
    TCN,
    AdaptiveSoftmax,
    Dropout,
    MixtureOfSoftmaxes,
    TrellisLayer,
    VariationalDropout,
)
from trellis_keras.models import LanguageModel, SequenceClassifier

WARNINGS = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
GCC = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
ZIG = [sys.executable, "-m", "ziglang", "cc"]


def compile_c(folder, *options, compiler=("gcc",), files=("model.c",)):
    """Compiles `files` in a folder, with the warnings as errors."""
    command = [*compiler, *WARNINGS, *options, *files, "-lm"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def classifier(**options):
    backbone = TCN(4, kernel_size=3, depth=2, return_sequences=False)
    model = SequenceClassifier(backbone, 2, class_names=["walk", "run"], normalize=True, **options)
    model.build((None, None, CHANNELS))
    draw(model, np.random.default_rng(0))
    return model


def language_model(head=None, tie_embeddings=True):
    backbone = LRU(4, 2, stateful=True)
    model = LanguageModel(9, 4, backbone, head=head, tie_embeddings=tie_embeddings)
    model.build((1, None))
    draw(model, np.random.default_rng(0))
    return model


# `proven_source` raises unless the C equals Keras.

QUICK = range(10)


@pytest.mark.parametrize(
    "seed", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 200))]
)
def test_random_nets_equal_keras(seed):
    proven_source(random_net(seed), "net")


def test_doubles_equal_keras():
    source, *_ = proven_source(random_net(3, "float64"), "net")
    assert source.real == "double" and "float" not in source.code


HEADS = {
    "dense": lambda: None,
    "mixture": lambda: MixtureOfSoftmaxes(9, 3, epsilon=1e-3),
    "adaptive": lambda: AdaptiveSoftmax(9, (3, 6), div_value=2),
}


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_language_models_equal_keras(head, tie_embeddings):
    if head == "adaptive" and tie_embeddings:
        pytest.skip("tails of another width have a matrix of their own")
    model = language_model(HEADS[head](), tie_embeddings)
    source, *_ = proven_source(model, "net")
    # A tied matrix is stored once.
    assert source.weight_bytes <= 4 * model.count_params() + 200
    stream = compiled.NativeStream(source)
    stream._step(stream._at[0], 9, stream._at[2])
    assert np.all(np.isnan(stream._y))  # the C function has no other way to refuse a token


@pytest.mark.both_backends
def test_a_model_keeps_its_names(tmp_path):
    columns = {"inputs": ["flow", "rain", "hour"]}
    export(classifier(), tmp_path / "gait.c", format="c", series=columns)
    header = (tmp_path / "gait.h").read_text()
    assert "0: flow" in header and "2: hour" in header
    assert '#define GAIT_NAMES "walk", "run" ' in header and "last 13 inputs" in header
    assert re.search(r"Largest difference from Keras over 200 random steps: below \de-0\d", header)


@GCC
def test_the_code_compiles_without_warnings_everywhere(tmp_path):
    """Also the sizes that it states are right, and the sanitizers find nothing."""
    pytest.importorskip("ziglang")
    test = """
#include "model.h"
int main(void)
{
    static model_state s;
    float x[MODEL_INPUTS] = {0}, y[MODEL_OUTPUTS];
    model_reset(&s);
    for (int t = 0; t < 50; t++)
        model_step(&s, x, y);
    return sizeof s == MODEL_STATE_BYTES ? 0 : 1;
}
"""
    export(classifier(), tmp_path / "model.c", format="c")
    (tmp_path / "main.c").write_text(test)
    files = ["model.c", "main.c"]
    compile_c(tmp_path, "-fsanitize=address,undefined", "-fno-sanitize-recover", files=files)
    assert subprocess.run(tmp_path / "a.out").returncode == 0
    compile_c(tmp_path, "-O2", compiler=ZIG, files=files)
    assert subprocess.run(tmp_path / "a.out").returncode == 0


@GCC
def test_every_operation_compiles_without_warnings(tmp_path):
    models = {
        "mixture": language_model(MixtureOfSoftmaxes(9, 2)),
        "adaptive": language_model(AdaptiveSoftmax(9, (3,)), tie_embeddings=False),
        **{f"net_{seed}": random_net(seed) for seed in QUICK},
    }
    for name, model in models.items():
        source = c_source(exported_stream(model), name)
        compiled.write_source(source, tmp_path)
    compile_c(tmp_path, "-c", files=[f"{name}.c" for name in models])


def test_the_same_model_gives_the_same_file(tmp_path):
    model = classifier()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    texts = []
    for folder, of in (("a", model), ("b", loaded)):
        path = export(of, tmp_path / folder / "model.c", format="c")
        texts.append(path.read_bytes() + path.with_suffix(".h").read_bytes())
    assert texts[0] == texts[1]


@GCC
def test_without_a_compiler_there_is_a_test_program(tmp_path, monkeypatch):
    for module in ("keras_streams.compiled", "keras_streams.c"):
        monkeypatch.setattr(f"{module}.find_compiler", lambda: None)
    with pytest.warns(UserWarning, match="cc model.c model_test.c -lm && ./a.out"):
        export(classifier(), tmp_path / "model.c", format="c")
    compile_c(tmp_path, files=["model.c", "model_test.c"])
    run = subprocess.run(tmp_path / "a.out", capture_output=True, text=True)
    assert run.returncode == 0 and re.match(r"largest difference from Keras: \d", run.stdout)
    code = (tmp_path / "model.c").read_text().replace("sum[k] +=", "sum[k] -=")
    (tmp_path / "model.c").write_text(code)
    compile_c(tmp_path, files=["model.c", "model_test.c"])
    assert subprocess.run(tmp_path / "a.out", capture_output=True).returncode == 1


@GCC
def test_weights_in_a_file_of_their_own(tmp_path, monkeypatch):
    model = language_model(tie_embeddings=False)
    for module in ("keras_streams.compiled", "keras_streams.c"):
        monkeypatch.setattr(f"{module}.find_compiler", lambda: None)
    with pytest.warns(UserWarning, match="model_test.c"):
        export(model, tmp_path / "model.c", format="c", weights="file")
    size = int(re.search(r"WEIGHT_BYTES (\d+)", (tmp_path / "model.h").read_text())[1])
    assert (tmp_path / "model.bin").stat().st_size == size
    assert "static const float" not in (tmp_path / "model.c").read_text()
    compile_c(tmp_path, files=["model.c", "model_test.c"])
    run = subprocess.run(tmp_path / "a.out", cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    with pytest.raises(ValueError, match="`weights` must be 'code', or 'file'"):
        keras_streams.export(model, tmp_path / "other.c", weights="bytes")
    with pytest.raises(ValueError, match="`weights`"):
        export(model, tmp_path / "serving", weights="file")


def test_a_difference_from_keras_is_an_error(tmp_path, monkeypatch):
    def wrong(model, x):
        return keras_steps(model, x) * 1.001

    monkeypatch.setattr("keras_streams.c.keras_steps", wrong)
    with pytest.raises(RuntimeError, match="differs from Keras by 1.0e-03"):
        export(classifier(), tmp_path / "model.c", format="c")
    assert not list(tmp_path.iterdir())


class Odd(keras.layers.Dense):
    def call(self, inputs):
        return super().call(keras.ops.erfinv(keras.ops.tanh(inputs)))


def built(layer):
    layer.build((None, None, CHANNELS))
    return layer


def quantized():
    model = built(keras.Sequential([keras.layers.Dense(2, name="narrow"), LRU(3)]))
    model.layers[0].quantize("int8")
    return model


def test_a_model_whose_outputs_are_zero_on_random_inputs(tmp_path):
    bias = keras.initializers.Constant(-50.0)
    layer = keras.layers.Dense(1, activation="relu", bias_initializer=bias)
    model = built(keras.Sequential([layer]))
    x = np.zeros((20, CHANNELS), "float32")
    for options in ({}, {"quantization": "int8", "representative_data": x}):
        export(model, tmp_path / "model.c", format="c", overwrite=True, **options)
        assert "nan" not in (tmp_path / "model.h").read_text()


REFUSED = {
    "model.txt": (classifier, "must end in .c"),
    "2nd.c": (classifier, "must be a C identifier"),
    "my-model.c": (classifier, "must be a C identifier"),
    "unbuilt.c": (lambda: TCN(4, 2, depth=1), "is not built"),
    "backwards.c": (lambda: built(LRU(4, go_backwards=True)), "need a causal layer"),
    "masking.c": (
        lambda: built(keras.Sequential([keras.layers.Masking(), LRU(CHANNELS)])),
        "no masked steps",
    ),
    "both.c": (
        lambda: built(keras.layers.Bidirectional(keras.layers.LSTM(4))),
        "Use a forward layer",
    ),
    "stateful.c": (
        lambda: TrellisLayer(4, 2, stateful=True, name="trellis"),
        "stateful=True of trellis",
    ),
    "quantized.c": (quantized, "Keras has quantized.*Received: narrow"),
    "half.c": (lambda: built(TCN(4, 2, depth=1, dtype="mixed_bfloat16")), "computes in bfloat16"),
    "mixed.c": (
        lambda: built(keras.Sequential([TCN(4, 2, depth=1), LRU(4, dtype="float64")])),
        "computes in float32, float64",
    ),
    "unknown.c": (
        lambda: built(keras.Sequential([TCN(4, 2, depth=1), Odd(3)])),
        "the operation Erfinv has no C code",
    ),
    "statistics.c": (
        lambda: built(SequenceClassifier(TCN(4, 2, depth=1), 2, per_step=True, normalize=True)),
        "call model.adapt",
    ),
    "number.c": (lambda: 3, "`model` must be a layer"),
}


def test_model_of_float64_layers_is_written_whatever_its_own_dtype(tmp_path):
    model = keras.Sequential([keras.Input((None, 2)), keras.layers.Dense(3, dtype="float64")])
    assert model.compute_dtype == "float32"
    assert "double" in export(model, tmp_path / "model.c", format="c").read_text()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_before_a_file_is(name, tmp_path):
    make, message = REFUSED[name]
    model = make()
    if name == "stateful.c":
        model.build((1, None, CHANNELS))
    with pytest.raises(ValueError, match=message):
        export(model, tmp_path / "folder" / name, format="c")
    assert not list(tmp_path.iterdir())


def test_masked_tokens_and_infinite_weights_are_refused(tmp_path):
    embedding = keras.layers.Embedding(5, 4, mask_zero=True)
    model = SequenceClassifier(TCN(4, 2, depth=1), 2, per_step=True, embedding=embedding)
    model.build((None, None))
    with pytest.raises(ValueError, match="mask_zero=True"):
        export(model, tmp_path / "model.c", format="c")
    layer = built(TCN(4, 2, depth=1))
    layer.blocks[0].biases[0].assign([np.inf] * 4)
    with pytest.raises(ValueError, match="block_1 have values that are not finite"):
        export(layer, tmp_path / "model.c", format="c")


def test_every_kind_of_dropout_is_left_out(tmp_path):
    kinds = [keras.layers.Dropout, Dropout, VariationalDropout]
    net = keras.Sequential([keras.Input((None, 3)), TCN(4, 2, 2), *(kind(0.5) for kind in kinds)])
    export(net, tmp_path / "net.c", format="c")
    export(zoo.lstm_adding(layers=2, hidden_units=4), tmp_path / "zoo.c", format="c")


def test_files_are_replaced_only_with_overwrite(tmp_path):
    (tmp_path / "model.h").write_text("mine")
    with pytest.raises(ValueError, match="model.h already exists"):
        export(classifier(), tmp_path / "model.c", format="c")
    assert [p.name for p in tmp_path.iterdir()] == ["model.h"]
    export(classifier(), tmp_path / "model.c", format="c", overwrite=True)
    assert "mine" not in (tmp_path / "model.h").read_text()
