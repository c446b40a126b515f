"""Converts weights from keras-tcn (https://github.com/philipperemy/keras-tcn).

docs/keras_tcn.md describes migration from keras-tcn. `torch_weights` reads the PyTorch weights of
the papers' authors.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from trellis_keras.layers import TCN

__all__ = ["from_keras_tcn", "load_keras_tcn"]

# The default epsilon of `keras.layers.BatchNormalization`, which keras-tcn uses.
_EPSILON = 1e-3


def from_keras_tcn(layer: Any) -> TCN:
    """Returns a `TCN` with the architecture and the weights of a keras-tcn layer.

    Args:
        layer: Built `tcn.TCN` of keras-tcn 3.5.

    Returns:
        A built `layers.TCN` that computes the same outputs. Its kernels have no weight
        normalization.

    Raises:
        ValueError: If the layer is not from keras-tcn or not built, or has options without a
            counterpart: an `activation` other than `"relu"` or `"linear"`, or `padding="same"` with
            `return_sequences=False`.

    Example:

        import tcn

        old = keras.models.load_model("model.keras", custom_objects={"TCN": tcn.TCN})
        new = keras.Sequential([from_keras_tcn(old.layers[0]), *old.layers[1:]])
    """
    if not _is_keras_tcn(layer):
        raise ValueError(
            "`layer` must be a layer of keras-tcn, not a model that contains it, nor the "
            f"InputLayer of a functional model. Received: {layer!r}"
        )
    if not layer.built or not layer.weights:
        raise ValueError(f"{layer.name} is not built, so it has no weights to convert.")
    config = layer.get_config()
    filters, stacks = config["nb_filters"], config["nb_stacks"]
    other = "layer" if config["use_layer_norm"] else None
    new = TCN(
        filters if isinstance(filters, int) else stacks * list(filters),
        config["kernel_size"],
        dilations=stacks * list(config["dilations"]),
        dropout=config["dropout_rate"],
        dropout_kind="spatial",
        weight_norm=False,
        activation=config["activation"],
        normalization="batch" if config["use_batch_norm"] else other,
        padding=config["padding"],
        skip_connections=config["use_skip_connections"],
        return_sequences=config["return_sequences"],
        go_backwards=config["go_backwards"],
        name=layer.name,
        dtype=layer.dtype_policy,
    )
    new.build((None, None, layer.weights[0].shape[1]))
    load_keras_tcn(new, layer)
    new.trainable = layer.trainable
    return new


def load_keras_tcn(model: keras.Layer, weights: Any) -> None:
    """Loads weights of keras-tcn into a `TCN`, or into a model with `TCN`s.

    The outputs equal those of keras-tcn if the architectures match. If the keras-tcn layer or model
    itself is given, options that are not visible in the weights are also compared. Weights with
    batch normalization also load into a `TCN` without normalization: they are folded into the
    kernels, using the moving statistics. With `weight_norm=True` the gains are the kernels' norms.

    Args:
        model: Built `TCN`, or a built `keras.Sequential` or functional model with a `TCN` for each
            keras-tcn layer, and equal layers elsewhere.
        weights: The keras-tcn layer or model, or its `get_weights()`.

    Raises:
        ValueError: If there is no built `TCN`, the weights do not match, the options differ, or the
            `TCN` has options that keras-tcn lacks. In this case the model is unchanged.

    Example:

        load_keras_tcn(new_model, old_model.get_weights())
    """
    is_model = isinstance(model, keras.Model)
    layers = model.layers if is_model else [model]
    if not any(isinstance(layer, TCN) for layer in layers):
        raise ValueError(
            f"`model` must be a TCN or a model with TCNs among its layers. Received: {model!r} "
            f"with layers {[layer.name for layer in layers]}"
        )
    if hasattr(weights, "get_weights"):
        old = [part for part in getattr(weights, "layers", [weights]) if _is_keras_tcn(part)]
        new = [part for part in layers if isinstance(part, TCN)]
        for pair in zip(new, old, strict=False):
            _check_options(*pair)
    elif not isinstance(weights, (list, tuple)):
        raise ValueError(
            "`weights` must be a keras-tcn layer or model, or the list that its `get_weights()` "
            f"returns. Received: {type(weights).__name__}"
        )
    source = _Arrays(weights.get_weights() if hasattr(weights, "get_weights") else weights)
    pairs: list[tuple[keras.Variable, np.ndarray]] = []
    for layer in layers:
        if isinstance(layer, TCN):
            pairs += _match_tcn(layer, source)
        else:
            pairs += [(weight, source.take(weight.path, weight.shape)) for weight in layer.weights]
    if source.left:
        raise ValueError(
            f"{model.name} has fewer weights than the keras-tcn model: {len(source.left)} arrays "
            f"are left over, of shapes {[a.shape for a in source.left]}"
        )
    for weight, array in pairs:
        weight.assign(array)


def _is_keras_tcn(layer):
    return hasattr(layer, "nb_filters")


def _check_options(layer, old):
    """Raises ValueError if a TCN and a keras-tcn layer differ in options not in the weights."""
    config, block = old.get_config(), layer.blocks[0]
    expected = {
        "dilations": config["nb_stacks"] * list(config["dilations"]),
        "skip_connections": config["use_skip_connections"],
        "padding": config["padding"],
        "go_backwards": config["go_backwards"],
        "return_sequences": config["return_sequences"],
    }
    wrong = {name: value for name, value in expected.items() if getattr(layer, name) != value}
    if keras.activations.get(config["activation"]) != block.activation:
        wrong["activation"] = config["activation"]
    if wrong:
        needed = ", ".join(f"{name}={value!r}" for name, value in wrong.items())
        raise ValueError(f"{layer.name} needs the options of the keras-tcn layer: {needed}.")


class _Arrays:
    """An iterator over arrays that checks their shapes."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.left = [np.asarray(array) for array in arrays]

    def take(self, name, shape):
        """Returns the next array, which must have this shape."""
        if not self.left:
            raise ValueError(f"The weights end before {name} of shape {tuple(shape)}.")
        array = self.left.pop(0)
        if array.shape != tuple(shape):
            raise ValueError(
                f"{name} needs an array of shape {tuple(shape)}. Received: shape {array.shape}. "
                "The keras-tcn layer must have the same filters, kernel size, number of blocks "
                "and input channels as this one."
            )
        return array

    def count_vectors(self):
        """Returns the number of vectors between the first kernel's bias and the second kernel."""
        dimensions = [array.ndim for array in self.left[2:]]
        return dimensions.index(3) if 3 in dimensions else 0


