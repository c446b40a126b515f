"""Weights of the TrellisNet, TCN and LRU authors' PyTorch checkpoints.

Their layout: convolution kernels are (out, in, tap), ours (tap, in, out); with weight norm
`weight_v` is the direction and `weight_g` the gain.

In TrellisNets gate blocks stand in the order input, output, candidate, forget, ours in Keras'
order input, forget, candidate, output; `weight1` acts on x, `weight2` and `bias2` on h. `prior` and
`latent` are those of a mixture of softmaxes, one expert after the other, as ours. `tail_vectors`
and `tail_bias` are those of the split cross-entropy, which keeps them in a state dict of its own,
the last tail's first; ours are an adaptive softmax's, the first tail's first. In TCNs
`network.i.conv1` and `conv2` are the convolutions of block i, `downsample` is its shortcut.

In lattices `layers.i.rnn.n` is cell n of node i. Its `lin` (blocks * units, 2 * units) makes the
gates of [h1; h2], `gate0` projection 1 of [h1; r * h2], `gate1` projection 2 of [h2; q * h1]. Ours
have a `kernel` for h1 and a `recurrent_kernel` for h2 with all blocks side by side. The authors'
update gates need `convention="authors"`.
"""

import collections.abc
import pathlib

import keras
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
from trellis_keras.layers.gates import LSTMGates
from trellis_keras.models import LanguageModel
from trellis_keras.models.sequence_model import SequenceModel
from trellis_keras.torch_files import read_state_dict


