"""Checkpoints of the authors' programs: names, layouts, and what is refused."""

import pathlib
import sys
import types

import keras
import ml_dtypes
import numpy as np
import pytest

from tests.support.checkpoints import assert_same
from trellis_keras.layers import (
    LRU,
    TCN,
    AdaptiveSoftmax,
    LRUCell,
    MixtureOfSoftmaxes,
    TrellisLayer,
)
from trellis_keras.models import LanguageModel
from trellis_keras.torch_weights import load_torch_state_dict, short_name

GOLDEN = pathlib.Path(__file__).parent / "golden"


def built_layer(**options):
    layer = TrellisLayer(units=3, depth=2, **{"weight_norm": True, **options})
    layer.build((None, None, 2))
    return layer


def built_model(**options):
    backbone = TrellisLayer(units=5, depth=2, output_units=4, weight_norm=True)
    model = LanguageModel(7, 4, backbone, **options)
    model.build((None, None))
    return model


def weights(units=3, channels=2):
    rng, rows = np.random.default_rng(0), 4 * units
    shapes = {"weight1_v": (rows, channels, 2), "weight1_g": (rows, 1, 1), "bias2": (rows,)}
    shapes |= {"weight2_v": (rows, units, 2), "weight2_g": (rows, 1, 1)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def model_weights():
    rng = np.random.default_rng(1)
    coder = {"encoder.weight": rng.normal(size=(7, 4)), "decoder.bias": rng.normal(size=7)}
    return weights(5, 4) | coder


def values(model):
    return [keras.ops.convert_to_numpy(w) for w in model.weights]


def assert_same_weights(a, b):
    assert_same(values(a), values(b))


def assert_refused(model, state, message, error=ValueError):
    before = values(model)
    with pytest.raises(error, match=message):
        load_torch_state_dict(model, state)
    assert_same(values(model), before)


# Layouts (the golden tests load whole models of all three families)


@pytest.mark.both_backends
def test_gates_and_taps_are_reordered():
    layer, state = built_layer(), weights()
    load_torch_state_dict(layer, state)
    kernel = keras.ops.convert_to_numpy(layer.kernel.kernel)  # (tap, in, out), gates i, f, c, o
    blocks = np.split(state["weight1_v"], 4)  # (out, in, tap), gates i, o, c, f
    for ours, theirs in zip(np.split(kernel, 4, axis=-1), [0, 3, 2, 1], strict=True):
        np.testing.assert_allclose(ours, blocks[theirs].transpose(2, 1, 0), rtol=1e-6)


def test_tails_of_the_split_cross_entropy():
    model, state = built_model(head=AdaptiveSoftmax(7, (2, 5))), model_weights()
    assert_refused(model, state, r"lacks \['tail_bias', 'tail_vectors'\]")
    tails = {"tail_vectors": np.arange(8.0).reshape(2, 4), "tail_bias": np.array([8.0, 9.0])}
    load_torch_state_dict(model, state | {f"criterion.{k}": v for k, v in tails.items()})
    # The authors' list of tails starts with the last one.
    np.testing.assert_array_equal(model.head.cluster_kernel, tails["tail_vectors"][::-1])
    np.testing.assert_array_equal(model.head.cluster_bias, [9.0, 8.0])
    np.testing.assert_allclose(model.head.bias, state["decoder.bias"], rtol=1e-6)
    untied = built_model(head=AdaptiveSoftmax(7, (2, 5)), tie_embeddings=False)
    assert_refused(untied, state | tails, "tie_embeddings=False")


def test_an_untied_decoder_has_weights_of_its_own():
    model, state = built_model(tie_embeddings=False), model_weights()
    decoder = np.random.default_rng(2).normal(size=(7, 4))
    assert_refused(model, state, "decoder.weight")
    load_torch_state_dict(model, state | {"decoder.weight": decoder})
    np.testing.assert_allclose(model.head.kernel, decoder.T, rtol=1e-6)


# Names


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("tnet.module.full_conv.weight1_v_raw", "weight1_v"),
        ("mixsoft.latent.bias", "latent.bias"),
        ("tcn.network.10.downsample.bias", "network.10.downsample.bias"),
        ("tcn.network.1.net.0.weight_g", "network.1.conv1.weight_g"),
        ("network.0.conv2.parametrizations.weight.original1", "network.0.conv2.weight_v"),
        ("rnn.2.lin.bias", "layers.0.rnn.2.lin.bias"),
        ("cell.gate1.bias", "layers.0.rnn.0.gate1.bias"),
        ("affine_dec.bias", "decoder.bias"),
    ],
)
def test_names_depend_on_no_wrapper(name, short):
    assert short_name(name) == short


