"""The gradient of a model's training loss, computed beside training and without a trace of it."""

import contextlib

import keras
from keras import ops

from trellis_keras.layers.base import at_least_float32


class LossGradient:
    """Computes the gradient of the loss that `fit` would minimise, and changes nothing.

    Weights, random generators, metrics and carried states are as before; the states of stateful
    layers are taken to be empty. The optimizer's clipping and weight decay are not part of it. If
    the optimizer scales the loss, because small gradients would be 0 in float16, so does this, and
    takes the scale out of the gradient again.
    On JAX it can be called where the model's variables can be read: between epochs, not in one.

    Args:
        model: A compiled `keras.Model`, built.

    Call arguments:
        batch: (x, y) or (x, y, sample_weight) as `fit` takes them from a `PyDataset`.

    Returns:
        A list of tensors, one for each of `model.trainable_variables`, at least float32.

    Example:

    >>> gradients = LossGradient(model)((x, y))
    """

    def __init__(self, model):
        if not (model.built and model.compiled):
            raise ValueError("The gradient of a loss needs a model that is built and compiled.")
        self.model = model
        self._gradient = _differentiated(self._loss, model)

    def __call__(self, batch):
        batch = keras.tree.map_structure(_tensor, keras.utils.unpack_x_y_sample_weight(batch))
        others = [_tensor(v.value) for v in self._other_variables()]
        scale = ops.convert_to_tensor(self.model.optimizer.scale_loss(ops.ones(())))
        with without_history(self.model):
            return self._unscaled(self._gradient(self._weights(), others, batch, scale), scale)

    def _unscaled(self, gradient, scale):
        return [slope / ops.cast(scale, slope.dtype) for slope in map(_wide, gradient)]

    def _weights(self):
        return [_tensor(v.value) for v in self.model.trainable_variables]

    def _other_variables(self):
        return [*self.model.non_trainable_variables, *self.model.metrics_variables]

    def _loss(self, weights, others, batch, scale):
        variables = [*self.model.trainable_variables, *self._other_variables()]
        state = list(zip(variables, [*weights, *others], strict=True))
        # What a step assigns to variables stays in the scope.
        with keras.StatelessScope(state_mapping=state, collect_losses=True):
            with _as_in_training(self.model, batch):
                x, y, sample_weight = batch
                y_pred = self.model(x, training=True)
                loss = self.model.compute_loss(x, y, y_pred, sample_weight, training=True)
                return loss * ops.cast(scale, loss.dtype)


def _tensor(leaf):
    return None if leaf is None else ops.convert_to_tensor(leaf)


def _wide(x):
    return ops.cast(x, at_least_float32(keras.backend.standardize_dtype(x.dtype)))


def _as_in_training(model, batch):
    """A `LanguageModel` must be told which outputs its loss is about."""
    counting = getattr(model, "_counting", None)
    return contextlib.nullcontext() if counting is None else counting(batch)


@contextlib.contextmanager
def without_history(model):
    """While it is open, stateful layers begin with empty states, and keep none.

    A batch of another size than training's has no place in the states that training carries.
    """
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    try:
        for layer in layers:
            layer.stateful = False
        yield
    finally:
        for layer in layers:
            layer.stateful = True


def _differentiated(loss, model):
    """Returns loss' gradient in its first argument, compiled as the model's training step is."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return _differentiated_tf(loss, model)
    if backend == "jax":
        import jax

        gradient = jax.grad(loss)
        return gradient if model.run_eagerly else jax.jit(gradient)
    raise ValueError(f"Gradients are computed on TensorFlow and JAX. The backend is {backend!r}.")


def _differentiated_tf(loss, model):
    import tensorflow as tf

    def gradient(weights, *rest):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            value = loss(weights, *rest)
        slopes = tape.gradient(value, weights, unconnected_gradients="zero")
        return [tf.convert_to_tensor(slope) for slope in slopes]

    if model.run_eagerly:
        return gradient
    return tf.function(gradient, jit_compile=bool(model.jit_compile), autograph=False)