def _match_tcn(layer, source):
    """Returns pairs of a TCN's variables and the arrays for them, in the order of keras-tcn."""
    _check_supported(layer)
    number_of_vectors, normalization = source.count_vectors(), layer.blocks[0].normalization
    kinds = {0: None, 2: "layer", 4: "batch"}
    given = kinds.get(number_of_vectors, f"{number_of_vectors} vectors of")
    if normalization != given and (normalization, given) != (None, "batch"):
        raise ValueError(
            f"The weights have {given or 'no'} normalization, but {layer.name} has "
            f"normalization={normalization!r}."
        )
    pairs = []
    for block in layer.blocks:
        for n, convolution in enumerate(block.convolutions):
            name = f"{block.name}, {convolution.name}"
            kernel = source.take(name, convolution.kernel.shape)
            bias = source.take(f"{name}, bias", kernel.shape[-1:])
            vectors = [
                source.take(f"{name}, normalization", bias.shape) for _ in range(number_of_vectors)
            ]
            if normalization == "batch":
                gamma, beta, mean, variance = vectors
                vectors = [gamma, beta, mean - bias, variance]
            elif number_of_vectors == 4:
                kernel, bias = _fold(kernel, bias, *vectors)
            pairs.append((convolution.kernel, kernel))
            if convolution.gain is not None:
                pairs.append((convolution.gain, np.sqrt(np.sum(kernel**2, axis=(0, 1)))))
            if block.biases:
                pairs.append((block.biases[n], bias))
            if block.norms:
                pairs += zip(block.norms[n].weights, vectors, strict=True)
        if block.shortcut is not None:
            kernel, bias = block.shortcut.kernel, block.shortcut.bias
            name = f"{block.name}, shortcut"
            pairs.append((kernel, source.take(name, (1, *kernel.shape))[0]))
            pairs.append((bias, source.take(f"{name}, bias", bias.shape)))
    return pairs


def _check_supported(layer):
    """Raises ValueError unless a TCN has only options that keras-tcn supports."""
    if not layer.built:
        raise ValueError(f"{layer.name} is not built: call it once, or `build(input_shape)`.")
    block = layer.blocks[0]
    if block.activation not in (keras.activations.relu, keras.activations.linear):
        raise ValueError(
            "keras-tcn applies the activation twice at the end of a branch, which is equivalent "
            f"only for relu and linear. Received: {layer.name} with activation="
            f"{keras.activations.serialize(block.activation)!r}"
        )


def _fold(kernel, bias, gamma, beta, mean, variance):
    """Returns the kernel and bias of a convolution with batch normalization folded in."""
    scale = gamma / np.sqrt(variance + _EPSILON)
    return kernel * scale, (bias - mean) * scale + beta
