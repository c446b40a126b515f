"""Damaged requests are answered or refused, as damaged files are by the loaders."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))

from fuzz_limits import attempt  # noqa: E402
from fuzz_targets import requests  # noqa: E402


def test_a_damaged_request_is_answered_or_refused(double, tmp_path):
    target = requests(double, tmp_path / "request.json")

    @settings(
        max_examples=60,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def run(content):
        target.put(content)
        attempt(target.load, target.path)

    run()
