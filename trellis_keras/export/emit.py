"""Translates layers and models to a `Program`, by a registry of one emitter per class.

An `emitter(program, layer, x)` adds the operations of one step to the program and returns the
layer's output. It writes the layer's equations with the vectors of `keras_streams.program`.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.activations import activations as activation_ops
from keras.src.ops import nn as nn_ops  # like it, the classes of the operations in a graph

from keras_streams import program as p
from keras_streams.graph import functional_of
from keras_streams.program import Expression, Program, Vector, Weight, sigmoid, tanh
from trellis_keras.layers import (
    LRU,
    TCN,
    AdaptiveSoftmax,
    DenseHead,
    Dropout,
    GridLSTMCell,
    GRUGates,
    LRUCell,
    LSTMGates,
    MGUGates,
    MixtureOfSoftmaxes,
    RHNCell,
    RNNGates,
    StackedRNN,
    TCNBlock,
    TrellisLayer,
)
from trellis_keras.layers.rnn import DROPOUTS
from trellis_keras.models import (
    LanguageModel,
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)
from trellis_keras.models.normalization import LARGEST, Standardization
from trellis_keras.models.sequence_models import SequenceModel

Emitter = Callable[[Program, Any, Vector], Vector]

_EMITTERS: dict[type, Emitter] = {}


def emits(*classes: type) -> Callable[[Emitter], Emitter]:
    """Registers a function as the emitter of these classes, but not of their subclasses."""

    def register(emitter):
        _EMITTERS.update(dict.fromkeys(classes, emitter))
        return emitter

    return register


def emit(program: Program, layer: Any, x: Vector) -> Vector:
    """Adds one step of a layer to a program and returns its output.

    Raises:
        ValueError: If the layer's class or one of its options is not supported.
    """
    emitter = _emitter(layer)
    if isinstance(layer, _TRANSPARENT):
        return x
    with program.part(layer.name, type(layer).__name__):
        return emitter(program, layer, x)


def emit_model(program: Program, model: Any, x: Vector) -> Vector:
    """Adds one step of a model like `emit`, but its layers become the outermost parts."""
    return _emitter(model)(program, model, x)


def emit_inside(program: Program, layer: Any, x: Vector) -> Vector:
    """Adds one step of a layer like `emit`, but to the current part."""
    return _emitter(layer)(program, layer, x)


def _emitter(layer):
    emitter = _EMITTERS.get(type(functional_of(layer) or layer))
    if emitter is None:
        known = sorted({kind.__name__ for kind in _EMITTERS})
        raise ValueError(
            f"{layer.name} cannot be exported: {type(layer).__name__} is not supported. "
            f"Supported (without subclasses): {', '.join(known)}."
        )
    return emitter


def array(tensor: Any) -> np.ndarray:
    """Returns a tensor or variable as a NumPy array."""
    return ops.convert_to_numpy(tensor)


# Identities at inference.
_TRANSPARENT = (
    keras.layers.ActivityRegularization,
    keras.layers.AlphaDropout,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.Identity,
    Dropout,
    *DROPOUTS,
)


@emits(*_TRANSPARENT, keras.layers.SpatialDropout1D)
def _nothing(program, layer, x):
    return x


def is_elementwise(layer: Any) -> bool:
    """Returns whether a layer treats all elements of its input alike."""
    if isinstance(layer, keras.layers.Activation):
        return layer.activation in _ELEMENTWISE
    if isinstance(layer, keras.layers.Rescaling):
        return np.size(layer.scale) == np.size(layer.offset) == 1
    if isinstance(layer, keras.layers.Normalization):
        return layer.axis == ()
    return isinstance(layer, _ELEMENTWISE_LAYERS)


# Activations


def _relu(x, negative_slope=0.0, max_value=None, threshold=0.0):
    y = x if max_value is None else p.minimum(x, max_value)
    if not negative_slope and not threshold:
        return p.maximum(y, 0.0)
    return p.where(x < threshold, negative_slope * (x - threshold), y)


def softplus(x: Expression) -> Expression:
    """Returns log(1 + exp(x))."""
    return p.maximum(x, 0.0) + p.log1p(p.exp(-p.absolute(x)))


def _elu(x, alpha=1.0):
    return p.where(x < 0, alpha * (p.exp(x) - 1), x)


def _hard_sigmoid(x):
    return p.minimum(p.maximum(x / 6 + 0.5, 0.0), 1.0)


_ELEMENTWISE: dict[Callable, Callable[[Expression], Expression]] = {
    keras.activations.linear: lambda x: x,
    keras.activations.relu: _relu,
    keras.activations.relu6: lambda x: _relu(x, max_value=6.0),
    keras.activations.leaky_relu: lambda x: p.where(x < 0, 0.2 * x, x),
    keras.activations.elu: _elu,
    keras.activations.celu: _elu,
    keras.activations.selu: lambda x: 1.0507009873554805 * _elu(x, 1.6732632423543772),
    keras.activations.sigmoid: sigmoid,
    keras.activations.hard_sigmoid: _hard_sigmoid,
    keras.activations.log_sigmoid: lambda x: -softplus(-x),
    keras.activations.tanh: tanh,
    keras.activations.hard_tanh: lambda x: p.minimum(p.maximum(x, -1.0), 1.0),
    keras.activations.tanh_shrink: lambda x: x - tanh(x),
    keras.activations.softplus: softplus,
    keras.activations.softsign: lambda x: x / (1 + p.absolute(x)),
    keras.activations.silu: lambda x: x * sigmoid(x),
    keras.activations.hard_silu: lambda x: x * _hard_sigmoid(x),
    keras.activations.mish: lambda x: x * tanh(softplus(x)),
    keras.activations.gelu: lambda x: 0.5 * x * (1 + p.erf(x * 0.7071067811865476)),
    keras.activations.exponential: p.exp,
    keras.activations.squareplus: lambda x: 0.5 * (x + p.sqrt(x * x + 4)),
}


def _name(activation):
    return getattr(activation, "__name__", type(activation).__name__)


def _elementwise(layer, activation):
    """Returns an activation as a function of an `Expression`."""
    if activation not in _ELEMENTWISE:
        known = sorted(map(_name, _ELEMENTWISE))
        raise ValueError(
            f"{layer.name} cannot be exported: the activation {_name(activation)!r} is not "
            f"supported. Supported: {', '.join(known)}."
        )
    return _ELEMENTWISE[activation]


def activate(program: Program, layer: Any, activation: Callable, x: Vector) -> Vector:
    """Adds an activation and returns it. (Softmax is not elementwise.)"""
    if activation is keras.activations.linear:
        return x
    if activation in (keras.activations.softmax, keras.activations.log_softmax):
        return program.softmax(x, log=activation is keras.activations.log_softmax)
    f = _elementwise(layer, activation)
    return program.elementwise(lambda x: {"y": f(x)}, x, name=f"each_{_name(activation)}")[0]


# Keras' layers that treat each step by itself


@emits(keras.layers.Activation)
def _activation(program, layer, x):
    return activate(program, layer, layer.activation, x)


@emits(keras.layers.Softmax, nn_ops.Softmax)
def _softmax_layer(program, layer, x):
    return program.softmax(x)


@emits(nn_ops.LogSoftmax)
def _log_softmax(program, operation, x):
    return program.softmax(x, log=True)


@emits(keras.layers.ReLU, activation_ops.ReLU)
def _relu_layer(program, layer, x):
    options = layer.negative_slope, layer.max_value, layer.threshold
    return program.elementwise(lambda x: {"y": _relu(x, *options)}, x, name="each_relu")[0]


@emits(keras.layers.LeakyReLU, nn_ops.LeakyRelu)
def _leaky_relu_layer(program, layer, x):
    slope = layer.negative_slope
    f = lambda x: {"y": p.where(x < 0, slope * x, x)}  # noqa: E731
    return program.elementwise(f, x, name="each_leaky_relu")[0]


@emits(keras.layers.ELU, nn_ops.Elu)
def _elu_layer(program, layer, x):
    return program.elementwise(lambda x: {"y": _elu(x, layer.alpha)}, x, name="each_elu")[0]


@emits(nn_ops.Celu)
def _celu(program, operation, x):
    alpha = operation.alpha
    f = lambda x: {"y": p.where(x < 0, alpha * (p.exp(x / alpha) - 1), x)}  # noqa: E731
    return program.elementwise(f, x, name="each_celu")[0]


@emits(nn_ops.Gelu)
def _gelu(program, operation, x):
    if not operation.approximate:
        return activate(program, operation, keras.activations.gelu, x)
    inner = lambda x: 0.7978845608028654 * (x + 0.044715 * x * x * x)  # noqa: E731
    f = lambda x: {"y": 0.5 * x * (1 + tanh(inner(x)))}  # noqa: E731
    return program.elementwise(f, x, name="each_approximate_gelu")[0]


@emits(nn_ops.Squareplus)
def _squareplus(program, operation, x):
    f = lambda x: {"y": 0.5 * (x + p.sqrt(x * x + operation.b))}  # noqa: E731
    return program.elementwise(f, x, name="each_squareplus")[0]


# Operations in a graph of calls like `keras.ops.relu(x)`, without options.
_OPERATIONS: dict[type, Callable] = {
    nn_ops.Relu: keras.activations.relu,
    nn_ops.Relu6: keras.activations.relu6,
    nn_ops.Selu: keras.activations.selu,
    nn_ops.Sigmoid: keras.activations.sigmoid,
    nn_ops.HardSigmoid: keras.activations.hard_sigmoid,
    nn_ops.LogSigmoid: keras.activations.log_sigmoid,
    nn_ops.HardTanh: keras.activations.hard_tanh,
    nn_ops.TanhShrink: keras.activations.tanh_shrink,
    nn_ops.Softplus: keras.activations.softplus,
    nn_ops.Softsign: keras.activations.softsign,
    nn_ops.Silu: keras.activations.silu,
    nn_ops.HardSilu: keras.activations.hard_silu,
}


@emits(*_OPERATIONS)
def _activation_operation(program, operation, x):
    return activate(program, operation, _OPERATIONS[type(operation)], x)


_ELEMENTWISE_LAYERS = (
    *_TRANSPARENT,
    *_OPERATIONS,
    keras.layers.ELU,
    keras.layers.LeakyReLU,
    keras.layers.ReLU,
    activation_ops.ReLU,
    nn_ops.Celu,
    nn_ops.Elu,
    nn_ops.Gelu,
    nn_ops.LeakyRelu,
    nn_ops.Squareplus,
)


@emits(keras.layers.Dense)
def _dense(program, layer, x):
    if layer.quantization_mode is not None:
        raise ValueError(
            f"{layer.name} is quantized by Keras to {layer.quantization_mode}. Export the original "
            "float32 model instead."
        )
    kernel = program.weight("kernel", array(layer.kernel), "[input][output]")
    bias = program.weight("bias", array(layer.bias)) if layer.use_bias else None
    return activate(program, layer, layer.activation, program.dense(x, kernel, bias))


def emit_scaled(program: Program, x: Vector, scale: np.ndarray, offset: np.ndarray) -> Vector:
    """Adds scale * x + offset and returns it."""
    scale, offset = (np.broadcast_to(a.ravel(), x.size).astype(a.dtype) for a in (scale, offset))
    weights = program.weight("scale", scale), program.weight("offset", offset)
    function = lambda x, scale, offset: {"y": scale * x + offset}  # noqa: E731
    return program.elementwise(function, x, *weights, name="scale_and_shift")[0]


@emits(keras.layers.BatchNormalization)
def _batch_normalization(program, layer, x):
    mean, variance = array(layer.moving_mean), array(layer.moving_variance)
    scale = (array(layer.gamma) if layer.scale else 1) / np.sqrt(variance + layer.epsilon)
    offset = (array(layer.beta) if layer.center else 0) - mean * scale
    return emit_scaled(program, x, scale.astype(mean.dtype), offset.astype(mean.dtype))


@emits(keras.layers.Rescaling)
def _rescaling(program, layer, x):
    scale, offset = (np.asarray(a, layer.compute_dtype) for a in (layer.scale, layer.offset))
    if any(a.size > 1 and a.size != a.shape[-1] for a in (scale, offset)):
        raise ValueError(
            f"{layer.name} cannot be exported: `scale` and `offset` must be numbers, or have one "
            f"value per channel. Received: shapes {scale.shape} and {offset.shape}"
        )
    return emit_scaled(program, x, scale, offset)


@emits(keras.layers.Normalization)
def _normalization(program, layer, x):
    mean, variance = (np.broadcast_to(a.ravel(), x.size) for a in map(array, _moments(layer)))
    deviation = np.maximum(np.sqrt(variance), keras.backend.epsilon()).astype(variance.dtype)
    mean, deviation = program.weight("mean", mean), program.weight("deviation", deviation)

    def standardize(x, mean, deviation):
        return {"y": x * deviation + mean if layer.invert else (x - mean) / deviation}

    return program.elementwise(standardize, x, mean, deviation)[0]


def _moments(layer):
    if layer.mean is None:
        raise ValueError(f"{layer.name} has no statistics. Call its `adapt` method first.")
    return layer.mean, layer.variance


@emits(keras.layers.LayerNormalization)
def _layer_normalization(program, layer, x):
    if layer.rms_scaling:
        raise ValueError(f"{layer.name} has rms_scaling=True: use a keras.layers.RMSNormalization.")
    y = program.normalize(x, layer.epsilon)
    scale, center = (getattr(layer, name) for name in ("gamma", "beta"))
    if scale is None and center is None:
        return y
    dtype = layer.compute_dtype
    scale = np.ones(x.size, dtype) if scale is None else array(scale)
    center = np.zeros(x.size, dtype) if center is None else array(center)
    return emit_scaled(program, y, scale, center)


@emits(keras.layers.RMSNormalization)
def _rms_normalization(program, layer, x):
    y = program.normalize(x, layer.epsilon, centered=False)
    scale = array(layer.scale)
    return emit_scaled(program, y, scale, np.zeros_like(scale))


# TCN


@emits(TCNBlock)
def _tcn_block(program, block, x):
    return _output_and_branch(program, block, x)[0]


@emits(TCN)
def _tcn(program, layer, x):
    branches = []
    for block in layer.blocks:
        comment = f"{block.kernel_size} taps, {block.dilation_rate} steps apart"
        with program.part(block.name, comment):
            x, branch = _output_and_branch(program, block, x)
        branches.append(branch)
    if not layer.skip_connections:
        return x
    return _sum(program, branches)


def _sum(program, vectors):
    total = vectors[0]
    for vector in vectors[1:]:
        (total,) = program.elementwise(lambda a, b: {"sum": a + b}, total, vector, name="add")
    return total


def _output_and_branch(program, block, x):
    _check_no_condition(block)
    z = x
    for n, convolution in enumerate(block.convolutions):
        steps = (block.kernel_size - 1) * block.dilation_rate + 1
        kernel = program.weight(
            convolution.name, array(convolution()), "[tap][input][output], the oldest tap first"
        )
        bias = program.weight(f"bias_{n + 1}", array(block.biases[n])) if block.biases else None
        ring = program.ring(f"inputs_{n + 1}", z, steps)
        z = program.convolution(ring, kernel, block.dilation_rate, bias)
        if block.activation == "glu":
            f = lambda a, gate: {"z": a * sigmoid(gate)}  # noqa: E731
            (z,) = program.elementwise(f, *z.split(2), name="gated")
        if block.norms:
            z = emit(program, block.norms[n], z)
        if block.activation != "glu":
            z = activate(program, block, block.activation, z)
    if not block.residual:
        return z, z
    shortcut = x if block.shortcut is None else emit(program, block.shortcut, x)
    f, name = (lambda x: x), "add"
    if block.activation != "glu":
        f, name = _elementwise(block, block.activation), f"add_and_{_name(block.activation)}"
    (y,) = program.elementwise(lambda a, b: {"y": f(a + b)}, z, shortcut, name=name)
    return y, z


def _check_no_condition(layer):
    if layer.condition_size is not None:
        raise ValueError(
            f"{layer.name} has condition_size={layer.condition_size}, but an exported step has no "
            "input for a condition. Pass the condition as additional input channels instead."
        )


# TrellisLayer


def _lstm_gates(i, f, g, o, h_past, c_past):
    c = sigmoid(f) * c_past + sigmoid(i) * tanh(g)
    return {"h": sigmoid(o) * tanh(c), "c": c}


def _gru_gates(z, r, current, past, h_past):
    z = sigmoid(z)
    return {"h": z * h_past + (1 - z) * tanh(current + sigmoid(r) * past)}


def _mgu_gates(f, current, past, h_past):
    f = sigmoid(f)
    return {"h": (1 - f) * h_past + f * tanh(current + f * past)}


def _rnn_gates(a, h_past):
    return {"h": tanh(a)}


# (equations, name, indices of the states that they read from one dilation ago)
_GATES = {
    LSTMGates: (_lstm_gates, "lstm_gates", [1]),
    GRUGates: (_gru_gates, "gru_gates", [0]),
    MGUGates: (_mgu_gates, "mgu_gates", [0]),
    RNNGates: (_rnn_gates, "rnn_gates", []),
}


@emits(TrellisLayer)
def _trellis_layer(program, layer, x):
    _check_no_condition(layer)
    if type(layer.cell) not in _GATES:
        known = ", ".join(sorted(cell.__name__ for cell in _GATES))
        raise ValueError(
            f"{layer.name} cannot be exported: the cell {type(layer.cell).__name__} is not "
            f"supported. Supported: {known}."
        )
    gates, name, read = _GATES[type(layer.cell)]
    taps, levels = layer.kernel_size, range(1, layer.depth + 1)
    kernel, recurrent = (
        array(layer.cell.arrange(of.effective_kernel()))
        for of in (layer.kernel, layer.recurrent_kernel)
    )
    kernel, recurrent = (
        program.weight(name, k if taps > 1 else k[0], "[tap][input][output], the oldest tap first")
        for name, k in (("kernel", kernel), ("recurrent_kernel", recurrent))
    )
    bias = program.weight("bias", array(layer.bias))

    # Levels with the same dilation share the contribution of x and the bias.
    injected, ring = {}, None
    dilations = sorted({layer.dilation(i) for i in levels if layer.injects_input(i)})
    if taps > 1:
        ring = program.ring("inputs", x, (taps - 1) * max(dilations) + 1)
    for d in dilations if taps > 1 else [1]:
        name_of = f"injected_{d}" if len(dilations) > 1 and taps > 1 else "injected"
        injected[d] = _taps(program, x, ring, kernel, d, bias, name_of)

    states: list[Vector | float] = [0.0] * len(layer.cell.state_size)  # below the first level
    for i in levels:
        d = layer.dilation(i)
        with program.part(f"level_{i}", f"dilation {d}"):
            a = injected[d if taps > 1 else 1] if layer.injects_input(i) else bias
            past = list(states)
            if i > 1:
                kept = {n for n in read} | ({0} if taps > 1 else set())
                reach = {n: d * max(taps - 1, 1) if n == 0 else d for n in kept}
                rings = {n: program.ring("hc"[n], states[n], reach[n] + 1) for n in sorted(kept)}
                h_ring = rings[0] if taps > 1 else None
                a = _taps(program, states[0], h_ring, recurrent, d, a, "a")
                past = [
                    program.tap(rings[n], d, f"{'hc'[n]}_past") if n in read else 0.0
                    for n in range(len(states))
                ]
            blocks = a.split(layer.cell.preactivation_blocks)
            first = "" if i > 1 else "_from_zero"
            states = _ordered(program.elementwise(gates, *blocks, *past, name=name + first), "hc")
            active = layer.active_channels(i)
            if active is not None:
                started = program.weight("started", active.astype(bias.array.dtype))
                f = lambda x, on: {"y": x * on}  # noqa: E731
                states = [program.elementwise(f, s, started, name="mask")[0] for s in states]
    h = states[0]
    return h.part(layer.units - layer.output_units, layer.output_units)


def _taps(program, x, ring, kernel, dilation, start, name):
    if ring is None:
        return program.dense(x, kernel, start, name)
    return program.convolution(ring, kernel, dilation, start, name)


def _ordered(vectors, names):
    """Returns vectors sorted by the position of their names in `names`."""
    return sorted(vectors, key=lambda vector: names.index(vector.name))


# Recurrent cells, which create their own states


@emits(LRU)
def _lru(program, layer, x):
    h1 = x if layer.projection is None else emit(program, layer.projection, x)
    for cell in layer.cells:
        h1 = emit(program, cell, h1)
    return h1


@emits(LRUCell)
def _lru_cell(program, cell, h1):
    units, n = cell.units, len(cell.gates) * cell.units
    state = h2 = program.state("h2", units)

    def reset(a, s, h):
        return {"reset_h": sigmoid(a + s) * h}

    def mix(a, s, candidate, h):
        z = sigmoid(a + s)
        new, old = (1 - z, z) if cell.z_keeps else (z, 1 - z)
        return {"mixed": new * tanh(candidate) + old * h}

    for i in range(cell.cells_per_node):
        W, U, b = map(array, cell.weights_of(i, cell.compute_dtype))
        kernel = program.weight("kernel", W[:, :-units], "[input][gates, p1]")
        kernel_2 = program.weight("kernel_2", W[:, -units:], "[input][p2]")
        recurrent = np.delete(U, range(n, n + units), axis=1)
        recurrent = program.weight("recurrent_kernel", recurrent, "[input][gates, p2]")
        recurrent_1 = program.weight("recurrent_kernel_1", U[:, n : n + units], "[input][p1]")
        bias = program.weight("bias", b[:-units])
        bias_2 = program.weight("bias_2", np.append(np.zeros(n, b.dtype), b[-units:]))

        a = program.dense(h1, kernel, bias, "h1_part")
        s = program.dense(h2, recurrent, bias_2, "h2_part")
        parts = [v.part(0, n).split(len(cell.gates)) for v in (a, s)]
        gate = dict(zip(cell.gates, zip(*parts, strict=True), strict=True))
        gate = {"z1": gate["z2"], "r1": gate["r2"]} | gate  # shared unless they exist
        (r2_h2,) = program.elementwise(reset, *gate["r2"], h2)
        (r1_h1,) = program.elementwise(reset, *gate["r1"], h1)
        p1 = program.dense(r2_h2, recurrent_1, a.part(n, units), "p1")
        p2 = program.dense(r1_h1, kernel_2, s.part(n, units), "p2")
        (h1,), (h2,) = (
            program.elementwise(mix, *gate["z1"], p2, h1),
            program.elementwise(mix, *gate["z2"], p1, h2),
        )
    program.assign(state, h2)
    return h1


@emits(StackedRNN)
def _stacked_rnn(program, layer, x):
    for part in layer.layers:
        x = emit(program, part, x)
    return x


@emits(keras.layers.SimpleRNN, keras.layers.LSTM, keras.layers.GRU, keras.layers.RNN)
def _rnn(program, layer, x):
    return emit(program, layer.cell, x)


@emits(keras.layers.StackedRNNCells)
def _stacked_cells(program, stack, x):
    for cell in stack.cells:
        x = emit(program, cell, x)
    return x


def _products(program, cell, x, h, bias=None):
    """Adds x kernel + h recurrent_kernel + bias of a Keras cell and returns it."""
    kernel = program.weight("kernel", array(cell.kernel), "[input][output]")
    recurrent = program.weight("recurrent_kernel", array(cell.recurrent_kernel), "[input][output]")
    bias = None if bias is None else program.weight("bias", bias)
    return program.dense(h, recurrent, program.dense(x, kernel, bias, "x_part"))


@emits(keras.layers.SimpleRNNCell)
def _simple_rnn_cell(program, cell, x):
    h = program.state("h", cell.units)
    a = _products(program, cell, x, h, array(cell.bias) if cell.use_bias else None)
    y = activate(program, cell, cell.activation, a)
    program.assign(h, y)
    return h


@emits(keras.layers.LSTMCell)
def _lstm_cell(program, cell, x):
    h, c = program.state("h", cell.units), program.state("c", cell.units)
    a = _products(program, cell, x, h, array(cell.bias) if cell.use_bias else None)
    gate, f_of = (_elementwise(cell, of) for of in (cell.recurrent_activation, cell.activation))

    def lstm(i, f, g, o, c):
        c = gate(f) * c + gate(i) * f_of(g)
        return {"new_c": c, "new_h": gate(o) * f_of(c)}

    new_c, new_h = program.elementwise(lstm, *a.split(4), c)
    program.assign(h, new_h)
    program.assign(c, new_c)
    return h


@emits(keras.layers.GRUCell)
def _gru_cell(program, cell, x):
    units, h = cell.units, program.state("h", cell.units)
    gate, f_of = (_elementwise(cell, of) for of in (cell.recurrent_activation, cell.activation))
    biases = np.zeros((2, 3 * units), cell.compute_dtype)
    if cell.use_bias:
        biases[: 1 + cell.reset_after] = array(cell.bias)
    kernel = program.weight("kernel", array(cell.kernel), "[input][output]")
    a = program.dense(x, kernel, program.weight("bias", biases[0]), "x_part")
    (x_z, x_r, x_h), recurrent = a.split(3), array(cell.recurrent_kernel)

    def mix(x_z, z, candidate, h):
        z = gate(x_z + z)
        return {"new_h": z * h + (1 - z) * f_of(candidate)}

    if cell.reset_after:
        recurrent = program.weight("recurrent_kernel", recurrent, "[input][output]")
        s = program.dense(h, recurrent, program.weight("recurrent_bias", biases[1]), "h_part")
        z, r, past = s.split(3)
        f = lambda x_r, r, x_h, past: {"a": x_h + gate(x_r + r) * past}  # noqa: E731
        (candidate,) = program.elementwise(f, x_r, r, x_h, past, name="gru_reset")
    else:
        gates = program.weight("recurrent_gates", recurrent[:, : 2 * units], "[input][output]")
        last = program.weight("recurrent_kernel", recurrent[:, 2 * units :], "[input][output]")
        z, r = program.dense(h, gates, None, "h_part").split(2)
        f = lambda x_r, r, h: {"reset": gate(x_r + r) * h}  # noqa: E731
        (reset,) = program.elementwise(f, x_r, r, h, name="gru_reset_before")
        candidate = program.dense(reset, last, x_h)
    (new_h,) = program.elementwise(mix, x_z, z, candidate, h, name="gru_mix")
    program.assign(h, new_h)
    return h


_HIGHWAYS = {
    "coupled": lambda h, t, s: {"new_s": tanh(h) * sigmoid(t) + s * (1 - sigmoid(t))},
    "independent": lambda h, t, c, s: {"new_s": tanh(h) * sigmoid(t) + s * sigmoid(c)},
}


@emits(RHNCell)
def _rhn_cell(program, cell, x):
    state = s = program.state("s", cell.units)
    kernel = program.weight("kernel", array(cell.kernel), "[input][output]")
    start = program.dense(x, kernel, None, "x_part")
    for i, recurrent in enumerate(map(array, cell.recurrent_kernels), 1):
        a = program.dense(s, program.weight(f"recurrent_kernel_{i}", recurrent), start)
        start = None  # x enters the first layer only
        if cell.use_bias:
            bias = program.weight(f"bias_{i}", array(cell.biases[i - 1]))
            a = _sum(program, [a, bias])

        gates = a.split(cell.n_blocks)
        (s,) = program.elementwise(_HIGHWAYS[cell.carry], *gates, s, name=f"{cell.carry}_highway")
    program.assign(state, s)
    return s


@emits(GridLSTMCell)
def _grid_lstm_cell(program, cell, x):
    units = cell.units
    h1: Vector = x.part(0, units)
    m1: Vector | float = x.part(units, units) if x.size > units else 0.0

    def lstm(i, f, c, o, m_past):
        m = sigmoid(f) * m_past + sigmoid(i) * tanh(c)
        return {"m": m, "h": sigmoid(o) * tanh(m)}

    def node(below, before, m, weights):
        kernel, recurrent, bias = weights
        a = program.dense(before, recurrent, program.dense(below, kernel, bias, "depth_part"))
        name = "lstm" if isinstance(m, Vector) else "lstm_from_zero"
        return program.elementwise(lstm, *a.split(4), m, name=name)

    names = "kernel", "recurrent_kernel", "bias"
    nodes = [
        [
            [
                None if w is None else program.weight(f"{direction}_{name}", array(w))
                for name, w in zip(names, weights, strict=True)
            ]
            for direction, weights in zip(("depth", "time"), of_node, strict=True)
        ]
        for of_node in cell.nodes
    ]
    for n in range(cell.depth):
        depth_weights, time_weights = nodes[0 if cell.share_depth_weights else n]
        h2, m2 = program.state("h2", units), program.state("m2", units)
        below = h1
        m1, h1 = node(below, h2, m1, depth_weights)
        if cell.update == "sequential":
            below = h1
        new_m2, new_h2 = node(below, h2, m2, time_weights)
        program.assign(h2, new_h2)
        program.assign(m2, new_m2)
    return program.concatenate([h1, m1], "h_and_m") if cell.return_memory else h1


# Heads of language models, which return logits (log-probabilities are valid logits)


@emits(DenseHead)
def _dense_head(program, head, hidden):
    return program.dense(hidden, _output_matrix(program, head), _head_bias(program, head))


def _output_matrix(program, head):
    """Returns the head's matrix, which may be tied to the embedding."""
    tied = [w for w in program.weights if head.embedding is not None and w.name == _TIED]
    if tied:
        return tied[0]
    return program.weight("kernel", array(head.matrix()), "[input][output]")


