"""Theorem 1 of the TrellisNet paper as a program (Bai et al. 2019, sections 4.2, A and B.1).

`to_trellis` converts a stack of Keras' recurrent layers to a TrellisNet that computes the same
function, truncated to M steps; `to_dense` makes its kernels dense, for training in the larger
space; `to_rnn` converts it back to recurrent layers. docs/theorem1.md explains the construction.

A stack of L layers becomes a TrellisNet with kernel size 2, M + L - 1 levels, and L groups of
channels, one per layer. With K_j, U_j, b_j the kernel, recurrent kernel and bias of layer j, each
block of gates has the kernels (Eq. 5)

    past tap of Wh = diag(U_1, ..., U_L)        current tap of Wx = (K_1, 0, ..., 0)
    current tap of Wh = K_2, ..., K_L, each from group j - 1 to group j

The proof needs states of zero before an RNN starts, which follows from g(0) = 0 without biases.
With biases `TrellisLayer(group_starts=[1, ..., L])` keeps group i at zero below level i.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from trellis_keras._keras_internals import get_keras_mask
from trellis_keras.layers import (
    GatedActivation,
    GRUGates,
    LSTMGates,
    RNNGates,
    StackedRNN,
    TrellisLayer,
)
from trellis_keras.layers.checks import check_positive
from trellis_keras.layers.stacked_rnn import DROPOUTS
from trellis_keras.models import LanguageModel
from trellis_keras.models.sequence_model import SequenceModel
from trellis_keras.types import Specs, Tensor

__all__ = ["TruncatedRNN", "to_dense", "to_rnn", "to_trellis"]


# From an RNN to a TrellisNet


def to_trellis(
    model_or_layers: keras.Model | keras.layers.Layer | Sequence[keras.layers.Layer],
    truncation: int,
) -> Any:
    """Converts an RNN to a TrellisNet that equals the M-truncated RNN (Bai et al. 2019, Theorem 1).

    At every t, output t of the result is that of the RNN started from zero states at step
    max(1, t - M + 1), with or without biases.

    The result has its own weights. Training-only properties of the RNN (initializers, regularizers,
    constraints, `trainable=False`) are not converted. A layer without bias becomes a group with a
    trainable bias of zeros. A compiled model is recompiled with a new optimizer.

    Args:
        model_or_layers: Built layers, one of

            - a list of `keras.layers.SimpleRNN`, `LSTM` or `GRU` (reset_after=True), or of
              `keras.layers.RNN` with their cells, all of the same kind, from the bottom up, or a
              single such layer;
            - a `layers.StackedRNN` of such layers. If it is stateful, so is the result, which
              rejects segments of more than M steps (appendix B.1, see `TruncatedRNN`);
            - a `keras.Sequential` or functional model that contains one such stack, or a model of
              `trellis_keras.models` with one as its backbone.

        truncation: Positive integer M, number of steps.

    Returns:
        A built `TruncatedRNN`, which is a `TrellisLayer`. Whether it returns all steps, and its
        states, follows the top layer; the states of all layers are concatenated. For a model, the
        result is a model of the same kind, with copies of its other layers.

    Raises:
        ValueError: If `truncation` is below 1, or layers are not built or not an RNN of the form of
            Eq. (4); the message names the reason.

    Example:

    >>> lower = keras.layers.LSTM(8, return_sequences=True)
    >>> rnn = keras.Sequential([keras.Input((None, 3)), lower, keras.layers.LSTM(5)])
    >>> trellis = to_trellis(rnn, truncation=12)
    >>> x = np.random.normal(size=(2, 12, 3)).astype("float32")
    >>> np.allclose(trellis(x), rnn(x), atol=1e-6)
    True
    >>> trellis.layers[0].depth
    13
    """
    check_positive(truncation=truncation)
    if isinstance(model_or_layers, keras.Model):
        return _convert_model(model_or_layers, lambda part: to_trellis(part, truncation))
    single = not isinstance(model_or_layers, (list, tuple))
    layers: list[Any] = [model_or_layers] if single else list(model_or_layers)
    if len(layers) == 1 and isinstance(layers[0], StackedRNN):
        (outer,) = layers
        names = ("return_sequences", "return_state", "stateful")
        options = {name: getattr(outer, name) for name in names}
        layer = _truncated_rnn(outer.layers, truncation, **options)
        if outer.stateful:
            _carry_like(layer, outer)
        return layer
    return _truncated_rnn(layers, truncation)


def _truncated_rnn(layers, truncation, **options):
    layers = [layer for layer in layers if not _is_idle(layer)]
    kind, cells = _check_stack(layers)
    widths = [cell.units for cell in cells]
    top = layers[-1]
    layer = TruncatedRNN(
        sum(widths),
        int(truncation) + len(widths) - 1,
        output_units=widths[-1],
        cell=kind.name,
        kernel_structure="mixed_group",
        groups=widths,
        group_starts=list(range(1, len(widths) + 1)),
        dtype=cells[0].dtype_policy,
        **{"return_sequences": top.return_sequences, "return_state": top.return_state, **options},
    )
    weights = [_cell_weights(cell, kind.blocks) for cell in cells]
    layer.build((None, None, weights[0].kernel.shape[0]))
    _set_trellis_weights(layer, _join(weights))
    return layer


@keras.saving.register_keras_serializable("trellis_keras")
class TruncatedRNN(TrellisLayer):
    """The result of `to_trellis`: a `TrellisLayer` that computes an M-truncated RNN.

    At level j and step t it holds

        z_t^{(j)} = [h^{(1)}_{t,t-j+1}, h^{(2)}_{t,t-j+2}, ..., h^{(L)}_{t,t-j+L}]    (Eq. 6)

    where h^{(i)}_{t,t'} is the state at t of layer i of the RNN started at t', and zero for t' > t.
    The last group of level M + L - 1 is the output of the RNN over the last M steps.

    With the RNN's own states as initial states (`stateful=True` or `initial_state`), the outputs
    and last states equal those of the RNN without truncation, for segments of at most M steps
    (appendix B.1), because all windows reach back to the initial states. Longer segments raise an
    error. When streaming from an `initial_state`, the number of steps is unknown: the first M
    outputs are those of the RNN, later ones those of the M-truncated RNN.

    Masks are correct for padding before and after a sequence. At masked steps in between, an RNN
    skips the step, whereas a TrellisNet sees the initial states.

    Args:
        *args, **kwargs: As in `TrellisLayer`, with the structure of Theorem 1: kernel size 2,
            dilation 1, `kernel_structure="mixed_group"`, `group_starts` 1, 2, ..., and
            `output_units` the width of the last group.

    Call arguments:
        initial_state: The RNN's states, [h], or [h, c] for LSTMs, each (batch, units) with the
            concatenated channels of all layers, bottom layer first. Defaults to zeros, or to the
            carried states of a stateful layer. Returned states are laid out in the same way.

    Raises:
        ValueError: If the structure is not that of Theorem 1; or if, with initial states, a segment
            has more than `truncation` steps. (TensorFlow raises its own error in a function
            compiled for any length.)

    Example: an LSTM over two segments, connected by its carried states.

    >>> lstm = keras.layers.LSTM(4, return_sequences=True, return_state=True)
    >>> x = np.random.normal(size=(2, 10, 3)).astype("float32")
    >>> y, _, _ = lstm(x)
    >>> layer = to_trellis(lstm, truncation=5)
    >>> _, h, c = layer(x[:, :5])
    >>> y2, _, _ = layer(x[:, 5:], initial_state=[h, c])
    >>> np.allclose(y2, y[:, 5:], atol=1e-6)
    True
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check_arguments(self, kernel_structure=(self.kernel_structure, "mixed_group"))
        _check_structure(self)

    @property
    def truncation(self) -> int:
        """M: the number of inputs that an output depends on, the current one included."""
        return self.depth - len(self.groups or [self.units]) + 1

    def call(
        self,
        inputs: Tensor,
        initial_state: Sequence[Tensor] | None = None,
        mask: Tensor | None = None,
        training: bool = False,
        output_length: int | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        self._check_segment(inputs.shape[1], initial_state)
        if inputs.shape[1] is None and (self.stateful or initial_state is not None):
            inputs = self._checked_when_run(inputs)
        return super().call(inputs, initial_state, mask, training, output_length)

    def compute_output_spec(
        self, inputs: Tensor, initial_state: Any = None, *args: Any, **kwargs: Any
    ) -> Specs:
        self._check_segment(inputs.shape[1], initial_state)
        return super().compute_output_spec(inputs, initial_state, *args, **kwargs)

    def _check_segment(self, time, initial_state):
        has_states = self.stateful or initial_state is not None
        if has_states and time is not None and time > self.truncation:
            raise ValueError(
                "With initial states, this layer computes an RNN over segments of at most "
                f"truncation={self.truncation} steps (TrellisNet, appendix B.1). Split the "
                "sequence, or convert with a larger truncation. "
                f"Received: {time} steps"
            )

    def _checked_when_run(self, inputs):
        """Returns the inputs; a graph for any length fails here if they are too long."""
        with keras.name_scope("segment_longer_than_the_truncation"):
            ones = ops.ones((1, self.truncation, 1), inputs.dtype)
            return inputs * ops.slice(ones, (0, 0, 0), (1, ops.shape(inputs)[1], 1))


def _check_structure(layer):
    """Raises ValueError unless a `TrellisLayer` has the arguments of a truncated RNN."""
    groups = layer.groups or [layer.units]
    starts = layer.group_starts or [1] * len(groups)  # a single group starts at level 1 anyway
    _check_arguments(
        layer,
        kernel_size=(layer.kernel_size, 2),
        dilation_rate=(set(layer.dilations), {1}),
        injection_every=(layer.injection_every, 1),
        go_backwards=(layer.go_backwards, False),
        group_starts=(starts, list(range(1, len(groups) + 1))),
        output_units=(layer.output_units, groups[-1]),
    )


def _check_arguments(layer, **arguments):
    """Raises ValueError unless every argument (found, expected) is as expected."""
    for name, (found, expected) in arguments.items():
        if found != expected:
            raise ValueError(
                f"A TrellisLayer with groups={layer.groups} is an RNN only with {name}={expected} "
                f"(Theorem 1). Received: {name}={found} in {layer.name}"
            )


# Dense kernels


def to_dense(model_or_layer: keras.Model | TrellisLayer) -> Any:
    """Returns the same function with dense kernels, for training in the larger space.

    This is the paper's step from an RNN to a TrellisNet (Bai et al. 2019, section 4.2): all weights
    are trainable. Start levels are kept. A compiled model is recompiled with a new optimizer.

    Args:
        model_or_layer: `TrellisLayer` with `kernel_structure="mixed_group"`, such as the result of
            `to_trellis`, or a built model with at least one: `keras.Sequential`, functional, or
            from `trellis_keras.models`.

    Returns:
        A new layer or model with its own weights.

    Example:

    >>> lstm = keras.layers.LSTM(4, return_sequences=True)
    >>> model = keras.Sequential([keras.Input((None, 3)), lstm, keras.layers.Dense(1)])
    >>> model = to_trellis(model, truncation=5)
    >>> to_dense(model).layers[0].kernel_structure
    'dense'
    """
    if isinstance(model_or_layer, TrellisLayer):
        return _dense_layer(model_or_layer)
    model = model_or_layer
    if isinstance(model, (LanguageModel, SequenceModel)):
        return _convert_model(model, to_dense)
    layers = getattr(model, "layers", [])
    if not any(_is_mixed_group(layer) for layer in layers):
        raise ValueError(
            'The model must have a TrellisLayer with kernel_structure="mixed_group", as '
            f"`to_trellis` returns. Received: {model!r} with {[layer.name for layer in layers]}"
        )
    duplicate = functools.cache(
        lambda x: _dense_layer(x) if _is_mixed_group(x) else copy.deepcopy(x)
    )
    new = keras.models.clone_model(model, clone_function=duplicate)
    if model.compiled:
        new.compile_from_config(model.get_compile_config())
    return new


def _is_mixed_group(layer):
    return isinstance(layer, TrellisLayer) and layer.kernel_structure == "mixed_group"


def _dense_layer(layer):
    if not _is_mixed_group(layer):
        raise ValueError(
            '`to_dense` needs a layer with `kernel_structure="mixed_group"`. '
            f"Received: kernel_structure={layer.kernel_structure!r}"
        )
    config = layer.get_config() | {"kernel_structure": "dense"}
    if layer.group_starts is None:
        config["groups"] = None
    cls = TrellisLayer if isinstance(layer, TruncatedRNN) else type(layer)
    dense = cls.from_config(config)
    if not layer.built:
        return dense
    dense.build_from_config(layer.get_build_config())
    dense.set_weights(layer.get_weights())
    _set_dense_kernel(dense.kernel, layer.kernel)
    _set_dense_kernel(dense.recurrent_kernel, layer.recurrent_kernel)
    if layer.stateful:
        _carry_like(dense, layer)
        for training in (True, False):
            # Copies: JAX donates the arrays of a model's variables to its compiled functions.
            states = [ops.copy(state) for state in layer.carried_states(training).current]
            dense.carry_states(states, training)
    return dense


def _carry_like(layer, other):
    """Allocates zero states for the batch sizes of another stateful layer."""
    for training in (True, False):
        layer.reset_state(other.carried_states(training).rows, training)


def _set_dense_kernel(dense, mixed):
    """Assigns the kernel of a `MixedGroupKernel`, with its zeros, to a `ConvolutionKernel`."""
    kernel = mixed.apply_connections(ops.convert_to_tensor(mixed.kernel))
    if mixed.gain is not None:
        # A direction of zeros could not be trained. Where there is no weight, the gain is zero.
        empty = ops.all(kernel == 0, axis=(0, 1))
        kernel = ops.where(empty, dense.initializer(kernel.shape, dtype=kernel.dtype), kernel)
        gain = ops.convert_to_tensor(mixed.gain)
        dense.gain.assign(ops.where(empty, ops.zeros_like(gain), gain))
    dense.kernel.assign(kernel)


# From a TrellisNet to an RNN


def to_rnn(trellis: TrellisLayer) -> list[keras.layers.Layer]:
    """Converts a TrellisNet with the kernels of Eq. (5) to an RNN (Bai et al. 2019, Theorem 1).

    This is the inverse of `to_trellis`: over windows of M = depth - L + 1 steps, with L groups, the
    layers compute the same function as the TrellisNet. They are not truncated.

    Args:
        trellis: Built `TrellisLayer` with the structure of the result of `to_trellis`: L groups
            that start at levels 1..L, and only the weights of Eq. (5), either with
            `kernel_structure="mixed_group"` or because all other weights of a dense kernel are
            zero.

    Returns:
        List of L built `keras.layers.SimpleRNN`, `LSTM` or `GRU`, bottom layer first, with
        biases. Each returns all steps, except that the top one follows the TrellisNet. They return
        their states if the TrellisNet returns or carries its own, so that `layers.StackedRNN`
        accepts them. (Where only the sum of a GRU's two biases matters, the state's bias is zero.)

    Example:

    >>> gru = keras.layers.GRU(4, return_sequences=True)
    >>> gru.build((None, None, 3))
    >>> (again,) = to_rnn(to_trellis(gru, truncation=20))
    >>> x = np.random.normal(size=(2, 7, 3)).astype("float32")
    >>> np.allclose(again(x), gru(x), atol=1e-6)
    True
    """
    if not isinstance(trellis, TrellisLayer) or not trellis.built:
        raise ValueError(f"`to_rnn` needs a built TrellisLayer. Received: {trellis!r}")
    kind = next((kind for kind in _KINDS if type(trellis.cell) is kind.gates), None)
    if kind is None:
        raise ValueError(
            "Keras has no recurrent layer for this gated activation. "
            f"Received: cell={trellis.cell!r}"
        )
    _check_structure(trellis)
    _check_arguments(
        trellis,
        dropout=(trellis.dropout, 0),
        weight_dropout=(trellis.weight_dropout, 0),
        return_aux=(trellis.return_aux, False),
        output_length=(trellis.output_length, None),
    )
    groups = trellis.groups or [trellis.units]
    weights = _split(_trellis_weights(trellis, kind.blocks), groups)
    layers = []
    for w in weights:
        layer = kind.layer(
            w.bias.shape[1],
            return_sequences=trellis.return_sequences or w is not weights[-1],
            return_state=trellis.return_state or trellis.stateful,
            dtype=trellis.dtype_policy,
        )
        layer.build((None, None, w.kernel.shape[0]))
        _set_cell_weights(layer, w)
        layers.append(layer)
    return layers


# The weights


class _GateWeights(NamedTuple):
    """The weights of a cell of an RNN, or of all groups of a TrellisNet."""

    kernel: np.ndarray  # (in, blocks, units); in a TrellisNet (tap, in, blocks, units)
    recurrent_kernel: np.ndarray  # (units, blocks, units); (tap, units, blocks, units)
    bias: np.ndarray  # (pre-activation blocks, units)


def _join(weights):
    """Returns the weights of the TrellisNet from a list of the cells' weights (Eq. 5)."""
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
    return _GateWeights(kernel, recurrent_kernel, np.concatenate([w.bias for w in weights], axis=1))


def _split(weights, widths):
    """Inverts `_join`. There must be no weights other than those of Eq. (5)."""
    groups = _slices(widths)
    kernels = [weights.kernel[1][..., groups[0]]]
    for below, group in zip(groups, groups[1:], strict=False):
        kernels.append(weights.recurrent_kernel[1, below, :, group])
    parts = [
        _GateWeights(kernel, weights.recurrent_kernel[0, group, :, group], weights.bias[:, group])
        for kernel, group in zip(kernels, groups, strict=True)
    ]
    pairs = zip(weights[:2], _join(parts)[:2], strict=True)
    others = sum(np.count_nonzero(found != joined) for found, joined in pairs)
    if others:
        raise ValueError(
            "An RNN has only the connections of Eq. (5): a group's past feeds the group itself, "
            "its present feeds the next group, and the present of x feeds the first. "
            f"Received: {others} nonzero weights elsewhere"
        )
    return parts


def _slices(widths):
    ends = np.cumsum(widths).tolist()
    return [slice(end - width, end) for width, end in zip(widths, ends, strict=True)]


def _cell_weights(cell, blocks):
    kernel = ops.convert_to_numpy(cell.kernel).reshape(-1, blocks, cell.units)
    recurrent_kernel = ops.convert_to_numpy(cell.recurrent_kernel)
    recurrent_kernel = recurrent_kernel.reshape(-1, blocks, cell.units)
    is_gru = isinstance(cell, keras.layers.GRUCell)
    bias = np.zeros((1 + is_gru, blocks, cell.units), kernel.dtype)
    if cell.use_bias:
        bias = ops.convert_to_numpy(cell.bias).reshape(bias.shape)
    if not is_gru:
        return _GateWeights(kernel, recurrent_kernel, bias[0])
    # Keras has an input bias and a recurrent bias per block. They add up except in the candidate,
    # where the reset gate multiplies the recurrent part, a separate block in `GRUGates`.
    (z, r, candidate), (z_state, r_state, past) = bias
    bias = np.stack([z + z_state, r + r_state, candidate, past])
    return _GateWeights(kernel, recurrent_kernel, bias)


def _set_cell_weights(layer, weights):
    """Sets the weights of a Keras layer with one cell and a bias."""
    bias = weights.bias
    if isinstance(layer, keras.layers.GRU):
        z, r, candidate, past = bias
        bias = np.stack([[z, r, candidate], [np.zeros_like(z), np.zeros_like(r), past]])
    arrays = (weights.kernel, weights.recurrent_kernel, bias)
    shapes = [weight.shape for weight in layer.get_weights()]
    layer.set_weights([a.reshape(shape) for a, shape in zip(arrays, shapes, strict=True)])


def _trellis_weights(layer, blocks):
    kernel, recurrent_kernel, bias = map(
        ops.convert_to_numpy,
        (layer.kernel.effective_kernel(), layer.recurrent_kernel.effective_kernel(), layer.bias),
    )
    return _GateWeights(
        kernel.reshape(*kernel.shape[:2], blocks, layer.units),
        recurrent_kernel.reshape(*recurrent_kernel.shape[:2], blocks, layer.units),
        bias.reshape(-1, layer.units),
    )


def _set_trellis_weights(layer, weights):
    """Sets the weights of a built TrellisLayer without weight norm."""
    variables = (layer.kernel.kernel, layer.recurrent_kernel.kernel, layer.bias)
    for variable, array in zip(variables, weights, strict=True):
        variable.assign(array.reshape(variable.shape))


# Supported RNNs


class _Kind(NamedTuple):
    """A kind of recurrent layer whose step has the form of Eq. (4)."""

    name: str  # of the gated activation
    gates: type[GatedActivation]
    layer: type[keras.layers.Layer]
    cell: type[keras.layers.Layer]
    blocks: int  # of gates, in the kernels


_KINDS = (
    _Kind("rnn", RNNGates, keras.layers.SimpleRNN, keras.layers.SimpleRNNCell, 1),
    _Kind("lstm", LSTMGates, keras.layers.LSTM, keras.layers.LSTMCell, 4),
    _Kind("gru", GRUGates, keras.layers.GRU, keras.layers.GRUCell, 3),
)
_LAYERS = (keras.layers.RNN, *(kind.layer for kind in _KINDS))
_ACTIVATIONS = {
    "activation": keras.activations.tanh,
    "recurrent_activation": keras.activations.sigmoid,
}


def _check_stack(layers):
    """Returns the `_Kind` and the cells of a list of layers, the bottom one first."""
    if not layers:
        raise ValueError("There is no recurrent layer to convert. Received: an empty stack.")
    for layer in layers:
        reason = _why_not(layer, is_top=layer is layers[-1])
        if reason:
            name = getattr(layer, "name", layer)
            raise ValueError(f"{reason} Received: {name} ({type(layer).__name__})")
    cells = [cell for layer in layers for cell in _flatten_cells(layer.cell)]
    kinds = [_find_kind(cell) for cell in cells]
    if len(set(kinds)) > 1:
        names = [type(cell).__name__ for cell in cells]
        raise ValueError(
            "All recurrent layers must be of the same kind: the levels of a TrellisNet share one "
            f"gated activation f (Eq. 3). Received: {names}"
        )
    for cell in cells:
        _check_cell(cell)
    policies = [cell.dtype_policy.name for cell in cells]
    if len(set(policies)) > 1:
        raise ValueError(
            f"The layers of a stack must have the same dtype policy. Received: {policies}"
        )
    for lower, upper in zip(cells, cells[1:], strict=False):
        if upper.kernel.shape[0] != lower.units:
            raise ValueError(
                "The layers must be ordered from the input up, each reading the previous one. "
                f"Received: {upper.name}, which reads {upper.kernel.shape[0]} channels, above "
                f"{lower.name} with {lower.units} units"
            )
    return kinds[0], cells


def _is_recurrent(layer):
    """Whether a layer is, or wraps, a recurrent layer of Keras."""
    wrapped = [getattr(layer, name, None) for name in ("layer", "forward_layer")]
    kinds = (keras.layers.RNN, StackedRNN)
    return any(isinstance(part, kinds) for part in (layer, *wrapped))


def _is_idle(layer):
    """Whether a layer is dropout with rate 0."""
    return isinstance(layer, DROPOUTS) and layer.rate == 0


def _why_not(layer, is_top):
    """Returns why a layer cannot be converted, or None."""
    if isinstance(layer, DROPOUTS):
        return _no_dropout(f"rate={layer.rate}")
    if isinstance(layer, keras.layers.Bidirectional) or getattr(layer, "go_backwards", False):
        return (
            "A layer that is Bidirectional or has go_backwards=True reads the future: its outputs "
            "depend on later inputs, those of a TrellisNet only on earlier ones."
        )
    if type(layer) not in _LAYERS:
        return (
            "Only keras.layers.SimpleRNN, LSTM and GRU, and keras.layers.RNN with their cells, "
            "stacked directly on one another, are supported (Eq. 4)."
        )
    if not layer.built:
        return "The layer is not built, so it has no weights to convert: build it or call it first."
    if layer.stateful:
        return (
            "Keras' stateful=True shares one state between training and validation. Wrap stateless "
            "layers in layers.StackedRNN(..., stateful=True), which keeps separate states."
        )
    if not layer.return_sequences and not is_top:
        return (
            "A layer below another one must have return_sequences=True: every layer of Eq. (4) "
            "reads all steps of the layer below. It has return_sequences=False."
        )
    return None


def _no_dropout(received):
    return (
        "Dropout within a stack cannot be converted: a TrellisNet has one mask for all its levels "
        f"(appendix B.1). Set the rates to 0, which does not change inference. Here: {received}."
    )


def _flatten_cells(cell):
    """Returns the cells of a layer's cell, the bottom one first."""
    if type(cell) is keras.layers.StackedRNNCells:
        return [part for inner in cell.cells for part in _flatten_cells(inner)]
    return [cell]


def _find_kind(cell):
    for kind in _KINDS:
        if type(cell) is kind.cell:
            return kind
    raise ValueError(
        "Only SimpleRNNCell, LSTMCell and GRUCell have the form of Eq. (4), in which "
        f"states enter through one matrix product. Received: {cell.name} ({type(cell).__name__})"
    )


def _check_cell(cell):
    received = f"{cell.name} ({type(cell).__name__})"
    rates = {name: getattr(cell, name) for name in ("dropout", "recurrent_dropout")}
    if any(rates.values()):
        raise ValueError(f"{_no_dropout(rates)} Received: {received}")
    for name, expected in _ACTIVATIONS.items():
        found = getattr(cell, name, expected)
        if found is not expected:
            raise ValueError(
                'The cells must have activation="tanh" and recurrent_activation="sigmoid", as a '
                f"TrellisLayer has. Received: {name}={keras.activations.serialize(found)!r} in "
                f"{received}"
            )
    if not getattr(cell, "reset_after", True):
        raise ValueError(
            "A GRU with reset_after=False does not have the form of Eq. (4): its reset gate "
            "multiplies the state before the matrix product U(r * h). Train it with "
            "reset_after=True (Keras' default). "
            f"Received: {received}"
        )


# Models


def _convert_model(model, convert):
    """Returns a copy of a model with its recurrent layers replaced.

    Args:
        model: Built `keras.Sequential`, functional model, or model of `trellis_keras.models`.
        convert: Function from a list of layers, or a backbone, to the layer that replaces them.
    """
    if not model.built:
        raise ValueError(f"{model.name} is not built, so it has no weights to convert.")
    if isinstance(model, (LanguageModel, SequenceModel)):
        new = _with_backbone(model, convert(model.backbone))
    elif getattr(model, "inputs", None):
        new = _convert_functional(model, convert)
    else:
        raise ValueError(
            "Only keras.Sequential, functional models and the models of trellis_keras can be "
            "converted. Convert the list of recurrent layers instead. "
            f"Received: {model.name} ({type(model).__name__})"
        )
    if model.compiled:
        new.compile_from_config(model.get_compile_config())
    return new


def _with_backbone(model, backbone):
    config = keras.saving.deserialize_keras_object(model.get_config() | {"backbone": None})
    new = type(model)(**config | {"backbone": backbone})
    # "frozen" holds indices of sublayers, which have changed.
    build_config = {k: v for k, v in model.get_build_config().items() if k != "frozen"}
    new.build_from_config(build_config)
    for own, copied in zip(_around_backbone(model), _around_backbone(new), strict=True):
        copied.assign(own)
    for name in ("embedding", "head"):
        if (part := getattr(model, name, None)) is not None:
            getattr(new, name).trainable = part.trainable
    return new


def _around_backbone(model):
    """Returns the weights of a model that its backbone has not."""
    of_backbone = {id(weight) for weight in model.backbone.weights}
    return [weight for weight in model.weights if id(weight) not in of_backbone]


def _convert_functional(model, convert):
    is_sequential = isinstance(model, keras.Sequential)
    functional = keras.Model(model.inputs, model.outputs) if is_sequential else model
    calls = _FunctionalCalls(functional, convert)
    duplicate = functools.cache(copy.deepcopy)  # once, even for a layer that is called twice
    new = keras.models.clone_model(
        functional,
        clone_function=lambda layer: layer if layer in calls.layers else duplicate(layer),
        call_function=calls,
    )
    return keras.Sequential(new.layers, name=model.name) if is_sequential else new


class _FunctionalCalls:
    """Repeats the calls of a functional model's layers, with the recurrent ones replaced.

    The TrellisNet replaces the top recurrent layer and reads the input of the bottom one. A
    placeholder stands for the outputs of the others, which no longer exist. Only the next recurrent
    layer may read it.
    """

    def __init__(self, model, convert):
        self.model, self.convert = model, convert
        self.layers = _recurrent_layers(model)
        self.called, self.inputs, self.placeholder = 0, None, None
        lower = [id(layer.output) for layer in self.layers[:-1]]
        if any(id(y) in lower for y in keras.tree.flatten(model.outputs)):
            raise self._not_one_stack("one below the top is an output")

    def __call__(self, layer, *args, **kwargs):
        read = keras.tree.flatten((args, kwargs))
        reads_below = self.placeholder is not None and any(x is self.placeholder for x in read)
        if layer in self.layers:
            return self._call_recurrent(layer, args[0], reads_below)
        if not reads_below:
            return layer(*args, **kwargs)
        if not _is_idle(layer):
            raise self._not_one_stack(f"one below the top is read by {layer.name}")
        return self.placeholder

    def _call_recurrent(self, layer, inputs, reads_below):
        if layer in self.layers[: self.called]:
            raise self._not_one_stack(f"{layer.name} is called more than once")
        if self.called == 0:
            self.inputs = inputs
        elif not reads_below:
            raise self._not_one_stack(f"{layer.name} does not read the one before")
        self.called += 1
        if layer is self.layers[-1]:
            return self.convert(self.layers)(self.inputs)
        self.placeholder = keras.KerasTensor(layer.output.shape, layer.output.dtype)
        return self.placeholder

    def _not_one_stack(self, reason):
        return ValueError(
            "The recurrent layers of a model must form one stack, each read only by the next (a "
            "dropout between them must have rate 0). "
            f"Received: {self.model.name}, of whose recurrent layers {reason}"
        )


def _recurrent_layers(model):
    """Returns the recurrent layers of a Keras model, the bottom one first."""
    found = [layer for layer in model.layers if _is_recurrent(layer)]
    if not found:
        names = [layer.name for layer in model.layers]
        raise ValueError(
            "The model must have recurrent layers. (Convert a nested model separately.) "
            f"Received: {model.name} with layers {names}"
        )
    for layer in found:
        read = keras.tree.flatten(layer.input)
        if any(x.dtype == "bool" or get_keras_mask(x) is not None for x in read):
            raise ValueError(
                "Masks cannot be converted: an RNN skips masked steps, whereas a TrellisNet sees "
                "zero states there. Remove the Masking layer or mask_zero=True. "
                f"Received: {layer.name}, which reads a mask"
            )
        if len(read) > 1 or getattr(layer, "return_state", False):
            raise ValueError(
                "In a model, the recurrent layers must have neither initial_state nor "
                "return_state=True: a TrellisNet has one state for all of them. Convert the list "
                f"of layers instead. Received: {layer.name}"
            )
    return found
