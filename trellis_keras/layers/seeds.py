"""Seeds of the parts of layers and models."""

import zlib

import numpy as np

from trellis_keras.layers.checks import check_integer
from trellis_keras.types import Initializer


def sub_seed(seed: int | None, *path: int | str) -> int | None:
    """Returns an independent seed for one part of a layer or model.

    All layers and models derive their seeds with this function, so no two parts draw the same
    numbers, whether they share a seed or not.

    Args:
        seed: Integer or None.
        *path: Strings and integers that identify the part: its class, then its place in the class.
    """
    if seed is None:
        return None
    seed = check_integer("seed", seed)
    parts = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in path]
    return int(np.random.SeedSequence([seed % 2**32, *parts]).generate_state(1)[0] >> 1)


def seeded(initializer: Initializer, seed: int | None, *path: int | str) -> Initializer:
    """Returns a copy of an initializer with the seed of a part of a layer.

    An initializer with an integer seed draws the same numbers on every call, so parts that share
    it would start out equal.

    Args:
        initializer: Keras initializer. Its own seed takes precedence over `seed`.
        seed: Integer or None.
        *path: See `sub_seed`.
    """
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    if "seed" not in config:
        return initializer  # deterministic
    own = config["seed"]
    if own is not None and not isinstance(own, int):
        return initializer  # a SeedGenerator
    base = seed if own is None else own
    if base is None:
        return initializer.clone()
    return type(initializer).from_config({**config, "seed": sub_seed(base, *path)})
