"""A model's graph for TensorBoard."""

import keras

from trellis_keras.training.gradients import without_history
from trellis_keras.training.summaries import Summaries


def write_graph(model, batch, directory):
    """Writes the graph of a model's forward pass, as TensorFlow has it.

    `keras.callbacks.TensorBoard` writes none for models that are classes of their own.

    Args:
        model: A `keras.Model`, built.
        batch: (x, ...) with x as the model is called; its number of rows stays open.
        directory: Where to write TensorBoard's logs.

    Raises:
        ValueError: The backend is not TensorFlow.

    Example:

    >>> write_graph(model, train[0], "run/tensorboard")
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(f"Graphs are TensorFlow's. The backend is {backend!r}.")
    import tensorflow as tf

    x = keras.utils.unpack_x_y_sample_weight(batch)[0]
    spec = keras.tree.map_structure(lambda x: tf.TensorSpec((None, *x.shape[1:]), x.dtype), x)
    with without_history(model):
        # Not by `__call__`, which would put everything into one node.
        function = tf.function(lambda inputs: model.call(inputs, training=False), autograph=False)
        graph = function.get_concrete_function(spec).graph
    summaries = Summaries(directory)
    summaries.graph(graph)
    summaries.flush()