def _head_bias(program, head):
    return program.weight("bias", array(head.bias))


@emits(MixtureOfSoftmaxes)
def _mixture(program, head, hidden):
    def linear(name, kernel, bias):
        kernel = program.weight(f"{name}_kernel", array(kernel), "[input][output]")
        return program.dense(hidden, kernel, program.weight(f"{name}_bias", array(bias)), name)

    log_prior = program.softmax(linear("prior", head.prior_kernel, head.prior_bias), log=True)
    latent = linear("latent", head.latent_kernel, head.latent_bias)
    (latent,) = program.elementwise(lambda x: {"latent": tanh(x)}, latent, name="each_tanh")
    matrix, bias = _output_matrix(program, head), _head_bias(program, head)

    def log_add(total, log_prior, log_p):
        a, b = total, log_prior + log_p
        return {"sum": p.maximum(a, b) + p.log1p(p.exp(-p.absolute(a - b)))}

    total: Vector | None = None
    for k, of_expert in enumerate(latent.split(head.experts)):
        log_p = program.softmax(program.dense(of_expert, matrix, bias), log=True)
        prior = log_prior.part(k, 1)
        if total is None:
            f = lambda log_prior, log_p: {"sum": log_prior + log_p}  # noqa: E731
            (total,) = program.elementwise(f, prior, log_p, name="add")
        else:
            (total,) = program.elementwise(log_add, total, prior, log_p)
    if head.epsilon is not None:
        floor = float(np.log(head.epsilon))
        f = lambda x: {"y": x + softplus(floor - x)}  # noqa: E731
        (total,) = program.elementwise(f, total, name="add_epsilon")
    return total


