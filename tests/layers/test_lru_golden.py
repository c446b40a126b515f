"""LRUCell and LRU against the authors' program: outputs, states and gradients; its checkpoints."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.golden import family, floats, variables_and_references
from tests.support.gradients import value_and_gradients
from trellis_keras.layers import LRU, LRUCell
from trellis_keras.models import LanguageModel
from trellis_keras.torch_weights import load_torch_state_dict

pytestmark = [pytest.mark.both_backends, pytest.mark.float64]

CELLS = {
    "lru": {},
    "lru_nobias": {"use_gate_bias": False},
    "lrux3": {"cells_per_node": 3},
    "pslru": {"variant": "ps"},
    "rglru": {"variant": "rg"},
}
SEQUENCES = {
    "lru_l1": {},
    "lru_l2": {"cells_per_node": 2},
    "pslru_l1": {"variant": "ps"},
    "rglru_l1": {"variant": "rg"},
}


def reference_gradients(arrays, layer, suffix=""):
    """(names, variable, gradient) of each weight, in the run with or without carried states."""
    reference = {
        name.removesuffix(suffix): array
        for name, array in family(arrays, "grad").items()
        if name.endswith("_mem") == bool(suffix)
    }
    return variables_and_references(layer, reference)


def assert_gradients(assert_close, gradients, references):
    for (name, _, wanted), gradient in zip(references, gradients, strict=True):
        assert_close(gradient, wanted, "gradient", name)


@pytest.mark.parametrize("case", CELLS)
def test_cell(case, golden, assert_close):
    arrays = golden(f"lru_cell_{case}")
    size = arrays["meta"]["config"]["H"]
    cell = LRUCell(size, convention="authors", **CELLS[case])
    cell.build((None, size))
    load_torch_state_dict(cell, family(arrays, "param"))
    gradients = reference_gradients(arrays, cell)
    variables = [variable for _, variable, _ in gradients]

    def loss(h1, h2):
        h1, (h2,) = cell(h1, [h2])
        return ops.sum(h1**2) + 0.5 * ops.sum(h2**3), (h1, h2)

    (value, (h1, h2)), by_variable, (by_h1, by_h2) = value_and_gradients(
        loss, variables, floats(arrays["in.h1"]), floats(arrays["in.h2"])
    )
    assert_close(h1, arrays["out.h1_f64"], "output", "h1")
    assert_close(h2, arrays["out.h2_f64"], "output", "h2")
    assert_close(value, arrays["out.loss_f64"], "output", "loss")
    reference = family(arrays, "grad")
    assert_close(by_h1, reference["h1"], "gradient", "h1")
    assert_close(by_h2, reference["h2"], "gradient", "h2")
    assert_gradients(assert_close, by_variable, gradients)

    h1, (h2,) = cell(floats(arrays["in.h1"]), [cell.get_initial_state(len(arrays["in.h1"]))])
    assert_close(h1, arrays["out.h1_single_f64"], "output", "h1 from zeros")
    assert_close(h2, arrays["out.h2_single_f64"], "output", "h2 from zeros")


@pytest.mark.parametrize("memory", ["", "_mem"], ids=["zeros", "memory"])
@pytest.mark.parametrize("case", SEQUENCES)
def test_sequence(case, memory, golden, assert_close):
    arrays = golden(f"lru_seq_{case}")
    size = arrays["meta"]["config"]["H"]
    layer = LRU(
        size,
        arrays["meta"]["config"]["num_layers"],
        convention="authors",
        return_sequences=True,
        return_state=True,
        **SEQUENCES[case],
    )
    layer.build((None, None, size))
    load_torch_state_dict(layer, family(arrays, "param"))
    gradients = reference_gradients(arrays, layer, memory)
    variables = [variable for _, variable, _ in gradients]
    first = floats(arrays["in.mem_H1"]) if memory else np.zeros_like(floats(arrays["in.mem_H1"]))

    def loss(x, first):
        y, *last = layer(x, initial_state=[first[:, i] for i in range(layer.depth)])
        last = ops.stack(last, axis=1)
        return ops.sum(y**2) + ops.sum(last**2), (y, last)

    (value, (y, last)), by_variable, (by_x, by_first) = value_and_gradients(
        loss, variables, floats(arrays["in.x"]), first
    )
    assert_close(y, arrays[f"out.y{memory}_f64"], "output", "y")
    assert_close(last, arrays[f"out.H1{memory}_f64"], "output", "states")
    assert_close(value, arrays[f"out.loss{memory}_f64"], "output", "loss")
    reference = family(arrays, "grad")
    assert_close(by_x, reference[f"x{memory}"], "gradient", "x")
    if memory:
        assert_close(by_first, reference["mem_H1"], "gradient", "first states")
    assert_gradients(assert_close, by_variable, gradients)


# Checkpoints


def theirs(units=3, depth=2, variant_gates=4, prefix="rnn."):
    rng = np.random.default_rng(0)
    shapes = {
        "lin.weight": (variant_gates * units, 2 * units),
        "lin.bias": (variant_gates * units,),
        "gate0.weight": (units, 2 * units),
        "gate0.bias": (units,),
        "gate1.weight": (units, 2 * units),
        "gate1.bias": (units,),
    }
    return {
        f"{prefix}layers.{i}.rnn.0.{name}": rng.normal(size=shape)
        for i in range(depth)
        for name, shape in shapes.items()
    }


def built(layer, channels=3):
    layer.build((None, None, channels))
    return layer


def test_checkpoints_fit_an_rnn_of_cells_and_a_language_model():
    state, lattice = theirs(), built(LRU(3, 2))
    load_torch_state_dict(lattice, state)
    stacked = built(keras.layers.RNN([LRUCell(3), LRUCell(3)]))
    load_torch_state_dict(stacked, state)
    single = built(keras.layers.RNN(LRUCell(3)))
    load_torch_state_dict(single, theirs(depth=1))
    model = LanguageModel(5, 3, LRU(3, 2, return_sequences=True), tie_embeddings=False)
    model.build((None, None))
    coder = {"affine_enc.weight": np.ones((5, 3)), "affine_dec.weight": np.eye(5)[:, :3]}
    load_torch_state_dict(model, state | coder | {"affine_dec.bias": np.arange(5.0)})
    for i, weights in enumerate(zip(lattice.weights, stacked.weights, strict=True)):
        arrays = [ops.convert_to_numpy(w) for w in (*weights, model.backbone.weights[i])]
        np.testing.assert_array_equal(arrays[0], arrays[1])
        np.testing.assert_array_equal(arrays[0], arrays[2])
    for ours, wanted in zip(single.weights, lattice.weights[:3], strict=True):
        np.testing.assert_array_equal(ours, wanted)
    np.testing.assert_array_equal(model.head.kernel, np.eye(5)[:3])


def test_checkpoints_that_do_not_fit_are_refused():
    layer, state = built(LRU(3, 2)), theirs()
    before = [ops.convert_to_numpy(w) for w in layer.weights]
    name = "rnn.layers.1.rnn.0.gate1.weight"
    bad = {
        r"lacks \['layers.1.rnn.0.gate1.weight'\]": {k: v for k, v in state.items() if k != name},
        r"gate1.weight' must convert to shape \(3, 18\)": state | {name: np.zeros((3, 7))},
        r"\(12, 6\) float64, \(3, 6\) float64, \(2, 6\)": state | {name: np.zeros((2, 6))},
        "lacks.*layers.1.rnn.0.gate0": theirs(depth=1),
        "has 'rnn.layers.2.rnn.0.lin.weight', which the model has no": theirs(depth=3),
        "ambiguous": state | {f"module.{name}": np.zeros((3, 6))},
    }
    for message, weights in bad.items():
        with pytest.raises(ValueError, match=message):
            load_torch_state_dict(layer, weights)
    for weight, wanted in zip(layer.weights, before, strict=True):
        np.testing.assert_array_equal(weight, wanted)
    load_torch_state_dict(layer, state | {f"module.{name}": state[name]})
    with pytest.raises(ValueError, match="convention"):
        load_torch_state_dict(built(LRU(3, 2, variant="rg")), theirs(variant_gates=3))
    with pytest.raises(ValueError, match="projection"):
        load_torch_state_dict(built(LRU(3, 2, input_projection=True)), state)
    with pytest.raises(ValueError, match="Build the model"):
        load_torch_state_dict(LRU(3, 2), state)
