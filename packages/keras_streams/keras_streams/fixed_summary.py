"""Which layer of integer-only C loses accuracy."""

import numpy as np

from keras_streams.cells import Buffer
from keras_streams.compiled import FixedStream
from keras_streams.fixed_maps import SIZES
from keras_streams.fixed_point import FixedPrinter, simulate


def layer_table(printer: FixedPrinter, x: np.ndarray) -> list[str]:
    """Returns the lines of a table of the layers, in the order of execution.

    It has the largest absolute value of a layer's last result, the share of its numbers that exceed
    their range, and the largest difference of its last result from floating point, as a share of
    the largest value.

    Args:
        printer: Printer that has printed the program.
        x: Inputs (steps, inputs), or tokens (steps,).
    """
    stream = FixedStream(printer.print_apart())
    of_quantize = {op.buffer for op in printer.front}
    scopes = {
        op.buffer: op.scope or "model"
        for group in printer.groups
        for op in group
        if op.buffer in printer.kept - of_quantize and op.buffer.dtype in ("int16", "int32")
    }
    last = {scope: b for b, scope in scopes.items()}
    largest, errors = dict.fromkeys(last, 0.0), dict.fromkeys(last, 0.0)
    counts, saturated = dict.fromkeys(last, 0), dict.fromkeys(last, 0)
    values: dict[Buffer, np.ndarray] = {}  # of the step so far
    steps = iter(x)

    def compare():
        for b, value in values.items():
            numbers, scope = printer.result(b, stream.memory), scopes[b]
            counts[scope] += b.size
            saturated[scope] += np.count_nonzero(np.abs(numbers) == 2 ** (SIZES[b.dtype] - 1) - 1)
            if b is last[scope]:
                expected = np.reshape(value, (b.size, -1))[:, 0]
                is_finite = np.abs(expected) < 1e30  # more stands for infinity
                expected = expected[is_finite]
                error = np.abs(numbers[is_finite] * 2.0 ** -printer.bits(b) - expected)
                errors[scope] = np.max(error, initial=errors[scope])
                largest[scope] = np.max(np.abs(expected), initial=largest[scope])
        values.clear()

    def observe(b, value):
        if b is printer.program.inputs[0]:  # the first result of a step
            compare()
            stream.step(next(steps))
        elif b in scopes:
            values[b] = value

    simulate(printer.program, printer.groups, x[None], observe)
    compare()
    width = max(map(len, [*last, "layer"]))
    lines = [f"{'layer':{width}}  largest value  saturated    error"]
    for scope in last:
        error = errors[scope] / (largest[scope] or 1)
        share = saturated[scope] / max(counts[scope], 1)
        lines.append(f"{scope:{width}}  {largest[scope]:13.4g}  {share:9.2%}  {error:7.2%}")
    return lines