@emits(AdaptiveSoftmax)
def _adaptive(program, head, hidden):
    def log_softmax(i, cluster):
        kernel, bias, projection = cluster
        x = hidden
        if projection is not None:
            x = program.dense(x, program.weight(f"projection_{i}", array(projection)))
        kernel = program.weight(f"kernel_{i}", array(kernel).T, "[input][output]")
        bias = program.weight(f"bias_{i}", array(bias))
        return program.softmax(program.dense(x, kernel, bias), log=True)

    frequent, *tails = head.read_clusters()
    log_p = log_softmax(0, frequent)
    words = log_p.size - len(tails)
    parts = [log_p.part(0, words)]
    for i, tail in enumerate(tails):
        f = lambda a, b: {"sum": a + b}  # noqa: E731
        tail_p = log_softmax(i + 1, tail)
        parts += program.elementwise(f, tail_p, log_p.part(words + i, 1), name="add")
    return program.concatenate(parts, "log_p")


# Models

_TIED = "tied_embedding"


@emits(LanguageModel)
def _language_model(program, model, x):
    embedding, head = model.embedding, model.head
    tied = isinstance(head, DenseHead) and head.embedding is embedding
    x = program.lookup(embedding_table(program, embedding, tied), transposed=tied)
    return emit(program, head, emit(program, model.backbone, x))


