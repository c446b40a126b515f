"""Exchanging the recurrent layers of a model for a TrellisNet, with copies of all other layers."""

import tempfile

import keras
import numpy as np

from trellis_keras.equivalence.stack import is_idle, is_recurrent
from trellis_keras.models import LanguageModel
from trellis_keras.models.sequence_models import SequenceModel


def convert(model, convert_layers):
    """Returns a model with the recurrent layers exchanged.

    Args:
        model: A built `keras.Sequential`, functional model, or model of `trellis_keras.models`.
        convert_layers: Makes of a list of layers, or of a backbone, the layer that takes their
            place.

    Raises:
        ValueError: A model of another kind, or without one stack of recurrent layers in it.
    """
    if not model.built:
        raise ValueError(f"{model.name} is not built, so it has no weights to convert.")
    if isinstance(model, (LanguageModel, SequenceModel)):
        new = _with_backbone(model, convert_layers(model.backbone))
    elif isinstance(model, keras.Sequential):
        new = _sequential(model, convert_layers)
    elif getattr(model, "inputs", None):
        new = _functional(model, convert_layers)
    else:
        raise ValueError(
            "Only keras.Sequential, functional models and the models of trellis_keras show how "
            "their layers are connected. Convert the list of recurrent layers instead. "
            f"Received: {model.name} ({type(model).__name__})"
        )
    if model.compiled:
        new.compile_from_config(model.get_compile_config())
    return new


def _with_backbone(model, backbone):
    config = model.get_config() | {"backbone": keras.saving.serialize_keras_object(backbone)}
    new = type(model).from_config(config)
    # Which of the parts are frozen is another list of numbers there.
    build_config = {k: v for k, v in model.get_build_config().items() if k != "frozen"}
    new.build_from_config(build_config)
    kept = {model.head: new.head}
    if isinstance(model, LanguageModel):
        kept[model.embedding] = new.embedding
    copy_weights({backbone: new.backbone, **kept})
    for layer, its_copy in kept.items():
        its_copy.trainable = layer.trainable
    return new


def _sequential(model, convert_layers):
    recurrent = _recurrent_layers(model)
    first, last = (model.layers.index(recurrent[i]) for i in (0, -1))
    trellis = convert_layers(model.layers[first : last + 1])
    below, above = model.layers[:first], model.layers[last + 1 :]
    copies = {layer: copy(layer) for layer in below + above}
    x = model.inputs[0]
    layers = [keras.Input(batch_shape=x.shape, dtype=x.dtype, name=x.name)]
    layers += [copies[layer] for layer in below] + [trellis] + [copies[layer] for layer in above]
    new = keras.Sequential(layers, name=model.name)
    copy_weights(copies)
    return new


def _functional(model, convert_layers):
    exchange = _Exchange(model, convert_layers)
    copies = {}

    def copied(layer):
        return layer if layer in exchange.layers else copies.setdefault(layer, copy(layer))

    new = keras.models.clone_model(model, clone_function=copied, call_function=exchange)
    copy_weights(copies)
    return new


class _Exchange:
    """Calls the layers of a functional model as they were called, but for the recurrent ones.

    The TrellisNet answers for the top one, and reads what the bottom one was to read. What the
    others would return is not made: a tensor that comes from nowhere stands for it, and only the
    next recurrent layer may read it.
    """

    def __init__(self, model, convert_layers):
        self.model, self.convert_layers = model, convert_layers
        self.layers = _recurrent_layers(model)
        self.called, self.inputs, self.between = 0, None, None
        lower = [id(layer.output) for layer in self.layers[:-1]]
        if any(id(y) in lower for y in keras.tree.flatten(model.outputs)):
            raise _not_one_stack(model, "one below the top is an output")

    def __call__(self, layer, *args, **kwargs):
        read = keras.tree.flatten((args, kwargs))
        reads_below = self.between is not None and any(x is self.between for x in read)
        if layer in self.layers:
            return self._recurrent(layer, args[0], reads_below)
        if not reads_below:
            return layer(*args, **kwargs)
        if not is_idle(layer):
            raise _not_one_stack(self.model, f"one below the top is read by {layer.name}")
        return self.between

    def _recurrent(self, layer, inputs, reads_below):
        if layer in self.layers[: self.called]:
            raise _not_one_stack(self.model, f"{layer.name} is called more than once")
        if self.called == 0:
            self.inputs = inputs
        elif not reads_below:
            raise _not_one_stack(self.model, f"{layer.name} does not read the one before")
        self.called += 1
        if layer is self.layers[-1]:
            return self.convert_layers(self.layers)(self.inputs)
        self.between = keras.KerasTensor(layer.output.shape, layer.output.dtype)
        return self.between


def _not_one_stack(model, reason):
    return ValueError(
        "The recurrent layers of a model must be one stack, each read by the next one alone (a "
        "dropout between them must have rate 0). "
        f"Received: {model.name}, of whose recurrent layers {reason}"
    )


def _recurrent_layers(model):
    """The recurrent layers of a Keras model, the bottom one first."""
    found = [layer for layer in model.layers if is_recurrent(layer)]
    if not found:
        names = [layer.name for layer in model.layers]
        raise ValueError(
            "The model must have recurrent layers. (Those of a model in it are not looked for: "
            f"convert that one.) Received: {model.name} with layers {names}"
        )
    for layer in found:
        read = keras.tree.flatten(layer.input)
        if any(x.dtype == "bool" for x in read):
            raise ValueError(
                "Masks cannot be kept: an RNN skips masked steps, a TrellisNet sees the zero state "
                "there. Leave the Masking layer or mask_zero=True out: with padding after the "
                "sequences the outputs before it stay the same. "
                f"Received: {layer.name}, which reads a mask"
            )
        if len(read) > 1 or getattr(layer, "return_state", False):
            raise ValueError(
                "In a model the recurrent layers must have neither initial_state nor "
                "return_state=True: a TrellisNet has one state for all of them. Convert the list "
                f"of layers instead. Received: {layer.name}"
            )
    return found


def copy(layer):
    """A layer with the same arguments, without weights."""
    return type(layer).from_config(layer.get_config())


def copy_weights(copies):
    """Gives each layer's weights to its copy, {layer: copy}, and what it has adapted to data."""
    for layer, its_copy in copies.items():
        if isinstance(layer, keras.Layer):  # and no operation of keras.ops
            parts = layer._flatten_layers(), its_copy._flatten_layers()
            for part, its_part in zip(*parts, strict=True):
                _copy_state(part, its_part)


def _copy_state(layer, its_copy):
    """As saving and loading do: weights alone do not make an adapted layer work."""
    store = {}
    layer.save_own_variables(store)
    # As arrays of their own: JAX gives those of a model that it computes with away.
    its_copy.load_own_variables({name: np.array(value) for name, value in store.items()})
    if hasattr(layer, "save_assets"):
        with tempfile.TemporaryDirectory() as folder:
            layer.save_assets(folder)
            its_copy.load_assets(folder)
