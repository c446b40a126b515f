"""Models as C: equal to Keras, without warnings, the same file for the same model."""

import functools
import re
import shutil
import subprocess

import keras
import numpy as np
import pytest

from keras_streams import native_stream
from keras_streams.c_export import keras_steps, proven_source
from keras_streams.native_stream import ZIG
from tests.export.nets import CHANNELS, GRAPHS, classifier, graph, language_model, random_net
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
from trellis_keras.models import SequenceClassifier

WARNINGS = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
GCC = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


def compile_c(folder, *options, compiler=("gcc",), files=("model.c",)):
    """Compiles `files` in a folder, with the warnings as errors."""
    command = [*compiler, *WARNINGS, *options, *files, "-lm"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


RUN = """
#include "model.h"
int main(void)
{
    static model_state s;
#ifdef MODEL_TOKENS
    int x = 1;
#else
    float x[MODEL_INPUTS] = {0};
#endif
    float y[MODEL_OUTPUTS];
    model_reset(&s);
    for (int t = 0; t < 100; t++)
        model_step(&s, x, y);
    return sizeof s == MODEL_STATE_BYTES ? 0 : 1;
}
"""


def assert_clean(source, folder, compiler=("gcc",)):
    """No warnings, the stated size of the state is right, and the sanitizers find nothing."""
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"needs {compiler[0]}")
    native_stream.write_source(source, folder)
    (folder / "main.c").write_text(RUN)
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover"]
    options = sanitizers if compiler == ("gcc",) else ["-O2"]
    compile_c(folder, *options, compiler=compiler, files=["model.c", "main.c"])
    assert subprocess.run(folder / "a.out").returncode == 0


# `proven_source` raises unless the C equals Keras.


HEADS = {
    "dense": lambda: None,
    "mixture": lambda: MixtureOfSoftmaxes(9, 3, epsilon=1e-3),
    "adaptive": lambda: AdaptiveSoftmax(9, (3, 6), div_value=2),
}


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_language_models_equal_keras(head, tie_embeddings, tmp_path):
    if head == "adaptive" and tie_embeddings:
        pytest.skip("tails of another width have a matrix of their own")
    model = language_model(HEADS[head](), tie_embeddings)
    source, *_ = proven_source(model, "model")
    # A tied matrix is stored once.
    assert source.weight_bytes <= 4 * model.count_params() + 200
    stream = native_stream.NativeStream(source)
    stream._step(stream._at[0], 9, stream._at[2])
    assert np.all(np.isnan(stream._y))  # the C function has no other way to refuse a token
    assert_clean(source, tmp_path)


@pytest.mark.both_backends
def test_a_model_keeps_its_names(tmp_path):
    export(classifier(), tmp_path / "gait.c")
    header = (tmp_path / "gait.h").read_text()
    assert '#define GAIT_NAMES "walk", "run" ' in header and "last 13 inputs" in header
    assert re.search(r"Largest difference from Keras over 200 random steps: below \de-0\d", header)


def stateful():
    layer = TrellisLayer(4, 2, stateful=True)
    layer.build((1, None, CHANNELS))
    return layer


NETS = {
    "classifier": classifier,
    "stateful": stateful,
    **{f"net {seed}": functools.partial(random_net, seed) for seed in range(200)},
    **{name: functools.partial(graph, name) for name in GRAPHS},
}
SLOW = {f"net {seed}" for seed in (4, 5, 7, *range(8, 200))}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in NETS]
)
def test_nets_equal_keras(name, tmp_path):
    source, *_ = proven_source(NETS[name](), "model")
    assert_clean(source, tmp_path)
    if name == "classifier" and native_stream.has_zig():
        assert_clean(source, tmp_path, ZIG)


def test_the_same_model_gives_the_same_file(tmp_path):
    model = classifier()
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    texts = []
    for folder, of in (("a", model), ("b", loaded)):
        path = export(of, tmp_path / folder / "model.c")
        texts.append(path.read_bytes() + path.with_suffix(".h").read_bytes())
    assert texts[0] == texts[1]


@pytest.fixture
def no_compiler(monkeypatch):
    for module in ("keras_streams.native_stream", "keras_streams.c_export"):
        monkeypatch.setattr(f"{module}.find_compiler", lambda: None)


