"""Lifting the sparsity of a converted model."""

import keras

from trellis_keras.equivalence.models import convert, copy, copy_weights
from trellis_keras.layers import TrellisLayer
from trellis_keras.models import LanguageModel
from trellis_keras.models.sequence_models import SequenceModel


def to_dense(model_or_layer):
    """Returns the same function with dense kernels, to be trained on in the larger space.

    This is the paper's step from an RNN to a TrellisNet (Bai et al. 2019, section 4.2). What
    `TrellisLayer.to_dense` does for a layer this does for a model: `keras.Sequential`, functional,
    or of `trellis_keras.models`. Weights are copied; a compiled model is compiled again, with a new
    optimizer.

    Args:
        model_or_layer: A built model with at least one mixed-group `TrellisLayer`, as `to_trellis`
            returns, or such a layer.

    Returns:
        A new model, or layer, with weights of its own.

    Raises:
        ValueError: There is no mixed-group layer.

    Example:

    >>> lstm = keras.layers.LSTM(4, return_sequences=True)
    >>> model = keras.Sequential([keras.Input((None, 3)), lstm, keras.layers.Dense(1)])
    >>> model = trellis_keras.equivalence.to_trellis(model, horizon=5)
    >>> dense = trellis_keras.equivalence.to_dense(model)
    >>> dense.layers[0].kernel_structure
    'dense'
    """
    if isinstance(model_or_layer, TrellisLayer):
        return model_or_layer.to_dense()
    model = model_or_layer
    if isinstance(model, (LanguageModel, SequenceModel)):
        return convert(model, to_dense)
    layers = getattr(model, "layers", [])
    if not any(_is_sparse(layer) for layer in layers):
        raise ValueError(
            'The model must have a TrellisLayer with kernel_structure="mixed_group", as '
            f"`to_trellis` makes. Received: {model!r} with {[layer.name for layer in layers]}"
        )
    copies = {}

    def copied(layer):
        return layer.to_dense() if _is_sparse(layer) else copies.setdefault(layer, copy(layer))

    new = keras.models.clone_model(model, clone_function=copied)
    copy_weights(copies)
    if model.compiled:
        new.compile_from_config(model.get_compile_config())
    return new


def _is_sparse(layer):
    return isinstance(layer, TrellisLayer) and layer.kernel_structure == "mixed_group"
