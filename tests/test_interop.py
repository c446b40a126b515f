"""Loading weights under the authors' names, and what is refused."""

import keras
import numpy as np
import pytest

from trellis_keras.interop import load_torch_state_dict, parameters
from trellis_keras.layers import TCN, AdaptiveSoftmax, MixtureOfSoftmaxes, TrellisLayer
from trellis_keras.models import LanguageModel

pytestmark = pytest.mark.both_backends


def built_layer(**options):
    layer = TrellisLayer(units=3, depth=2, weight_norm=True, **options)
    layer.build((None, None, 2))
    return layer


def built_model(**options):
    backbone = TrellisLayer(units=5, depth=2, output_units=4, weight_norm=True)
    model = LanguageModel(7, 4, backbone, **options)
    model.build((None, None))
    return model


def weights(units, channels):
    rng = np.random.default_rng(0)
    shapes = {
        "weight1_v": (4 * units, channels, 2),
        "weight1_g": (4 * units, 1, 1),
        "weight2_v": (4 * units, units, 2),
        "weight2_g": (4 * units, 1, 1),
        "bias2": (4 * units,),
    }
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def model_weights():
    rng = np.random.default_rng(1)
    coder = {"encoder.weight": rng.normal(size=(7, 4)), "decoder.bias": rng.normal(size=7)}
    return weights(5, 4) | coder


def full_names(short):
    """The names in the checkpoints of the authors' programs."""
    renamed = {}
    for name, array in short.items():
        if "coder" in name:
            renamed[name] = array
        else:
            suffix = "" if name == "bias2" else "_raw"
            renamed[f"tnet.module.full_conv.{name}{suffix}"] = array
    return renamed


def values(module):
    return [keras.ops.convert_to_numpy(w) for w in module.weights]


