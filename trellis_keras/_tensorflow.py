"""TensorFlow-specific code: graphs, gradients, random numbers, devices and replicas.

Layers, kernels and models are written in `keras.ops`; they import this module only on the
TensorFlow backend.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

# Graphs


def in_graph() -> bool:
    """Returns whether a function is being traced."""
    return not tf.executing_eagerly()


def with_gradient(function: Callable) -> Callable:
    """Returns a function of (weights, ...) that returns (auxiliary results, gradients).

    `function` takes the same arguments and returns (loss, auxiliary results).
    """

    def differentiate(weights, *arguments):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            loss, others = function(weights, *arguments)
        gradients = tape.gradient(loss, weights, unconnected_gradients="zero")
        return others, [tf.convert_to_tensor(gradient) for gradient in gradients]

    return differentiate


def add_axes(x: tf.Tensor, rank: int) -> tf.Tensor:
    """Appends axes of size 1 to x, whose rank may be known only at run time."""
    shape = tf.shape(x)
    return tf.reshape(x, tf.concat([shape, tf.ones(rank - tf.size(shape), tf.int32)], axis=0))


# Random numbers. If TensorFlow chooses the algorithm, it chooses the same one, but derives the key
# by operations that XLA repeats for each number on a CPU.

_ALGORITHM = "philox"


def uniform(shape: tf.Tensor | tuple, generator: keras.random.SeedGenerator) -> tf.Tensor:
    """Draws float32 numbers in [0, 1); without XLA, the same as `keras.random.uniform`."""
    return tf.random.stateless_uniform(shape, _next_seed(generator), alg=_ALGORITHM)


def dropout(
    x: tf.Tensor,
    rate: float,
    noise_shape: tuple[int | None, ...] | None,
    generator: keras.random.SeedGenerator,
) -> tf.Tensor:
    """Drops elements of x; in float32 and without XLA, those that `keras.random.dropout` drops.

    Keras draws numbers of the dtype of x. In bfloat16 there are 128, and every rate would be
    rounded up to a multiple of 1/128.
    """
    shape = tf.shape(x)
    if noise_shape is not None:
        shape = [shape[i] if size is None else size for i, size in enumerate(noise_shape)]
    kept = uniform(shape, generator) >= rate
    return tf.where(kept, x * tf.cast(1 / (1 - rate), x.dtype), tf.zeros([], x.dtype))


def _next_seed(generator):
    """Returns the int32 seed that Keras passes to TensorFlow."""
    return tf.cast(tf.math.floormod(generator.next(), tf.int32.max - 1), tf.int32)


# Devices and replicas


def has_only_cpus() -> bool:
    """Returns whether there is no visible accelerator."""
    return {device.device_type for device in tf.config.get_visible_devices()} == {"CPU"}


def sum_over_replicas(x: tf.Tensor) -> tf.Tensor | None:
    """Returns the sum of the replicas' x, or None while Keras infers shapes."""
    context = tf.distribute.get_replica_context()
    return None if context is None else context.all_reduce(tf.distribute.ReduceOp.SUM, x)


def outside_replica(step: Callable[[], Any]) -> Any:
    """Calls a function outside the replica context, unless `tf.distribute` is in use.

    In a replica context, even with a single replica, Keras' optimizers reduce gradients with a
    custom-gradient function, whose graph TensorFlow never frees.
    """
    if tf.distribute.has_strategy():  # its variables need the context of a replica
        return step()
    return tf.distribute.get_replica_context().merge_call(lambda strategy: step())
