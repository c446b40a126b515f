"""The kernels of Theorem 1 (TrellisNet, Eq. 5), from those of an RNN and back.

With K_j, U_j, b_j the kernel, recurrent kernel and bias of layer j, each block of gates of the
TrellisNet is

    past tap of Wh = diag(U_1, ..., U_L)        current tap of Wx = (K_1, 0, ..., 0)
    current tap of Wh = K_2, ..., K_L, one group off the diagonal: group j - 1 -> group j

(The past tap of Wx is zero.) Group j has the same channels in every block.
"""

import dataclasses

import keras
import numpy as np


@dataclasses.dataclass(frozen=True)
class CellWeights:
    """The weights of a cell of an RNN, or of all groups of a TrellisNet.

    Attributes:
        kernel: Array (in, blocks, units), for a TrellisNet (tap, in, blocks, units).
        recurrent_kernel: Array (units, blocks, units), for a TrellisNet (tap, units, blocks,
            units).
        bias: Array (pre-activation blocks, units).
    """

    kernel: np.ndarray
    recurrent_kernel: np.ndarray
    bias: np.ndarray


def join(weights):
    """Returns the `CellWeights` of the TrellisNet, from a list of those of the cells."""
    widths = [w.bias.shape[1] for w in weights]
    units, groups = sum(widths), _slices(widths)
    channels, blocks, _ = weights[0].kernel.shape
    dtype = weights[0].kernel.dtype
    kernel = np.zeros((2, channels, blocks, units), dtype)
    recurrent_kernel = np.zeros((2, units, blocks, units), dtype)
    kernel[1][..., groups[0]] = weights[0].kernel
    for w, group in zip(weights, groups, strict=True):
        recurrent_kernel[0, group, :, group] = w.recurrent_kernel
    for w, below, group in zip(weights[1:], groups, groups[1:], strict=False):
        recurrent_kernel[1, below, :, group] = w.kernel
    bias = np.concatenate([w.bias for w in weights], axis=1)
    return CellWeights(kernel, recurrent_kernel, bias)


def split(weights, widths):
    """Undoes `join`.

    Raises:
        ValueError: A weight that Eq. (5) does not have is not zero.
    """
    groups = _slices(widths)
    kernels = [weights.kernel[1][..., groups[0]]]
    for below, group in zip(groups, groups[1:], strict=False):
        kernels.append(weights.recurrent_kernel[1, below, :, group])
    parts = [
        CellWeights(kernel, weights.recurrent_kernel[0, group, :, group], weights.bias[:, group])
        for kernel, group in zip(kernels, groups, strict=True)
    ]
    again = join(parts)
    others = sum(
        np.count_nonzero(getattr(weights, name) != getattr(again, name))
        for name in ("kernel", "recurrent_kernel")
    )
    if others:
        raise ValueError(
            "An RNN has only the connections of Eq. (5): each group's past feeds the group itself, "
            "its present the next one, x's present the first. "
            f"Received: {others} weights elsewhere that are not zero"
        )
    return parts


def of_cell(cell, blocks):
    """Reads the `CellWeights` of a Keras cell with so many gate blocks."""
    kernel = _array(cell.kernel).reshape(-1, blocks, cell.units)
    recurrent_kernel = _array(cell.recurrent_kernel).reshape(-1, blocks, cell.units)
    is_gru = isinstance(cell, keras.layers.GRUCell)
    bias = np.zeros((1 + is_gru, blocks, cell.units), kernel.dtype)
    if cell.use_bias:
        bias = _array(cell.bias).reshape(bias.shape)
    return CellWeights(kernel, recurrent_kernel, _join_gru_bias(*bias) if is_gru else bias[0])


def set_cell(layer, weights):
    """Gives the weights to a Keras layer of one cell, which has a bias."""
    is_gru = isinstance(layer, keras.layers.GRU)
    bias = _split_gru_bias(weights.bias) if is_gru else weights.bias
    arrays = (weights.kernel, weights.recurrent_kernel, bias)
    shapes = [weight.shape for weight in layer.get_weights()]
    layer.set_weights([a.reshape(shape) for a, shape in zip(arrays, shapes, strict=True)])


def _join_gru_bias(of_input, of_state):
    """The four biases of `gates.GRUGates`, from Keras' two times three.

    Those of input and state add up, but for the candidate's: there the reset gate stands between
    them, so that f has a pre-activation for each.
    """
    return np.stack([*(of_input + of_state)[:2], of_input[2], of_state[2]])


def _split_gru_bias(bias):
    none = np.zeros_like(bias[0])
    return np.stack([bias[:3], np.stack([none, none, bias[3]])])


def of_trellis(layer, blocks):
    """Reads the `CellWeights` of a built TrellisLayer, as its convolutions use them."""
    kernel, recurrent_kernel, bias = map(
        _array, (layer.kernel.uncast(), layer.recurrent_kernel.uncast(), layer.bias)
    )
    units = layer.units
    return CellWeights(
        kernel.reshape(*kernel.shape[:2], blocks, units),
        recurrent_kernel.reshape(*recurrent_kernel.shape[:2], blocks, units),
        bias.reshape(-1, units),
    )


def set_trellis(layer, weights):
    """Gives the weights to a built TrellisLayer without weight norm."""
    for variable, array in (
        (layer.kernel.kernel, weights.kernel),
        (layer.recurrent_kernel.kernel, weights.recurrent_kernel),
        (layer.bias, weights.bias),
    ):
        variable.assign(array.reshape(variable.shape))


def _slices(widths):
    ends = np.cumsum(widths).tolist()
    return [slice(end - width, end) for width, end in zip(widths, ends, strict=True)]


def _array(variable):
    return keras.ops.convert_to_numpy(variable)
