"""What a replica of `tf.distribute` does by itself (see training/test_multi_device.py for two)."""

from types import SimpleNamespace

import keras
import pytest

from trellis_keras.models import devices


def model(replicas, stateful=False):
    strategy = SimpleNamespace(num_replicas_in_sync=replicas)
    return SimpleNamespace(
        distribute_strategy=strategy, backbone=SimpleNamespace(stateful=stateful)
    )


def test_what_replicas_cannot_do_is_refused():
    for wrong in ({"jit_compile": True}, {"steps_per_execution": 2}):
        options = {"jit_compile": False, "steps_per_execution": 1} | wrong
        with pytest.raises(ValueError, match="neither compile a step with XLA nor run several"):
            devices.check_compile(model(2), **options)
        devices.check_compile(model(1), **options)
        devices.check_compile(SimpleNamespace(), **options)  # not on TensorFlow
    devices.check_compile(model(2), "auto", 1)
    with pytest.raises(ValueError, match="stateful backbone cannot be trained on several replicas"):
        devices.check_compile(model(2, stateful=True), False, 1)


def test_one_device_is_left_alone():
    loss = keras.ops.convert_to_tensor(2.0)
    assert devices.share(loss, 3.0) is loss
    assert devices.mean_over_replicas(loss) is loss
    assert devices.replicas() == devices.processes() == 1
