"""Which layer of integer-only C loses accuracy."""

from typing import Any

import numpy as np

from keras_streams.fixed_formats import HUGE, FixedProgram, simulate
from keras_streams.fixed_maps import SIZES
from keras_streams.fixed_point import print_fixed
from keras_streams.native_stream import FixedStream


def layer_table(fixed: FixedProgram, about: Any, x: np.ndarray) -> list[str]:
    """Returns the lines of a table of the layers, in the order of execution.

    It has the largest absolute value of a layer's last result, the share of its numbers that exceed
    their range, the largest difference of its last result from floating point, as a share of the
    largest value, and the fractional bits of the result, the fewest and the most of its channels.

    Args:
        fixed: The program.
        about: See `Printer`.
        x: Inputs (steps, inputs), or tokens (steps,).
    """
    printer, source = print_fixed(fixed, "model", about, apart=True)
    stream, steps = FixedStream(source), iter(x)
    scopes = {
        op.buffer.base: op.scope or "model"
        for group in fixed.groups
        for op in group
        if op.buffer in printer.kept & fixed.ranges.keys() and op.buffer.dtype in ("int16", "int32")
    }
    last = {scope: base for base, scope in scopes.items()}
    # Largest value, error, number of values, and how many are at the end of their range.
    figures = {scope: np.zeros(4) for scope in last}
    values: dict[int, np.ndarray] = {}  # of the step so far

    def compare():
        for base, value in values.items():
            b, found = fixed.program.owner(base), figures[scopes[base]]
            start = printer.starts[printer.array("work", b.dtype)]
            start += printer.offsets[b] * np.dtype(b.dtype).itemsize
            numbers = np.frombuffer(stream.memory, b.dtype, b.size, start).astype("float64")
            is_end = np.abs(numbers) == 2 ** (SIZES[b.dtype] - 1) - 1
            found[2:] += b.size, np.count_nonzero(is_end)
            if base == last[scopes[base]]:
                expected = np.reshape(value, (b.size, -1))[:, 0] / 2.0**b.exponents
                pairs = np.stack([expected, numbers / 2.0 ** (b.bits + b.exponents) - expected])
                pairs = np.abs(pairs[:, np.abs(expected) < HUGE])
                found[:2] = np.maximum(found[:2], np.max(pairs, axis=1, initial=0))
        values.clear()

    def observe(b, value):
        if b is fixed.floats[0].inputs[0]:  # the first result of a step
            compare()
            stream.step(next(steps))
        elif b.base in scopes:
            values[b.base] = value

    simulate(*fixed.floats, x[None], observe)
    compare()
    width = max(map(len, [*last, "layer"]))
    lines = [f"{'layer':{width}}  largest value  saturated    error  fractional bits"]
    for scope, (largest, error, count, ends) in figures.items():
        share, error = ends / max(count, 1), error / (largest or 1)
        b = fixed.program.owner(last[scope])
        bits = sorted({b.bits + int(np.min(b.exponents)), b.bits + int(np.max(b.exponents))})
        lines.append(
            f"{scope:{width}}  {largest:13.4g}  {share:9.2%}  {error:7.2%}  "
            f"{' to '.join(map(str, bits))}"
        )
    return lines
