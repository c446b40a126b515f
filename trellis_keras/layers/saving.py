"""Configs of layers, and what Keras does not save of sublayers."""

import inspect
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from trellis_keras._keras_internals import all_layers


class ConfigMixin(keras.layers.Layer):
    """A layer whose config is its constructor's arguments, read from attributes of their names.

    A subclass with an argument that has no such attribute overrides `get_config`.
    """

    # {option that no longer exists: its former default}, which files of earlier versions may have.
    removed_options: dict[str, Any] = {}

    def get_config(self) -> dict[str, Any]:
        names = list(_argument_names(type(self)))
        missing = [name for name in names if not hasattr(self, name)]
        if missing and type(self).get_config is ConfigMixin.get_config:
            raise NotImplementedError(
                f"{type(self).__name__} must keep its argument `{missing[0]}` as an attribute, or "
                "override `get_config`."
            )
        own = {name: _serialize(getattr(self, name)) for name in names if name not in missing}
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ConfigMixin":
        config = dict(config)
        for name, default in cls.removed_options.items():
            value = config.pop(name, default)
            if isinstance(value, dict):  # Keras numbers the objects in a file
                value = {k: v for k, v in value.items() if k != "shared_object_id"}
            if value != default:
                raise ValueError(f"The option `{name}` no longer exists. Received: {value!r}")
        return super().from_config(config)


def _argument_names(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        if issubclass(base, ConfigMixin) and "__init__" in vars(base):
            _, *arguments = inspect.signature(base.__init__).parameters.values()
            kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
            yield from (a.name for a in arguments if a.kind not in kinds)


def _serialize(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()  # NumPy's numbers are not JSON serializable
    if isinstance(value, (list, tuple)):
        return [_serialize(part) for part in value]
    if inspect.isfunction(value):
        return keras.activations.serialize(value)
    return keras.saving.serialize_keras_object(value) if callable(value) else value


class SublayersMixin(keras.layers.Layer):
    """Saves which sublayers of a layer or model have `trainable=False` or were quantized by Keras.

    Keras saves both in the config of layers that are constructor arguments, but sublayers created
    by the constructor have no config in the file (Keras issue 9589 for models within models).
    """

    def get_build_config(self) -> dict[str, Any] | None:
        config = super().get_build_config()
        parts = list(enumerate(all_layers(self)))
        frozen = [i for i, part in parts if not part.trainable]
        quantized = {
            str(i): keras.saving.serialize_keras_object(part.quantization_config)
            for i, part in parts
            if getattr(part, "quantization_config", None) is not None
        }
        found = {"frozen": frozen, "quantized": quantized}
        found = {name: value for name, value in found.items() if value}
        return {**(config or {}), **found} if found else config

    def build_from_config(self, config: dict[str, Any] | None) -> None:
        config = dict(config or {})
        frozen, quantized = config.pop("frozen", ()), config.pop("quantized", {})
        super().build_from_config(config)
        parts = all_layers(self)
        for i in frozen:
            parts[i].trainable = False
        for i, how in quantized.items():
            # Unless a layer within this one has done so.
            if parts[int(i)].quantization_mode is None:
                how = keras.saving.deserialize_keras_object(how)
                parts[int(i)].quantize(how.mode, config=how)
