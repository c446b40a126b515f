"""A loop on TensorFlow whose turns do not overlap."""

import tensorflow as tf


def while_loop(condition, body, carry):
    """As `keras.ops.while_loop`.

    That one lets TensorFlow begin up to ten turns before the first has ended, as far as they do
    not depend on each other: each holds its own large arrays then.
    """
    return tf.while_loop(condition, body, carry, parallel_iterations=1)
