"""A forecaster for formats of one step, such as C: it gives what `Forecaster` returns."""

import numpy as np

from trellis_keras.export.emit import array, emit_scaled, emit_sequence_model, emits, softplus
from trellis_keras.export.program import Expression, Program, Vector
from trellis_keras.forecasting.forecaster import Forecaster
from trellis_keras.forecasting.losses import middle_quantile


@emits(Forecaster)
def emit_forecaster(program: Program, model: Forecaster, x: Vector) -> Vector:
    """Adds one step of a forecaster and returns its forecasts, in the units of the data."""
    y = emit_sequence_model(program, model, x)
    columns = len(model.quantiles or (0,))

    def of_outputs(values):  # (targets,) or (targets, quantiles): for each output
        values = np.broadcast_to(values.reshape(model.targets, -1), (model.targets, columns))
        return np.tile(values.reshape(-1), model.horizon)

    if model.quantiles is not None:

        def gaps(x: Expression, scale: Expression) -> dict[str, Expression]:
            return {"gap": softplus(x) * scale}

        scale = program.weight("gap_scale", of_outputs(array(model.gap_scale)))
        (gap,) = program.elementwise(gaps, y, scale)
        y = program.spread(y, gap, columns, middle_quantile(model.quantiles))
    if model.target_normalization is not None:
        scaling = model.target_normalization
        y = emit_scaled(
            program, y, *(of_outputs(array(of)) for of in (scaling.scale, scaling.mean))
        )
    shape = [model.horizon, model.targets, *([columns] if model.quantiles else [])]
    names = ["step", "target", "quantile"][: len(shape)]
    program.notes.append(f"Outputs: y[{']['.join(names)}] of sizes {shape}, row after row.")
    if model.quantiles:
        program.notes.append(f"Quantiles: {', '.join(map(str, model.quantiles))}.")
    if model.future_channels:
        program.notes.append(
            f"The last {model.future_channels} inputs are those {model.horizon} steps ahead."
        )
    return y
