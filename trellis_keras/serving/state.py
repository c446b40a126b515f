"""A stream's state as named tensors, which the client holds."""

import keras
from keras import ops

from trellis_keras.layers.base import at_least_float32
from trellis_keras.serving import checks
from trellis_keras.serving.endpoint import Endpoint, Field


def streams(backbone):
    """Whether a layer follows the protocol of `layers.streaming`."""
    return all(hasattr(backbone, name) for name in ("initial_cache", "step", "prefill"))


class State:
    """A backbone's cache as a flat dict of tensors.

    Their names are their places in the cache, such as `state_inputs` or `state_states_0_1`. The
    batch is the first axis of each. What is of half precision in the cache is float32 here, and
    what has no elements is left out: JSON has neither.

    Args:
        backbone: Built layer that streams.

    Attributes:
        fields: Dict from name to `Field`.
    """

    def __init__(self, backbone):
        self._backbone = backbone
        self._like = backbone.initial_cache(1)
        self.fields = {
            name: Field(
                at_least_float32(keras.backend.standardize_dtype(leaf.dtype)),
                ("batch", *leaf.shape[1:]),
                "Part of the state: at first from `initial_state`, then from the last call.",
            )
            for name, leaf in _named(self._like)
            if 0 not in leaf.shape
        }

    def initial(self, batch_size):
        """Returns the state before the first step of `batch_size` rows."""
        return self.flat(self._backbone.initial_cache(batch_size))

    def flat(self, cache):
        """Turns a cache into a dict."""
        named = dict(_named(cache))
        return {name: ops.cast(named[name], field.dtype) for name, field in self.fields.items()}

    def cache(self, state, batch_size):
        """Turns a dict into a cache."""
        leaves = [
            ops.cast(state[name], leaf.dtype)
            if name in self.fields
            else ops.zeros((batch_size, *leaf.shape[1:]), leaf.dtype)
            for name, leaf in _named(self._like)
        ]
        return keras.tree.pack_sequence_as(self._like, leaves)

    def endpoint(self):
        """Returns the endpoint `initial_state`."""
        return Endpoint(
            "initial_state",
            "The state before the first step.",
            {"batch_size": Field("int32", (), "Number of rows.", example=1)},
            self.fields,
            self.initial,
            lambda batch_size: [checks.number_of_rows(batch_size)],
        )


def _named(cache):
    leaves = keras.tree.flatten_with_path(cache)
    return [("_".join(["state", *map(str, path)]), leaf) for path, leaf in leaves]
