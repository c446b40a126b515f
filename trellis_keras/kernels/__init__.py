"""Fast formulations of the layers' equations, on arrays.

Every layer states its equations once, and runs them as written under `disabled()`: for reading,
for debugging, and to test the kernels. Normally a layer calls a kernel, which computes the same
result with less work: only the positions that the loss depends on (`cone`), a loop over
levels that is compiled once (`depth_loop`), or fewer and larger matrix products.
"""

import contextlib
import contextvars
from collections.abc import Iterator

_ENABLED = contextvars.ContextVar("trellis_keras_kernels_enabled", default=True)


def enabled() -> bool:
    """Returns whether layers use kernels. Evaluated when a layer is called or traced."""
    return _ENABLED.get()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Context in which layers run their equations as written, without kernels.

    Functions compiled earlier are not affected: create the model, or its `tf.function` or
    `jax.jit`, inside the context. Training with kernels has no forward-mode gradients on JAX
    (`jax.jvp`).

    Example:

    >>> layer = trellis_keras.layers.TrellisLayer(8, depth=30, output_length=1)
    >>> x = np.random.normal(size=(2, 100, 3)).astype("float32")
    >>> fast = layer(x)  # few of the 100 positions of each level
    >>> with trellis_keras.kernels.disabled():
    ...     plain = layer(x)  # all of them
    >>> np.allclose(fast, plain, atol=1e-6)
    True
    """
    token = _ENABLED.set(False)
    try:
        yield
    finally:
        _ENABLED.reset(token)
