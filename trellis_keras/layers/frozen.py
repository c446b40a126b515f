"""What keeps frozen the parts of a layer that its constructor makes."""


class KeepsFrozen:
    """Saves with a layer or model which of its parts have trainable=False.

    Keras saves that of layers that are arguments of others, in their configurations. Those that a
    constructor makes have none there.
    """

    def get_build_config(self):
        config = super().get_build_config()
        frozen = [i for i, part in enumerate(self._flatten_layers()) if not part.trainable]
        return {**(config or {}), "frozen": frozen} if frozen else config

    def build_from_config(self, config):
        config = dict(config or {})
        frozen = config.pop("frozen", ())
        super().build_from_config(config)
        parts = list(self._flatten_layers())
        for i in frozen:
            parts[i].trainable = False
