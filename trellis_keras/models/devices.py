"""Training on several devices: replicas of `tf.distribute`, processes of `keras.distribution`.

On JAX a step is one program over all devices, so nothing has to be done but to know how many rows
all processes read together. On TensorFlow each replica computes the loss of its own rows, and the
replicas' gradients are summed.
"""

import keras
from keras import ops


def replicas():
    """Number of replicas of `tf.distribute` that train together, 1 without."""
    if keras.backend.backend() != "tensorflow":
        return 1
    import tensorflow as tf

    return tf.distribute.get_strategy().num_replicas_in_sync


def mean_over_replicas(value):
    """The mean of a scalar over the replicas, in each of them."""
    if replicas() == 1:
        return value
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    # There is none while Keras works out shapes.
    return value if context is None else context.all_reduce(tf.distribute.ReduceOp.MEAN, value)


def share(loss, counted):
    """A replica's share of the loss: a mean over its own tokens becomes one over all.

    Args:
        loss: Mean over the `counted` tokens of this replica.
        counted: Their number.

    Returns:
        What sums up to the mean over all replicas' tokens. The loss itself if there is one.
    """
    if replicas() == 1:
        return loss
    return ops.divide_no_nan(loss * counted, mean_over_replicas(counted) * replicas())


def processes():
    """Number of processes that each read their own rows of every batch."""
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.auto_shard_dataset:
        return 1
    import jax

    return jax.process_count()


def check_compile(model, jit_compile, steps_per_execution):
    """Refuses what fails under `tf.distribute` when training begins, with errors of its own.

    Raises:
        ValueError: The model has several replicas, and XLA, several steps per execution or a
            stateful backbone.
    """
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return
    if jit_compile is True or steps_per_execution != 1:
        raise ValueError(
            "Under tf.distribute with several replicas, TensorFlow can neither compile a step with "
            "XLA nor run several at once: compile with jit_compile=False, which is an argument of "
            "the zoo's models too, and steps_per_execution=1. Received: "
            f"jit_compile={jit_compile}, steps_per_execution={steps_per_execution}"
        )
    if getattr(model.backbone, "stateful", False):
        raise ValueError(
            "A stateful backbone cannot be trained on several replicas of tf.distribute, each of "
            "which has some of the rows. Use keras.distribution on the JAX backend, or "
            'history="chop". Received: a backbone with stateful=True'
        )
