"""Gradients of a function of tensors, on each backend."""

from collections.abc import Callable

import keras

if keras.backend.backend() == "tensorflow":
    from trellis_keras import _tensorflow


def with_gradient(function: Callable) -> Callable:
    """Returns a function of (weights, ...) that returns (auxiliary results, gradients).

    Args:
        function: Function of a list of tensors and other arguments that returns (loss, auxiliary
            results).
    """
    backend = keras.backend.backend()
    if backend == "jax":
        return _on_jax(function)
    return _on_torch(function) if backend == "torch" else _tensorflow.with_gradient(function)


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
        gradients = torch.autograd.grad(loss, weights, materialize_grads=True)
        return keras.tree.map_structure(torch.Tensor.detach, others), gradients

    return differentiate
