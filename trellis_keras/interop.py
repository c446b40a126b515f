"""Weights of the TrellisNet and TCN authors' PyTorch checkpoints.

Their layout: convolution kernels are (out, in, tap), ours (tap, in, out); with weight norm
`weight_v` is the direction and `weight_g` the gain.

In TrellisNets gate blocks stand in the order input, output, candidate, forget, ours in Keras'
order input, forget, candidate, output; `weight1` acts on x, `weight2` and `bias2` on h. In TCNs
`network.i.conv1` and `conv2` are the convolutions of block i, `downsample` is its shortcut.
"""

import collections.abc
import pathlib
import pickle
import zipfile

import keras
import numpy as np

from trellis_keras.layers import TCN, TrellisLayer
from trellis_keras.layers.gates import LSTMGates
from trellis_keras.models import LanguageModel
from trellis_keras.models.sequence_model import SequenceModel


def load_torch_state_dict(model_or_layer, state_dict):
    """Loads weights under the authors' parameter names.

    Args:
        model_or_layer: A built `TrellisLayer` with LSTM gates, a built `TCN`, or a model of
            `trellis_keras.models` around one of them.
        state_dict: Mapping from names to arrays, or the path of a checkpoint (`.npz`, or a file
            of `torch.save(model.state_dict(), path)`, for which torch must be installed).
            Names may be full (`tnet.module.full_conv.weight1_v_raw`, `tcn.network.0.conv1.bias`)
            or short (`weight1_v`, `network.0.conv1.bias`);
            several names of one tensor are accepted if their values agree.

    Raises:
        ValueError: A name is missing, unknown, given twice with different values, or of the
            wrong shape, or the file is damaged. Nothing is changed then.

    Example:

    >>> layer = TrellisLayer(units=3, depth=2)
    >>> layer.build((None, None, 2))
    >>> weights = {"weight1": np.ones((12, 2, 2)), "weight2": np.ones((12, 3, 2)),
    ...            "bias2": np.zeros(12)}
    >>> load_torch_state_dict(layer, weights)
    """
    if not isinstance(state_dict, collections.abc.Mapping):
        state_dict = _read(state_dict)
    targets = parameters(model_or_layer)
    arrays = _canonical(state_dict, targets)
    missing = sorted(set(targets) - set(arrays))
    if missing:
        raise ValueError(f"The state dict lacks {missing}. It has {sorted(state_dict)}.")
    values = {}
    for name, (variable, convert) in targets.items():
        values[name] = _converted(name, arrays[name], convert, variable)
    for name, (variable, _) in targets.items():
        variable.assign(values[name])


def parameters(model_or_layer):
    """Returns {the authors' name: (our variable, what lays out an array of theirs as ours)}."""
    if isinstance(model_or_layer, TrellisLayer):
        return _trellis_targets(model_or_layer)
    if isinstance(model_or_layer, TCN):
        return _tcn_targets(model_or_layer)
    if not isinstance(model_or_layer, (LanguageModel, SequenceModel)):
        raise ValueError(
            "Expected a TrellisLayer, a TCN, or a model of trellis_keras around one of them. "
            f"Received: {type(model_or_layer).__name__}"
        )
    model = model_or_layer
    targets, head = parameters(model.backbone), "linear"
    if isinstance(model, LanguageModel):
        targets["encoder.weight"], head = (model.embedding.embeddings, np.asarray), "decoder"
    if not getattr(model, "tie_embeddings", False):
        targets[f"{head}.weight"] = (model.head.kernel, np.transpose)
    targets[f"{head}.bias"] = (model.head.bias, np.asarray)
    return targets


def _trellis_targets(layer):
    _check_built(layer)
    if not isinstance(layer.cell, LSTMGates):
        raise ValueError(
            f"The authors' programs have LSTM gates only. Received: cell={layer.cell!r}"
        )
    targets = {"bias2": (layer.bias, _reorder_gates)}
    for name, kernel in (("weight1", layer.kernel), ("weight2", layer.recurrent_kernel)):
        if layer.weight_norm:
            targets[f"{name}_v"] = (kernel.kernel, _convolution_kernel)
            targets[f"{name}_g"] = (kernel.gain, _gain)
        else:
            targets[name] = (kernel.kernel, _convolution_kernel)
    return targets


