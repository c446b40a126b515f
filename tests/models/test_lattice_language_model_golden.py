"""Recurrent language models against the LRU authors' programs: two segments, memory carried."""

from functools import partial

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.golden import (
    either,
    family,
    floats,
    gradients_of_run,
    grid_weights,
    highway_weights,
    log_softmax,
)
from tests.support.gradients import value_and_gradients
from trellis_keras.kernels.activations import tanh
from trellis_keras.layers import LRU, GridLSTMCell, LRUCell, RHNCell, StackedRNN
from trellis_keras.models import LanguageModel

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]

SEGMENTS = ("seg1", "seg2")
STATES = {"return_sequences": True, "return_state": True}
VARIANTS = {"lru": "ug", "rglru": "rg", "pslru": "ps"}


# Backbones of `units` channels and two layers


def library(kind, units):
    # (Keras' own tanh leaves float64 on JAX.)
    return StackedRNN([kind(units, activation=tanh, **STATES) for _ in range(2)], stateful=True)


def of_cells(cell, **options):
    """`cell` is one, or a list of several."""
    return StackedRNN([keras.layers.RNN(cell, **STATES)], **options)


def lattice(units):
    cells = [LRUCell(units, "ug", convention="authors") for _ in range(2)]
    return of_cells(cells, stateful=True)


def lattice_layer(variant, units):
    return LRU(
        units, 2, variant=variant, convention="authors", return_sequences=True, stateful=True
    )


def highway(units):
    return of_cells([RHNCell(units, 2), RHNCell(units, 2)], stateful=True)


# The authors' arrays (weights or gradients) of layer i, as the weights of ours in their order.
# Where the authors have two biases and we one, `merge` makes one of them.


def lstm_weights(theirs, i, merge):
    """Blocks i, f, g, o are Keras' i, f, c, o."""
    biases = theirs[f"rnn.bias_ih_l{i}"], theirs[f"rnn.bias_hh_l{i}"]
    return [theirs[f"rnn.weight_ih_l{i}"].T, theirs[f"rnn.weight_hh_l{i}"].T, merge(*biases)]


def gru_weights(theirs, i, merge):
    """Blocks r, z, n become z, r, h, and both biases are rows of one tensor."""

    def ordered(name):
        r, z, n = np.split(theirs[f"rnn.{name}_l{i}"], 3)
        return np.concatenate([z, r, n])

    kernels = [ordered(f"weight_{kind}").T for kind in ("ih", "hh")]
    return [*kernels, np.stack([ordered(f"bias_{kind}") for kind in ("ih", "hh")])]


def lru_weights(theirs, i, merge):
    """`lin` and `gate0` act on [h1; h2], `gate1` on [h2; h1]."""

    def parts(end):
        names = ("lin", "gate0", "gate1")
        return [theirs[f"rnn.layers.{i}.rnn.0.{name}.{end}"].T for name in names]

    (gates1, gates2), (p1_1, p1_2), (p2_2, p2_1) = (np.split(w, 2) for w in parts("weight"))
    kernel = np.concatenate([gates1, p1_1, p2_1], axis=1)
    recurrent_kernel = np.concatenate([gates2, p1_2, p2_2], axis=1)
    return [kernel, recurrent_kernel, np.concatenate(parts("bias"))]


def rhn_weights(theirs, i, merge):
    return highway_weights(theirs, f"rnn.layers.{i}.", depth=2)


def node_weights(theirs, i, merge):
    return grid_weights(theirs, f"rnn.layers.{i}", merge)


# {case: (fixture, backbone, layout of its weights)}
CASES = {
    "lstm": ("lstm", partial(library, keras.layers.LSTM), lstm_weights),
    "gru": ("gru", partial(library, keras.layers.GRU), gru_weights),
    "highway": ("highway", highway, rhn_weights),
    "cells": ("lru", lattice, lru_weights),
    **{name: (name, partial(lattice_layer, v), lru_weights) for name, v in VARIANTS.items()},
}
# Those that JAX and float64 repeat in each run.
OFTEN = ("lstm", "highway", "lru")
cases = pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in OFTEN else pytest.mark.slow_elsewhere) for c in CASES]
)


def in_our_order(theirs, layout, merge):
    layers = [weights for i in range(2) for weights in layout(theirs, i, merge)]
    head = [theirs["affine_dec.weight"].T, theirs["affine_dec.bias"]]
    return [theirs["affine_enc.weight"], *layers, *head]


def language_model(backbone, layout, arrays):
    """A model with the authors' weights, and its variables."""
    config = arrays["meta"]["config"]
    assert config["num_layers"] == 2
    model = LanguageModel(config["V"], config["H"], backbone, tie_embeddings=False)
    model.build((config["N"], None))
    variables = [*model.embedding.weights, *backbone.weights, *model.head.weights]
    # Two biases are added up in the precision of this process.
    theirs = {name: floats(value) for name, value in family(arrays, "param").items()}
    for variable, value in zip(variables, in_our_order(theirs, layout, np.add), strict=True):
        variable.assign(value)
    return model, variables