def embedding_table(program: Program, embedding: Any, tied: bool = False) -> Weight:
    """Adds the matrix of an embedding and returns it."""
    table = array(embedding.embeddings)
    if tied:  # in the layout of the head
        return program.weight(_TIED, table.T, "[channel][token]")
    return program.weight("embedding", table, "[token][channel]")


@emits(Standardization)
def _standardization(program, layer, x):
    def standardize(x, mean, scale):
        y = p.minimum(p.maximum((x - mean) / scale, -LARGEST), LARGEST)
        return {"y": p.where(p.is_nan(x), 0.0, y)}

    mean, scale = (program.weight(n, array(getattr(layer, n))) for n in ("mean", "scale"))
    return program.elementwise(standardize, x, mean, scale)[0]


def emit_sequence_model(program: Program, model: SequenceModel, x: Vector) -> Vector:
    """Adds one step of a model and returns its head's outputs."""
    if model.embedding is not None:
        if model.embedding.mask_zero:
            raise ValueError(
                f"{model.name} has an embedding with mask_zero=True, but a stream has no masked "
                "steps. Set mask_zero=False and do not feed padding to the stream."
            )
        x = program.lookup(embedding_table(program, model.embedding))
    if model.input_normalization is not None:
        x = emit(program, model.input_normalization, x)
    return emit(program, model.head, emit(program, model.backbone, x))


@emits(SequenceClassifier)
def _classifier(program, model, x):
    outputs = emit_sequence_model(program, model, x)
    program.notes.append("Outputs: the probabilities of the classes")
    program.names = list(model.class_names or ())
    return program.softmax(outputs) if model.activation is None else outputs


@emits(PolyphonicModel)
def _polyphonic(program, model, x):
    logits = emit_sequence_model(program, model, x)
    program.notes.append("Outputs: the probability of each key in the next frame")
    return program.elementwise(lambda x: {"p": sigmoid(x)}, logits, name="each_sigmoid")[0]


@emits(SequenceRegressor)
def _regressor(program, model, x):
    return emit_sequence_model(program, model, x)
