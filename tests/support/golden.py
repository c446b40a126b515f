"""Models of the golden fixtures, and their arrays in the fixtures' layout."""

import keras
import numpy as np
from keras import ops

from tests.support.gradients import value_and_gradients
from trellis_keras.layers import TCN, MixtureOfSoftmaxes, TrellisLayer
from trellis_keras.models import LanguageModel
from trellis_keras.torch_weights import load_torch_state_dict, parameters, short_name


def floats(array):
    """An array in the floatx of this process."""
    return np.asarray(array, keras.config.floatx())


def family(arrays, prefix):
    """The arrays `prefix.name` as {name: array}; float64 references win over float32 ones."""
    prefix = f"{prefix}."
    found = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
    exact = {k.removesuffix("_f64"): v for k, v in found.items() if k.endswith("_f64")}
    return {k: v for k, v in found.items() if not k.endswith("_f64")} | exact


def log_softmax(logits):
    """In NumPy and float64."""
    logits = np.asarray(logits, "float64")
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def nll_of(log_p, targets):
    """-log p of the targets (...) by log-probabilities (..., size)."""
    return -np.take_along_axis(np.asarray(log_p), targets[..., None], axis=-1)[..., 0]


def gradients_of_run(arrays, run=""):
    """The gradients of one of several runs, such as "_mem" or "_seg1", by the authors' names."""
    return {
        name.removesuffix(run): array
        for name, array in family(arrays, "grad").items()
        if (name.endswith(run) if run else not name.endswith("_mem"))
    }


def highway_weights(theirs, prefix, depth):
    """The authors' arrays laid out as the weights of an `RHNCell`, in their order.

    `lin` and `gate` are blocks h and t; those of the first layer act on [h1; h2].
    """

    def layer(n, end):
        pair = [theirs[f"{prefix}{name}.{n}.{end}"] for name in ("lin", "gate")]
        return np.concatenate([array.T for array in pair], axis=-1)

    first, *others = (layer(n, "weight") for n in range(depth))
    return [*np.split(first, 2), *others, *(layer(n, "bias") for n in range(depth))]


def grid_weights(theirs, prefix, merge):
    """The authors' arrays laid out as the weights of a node of a `GridLSTMCell`.

    Of the depth LSTM (0) the state (hh) is h1, of the time LSTM (1) it is h2.
    """
    weights = []
    for direction, (of_h1, of_h2) in enumerate([("hh", "ih"), ("ih", "hh")]):
        lstm = f"{prefix}.{direction}"
        weights += [theirs[f"{lstm}.weight_{kind}"].T for kind in (of_h1, of_h2)]
        weights.append(merge(*[theirs[f"{lstm}.bias_{kind}"] for kind in ("ih", "hh")]))
    return weights


def either(a, b):
    """The gradient of a sum of two biases is that of each."""
    np.testing.assert_allclose(a, b, rtol=1e-6)
    return a


def to_keras_time(array):
    """(batch, channels, time) -> (batch, time, channels)."""
    return floats(array).transpose(0, 2, 1)


def core_layer(arrays, **options):
    """The TrellisLayer of a `trellis_core_*` case, weights loaded."""
    config = arrays["meta"]["config"]
    outputs = {k: v for k, v in arrays.items() if k.startswith("out.y")}
    layer = TrellisLayer(
        arrays["in.h0"].shape[1],
        config["nlevels"],
        output_units=next(iter(outputs.values())).shape[-1],
        kernel_size=config["k"],
        dilation_rate=config["dil"],
        weight_norm=config["wn"],
        return_state=True,
        **options,
    )
    x = next(v for k, v in arrays.items() if k.startswith("in.x"))
    layer.build((None, None, x.shape[1]))
    load_torch_state_dict(layer, family(arrays, "param"))
    return layer


def tcn_layer(arrays, **options):
    """The TCN of a `tcn_core_*` case, weights loaded."""
    config = arrays["meta"]["config"]
    layer = TCN(config["channels"], config["k"], len(config["channels"]), **options)
    layer.build((None, None, config["ninp"]))
    load_torch_state_dict(layer, family(arrays, "param"))
    return layer


