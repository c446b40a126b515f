"""What TensorFlow logs while the package is imported."""

import os
import subprocess
import sys

import pytest

from tests.support.processes import child_environment
from trellis_keras.startup import hidden_logs

LOGS = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795768655.245351   23111 port.cc:153] oneDNN custom operations are on.
E0000 00:00:1795768664.456189   23111 cuda_platform.cc:52] failed call to cuInit
2026-01-01 00:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This binary
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow
"""


def test_lines_of_others_are_shown(monkeypatch, capfd):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    with hidden_logs():
        os.write(2, f"{LOGS}UserWarning: mine\n".encode())
    assert capfd.readouterr().err == "UserWarning: mine\n"
    with pytest.raises(ImportError), hidden_logs():
        os.write(2, LOGS.encode())
        raise ImportError
    assert capfd.readouterr().err == LOGS
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    with hidden_logs():
        os.write(2, LOGS.encode())
    assert capfd.readouterr().err == LOGS


def test_import_and_first_operation_print_nothing():
    """Of the library alone: it works without what is built on it."""
    environment = child_environment()
    del environment["TF_CPP_MIN_LOG_LEVEL"]
    script = """
import sys
sys.modules["trellis_keras.zoo"] = sys.modules["trellis_keras_command"] = None
import trellis_keras, keras
keras.ops.ones(1)
assert not hasattr(trellis_keras, "zoo")
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
