"""Weights from the authors' PyTorch checkpoints of TrellisNet, TCN and LRU.

Every family has its own array layout; convolution kernels are (out, in, tap), ours are
(tap, in, out), and with weight normalization `weight_v` is the direction and `weight_g` the gain.

- TrellisNet: `weight1` convolves x, `weight2` and `bias2` convolve h. The blocks of the gates are
  in the order input, output, candidate, forget; ours are in Keras' order (i, f, c, o). `prior` and
  `latent` belong to a mixture of softmaxes, `tail_vectors` and `tail_bias` to the split
  cross-entropy, which is our adaptive softmax with its tails in reverse order.
- TCN: `network.i.conv1` and `conv2` are the convolutions of block i, `downsample` is its shortcut.
- LRU: `layers.i.rnn.n` is cell n of node i. `lin` computes the gates from [h1; h2], `gate0` the
  first projection from [h1; r * h2], `gate1` the second one from [h2; q * h1]. Ours has a `kernel`
  for h1 and a `recurrent_kernel` for h2, each a concatenation of all blocks.
"""

import collections
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import ml_dtypes
import numpy as np

from trellis_keras.files import read_npz
from trellis_keras.layers import (
    LRU,
    TCN,
    AdaptiveSoftmax,
    LRUCell,
    MixtureOfSoftmaxes,
    TrellisLayer,
)
from trellis_keras.layers.trellisnet import LSTMGates
from trellis_keras.models import LanguageModel
from trellis_keras.models.sequence_model import SequenceModel


class Parameter(NamedTuple):
    """One of our variables, the authors' names of its arrays, and the layout conversion."""

    variable: keras.Variable
    names: tuple[str, ...]
    convert: Callable[..., np.ndarray]


