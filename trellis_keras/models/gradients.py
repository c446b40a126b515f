"""Gradients of a function of tensors, on each backend."""

from collections.abc import Callable

import keras

from keras_streams.xla import compile_xla


def with_gradient(function: Callable) -> Callable:
    """Returns a function of (weights, ...) that returns (auxiliary results, gradients).

    Args:
        function: Function of a list of tensors and other arguments that returns (loss, auxiliary
            results).
    """
    backend = keras.backend.backend()
    if backend == "jax":
        return _on_jax(function)
    if backend == "torch":
        return _on_torch(function)
    from trellis_keras import _tensorflow

    return _tensorflow.with_gradient(function)


def compiled(function: Callable, xla: bool = False) -> Callable:
    """Returns a function of tensors, compiled where the backend compiles.

    Args:
        function: Function of tensors that reads no variables.
        xla: Boolean, whether TensorFlow compiles it with XLA. Defaults to `False`.
    """
    if keras.backend.backend() == "tensorflow":
        from trellis_keras import _tensorflow

        return _tensorflow.compiled(function, xla)
    return compile_xla(function, [])


def _on_jax(function):
    import jax

    def differentiate(*arguments):
        (_, others), gradients = jax.value_and_grad(function, has_aux=True)(*arguments)
        return others, gradients

    return differentiate


def _on_torch(function):
    import torch

    def differentiate(weights, *arguments):
        weights = [weight.detach().requires_grad_() for weight in weights]
        loss, others = function(weights, *arguments)
        return others, torch.autograd.grad(loss, weights, materialize_grads=True)

    return differentiate
