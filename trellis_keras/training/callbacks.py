"""What the callbacks of this package share."""

import inspect


class SavedArguments:
    """Mixed into callbacks that have an attribute for each argument of the constructor."""

    def get_config(self) -> dict:
        config = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}

    @classmethod
    def from_config(cls, config: dict) -> "SavedArguments":
        return cls(**config)