def load_torch_state_dict(
    model: keras.layers.Layer, state_dict: Mapping[str, Any] | str | os.PathLike
) -> None:
    """Loads a checkpoint from the authors' programs.

    Args:
        model: Built `TrellisLayer` with LSTM gates, `TCN`, `LRU`, `LRUCell` or `keras.layers.RNN`
            of such cells, or a model of `trellis_keras.models` with one of these as its backbone.
        state_dict: Mapping from the authors' parameter names to arrays or tensors, or the path of
            a checkpoint: a `.npz` file, or one written by `torch.save(model.state_dict(), path)`,
            which needs PyTorch 2.6. Names may be full (`tnet.module.full_conv.weight1_v_raw`) or
            short (`weight1_v`); a parameter may occur under several names if the values agree. A
            model with an `AdaptiveSoftmax` also needs the parameters of the authors' loss:
            `{**model_state, **loss_state}`.

    Raises:
        ValueError: If a parameter is missing, unknown, ambiguous or has the wrong shape, or the
            file is damaged. In this case the model is unchanged.
        FileNotFoundError: If there is no file at the path.
        ImportError: If the file needs PyTorch 2.6 or newer, which is not installed.

    Example:

    >>> layer = TrellisLayer(units=3, depth=2)
    >>> layer.build((None, None, 2))
    >>> weights = {"weight1": np.ones((12, 2, 2)), "weight2": np.ones((12, 3, 2)),
    ...            "bias2": np.zeros(12)}
    >>> load_torch_state_dict(layer, weights)
    """
    if isinstance(state_dict, Mapping):
        _load(model, state_dict)
        return
    path = pathlib.Path(state_dict).expanduser()
    try:
        _load(model, _read(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parameters(model: keras.layers.Layer) -> list[Parameter]:
    """Returns the parameters in a checkpoint of this layer or model."""
    if isinstance(model, (LanguageModel, SequenceModel)):
        return parameters(model.backbone) + _of_ends(model)
    if not isinstance(model, (TrellisLayer, TCN)) and not _lru_cells(model):
        raise ValueError(
            "Expected a TrellisLayer, TCN, LRU, LRUCell, RNN of LRUCells, or a model of "
            f"trellis_keras around one of these. Received: {type(model).__name__}"
        )
    if not model.built:
        raise ValueError("Build the model before loading weights into it.")
    if isinstance(model, TrellisLayer):
        return _of_trellis(model)
    return _of_tcn(model) if isinstance(model, TCN) else _of_lru(model)


# `net` repeats the convolutions of a TCN block, newer versions of PyTorch rename gain and
# direction, and a standalone LRUCell has no layers.
_ALIASES = (
    (r"\.net\.0\.", ".conv1."),
    (r"\.net\.4\.", ".conv2."),
    (r"parametrizations\.weight\.original0$", "weight_g"),
    (r"parametrizations\.weight\.original1$", "weight_v"),
    (r"_raw$", ""),
    (r"\baffine_enc\b", "encoder"),
    (r"\baffine_dec\b", "decoder"),
    (r"^(?!.*layers\.)(?:.*?\.)??(rnn\.\d+\.)?((?:lin|gate[01])\.\w+)$", r"layers.0.\1\2"),
    (r"^layers\.0\.(lin|gate)", r"layers.0.rnn.0.\1"),
)
_NAME = re.compile(
    r"(network\.\d+\.(conv1|conv2|downsample)\.\w+"
    r"|layers\.\d+\.rnn\.\d+\.(lin|gate[01])\.\w+"
    r"|(encoder|decoder|linear|prior|latent)\.\w+"
    r"|weight[12](_[vg])?|bias2|tail_vectors|tail_bias)$"
)


def short_name(name: str) -> str:
    """Strips the parts of a parameter's name that come from the authors' module wrappers.

    >>> short_name("tnet.module.full_conv.weight1_v_raw")
    'weight1_v'
    >>> short_name("tcn.network.0.net.4.parametrizations.weight.original0")
    'network.0.conv2.weight_g'
    """
    for pattern, replacement in _ALIASES:
        name = re.sub(pattern, replacement, name)
    found = _NAME.search(name)
    return found[0] if found else name


def _load(model, state_dict):
    targets = parameters(model)
    arrays = _arrays_by_short_name(state_dict, _largest_sizes(targets))
    values = [_converted(parameter, arrays) for parameter in targets]
    for parameter, value in zip(targets, values, strict=True):
        parameter.variable.assign(value)


def _largest_sizes(targets):
    """{name: maximum number of values in an array of this name}."""
    sizes = collections.Counter()
    for variable, names, _ in targets:
        for name in names:
            sizes[name] += math.prod(variable.shape)
    return sizes


def _arrays_by_short_name(state_dict, wanted):
    arrays = {}
    for full_name, value in state_dict.items():
        name = short_name(full_name)
        if name == "decoder.weight" and name not in wanted and "encoder.weight" in wanted:
            name = "encoder.weight"  # tied: one tensor under two names
        if name not in wanted:
            raise ValueError(
                f"The state dict has {full_name!r}, but the model has no such parameter. "
                f"It takes {sorted(wanted)}."
            )
        # Before conversion, because a tensor expanded from one value may have any shape.
        if math.prod(np.shape(value)) > wanted[name]:
            raise ValueError(
                f"{full_name!r} must have at most {wanted[name]} values. "
                f"Received: shape {tuple(np.shape(value))}"
            )
        value = _array(full_name, value)
        if name in arrays and not np.array_equal(arrays[name], value):
            raise ValueError(f"{name!r} is ambiguous: {full_name!r} has different values.")
        arrays[name] = value
    if missing := sorted(wanted - arrays.keys()):
        raise ValueError(f"The state dict lacks {missing}. It has {sorted(state_dict)}.")
    return arrays


def _converted(parameter, arrays):
    variable, names, convert = parameter
    arrays, shape = [arrays[name] for name in names], tuple(variable.shape)
    try:
        value = convert(*arrays).astype(keras.backend.standardize_dtype(variable.dtype))
    except (ValueError, IndexError, TypeError):
        value = None
    if value is None or value.shape != shape:
        received = ", ".join(f"{array.shape} {array.dtype}" for array in arrays)
        raise ValueError(
            f"{', '.join(map(repr, names))} must convert to shape {shape} (the authors' kernels "
            f"are (out, in, tap)). Received: {received}"
        )
    if not np.all(np.isfinite(value)):
        raise ValueError(f"{', '.join(map(repr, names))} must be finite. Received: NaN or infinity")
    return value


def _array(name, value):
    if hasattr(value, "detach"):  # a torch tensor, which may be bfloat16 or on a GPU
        try:
            value = value.detach().cpu().double().numpy()
        except (TypeError, RuntimeError) as error:  # sparse, quantized, or without storage
            raise ValueError(f"{name!r} is not a dense tensor: {error}") from error
    value = np.asarray(value)
    if value.dtype == "V2":  # how NumPy stores bfloat16
        value = value.view(ml_dtypes.bfloat16)
    if value.dtype.kind not in "biuf" and value.dtype != ml_dtypes.bfloat16:
        raise ValueError(f"{name!r} must hold real numbers. Received: {value.shape} {value.dtype}")
    return value


def _read(path):
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint {path}.")
    if path.suffix == ".npz":
        return read_npz(path)
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"Reading {path} needs PyTorch: pip install torch. Or convert it to a .npz file where "
            "PyTorch is installed: "
            "np.savez(path, **{k: v.detach().double().numpy() for k, v in state_dict.items()})."
        ) from error
    # In earlier versions a file could run code despite `weights_only` (CVE-2025-32434).
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6):
        raise ImportError(
            f"Reading {path} needs PyTorch 2.6 or newer: earlier versions may run a file's code. "
            f"Received: PyTorch {torch.__version__}"
        )
    try:
        state_dict = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # many classes, including pickle's
        raise ValueError(f"torch.load(weights_only=True) rejects the file: {error}") from error
    if not isinstance(state_dict, Mapping) or not all(map(torch.is_tensor, state_dict.values())):
        raise ValueError(
            "Expected a state dict, written by torch.save(model.state_dict(), path). "
            f"Received: {type(state_dict).__name__}"
        )
    return state_dict


