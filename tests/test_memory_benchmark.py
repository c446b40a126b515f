"""The memory account's arithmetic."""

import pytest

from tests.support.processes import run_script

SOURCE = """
from benchmarks import memory

head, kernels, level, softmax, auxiliary, rest = 1000, 200, 30, 77, 9, 5

def row(parameters, buffers):
    return {"parameters": parameters, "moments": 2 * parameters, "total": 4 * parameters + buffers}

fixed = softmax + rest
buffers = [softmax, *(fixed + n * level for n in (memory.SHALLOW, memory.LEVELS))]
buffers += [buffers[-1] + auxiliary, 0]
sizes = [head] + 4 * [head + kernels]
rows = dict(zip(memory.ROWS, map(row, sizes, buffers), strict=True))
parts = memory.parts(rows)
assert list(parts.values()) == [1200, 2400, 1200, 70 * level, softmax, auxiliary, rest], parts
taken = {"process_before": 2**30, "process_peak": 2**31, "total": 2**30}
print(memory.markdown({"machine": {"cores": 2}, "rows": rows, "parts": parts, "taken": taken}))
"""


@pytest.mark.slow
def test_parts_are_differences_between_the_reports():
    assert "1.00 GiB at most before it and 2.00 GiB in it" in run_script(SOURCE)
