"""The default dtype policy."""

import contextlib
from collections.abc import Iterator

import keras


@contextlib.contextmanager
def default_policy(name: str | None) -> Iterator[None]:
    """Context in which layers get the dtype policy `name`. None changes nothing."""
    before = keras.config.dtype_policy()
    if name is not None:
        keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