# The parameters of each family


def _of_ends(model):
    """The parameters around a model's backbone: the embedding and the head."""
    found, output = [], "linear"
    if model.embedding is not None:
        found.append(Parameter(model.embedding.embeddings, ("encoder.weight",), np.asarray))
    if isinstance(model, LanguageModel):
        output = "decoder"
    head = model.head
    found.append(Parameter(head.bias, (f"{output}.bias",), np.asarray))
    if isinstance(head, AdaptiveSoftmax):
        if head.embedding is None:
            raise ValueError(
                "The authors' split cross-entropy is tied to the embedding. Received: an "
                "AdaptiveSoftmax with tie_embeddings=False"
            )
        if head.cutoffs:
            found.append(Parameter(head.cluster_kernel, ("tail_vectors",), np.flipud))
            found.append(Parameter(head.cluster_bias, ("tail_bias",), np.flip))
        return found
    if not getattr(model, "tie_embeddings", False):
        found.append(Parameter(head.kernel, (f"{output}.weight",), np.transpose))
    if isinstance(head, MixtureOfSoftmaxes):
        for part in ("prior", "latent"):
            kernel, bias = getattr(head, f"{part}_kernel"), getattr(head, f"{part}_bias")
            found.append(Parameter(kernel, (f"{part}.weight",), np.transpose))
            found.append(Parameter(bias, (f"{part}.bias",), np.asarray))
    return found


def _of_trellis(layer):
    if not isinstance(layer.cell, LSTMGates):
        raise ValueError(f"The authors' TrellisNets have LSTM gates. Received: cell={layer.cell!r}")
    found = [Parameter(layer.bias, ("bias2",), _reorder_gates)]
    for name, kernel in (("weight1", layer.kernel), ("weight2", layer.recurrent_kernel)):
        direction = f"{name}_v" if layer.weight_norm else name
        found.append(Parameter(kernel.kernel, (direction,), _gated_kernel))
        if layer.weight_norm:
            found.append(Parameter(kernel.gain, (f"{name}_g",), _gated_gain))
    return found


_AUTHORS_TCN = {
    "normalization": None,
    "activation": "relu",
    "skip_connections": False,
    "padding": "causal",
    "go_backwards": False,
}


