"""Emitter of `Forecaster` for formats that export one step, such as C."""

import numpy as np

from keras_streams.program import (
    Expression,
    Program,
    Vector,
    absolute,
    is_nan,
    maximum,
    minimum,
    where,
)
from trellis_keras.export.emit import array, emit_scaled, emit_sequence_model, emits, softplus
from trellis_keras.forecasting.forecaster import Forecaster
from trellis_keras.forecasting.losses import middle_quantile
from trellis_keras.models.normalization import LARGEST


def _started(net, offsets):
    return {"y": net + offsets}


def _moved(base, scale, net):
    return {"moved": base + scale * net}


def _emit_linear(program, model, x):
    """Adds one step of a forecaster's linear layer and returns the base and scale."""
    layer, scaling = model.linear, model.input_normalization
    targets, window = layer.targets, layer.window
    mean, scale, kernel, least = map(
        array, (scaling.mean, scaling.scale, layer.kernel, layer.least_scale)
    )

    def known_target(x, last, mean, scale):
        z = where(is_nan(x), last, (x - mean) / scale)
        return {"known": z, "change": absolute(z - last)}

    def known_covariate(x, last, mean, scale):
        z = minimum(maximum((x - mean) / scale, -LARGEST), LARGEST)
        return {"known": where(is_nan(x), last, z)}

    with program.part(layer.name, f"the last {window} steps"):
        last = program.state("last", x.size)
        mean, scale = program.weight("mean", mean), program.weight("deviation", scale)
        z, change = program.elementwise(
            known_target, *(v.part(0, targets) for v in (x, last, mean, scale))
        )
        if others := x.size - targets:
            parts = (v.part(targets, others) for v in (x, last, mean, scale))
            z = program.concatenate([z, *program.elementwise(known_covariate, *parts)], "known")
        program.assign(last, z)
        kernel = program.weight("kernel", kernel, "[step][channel][output], the oldest first")
        base = program.convolution(program.ring("steps", z, window), kernel, 1, name="base")
        mean = np.tile(np.eye(targets, dtype="float32") / (window - 1), (window - 1, 1, 1))
        mean = program.weight("mean_change", mean)
        mean = program.convolution(program.ring("changes", change, window - 1), mean, 1)
        least = program.weight("least_scale", least)
        (scale,) = program.elementwise(
            lambda mean, least: {"scale": maximum(mean, least)}, mean, least, name="at_least"
        )
    return base, scale


@emits(Forecaster)
def emit_forecaster(program: Program, model: Forecaster, x: Vector) -> Vector:
    """Adds one step of a forecaster and returns its forecasts in the units of the data."""
    if model.scale == "window":
        raise ValueError(
            f"{model.name} cannot be exported to C: with scale='window' its backbone reads the "
            "whole window at each step. Export it as a SavedModel, LiteRT or ONNX file, or train "
            "with scale='data'."
        )
    linear = None if model.linear is None else _emit_linear(program, model, x)
    y = emit_sequence_model(program, model, x)
    columns = len(model.quantiles or (0,))

    def of_outputs(values):  # (targets,) or (targets, quantiles), repeated for each output
        values = np.broadcast_to(values.reshape(model.targets, -1), (model.targets, columns))
        return np.tile(values.reshape(-1), model.horizon)

    if linear is not None:
        offsets = program.weight("starting_offsets", array(model.offsets))
        (y,) = program.elementwise(_started, y, offsets)
    if model.quantiles is not None:

        def gaps(x: Expression, scale: Expression) -> dict[str, Expression]:
            return {"gap": softplus(x) * scale}

        scale = program.weight("gap_scale", of_outputs(array(model.gap_scale)))
        (gap,) = program.elementwise(gaps, y, scale)
        y = program.spread(y, gap, columns, middle_quantile(model.quantiles))
    if linear is not None:
        wide = np.eye(model.horizon * model.targets).repeat(columns, axis=1)
        each_step = np.tile(np.eye(model.targets), model.horizon).repeat(columns, axis=1)
        base, units = (
            program.dense(part, program.weight(name, to.astype("float32")), name=name)
            for name, part, to in zip(("base", "scale"), linear, (wide, each_step), strict=True)
        )
        (y,) = program.elementwise(_moved, base, units, y)
    if model.target_normalization is not None:
        scaling = model.target_normalization
        y = emit_scaled(
            program, y, *(of_outputs(array(of)) for of in (scaling.scale, scaling.mean))
        )
    shape = [model.horizon, model.targets, *([columns] if model.quantiles else [])]
    names = ["step", "target", "quantile"][: len(shape)]
    program.notes.append(f"Outputs: y[{']['.join(names)}] of shape {shape}, in row-major order.")
    if model.quantiles:
        program.notes.append(f"Quantiles: {', '.join(map(str, model.quantiles))}.")
    if model.future_channels:
        program.notes.append(
            f"The last {model.future_channels} inputs are values from {model.horizon} steps ahead."
        )
    return y
