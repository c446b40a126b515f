"""Trains a zoo model on all GPUs of one machine, with TensorFlow.

    python examples/multi_device/replicas.py trellisnet_ptb
    python examples/multi_device/replicas.py trellisnet_ptb --check 20 --replicas 1

Each GPU computes the loss of its share of a batch's rows. See docs/multi_device.md.
"""

import json
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import task
import tensorflow as tf


def main():
    parser = task.arguments("Trains a zoo model on all GPUs of one machine.")
    parser.add_argument("--replicas", type=int, help="how many of the devices; default: all")
    parser.add_argument("--cpus", type=int, help="instead of GPUs: as many logical CPU devices")
    options = parser.parse_args()
    devices = _devices(options.cpus)
    wanted = len(devices) if options.replicas is None else options.replicas
    if not 1 <= wanted <= len(devices):
        parser.error(
            f"--replicas must lie in 1 to {len(devices)}, the number of devices. "
            "(--cpus 2 tries it without GPUs.)"
        )
    # TensorFlow has no XLA on several replicas.
    recipe, loaded = task.load(options, jit_compile=False)
    if recipe.training.batch_size % wanted:
        parser.error(f"batch_size={recipe.training.batch_size} cannot be shared by {wanted}")
    with tf.distribute.MirroredStrategy(devices[:wanted]).scope():
        model = task.build(recipe, loaded)
    losses = task.train(model, recipe, loaded, options, options.checkpoints)
    if losses:
        print(json.dumps(losses))


def _devices(cpus):
    if cpus is None:
        return [device.name.removeprefix("/physical_device:") for device in _physical("GPU")]
    logical = [tf.config.LogicalDeviceConfiguration()] * cpus
    tf.config.set_logical_device_configuration(_physical("CPU")[0], logical)
    return [f"CPU:{i}" for i in range(cpus)]


def _physical(kind):
    return tf.config.list_physical_devices(kind)


if __name__ == "__main__":
    main()