@GCC
@pytest.mark.parametrize("weights", ["code", "file"])
def test_without_a_compiler_there_is_a_test_program(tmp_path, no_compiler, weights):
    with pytest.warns(UserWarning, match="cc model.c model_test.c -lm && ./a.out"):
        export(classifier(), tmp_path / "model.c", weights=weights)
    code = (tmp_path / "model.c").read_text()
    if weights == "file":
        size = int(re.search(r"WEIGHT_BYTES (\d+)", (tmp_path / "model.h").read_text())[1])
        assert (tmp_path / "model.bin").stat().st_size == size
        assert "static const float" not in code
    for text, result in ((code, 0), (code.replace("sum[k] +=", "sum[k] -="), 1)):
        (tmp_path / "model.c").write_text(text)
        compile_c(tmp_path, files=["model.c", "model_test.c"])
        run = subprocess.run(tmp_path / "a.out", cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == result
        assert re.match(r"largest difference from Keras: \d", run.stdout)


def test_a_difference_from_keras_is_an_error(tmp_path, monkeypatch):
    def wrong(model, x):
        return keras_steps(model, x) * 1.001

    monkeypatch.setattr("keras_streams.c_export.keras_steps", wrong)
    with pytest.raises(RuntimeError, match="differs from Keras by 1.0e-03"):
        export(classifier(), tmp_path / "model.c")
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
        export(model, tmp_path / "model.c", overwrite=True, **options)
        assert "nan" not in (tmp_path / "model.h").read_text()


def infinite():
    layer = built(TCN(4, 2, depth=1))
    layer.blocks[0].biases[0].assign([np.inf] * 4)
    return layer


def sequence(*parts):
    return built(keras.Sequential(parts))


REFUSED = {
    "model.txt": (classifier, "must end in .c"),
    "2nd.c": (classifier, "must be a C identifier"),
    "quantized.c": (quantized, "Keras has quantized.*Received: narrow"),
    "half.c": (lambda: built(TCN(4, 2, depth=1, dtype="mixed_bfloat16")), "computes in bfloat16"),
    "mixed.c": (
        lambda: sequence(TCN(4, 2, depth=1), LRU(4, dtype="float64")),
        "computes in float32, float64",
    ),
    "unknown.c": (lambda: sequence(TCN(4, 2, depth=1), Odd(3)), "Erfinv has no C code"),
    "statistics.c": (
        lambda: built(SequenceClassifier(TCN(4, 2, depth=1), 2, per_step=True, normalize=True)),
        "call model.adapt",
    ),
    "infinite.c": (infinite, "block_1 have values that are not finite"),
    "number.c": (lambda: 3, "`model` must be a layer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_before_a_file_is(name, tmp_path):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        export(make(), tmp_path / "folder" / name, format="c")
    assert not list(tmp_path.iterdir())


def test_a_model_of_float64_layers_has_doubles_whatever_its_own_dtype():
    parts = [TrellisLayer(4, 2, dtype="float64"), TCN(3, 2, depth=2, dtype="float64")]
    model = sequence(*parts, keras.layers.Dense(3, activation="gelu", dtype="float64"))
    assert model.compute_dtype == "float32"
    source, *_ = proven_source(model, "net")
    assert source.real == "double" and "float" not in source.code


def test_every_kind_of_dropout_is_left_out(tmp_path):
    kinds = [keras.layers.Dropout, Dropout, VariationalDropout]
    net = keras.Sequential([keras.Input((None, 3)), TCN(4, 2, 2), *(kind(0.5) for kind in kinds)])
    export(net, tmp_path / "net.c")
    export(zoo.lstm_adding(layers=2, hidden_units=4), tmp_path / "zoo.c")


@GCC
def test_a_header_of_another_export_is_refused(tmp_path):
    export(classifier(), tmp_path / "model.c")
    header = (tmp_path / "model.h").read_bytes()
    export(language_model(), tmp_path / "model.c", overwrite=True)
    (tmp_path / "model.h").write_bytes(header)
    with pytest.raises(AssertionError, match="model.h and model.c are from different exports"):
        compile_c(tmp_path, "-c")


def test_a_header_names_several_inputs_and_outputs(tmp_path):
    x = {"q": keras.Input((None, 2), name="q"), "p": keras.Input((None, 1), name="p")}
    a = keras.layers.Conv1D(1, 3, padding="same")(x["p"])
    y = {"z": keras.layers.UpSampling1D(2)(x["q"]), "a": a}
    export(keras.Model(x, y), tmp_path / "model.c")
    header = (tmp_path / "model.h").read_text()
    for line in ("x[0]: input p", "x[1..2]: input q", "y[0]: output a", "y[1..4]: output z"):
        assert f" *     {line}\n" in header
    assert "#define MODEL_DELAY 1, 0\n#define MODEL_RATE 1, (1.0 / 2)\n" in header


def test_files_are_replaced_only_with_overwrite(tmp_path):
    (tmp_path / "model.h").write_text("mine")
    with pytest.raises(ValueError, match="model.h already exists"):
        export(classifier(), tmp_path / "model.c")
    assert [p.name for p in tmp_path.iterdir()] == ["model.h"]
    export(classifier(), tmp_path / "model.c", overwrite=True)
    assert "mine" not in (tmp_path / "model.h").read_text()