def _of_tcn(layer):
    block = layer.blocks[0]
    found = {
        "normalization": block.normalization,
        "activation": keras.activations.serialize(block.activation),
        "skip_connections": layer.skip_connections,
        "padding": layer.padding,
        "go_backwards": layer.go_backwards,
    }
    wrong = {name: found[name] for name, value in _AUTHORS_TCN.items() if found[name] != value}
    if wrong:
        needed = ", ".join(f"{name}={_AUTHORS_TCN[name]!r}" for name in wrong)
        raise ValueError(
            f"The authors' TCN computes something else. Build the TCN with {needed}. Received: "
            f"{', '.join(f'{name}={value!r}' for name, value in wrong.items())}"
        )
    found = []
    for i, block in enumerate(layer.blocks):
        for n, (kernel, bias) in enumerate(zip(block.convolutions, block.biases, strict=True), 1):
            name = f"network.{i}.conv{n}"
            direction = f"{name}.weight_v" if block.weight_norm else f"{name}.weight"
            found.append(Parameter(bias, (f"{name}.bias",), np.asarray))
            found.append(Parameter(kernel.kernel, (direction,), np.transpose))
            if block.weight_norm:
                found.append(Parameter(kernel.gain, (f"{name}.weight_g",), np.ravel))
        if block.shortcut is not None:
            name = f"network.{i}.downsample"
            found.append(Parameter(block.shortcut.kernel, (f"{name}.weight",), _pointwise))
            found.append(Parameter(block.shortcut.bias, (f"{name}.bias",), np.asarray))
    return found


def _of_lru(layer):
    if getattr(layer, "projection", None) is not None:
        raise ValueError(
            "The authors' lattices have no input projection: inputs must have `units` channels. "
            f"Received: {layer.input_channels} channels, units={layer.units}"
        )
    found = []
    for i, cell in enumerate(_lru_cells(layer)):
        if cell.variant != "ug" and cell.convention != "authors":
            raise ValueError(
                f"The authors' variant {cell.variant!r} needs convention='authors'. "
                f"Received: convention={cell.convention!r}"
            )
        for n in range(cell.cells_per_node):
            modules = [f"layers.{i}.rnn.{n}.{module}" for module in ("lin", "gate0", "gate1")]
            weights = tuple(f"{module}.weight" for module in modules)
            biases = tuple(f"{module}.bias" for module in modules if _has_bias(cell, module))
            found.append(Parameter(cell.kernels[n], weights, _columns_of_h1))
            found.append(Parameter(cell.recurrent_kernels[n], weights, _columns_of_h2))
            found.append(Parameter(cell.biases[n], biases, lambda *b: np.concatenate(b)))
    return found


def _has_bias(cell, module):
    return cell.use_gate_bias or not module.endswith("lin")


def _lru_cells(layer):
    """The LRUCells of a layer from the bottom up, or an empty list for other layers."""
    cells = [layer]
    if isinstance(layer, LRU):
        cells = layer.cells
    elif isinstance(layer, keras.layers.RNN):
        cells = getattr(layer.cell, "cells", [layer.cell])
    return cells if all(isinstance(cell, LRUCell) for cell in cells) else []


def _reorder_gates(array):
    i, o, g, f = np.split(array, 4)
    return np.concatenate([i, f, g, o])


def _gated_kernel(array):
    return _reorder_gates(array).transpose(2, 1, 0)


def _gated_gain(array):
    return _reorder_gates(array.reshape(-1))


def _pointwise(array):
    """(out, in, 1) -> (in, out)."""
    return array[:, :, 0].T


def _columns_of_h1(lin, gate0, gate1):
    # `gate1` reads [h2; h1], the other two [h1; h2].
    return np.concatenate([_half(lin, 0), _half(gate0, 0), _half(gate1, 1)]).T


def _columns_of_h2(lin, gate0, gate1):
    return np.concatenate([_half(lin, 1), _half(gate0, 1), _half(gate1, 0)]).T


def _half(array, index):
    return np.split(array, 2, axis=1)[index]