def test_all_names_of_a_mixture_of_softmaxes():
    """The authors' model holds its parts twice: by name and in the list `network`."""
    model = built_model(head=MixtureOfSoftmaxes(7, 3, latent_units=4))
    rng = np.random.default_rng(2)
    state = model_weights()
    state["decoder.weight"] = state["encoder.weight"]  # tied
    for name, shape in {"prior": (3, 4), "latent": (12, 4)}.items():
        state[f"mixsoft.{name}.weight"] = rng.normal(size=shape)
        state[f"mixsoft.{name}.bias"] = rng.normal(size=shape[0])
    twice = {name.replace("mixsoft", "network.1"): array for name, array in state.items()}
    load_torch_state_dict(model, state | twice)
    latent = state["mixsoft.latent.weight"]
    np.testing.assert_allclose(model.head.latent_kernel, latent.T, rtol=1e-6)
    np.testing.assert_allclose(model.head.prior_bias, state["mixsoft.prior.bias"], rtol=1e-6)
    np.testing.assert_allclose(model.embedding.embeddings, state["encoder.weight"], rtol=1e-6)


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight2_g": None}, r"lacks \['weight2_g'\]"),
        ({"tnet.weight3": np.ones(2)}, "'tnet.weight3'"),
        ({"tnet.bias2": np.ones(12)}, "'bias2' is ambiguous"),
        ({"weight1_v": np.ones((11, 2, 2))}, "'weight1_v' must convert"),
        ({"bias2": np.full(12, "a")}, "<U1"),
        ({"bias2": np.broadcast_to(np.float32(1), (10**6, 10**6))}, "at most 12 values"),
    ],
)
def test_state_dicts_that_do_not_fit(change, message):
    state = {k: v for k, v in (weights() | change).items() if v is not None}
    assert_refused(built_layer(), state, message)


def test_models_that_the_authors_do_not_have():
    with pytest.raises(ValueError, match="Build the model"):
        load_torch_state_dict(TrellisLayer(units=3, depth=2), weights())
    assert_refused(built_layer(cell="gru", weight_norm=False), weights(), "have LSTM gates")
    backbone = keras.layers.LSTM(4, return_sequences=True)
    for model in (backbone, LanguageModel(7, 4, backbone)):
        with pytest.raises(ValueError, match="Expected a TrellisLayer, .* Received: LSTM"):
            load_torch_state_dict(model, {})


# Files


def test_npz_files(tmp_path, monkeypatch):
    half = {name: array.astype(ml_dtypes.bfloat16) for name, array in weights().items()}
    layer, same, path = built_layer(), built_layer(), tmp_path / "weights.npz"
    monkeypatch.setenv("HOME", str(tmp_path))
    for state in (weights(), half):
        np.savez(path, **state)
        load_torch_state_dict(layer, "~/weights.npz")
        load_torch_state_dict(same, {k: v.astype("float32") for k, v in state.items()})
        assert_same_weights(layer, same)
    np.savez(path, **weights(), other=np.ones(2))
    assert_refused(layer, path, "weights.npz: .*'other'")
    path.write_bytes(path.read_bytes()[:-300])
    assert_refused(layer, path, "weights.npz: ")
    assert_refused(layer, tmp_path / "no.npz", "There is no checkpoint", FileNotFoundError)


@pytest.mark.parametrize("name", ["torch_trellis.pt", "torch_trellis_old.pt"])
def test_torch_files(name):
    """They hold numbers that count up, one in the format before PyTorch 1.6."""
    pytest.importorskip("torch")
    count = np.arange(120, dtype="float32")
    layer, same = (built_layer(weight_norm=False) for _ in range(2))
    load_torch_state_dict(layer, GOLDEN / name)
    state = {
        "weight1": count[:48].reshape(2, 2, 12).transpose(2, 1, 0),
        "weight2": count[48:].reshape(12, 3, 2),
        "bias2": np.arange(12),
    }
    load_torch_state_dict(same, state)
    assert_same_weights(layer, same)


def test_versions_of_pytorch_that_run_code_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="2.5.1+cpu"))
    path = tmp_path / "model.pt"
    path.write_bytes(b"")
    with pytest.raises(ImportError, match="PyTorch 2.6 or newer.*Received: PyTorch 2.5.1"):
        load_torch_state_dict(built_layer(), path)


