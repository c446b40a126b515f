"""What the callbacks of this package share."""

import inspect

import keras

from trellis_keras.types import Logs


class SavedArguments:
    """Mixed into callbacks that have an attribute for each argument of the constructor."""

    def get_config(self) -> dict:
        config = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}

    @classmethod
    def from_config(cls, config: dict) -> "SavedArguments":
        return cls(**config)


def monitored_value(callback: keras.callbacks.Callback, logs: Logs) -> float:
    """Returns the value that a callback monitors, from the logs of an epoch."""
    if callback.monitor not in (logs or {}):
        raise ValueError(
            f"{type(callback).__name__} monitors {callback.monitor!r}, which is missing from the "
            f"logs of this epoch: {sorted(logs or {})}. Set `monitor` to one of these, or pass "
            "`validation_data` to `fit`, with validation_freq=1."
        )
    return float(logs[callback.monitor])
