"""Gradients with respect to variables and inputs, on whichever backend is running."""

import keras


def value_and_gradients(function, variables, *inputs):
    """Returns `(value, aux), variable gradients, input gradients` of `function(*inputs)`.

    Args:
        function: Takes tensors, returns a scalar tensor and a structure of further outputs.
        variables: Keras variables.
        *inputs: Arrays.
    """
    if keras.backend.backend() == "jax":
        return _jax(function, variables, inputs)
    if keras.backend.backend() == "torch":
        return _torch(function, variables, inputs)
    return _tensorflow(function, variables, inputs)


def _tensorflow(function, variables, inputs):
    import tensorflow as tf

    inputs = [tf.convert_to_tensor(x) for x in inputs]
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        value, aux = function(*inputs)
    sources = [*(v.value for v in variables), *inputs]
    gradients = tape.gradient(value, sources, unconnected_gradients="zero")  # as JAX does
    gradients = [tf.convert_to_tensor(g) for g in gradients]
    return (value, aux), gradients[: len(variables)], gradients[len(variables) :]


def _jax(function, variables, inputs):
    import jax

    def stateless(values, inputs):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            return function(*inputs)

    inputs = [jax.numpy.asarray(x) for x in inputs]
    # Compiled: op by op, JAX takes ten times as long.
    compute = jax.jit(jax.value_and_grad(stateless, argnums=(0, 1), has_aux=True))
    result, (variable_gradients, input_gradients) = compute([v.value for v in variables], inputs)
    return result, variable_gradients, input_gradients


def _torch(function, variables, inputs):
    import torch

    inputs = [keras.ops.convert_to_tensor(x).detach().requires_grad_() for x in inputs]
    value, aux = function(*inputs)
    sources = [*(v.value for v in variables), *inputs]
    gradients = torch.autograd.grad(value, sources, materialize_grads=True)
    aux = keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x).detach(), aux)
    return (value.detach(), aux), gradients[: len(variables)], gradients[len(variables) :]
