"""Benchmarks: `python -m benchmarks list`, `python -m benchmarks run [names]`."""