def load_torch_state_dict(model_or_layer, state_dict):
    """Loads weights under the authors' parameter names.

    Args:
        model_or_layer: A built `TrellisLayer` with LSTM gates, `TCN`, `LRU`, `LRUCell` or
            `keras.layers.RNN` of such cells, or a model of `trellis_keras.models` around one of
            these layers.
        state_dict: Mapping from names to arrays, or the path of a checkpoint (`.npz`, or a file
            of `torch.save(model.state_dict(), path)`, which is read without PyTorch and without
            running anything in it).
            Names may be full (`tnet.module.full_conv.weight1_v_raw`, `tcn.network.0.conv1.bias`)
            or short (`weight1_v`, `network.0.conv1.bias`, `layers.0.rnn.0.lin.weight`);
            several names of one tensor are accepted if their values agree. An adaptive softmax
            needs those of the program's loss too: `{**model_state, **loss_state}`.

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
        try:
            return load_torch_state_dict(model_or_layer, _read(state_dict))
        except ValueError as error:
            raise ValueError(f"{state_dict}: {error}") from error
    targets = parameters(model_or_layer)
    arrays = _canonical(merge_lattice(state_dict), targets)
    missing = sorted(set(targets) - set(arrays))
    if missing:
        raise ValueError(f"The state dict lacks {missing}. It has {sorted(state_dict)}.")
    values = {}
    for name, (variable, convert) in targets.items():
        values[name] = _converted(name, arrays[name], convert, variable)
    for name, (variable, _) in targets.items():
        variable.assign(values[name])


def parameters(model_or_layer):
    """Returns {the authors' name: (our variable, what lays out an array of theirs as ours)}.

    (A lattice's names are those of `merge_lattice`.)
    """
    if isinstance(model_or_layer, TrellisLayer):
        return _trellis_targets(model_or_layer)
    if isinstance(model_or_layer, TCN):
        return _tcn_targets(model_or_layer)
    if (cells := _lattice_cells(model_or_layer)) is not None:
        return _lattice_targets(model_or_layer, cells)
    if not isinstance(model_or_layer, (LanguageModel, SequenceModel)):
        raise ValueError(
            "Expected a TrellisLayer, a TCN, an LRU, an LRUCell, an RNN of LRUCells, or a model of "
            "trellis_keras around one of these layers. "
            f"Received: {type(model_or_layer).__name__}"
        )
    model = model_or_layer
    targets, head = parameters(model.backbone), "linear"
    if isinstance(model, LanguageModel):
        targets["encoder.weight"], head = (model.embedding.embeddings, np.asarray), "decoder"
    targets[f"{head}.bias"] = (model.head.bias, np.asarray)
    if isinstance(model.head, AdaptiveSoftmax):
        return targets | _tail_targets(model.head)
    if not getattr(model, "tie_embeddings", False):
        targets[f"{head}.weight"] = (model.head.kernel, np.transpose)
    if isinstance(model.head, MixtureOfSoftmaxes):
        for part in ("prior", "latent"):
            targets[f"{part}.weight"] = (getattr(model.head, f"{part}_kernel"), np.transpose)
            targets[f"{part}.bias"] = (getattr(model.head, f"{part}_bias"), np.asarray)
    return targets


def _tail_targets(head):
    if head.embedding is None:
        raise ValueError(
            "The authors' split cross-entropy uses the embedding's matrix. Received: an adaptive "
            "softmax with matrices of its own (tie_embeddings=False)"
        )
    if not head.cutoffs:
        return {}
    return {
        "tail_vectors": (head.cluster_kernel, np.flipud),
        "tail_bias": (head.cluster_bias, np.flip),
    }


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


def _lattice_cells(layer):
    """The LRUCells of a layer, from the bottom up, or None if it is no lattice."""
    cells = [layer]
    if isinstance(layer, LRU):
        cells = layer.cells
    elif isinstance(layer, keras.layers.RNN):
        cells = getattr(layer.cell, "cells", [layer.cell])
    return cells if all(isinstance(cell, LRUCell) for cell in cells) else None


def _lattice_targets(layer, cells):
    _check_built(layer)
    if getattr(layer, "projection", None) is not None:
        raise ValueError("The authors' lattices have no input projection: the layer has one.")
    targets = {}
    for i, cell in enumerate(cells):
        if cell.variant != "ug" and cell.convention != "authors":
            raise ValueError(
                f"The authors' program computes variant {cell.variant!r} as "
                f'`convention="authors"` does. Received: convention={cell.convention!r}'
            )
        for n in range(cell.cells_per_node):
            prefix = f"layers.{i}.rnn.{n}"
            targets[f"{prefix}.kernel"] = (cell.kernels[n], np.asarray)
            targets[f"{prefix}.recurrent_kernel"] = (cell.recurrent_kernels[n], np.asarray)
            if cell.use_bias:
                targets[f"{prefix}.bias"] = (cell.biases[n], np.asarray)
    return targets


def merge_lattice(state_dict):
    """Lays the weights of a lattice's cells out as ours; leaves all others as they are.

    Args:
        state_dict: Mapping from the authors' names to arrays. What was `prefix.lin`, `prefix.gate0`
            and `prefix.gate1` becomes `prefix.kernel`, `prefix.recurrent_kernel` and `prefix.bias`;
            a prefix ends in `layers.i.rnn.n`, for a single cell in `rnn.n` or in nothing.

    Raises:
        ValueError: A cell lacks some of its weights, or they do not fit together.
    """
    merged, cells = {}, {}
    for name, array in state_dict.items():
        *path, module, kind = ["", *name.split(".")]
        if module in ("lin", "gate0", "gate1") and kind in ("weight", "bias"):
            parts, array = cells.setdefault(_cell_prefix(path), {}), _array(array)
            part = f"{module}.{kind}"
            if part in parts and not np.array_equal(parts[part], array):
                raise ValueError(f"Two names of a tensor have different values: {name!r} is one.")
            parts[part] = array
        else:
            merged[name] = array
    for prefix, parts in cells.items():
        merged |= {f"{prefix}.{name}": array for name, array in _merge_cell(prefix, parts).items()}
    return merged


def _cell_prefix(path):
    """`rnn.layers.1.rnn.0` -> `layers.1.rnn.0`; that of a single cell is `layers.0.rnn.n`."""
    if "layers" in path:
        return ".".join(path[path.index("layers") :])
    return f"layers.0.rnn.{path[-1] if path[-1].isdecimal() else 0}"


def _merge_cell(prefix, parts):
    missing = [f"{m}.weight" for m in ("lin", "gate0", "gate1") if f"{m}.weight" not in parts]
    if missing:
        raise ValueError(f"The state dict lacks {missing} of the cell {prefix!r}.")
    try:
        gates, p1, p2 = (np.split(parts[f"{m}.weight"], 2, 1) for m in ("lin", "gate0", "gate1"))
        # The second projection's operands are the other way round.
        of_h1, of_h2 = zip(gates, p1, reversed(p2), strict=True)
        merged = {
            "kernel": np.concatenate(of_h1).T,
            "recurrent_kernel": np.concatenate(of_h2).T,
        }
        biases = [parts[f"{m}.bias"] for m in ("lin", "gate0", "gate1") if f"{m}.bias" in parts]
        return merged | ({"bias": np.concatenate(biases)} if biases else {})
    except ValueError as error:
        shapes = {name: array.shape for name, array in parts.items()}
        raise ValueError(f"The weights of the cell {prefix!r} do not fit: {shapes}") from error


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


# Layers whose `weight` and `bias` keep their names, some of which have another one in lattices.
_DENSE = ("encoder", "decoder", "linear", "prior", "latent")
_LATTICE_DENSE = {"affine_enc": "encoder", "affine_dec": "decoder"}


def _short_name(name):
    """`tnet.module.full_conv.weight1_v_raw` -> `weight1_v`; `encoder.weight` and all of a TCN's
    `network` stay."""
    *path, last = name.split(".")
    if path[:1] == ["layers"]:
        return name  # from `merge_lattice`
    path = [_LATTICE_DENSE.get(part, part) for part in path]
    of_block = path[path.index("network") :] if "network" in path else []
    if set(of_block[2:3]) & _TCN_MODULES:
        return _tcn_name([*of_block, last])
    last = last.removesuffix("_raw")
    return f"{path[-1]}.{last}" if path and path[-1] in _DENSE else last


# A TrellisNet has a `network` too, which holds all that `tnet` and `mixsoft` hold.
_TCN_MODULES = {"conv1", "conv2", "net", "downsample"}
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
    path = pathlib.Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint {path}.")
    try:
        return read_npz(path) if path.suffix == ".npz" else read_state_dict(path)
    except ValueError as error:
        raise ValueError(
            f"it does not hold a state dict, or is damaged: {error}. Save one with "
            "np.savez(path, **arrays) or torch.save(model.state_dict(), path)."
        ) from error
