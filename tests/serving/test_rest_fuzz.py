"""Damaged requests are answered or refused, as damaged files are by the loaders."""

from hypothesis import HealthCheck, given, settings

from tests.fuzz.fuzz_limits import attempt  # noqa: E402
from tests.fuzz.fuzz_targets import requests  # noqa: E402


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