def test_expanded_torch_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    layer, same = built_layer(), built_layer()
    tensors = {name: torch.tensor(array) for name, array in weights().items()}
    one = torch.tensor(0.5, dtype=torch.bfloat16)
    path = tmp_path / "weights.pt"
    torch.save(tensors | {"bias2": one.expand(12)}, path)
    load_torch_state_dict(layer, path)
    load_torch_state_dict(same, weights() | {"bias2": np.full(12, 0.5)})
    assert_same_weights(layer, same)
    torch.save(tensors | {"bias2": one.expand(10**6, 10**6)}, path)  # a file of some KB
    assert_refused(layer, path, "weights.pt: 'bias2' must have at most 12 values")
    sparse = tensors | {"bias2": torch.ones(12).to_sparse()}
    assert_refused(layer, sparse, "'bias2' is not a dense tensor")


class Hostile:
    def __reduce__(self):
        return pathlib.Path.mkdir, (pathlib.Path("a checkpoint ran this"),)


def test_torch_files_that_hold_no_state_dict(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    for content in ({"weight1": Hostile()}, torch.nn.Linear(2, 2), {"epoch": 3}, [torch.ones(2)]):
        torch.save(content, "w.pt")
        assert_refused(built_layer(), "w.pt", "w.pt: ")
    pathlib.Path("w.pt").write_bytes(b"no checkpoint")
    assert_refused(built_layer(), "w.pt", "w.pt: ")
    assert not pathlib.Path("a checkpoint ran this").exists()


# Lattices


def lattice_weights(depth=2):
    rng = np.random.default_rng(0)
    rows = {"lin": 12, "gate0": 3, "gate1": 3}
    shapes = {f"{name}.weight": (n, 6) for name, n in rows.items()}
    shapes |= {f"{name}.bias": (n,) for name, n in rows.items()}
    return {
        f"rnn.layers.{i}.rnn.0.{name}": rng.normal(size=shape)
        for i in range(depth)
        for name, shape in shapes.items()
    }


def built(layer, channels=3):
    layer.build((None, None, channels))
    return layer


def test_lattices_of_any_container():
    state, lattice = lattice_weights(), built(LRU(3, 2))
    load_torch_state_dict(lattice, state)
    stacked = built(keras.layers.RNN([LRUCell(3), LRUCell(3)]))
    load_torch_state_dict(stacked, state)
    single = built(keras.layers.RNN(LRUCell(3)))
    load_torch_state_dict(single, lattice_weights(depth=1))
    model = LanguageModel(5, 3, LRU(3, 2, return_sequences=True), tie_embeddings=False)
    model.build((None, None))
    coder = {"affine_enc.weight": np.ones((5, 3)), "affine_dec.weight": np.eye(5)[:, :3]}
    load_torch_state_dict(model, state | coder | {"affine_dec.bias": np.arange(5.0)})
    assert_same_weights(lattice, stacked)
    assert_same_weights(lattice, model.backbone)
    for ours, wanted in zip(single.weights, lattice.weights[:3], strict=True):
        np.testing.assert_array_equal(ours, wanted)
    np.testing.assert_array_equal(model.head.kernel, np.eye(5)[:3])


def test_lattices_that_do_not_fit():
    layer, state = built(LRU(3, 2)), lattice_weights()
    name = "rnn.layers.1.rnn.0.gate1.weight"
    for wrong, message in (
        (state | {name: np.zeros((2, 6))}, "gate1.weight' must convert"),
        (state | {name: state[name] * np.nan}, "gate1.weight' must be finite"),
        (lattice_weights(depth=1), "lacks.*layers.1.rnn.0.gate0"),
        (lattice_weights(depth=3), "rnn.layers.2.rnn.0.lin.weight"),
    ):
        assert_refused(layer, wrong, message)
    load_torch_state_dict(layer, state | {f"module.{name}": state[name]})


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (LRU(3, 2, variant="rg"), "convention"),
        (LRU(4, 2), "projection"),
        (TCN(3, 2, 1, normalization="batch"), "normalization"),
        (TCN(3, 2, 1, activation="tanh"), "activation='relu'. Received: activation='tanh'"),
        (TCN(3, 2, 1, skip_connections=True), "skip_connections=False"),
        (TCN(3, 2, 1, padding="same"), "padding='causal'"),
        (TCN(3, 2, 1, go_backwards=True), "go_backwards=False"),
    ],
)
def test_layers_that_the_authors_do_not_have(layer, message):
    assert_refused(built(layer), lattice_weights(), message)