def assert_loaded(module, state):
    """`state` is where it belongs: the same as under short names."""
    other = built_layer() if isinstance(module, TrellisLayer) else built_model()
    load_torch_state_dict(other, state)
    for ours, theirs in zip(values(module), values(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def assert_refused(module, state, message, error=ValueError):
    before = values(module)
    with pytest.raises(error, match=message):
        load_torch_state_dict(module, state)
    for ours, theirs in zip(values(module), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


# What is accepted


def test_gates_and_taps_are_reordered():
    layer, state = built_layer(), weights(3, 2)
    load_torch_state_dict(layer, state)
    kernel = keras.ops.convert_to_numpy(layer.kernel.kernel)  # (tap, in, out), gates i, f, c, o
    blocks = np.split(state["weight1_v"], 4)  # (out, in, tap), gates i, o, g, f
    for ours, theirs in zip(np.split(kernel, 4, axis=-1), [0, 3, 2, 1], strict=True):
        np.testing.assert_allclose(ours, blocks[theirs].transpose(2, 1, 0), rtol=1e-6)


def test_full_names():
    layer, state = built_layer(), weights(3, 2)
    load_torch_state_dict(layer, full_names(state))
    assert_loaded(layer, state)


def test_full_names_of_a_language_model():
    model, state = built_model(), model_weights()
    load_torch_state_dict(model, full_names(state))
    assert_loaded(model, state)


def test_aliases_that_agree():
    layer, state = built_layer(), weights(3, 2)
    load_torch_state_dict(layer, full_names(state) | {"full_conv.weight1_v": state["weight1_v"]})
    assert_loaded(layer, state)


def test_the_tied_decoder_is_an_alias():
    model, state = built_model(), model_weights()
    load_torch_state_dict(model, state | {"decoder.weight": state["encoder.weight"]})
    assert_loaded(model, state)


def test_an_untied_decoder_has_weights_of_its_own():
    model, state = built_model(tie_embeddings=False), model_weights()
    decoder = np.random.default_rng(2).normal(size=(7, 4))
    assert_refused(model, state, r"lacks \['decoder.weight'\]")
    load_torch_state_dict(model, state | {"decoder.weight": decoder})
    kernel = keras.ops.convert_to_numpy(model.head.kernel)
    np.testing.assert_allclose(kernel, decoder.T, rtol=1e-6)


def test_all_names_of_a_mixture_of_softmaxes():
    """The authors' model holds its parts twice: by name and in a list."""
    model = built_model(head=MixtureOfSoftmaxes(7, 3, 4))
    rng = np.random.default_rng(2)
    shapes = {"prior": (3, 4), "latent": (12, 4)}
    mixture = {f"{name}.weight": rng.normal(size=shape) for name, shape in shapes.items()}
    mixture |= {f"{name}.bias": rng.normal(size=shape[0]) for name, shape in shapes.items()}
    short = model_weights()
    decoder = {"decoder.weight": short["encoder.weight"], "decoder.bias": short["decoder.bias"]}
    state = full_names(short) | decoder
    for name, array in full_names(weights(5, 4)).items():
        state[name.replace("tnet", "network.0")] = array
    for prefix in ("mixsoft", "network.1"):
        state |= {f"{prefix}.{name}": array for name, array in (mixture | decoder).items()}
    load_torch_state_dict(model, state)
    np.testing.assert_allclose(model.head.latent_kernel, mixture["latent.weight"].T, rtol=1e-6)
    np.testing.assert_allclose(model.head.prior_bias, mixture["prior.bias"], rtol=1e-6)
    np.testing.assert_allclose(model.embedding.embeddings, short["encoder.weight"], rtol=1e-6)
    bias = keras.ops.convert_to_numpy(model.backbone.bias)  # gates i, f, c, o; theirs i, o, g, f
    np.testing.assert_allclose(bias[:5], short["bias2"][:5], rtol=1e-6)
    np.testing.assert_allclose(bias[5:10], short["bias2"][15:], rtol=1e-6)


def test_tails_of_the_split_cross_entropy():
    model, state = built_model(head=AdaptiveSoftmax(7, (2, 5))), model_weights()
    assert_refused(model, state, r"lacks \['tail_bias', 'tail_vectors'\]")
    tails = {"tail_vectors": np.arange(8.0).reshape(2, 4), "tail_bias": np.array([8.0, 9.0])}
    load_torch_state_dict(model, state | {f"criterion.{k}": v for k, v in tails.items()})
    # Theirs begins with the last tail.
    np.testing.assert_array_equal(model.head.cluster_kernel, tails["tail_vectors"][::-1])
    np.testing.assert_array_equal(model.head.cluster_bias, [9.0, 8.0])
    np.testing.assert_allclose(model.head.bias, state["decoder.bias"], rtol=1e-6)
    wrong = tails | {"tail_vectors": np.zeros((3, 4))}
    assert_refused(model, state | wrong, "'tail_vectors' does not fit")
    untied = built_model(head=AdaptiveSoftmax(7, (2, 5)), tie_embeddings=False)
    assert_refused(untied, state | tails, "matrices of its own .tie_embeddings=False.")


def test_npz_file(tmp_path):
    layer, state = built_layer(), weights(3, 2)
    np.savez(tmp_path / "weights.npz", **full_names(state))
    load_torch_state_dict(layer, tmp_path / "weights.npz")
    assert_loaded(layer, state)
    with np.load(tmp_path / "weights.npz") as arrays:  # a mapping, but no dict
        load_torch_state_dict(layer, arrays)
    assert_loaded(layer, state)


def test_torch_file(tmp_path):
    torch = pytest.importorskip("torch")
    layer, state = built_layer(), weights(3, 2)
    tensors = {name: torch.tensor(array) for name, array in full_names(state).items()}
    torch.save(tensors, tmp_path / "weights.pt")
    load_torch_state_dict(layer, str(tmp_path / "weights.pt"))
    assert_loaded(layer, state)
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    load_torch_state_dict(layer, parameters)
    assert_loaded(layer, state)


def test_a_torch_file_that_is_no_state_dict(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    assert_refused(built_layer(), tmp_path / "module.pt", "does not hold a state dict")
    torch.save({"epoch": 3}, tmp_path / "epoch.pt")
    assert_refused(built_layer(), tmp_path / "epoch.pt", "does not hold a state dict")


# What is refused


def test_missing_name():
    state = weights(3, 2)
    del state["weight2_g"]
    assert_refused(built_layer(), state, r"lacks \['weight2_g'\]")


def test_extra_name():
    state = weights(3, 2) | {"tnet.module.full_conv.weight3": np.ones(2)}
    assert_refused(built_layer(), state, "has 'tnet.module.full_conv.weight3', .* no place for")
    assert_refused(built_layer(), model_weights(), "'encoder.weight'")


def test_aliases_that_disagree():
    state = weights(3, 2)
    state["full_conv.weight1_v"] = state["weight1_v"] + 1e-6
    assert_refused(built_layer(), state, "Two names of 'weight1_v'.*'full_conv.weight1_v'")
    state = model_weights()
    state["decoder.weight"] = state["encoder.weight"] * 2
    assert_refused(built_model(), state, "Two names of 'encoder.weight'.*'decoder.weight'")


@pytest.mark.parametrize("name", ["weight1_v", "weight1_g", "weight2_v", "bias2"])
@pytest.mark.parametrize(
    "change",
    [
        lambda array: array[:-1],
        lambda array: np.concatenate([array] * 2),
        lambda array: array[..., None],
        lambda array: array.transpose()[:, ..., None],
        lambda array: np.float64(1),
        lambda array: np.full(array.shape, "a"),
    ],
    ids=["short", "long", "extra_axis", "transposed", "scalar", "text"],
)
def test_wrong_arrays(name, change):
    state = weights(3, 2)
    state[name] = change(state[name])
    if name == "weight1_g" and state[name].size == 12 and state[name].dtype.kind == "f":
        pytest.skip("a gain has one number per channel, in any shape")
    assert_refused(built_layer(), state, f"'{name}' does not fit")


def test_wrong_embedding():
    state = model_weights()
    state["encoder.weight"] = np.ones((8, 4))
    assert_refused(built_model(), state, r"'encoder.weight' does not fit: .*\(7, 4\).*\(8, 4\)")


def test_a_layer_that_is_not_built():
    with pytest.raises(ValueError, match="Build the model"):
        load_torch_state_dict(TrellisLayer(units=3, depth=2), weights(3, 2))


def test_other_cells_and_layers():
    layer = TrellisLayer(units=3, depth=2, cell="gru")
    layer.build((None, None, 2))
    assert_refused(layer, weights(3, 2), "LSTM gates only")
    with pytest.raises(ValueError, match="Expected a TrellisLayer, .* Received: LSTM"):
        load_torch_state_dict(keras.layers.LSTM(3), {})
    backbone = keras.layers.LSTM(4, return_sequences=True)
    with pytest.raises(ValueError, match="Expected a TrellisLayer, .* Received: LSTM"):
        load_torch_state_dict(LanguageModel(7, 4, backbone), {})


@pytest.mark.parametrize("kept", [0, 20, 0.5, 0.99])
def test_truncated_file(tmp_path, kept):
    path = tmp_path / "weights.npz"
    np.savez(path, **weights(3, 2))
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
    assert_refused(built_layer(), path, "weights.npz: it does not hold a state dict, or is damaged")


def test_pickled_arrays_are_not_read(tmp_path):
    np.savez(tmp_path / "weights.npz", weight1_v=np.array([object()]))
    assert_refused(built_layer(), tmp_path / "weights.npz", "does not hold a state dict")


def test_missing_file(tmp_path):
    path = tmp_path / "weights.npz"
    assert_refused(built_layer(), path, "There is no checkpoint", FileNotFoundError)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_refused(built_layer(), "~/weights.npz", str(tmp_path), FileNotFoundError)


def test_a_files_own_names_are_told_with_the_file(tmp_path):
    path = tmp_path / "weights.npz"
    np.savez(path, **weights(3, 2), other=np.ones(2))
    assert_refused(built_layer(), path, "weights.npz: The state dict has 'other'")


def test_a_tcn_checkpoint_names_its_convolutions_twice():
    layer = TCN(4, 3, 2)
    layer.build((None, None, 4))
    rng = np.random.default_rng(0)
    short = {name: rng.normal(size=v.shape[::-1]) for name, (v, _) in parameters(layer).items()}
    short = {n: v[:, None, None] if n.endswith("_g") else v for n, v in short.items()}
    twice = {}
    for name, array in short.items():
        full = f"tcn.{name}"
        renamed = full.replace("weight_g", "parametrizations.weight.original0")
        twice[renamed.replace("weight_v", "parametrizations.weight.original1")] = array
        twice[full.replace("conv1", "net.0").replace("conv2", "net.4")] = array
    load_torch_state_dict(layer, twice)
    for name, (variable, convert) in parameters(layer).items():
        np.testing.assert_allclose(variable, convert(short[name]), rtol=1e-6)