def memory(arrays, segment):
    """The states after a segment as ours: (batch, hidden) each, the lowest layer first."""
    outputs = family(arrays, "out")
    of_layers = arrays["meta"]["config"]["model"] in ("lstm", "gru")
    found = [
        # (layers, batch, hidden), or of the lattices (batch, layers, hidden)
        outputs[name] if of_layers else outputs[name].swapaxes(0, 1)
        for name in (f"mem_mem{n}_{segment}" for n in range(2))
        if name in outputs
    ]
    return [state for of_layer in zip(*found, strict=True) for state in of_layer]


def check_gradients(variables, gradients, arrays, segment, layout, assert_close):
    wanted = in_our_order(gradients_of_run(arrays, f"_{segment}"), layout, either)
    for variable, gradient, reference in zip(variables, gradients, wanted, strict=True):
        gradient = ops.convert_to_numpy(gradient)
        assert_close(gradient, reference, "gradient", f"{variable.path} {segment}")


def log_probabilities(arrays, segment, shape):
    return log_softmax(np.reshape(arrays[f"out.logits_{segment}_f64"], shape))


def record_hidden(model):
    """Returns a list to which each call appends its hidden states."""
    encode, found = model.encode, []

    def recording(*arguments):
        outputs = encode(*arguments)
        found.append(outputs["hidden"])
        return outputs

    model.encode = recording
    return found


@pytest.mark.both_backends(slow=True)
@cases
def test_consecutive_segments(case, golden, assert_close):
    fixture, backbone, layout = CASES[case]
    arrays = golden(f"lru_lm_{fixture}")
    model, variables = language_model(backbone(arrays["meta"]["config"]["H"]), layout, arrays)
    carried, hidden = model.backbone.carried_states(training=True), record_hidden(model)
    for segment in SEGMENTS:
        x, y = arrays[f"in.x_{segment}"], arrays[f"in.y_{segment}"]

        def loss(x=x, y=y):
            value = model.compute_loss(x, y, model((x, y), training=True))
            return value, (model.head(hidden.pop()), carried.read(None))

        (value, (log_p, states)), gradients, _ = value_and_gradients(loss, variables)
        carried.write(states)  # on JAX `loss` has no side effects
        assert_close(log_p, log_probabilities(arrays, segment, log_p.shape), "output", segment)
        assert_close(value, arrays[f"out.loss_{segment}_f64"], "output", f"loss {segment}")
        check_gradients(variables, gradients, arrays, segment, layout, assert_close)
        for state, reference in zip(states, memory(arrays, segment), strict=True):
            assert_close(ops.convert_to_numpy(state), reference, "output", f"memory {segment}")
    evaluation = model.backbone.carried_states(training=False)
    assert not any(np.any(s) for s in evaluation.read(None))


class DepthMemory(keras.layers.Layer):
    """The authors' Grid-LSTM: the top node's depth memory of a segment is, position by position,
    the bottom node's of the next one."""

    def __init__(self, units):
        super().__init__()
        options = {"update": "sequential", "share_depth_weights": False, "return_memory": True}
        self.stack = of_cells(GridLSTMCell(units, 2, **options), return_state=True)
        self.units = units

    def start(self, batch, time):
        zeros = np.zeros((batch, self.units), keras.config.floatx())
        # (Tuples: Keras tracks lists, and JAX does not take what Keras makes of them.)
        self.before = np.zeros((batch, time, self.units), keras.config.floatx()), (zeros,) * 4

    def build(self, input_shape):
        self.stack.build((*input_shape[:-1], 2 * self.units))

    def call(self, x):
        m0, states = self.before
        y, *states = self.stack(ops.concatenate([x, m0], axis=-1), initial_state=states)
        y, m0 = ops.split(y, 2, axis=-1)
        self.after = m0, tuple(states)
        return y

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.units)


@pytest.mark.both_backends(slow=True)
def test_grid_lstm(golden, assert_close):
    arrays = golden("lru_lm_glstm")
    config = arrays["meta"]["config"]
    backbone = DepthMemory(config["H"])
    model, variables = language_model(backbone, node_weights, arrays)
    backbone.start(config["N"], config["L"])
    hidden = record_hidden(model)
    for segment in SEGMENTS:
        x, y = arrays[f"in.x_{segment}"], arrays[f"in.y_{segment}"]

        def loss(x=x, y=y):
            value = model.compute_loss(x, y, model((x, y), training=True))
            return value, (model.head(hidden.pop()), *backbone.after)

        (value, (log_p, m0, states)), gradients, _ = value_and_gradients(loss, variables)
        assert_close(log_p, log_probabilities(arrays, segment, log_p.shape), "output", segment)
        assert_close(value, arrays[f"out.loss_{segment}_f64"], "output", f"loss {segment}")
        check_gradients(variables, gradients, arrays, segment, node_weights, assert_close)
        found = {
            "M0": m0,
            "H1": ops.stack(states[::2], axis=1),
            "M1": ops.stack(states[1::2], axis=1),
        }
        for name, tensor in found.items():
            reference = arrays[f"out.mem_{name}_{segment}_f64"]
            assert_close(ops.convert_to_numpy(tensor), reference, "output", f"{name} {segment}")
        detached = tuple(ops.convert_to_numpy(state) for state in states)
        backbone.before = ops.convert_to_numpy(m0), detached
