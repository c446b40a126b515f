"""What Keras does not save of sublayers."""

from typing import Any

import keras

from trellis_keras._keras_internals import all_layers


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
