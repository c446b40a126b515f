"""The shared checks on the PyTorch backend, in a process of their own."""

import pytest

from tests.support.processes import run_module

LAYERS = [
    "tests/layers/test_trellisnet.py::test_layer",
    "tests/layers/test_tcn.py::test_layer",
    "tests/layers/test_lru.py::test_layer",
    "tests/layers/test_rnn.py::test_stacked_rnn",
    "tests/layers/test_heads.py",
    "tests/layers/test_stateful.py",
    "tests/models/test_dynamic_evaluation.py",
    "tests/training/test_gradient_norms.py",
    "tests/training/test_history.py",
    "tests/training/test_stopping.py",
    "tests/training/test_text_samples.py",
]
# With their slow tests. Generation is skipped without Keras-NLP.
RUNS = ["tests/models/test_generation.py", "tests/training/test_checkpoint.py"]


@pytest.mark.slow
@pytest.mark.both_backends(slow=True)  # so that it also runs where PyTorch is the only backend
@pytest.mark.parametrize(
    ("tests", "marks"), [(LAYERS, "not slow"), (RUNS, "slow or not slow")], ids=["layers", "runs"]
)
def test_on_pytorch(tests, marks):
    pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    # In float32: Keras' matmul on PyTorch computes float64 tensors in it too.
    words = "-q", "-m", marks, "-k", "not float64", *tests
    done = run_module("pytest", *words, backend="torch", timeout=None)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
