"""Which layer of integer-only C loses accuracy."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_streams.cells import Buffer
from keras_streams.compiled import FixedStream
from keras_streams.fixed_maps import SIZES
from keras_streams.fixed_point import FixedPrinter, simulate


@dataclasses.dataclass
class LayerSummary:
    """How well integers stand for the results of a layer.

    Attributes:
        name: Path of the layer.
        largest: Largest absolute value of its last result.
        saturated: Share of its numbers that exceed their range.
        error: Largest difference of its last result from floating point, as a share of `largest`.
    """

    name: str
    largest: float = 0.0
    saturated: float = 0.0
    error: float = 0.0


def summarize(printer: FixedPrinter, x: np.ndarray) -> list[LayerSummary]:
    """Returns the layers in the order of execution.

    Args:
        printer: Printer that has printed the program.
        x: Inputs (steps, inputs), or tokens (steps,).
    """
    stream = FixedStream(printer.print_apart())
    ops = [op for group in printer.groups for op in group]
    last = {op.scope: op.buffer for op in ops if _is_compared(printer, op.buffer)}
    scopes = {op.buffer: op.scope for op in ops if _is_compared(printer, op.buffer)}
    found = {scope: LayerSummary(scope or "model") for scope in scopes.values()}
    counts, saturated = dict.fromkeys(found, 0), dict.fromkeys(found, 0)
    errors = dict.fromkeys(found, 0.0)
    values: dict[Buffer, np.ndarray] = {}  # of the step so far
    step = -1

    def compare():
        for b, value in values.items():
            numbers, scope = printer.result(b, stream.memory), scopes[b]
            most = 2 ** (SIZES[b.dtype] - 1) - 1
            counts[scope] += b.size
            saturated[scope] += np.count_nonzero(np.abs(numbers) == most)
            if b is last[scope]:
                expected = np.reshape(value, (b.size, -1))[:, 0]
                is_finite = np.abs(expected) < 1e30  # more stands for infinity
                expected = expected[is_finite]
                numbers = numbers[is_finite] * 2.0 ** -printer.bits(b)
                errors[scope] = max(errors[scope], np.max(np.abs(numbers - expected), initial=0))
                largest = np.max(np.abs(expected), initial=0)
                found[scope].largest = max(found[scope].largest, float(largest))
        values.clear()

    def observe(b, value):
        nonlocal step
        if b is printer.program.inputs[0]:  # the first result of a step
            compare()
            step += 1
            stream.step(x[step])
        elif b in scopes:
            values[b] = value

    simulate(printer.program, printer.groups, x[None], observe)
    compare()
    for scope, layer in found.items():
        layer.saturated = saturated[scope] / max(counts[scope], 1)
        layer.error = float(errors[scope] / (layer.largest or 1.0))
    return list(found.values())


def _is_compared(printer, b):
    is_of_quantize = b in {op.buffer for op in printer.front}
    return b in printer.kept and b.dtype in ("int16", "int32") and not is_of_quantize


def as_table(layers: Sequence[LayerSummary]) -> list[str]:
    """Returns the lines of a table."""
    width = max([len(layer.name) for layer in layers] + [5])
    lines = [f"{'layer':{width}}  largest value  saturated    error"]
    for layer in layers:
        lines.append(
            f"{layer.name:{width}}  {layer.largest:13.4g}  {layer.saturated:9.2%}  "
            f"{layer.error:7.2%}"
        )
    return lines