def _tcn_targets(layer):
    _check_built(layer)
    targets = {}
    for i, block in enumerate(layer.blocks):
        prefix = f"network.{i}"
        for n, (kernel, bias) in enumerate(zip(block.convolutions, block.biases, strict=True)):
            name = f"{prefix}.conv{n + 1}"
            targets[f"{name}.bias"] = (bias, np.asarray)
            if block.weight_norm:
                targets[f"{name}.weight_v"] = (kernel.kernel, np.transpose)
                targets[f"{name}.weight_g"] = (kernel.gain, np.ravel)
            else:
                targets[f"{name}.weight"] = (kernel.kernel, np.transpose)
        if block.shortcut is not None:
            targets[f"{prefix}.downsample.weight"] = (block.shortcut.kernel, _pointwise)
            targets[f"{prefix}.downsample.bias"] = (block.shortcut.bias, np.asarray)
    return targets


def _check_built(layer):
    if not layer.built:
        raise ValueError("Build the model before loading weights into it.")


def _pointwise(array):
    """(out, in, 1) -> (in, out)."""
    return array[:, :, 0].T


def _reorder_gates(array):
    i, o, g, f = np.split(array, 4)
    return np.concatenate([i, f, g, o])


def _convolution_kernel(array):
    return _reorder_gates(array).transpose(2, 1, 0)


def _gain(array):
    return _reorder_gates(array.reshape(-1))


def _converted(name, array, convert, variable):
    shape = tuple(variable.shape)
    try:
        value = convert(array).astype(keras.backend.standardize_dtype(variable.dtype))
    except (ValueError, IndexError, TypeError):
        value = None
    if value is None or value.shape != shape:
        raise ValueError(
            f"{name!r} does not fit: a variable of shape {shape} cannot be made of an array of "
            f"shape {array.shape} and type {array.dtype} (kernels are (out, in, tap))."
        )
    return value


def _canonical(state_dict, targets):
    """Shortens the names and merges aliases."""
    arrays = {}
    for full_name, value in state_dict.items():
        name = _short_name(full_name)
        value = _array(value)
        if name == "decoder.weight" and name not in targets and "encoder.weight" in targets:
            name = "encoder.weight"  # tied: one tensor under two names
        if name not in targets:
            raise ValueError(
                f"The state dict has {full_name!r}, which the model has no place for. "
                f"It takes {sorted(targets)}."
            )
        if name in arrays and not np.array_equal(arrays[name], value):
            raise ValueError(f"Two names of {name!r} have different values: {full_name!r} is one.")
        arrays[name] = value
    return arrays


# Layers whose `weight` and `bias` keep their names.
_DENSE = ("encoder", "decoder", "linear")


def _short_name(name):
    """`tnet.module.full_conv.weight1_v_raw` -> `weight1_v`; `encoder.weight` and all that follows
    `network` stay."""
    *path, last = name.split(".")
    if "network" in path:
        return _tcn_name([*path[path.index("network") :], last])
    last = last.removesuffix("_raw")
    return f"{path[-1]}.{last}" if path and path[-1] in _DENSE else last


# `net` holds the convolutions a second time; newer versions of torch rename gain and direction.
_TCN_ALIASES = {
    "net.0": "conv1",
    "net.4": "conv2",
    "parametrizations.weight.original0": "weight_g",
    "parametrizations.weight.original1": "weight_v",
}


def _tcn_name(parts):
    """`network.0.net.4.bias` -> `network.0.conv2.bias`."""
    name = ".".join(parts)
    for alias, plain in _TCN_ALIASES.items():
        name = name.replace(f".{alias}.", f".{plain}.")
        if name.endswith(f".{alias}"):
            name = name.removesuffix(alias) + plain
    return name


def _array(value):
    """Returns a NumPy array of an array or of a torch tensor, wherever it is."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)


def _read(path):
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint {path}.")
    try:
        return _read_npz(path) if path.suffix == ".npz" else _read_torch(path)
    except (ValueError, EOFError, RuntimeError, zipfile.BadZipFile, pickle.PickleError) as error:
        raise ValueError(
            f"{path} does not hold a state dict, or is damaged: {error}. Save one with "
            "np.savez(path, **arrays) or torch.save(model.state_dict(), path)."
        ) from error


def _read_npz(path):
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _read_torch(path):
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"Reading {path} needs PyTorch (pip install torch). Without it, save the weights as "
            "an .npz file or pass a dict of arrays."
        ) from error
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(hasattr(v, "detach") for v in state.values()):
        raise ValueError("it is no mapping of names to tensors")
    return state