def language_model(arrays, parameters="param", **options):
    """The LanguageModel of a `trellis_lm_*` or `trajectory_*` case, weights loaded."""
    config = arrays["meta"]["config"]
    embedding = arrays[f"{parameters}.encoder.weight"]
    weight2 = next(v for k, v in arrays.items() if k.startswith(f"{parameters}.weight2"))
    recurrent = next(
        v for k, v in arrays.items() if k in (f"{parameters}.weight2", f"{parameters}.weight2_v")
    )
    dropouts = {"dropout": config.get("dropouth", 0.0), "weight_dropout": config.get("wdrop", 0.0)}
    backbone = TrellisLayer(
        weight2.shape[0] // 4,
        config["nlevels"],
        output_units=config["nout"],
        kernel_size=recurrent.shape[-1],
        dilation_rate=config.get("dil", 1),
        weight_norm=config["wn"],
        aux_every=config["aux_freq"] if config["aux"] else None,
        return_aux=bool(config["aux"]),
        stateful=config.get("repack", False),
        **dropouts,
    )
    if "n_experts" in config:
        options["head"] = MixtureOfSoftmaxes(
            config["V"],
            config["n_experts"],
            latent_dropout=config.get("dropoutl", 0.0),
            epsilon=1e-8,
        )
    model = LanguageModel(
        config["V"],
        embedding.shape[1],
        backbone,
        embedding_dropout=config.get("emb_dropout", 0.0),
        input_dropout=config.get("dropouti", 0.0),
        output_dropout=config.get("dropout", 0.0),
        aux_weight=config["aux"],
        activation_reg=config.get("alpha", 0),
        temporal_activation_reg=config.get("beta", 0),
        **options,
    )
    model.build((None, None))
    load_torch_state_dict(model, family(arrays, parameters))
    return model


def variables_and_references(model, reference):
    """[(the authors' names, our variable, the reference of its value or gradient laid out as ours)]

    `reference` holds the authors' arrays under their names.
    """
    arrays = {short_name(name): array for name, array in reference.items()}
    return [
        (", ".join(names), variable, convert(*(arrays[name] for name in names)))
        for variable, names, convert in parameters(model)
    ]


def matched_variables(model):
    """Our variables, in the order of `variables_and_references`."""
    return [parameter.variable for parameter in parameters(model)]


def check_gradients(model, gradients, reference, assert_close, kind="gradient"):
    """Compares the gradients of the `matched_variables` with the authors'."""
    references = variables_and_references(model, reference)
    for (name, _, wanted), gradient in zip(references, gradients, strict=True):
        assert_close(ops.convert_to_numpy(gradient), wanted, kind, name)


def check_cell(cell, variables, arrays, assert_close):
    """Outputs, loss and input gradients of a `lru_cell_*` case; returns those of the variables."""

    def loss(h1, h2):
        h1, (h2,) = cell(h1, [h2])
        return ops.sum(h1**2) + 0.5 * ops.sum(h2**3), (h1, h2)

    h1, h2 = floats(arrays["in.h1"]), floats(arrays["in.h2"])
    (value, outputs), by_variable, by_input = value_and_gradients(loss, variables, h1, h2)
    outputs = keras.tree.flatten([outputs, cell(h1, cell.get_initial_state(len(h1)))])
    for name, found in zip(("h1", "h2", "h1_single", "h2_single"), outputs, strict=True):
        assert_close(found, arrays[f"out.{name}_f64"], "output", name)
    assert_close(value, arrays["out.loss_f64"], "output", "loss")
    for name, found in zip(("h1", "h2"), by_input, strict=True):
        assert_close(found, arrays[f"grad.{name}_f64"], "gradient", name)
    return by_variable


def check_sequence(layer, variables, arrays, memory, assert_close):
    """As `check_cell`, of a `lru_seq_*` case; `memory` is "_mem" with initial states, else ""."""

    def loss(x, initial):
        y, *last = layer(x, initial_state=[initial[:, i] for i in range(initial.shape[1])])
        last = ops.stack(last, axis=1)
        return ops.sum(y**2) + ops.sum(last**2), (y, last)

    initial = floats(arrays["in.mem_H1"]) * bool(memory)
    (value, (y, last)), by_variable, (by_x, by_initial) = value_and_gradients(
        loss, variables, floats(arrays["in.x"]), initial
    )
    assert_close(y, arrays[f"out.y{memory}_f64"], "output", "y")
    assert_close(last, arrays[f"out.H1{memory}_f64"], "output", "states")
    assert_close(value, arrays[f"out.loss{memory}_f64"], "output", "loss")
    assert_close(by_x, arrays[f"grad.x{memory}_f64"], "gradient", "x")
    if memory:
        assert_close(by_initial, arrays["grad.mem_H1_f64"], "gradient", "initial states")
    return by_variable
