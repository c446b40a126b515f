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
    metrics = [each for m in callback.model.metrics for each in getattr(m, "metrics", [m])]
    larger = {m.name for m in metrics if getattr(m, "_direction", None) == "up"}
    if callback.mode == "min" and callback.monitor.removeprefix("val_") in larger:
        raise ValueError(
            f"Larger values of {callback.monitor!r} are better: pass mode='max' to "
            f"{type(callback).__name__}."
        )
    return float(logs[callback.monitor])
