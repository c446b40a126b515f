"""Softmaxes over large vocabularies, a block of time steps after the other.

Time is the axis before the last. A block has all rows of the axes before it, so that where a batch
is spread over several devices each of them has work in every block.
"""

import keras
from keras import ops

from trellis_keras.kernels.scan import scan


class TimeBlocks:
    """Cuts tensors (..., time, channels) into blocks of equal length.

    Args:
        like: Tensor (..., time, channels), whose axes but the last all tensors have.
        longest: The largest number of steps of a block: an integer, or on TensorFlow a tensor.
    """

    def __init__(self, like, longest):
        *self.leading, self.time, _ = ops.shape(like)
        self.number = -(-self.time // longest)
        # Not `longest`, which may leave a last block that is nearly all padding.
        self.steps = -(-self.time // self.number)

    @property
    def single(self):
        """Whether there is known to be one block only."""
        return isinstance(self.number, int) and self.number == 1

    def cut(self, x):
        """(..., time, channels) -> (blocks, rows * steps, channels), padded with zeros."""
        channels = x.shape[-1]
        x = ops.reshape(x, (-1, self.time, channels))
        missing = self.number * self.steps - self.time
        padding = ops.zeros((ops.shape(x)[0], missing, channels), dtype=x.dtype)
        x = ops.reshape(
            ops.concatenate([x, padding], axis=1), (-1, self.number, self.steps, channels)
        )
        return ops.reshape(ops.transpose(x, (1, 0, 2, 3)), (self.number, -1, channels))

    def join(self, blocks):
        """(blocks, rows * steps, channels) -> (..., time, channels)."""
        channels = blocks.shape[-1]
        x = ops.reshape(blocks, (self.number, -1, self.steps, channels))
        x = ops.transpose(x, (1, 0, 2, 3))
        x = ops.reshape(x, (-1, self.number * self.steps, channels))
        return ops.reshape(x[:, : self.time], (*self.leading, self.time, channels))


def steps_within(limit, x, numbers):
    """Returns how many time steps of x (..., time, channels) have `limit` numbers, at least one.

    Args:
        limit: Integer.
        x: Tensor.
        numbers: Integer, the numbers that one position has.

    Returns:
        An integer, or a tensor where the number of rows is unknown yet.
    """
    steps = limit // numbers
    for rows in ops.shape(x)[:-2]:
        steps = steps // rows
    return max(1, steps) if isinstance(steps, int) else ops.maximum(1, steps)


def map_blocks(function, steps, *tensors):
    """Returns `function(*tensors)`, computed for at most `steps` time steps at once.

    Args:
        function: Callable of tensors (..., channels) that treats each position by itself.
        steps: Integer or tensor, see `TimeBlocks`.
        *tensors: Tensors (..., time, channels).
    """
    blocks = TimeBlocks(tensors[0], steps)
    if blocks.single:
        return function(*tensors)
    return blocks.join(_scan_blocks(function, *map(blocks.cut, tensors)))


def _scan_blocks(function, *blocks):
    _, (outputs,) = scan(lambda carry, now: (carry, [function(*now)]), 0, list(blocks))
    return outputs


def experts_nll(latent, targets, kernel, bias, steps):
    """Returns -log softmax(latent_k kernel + bias) at the targets, for each of K experts.

    It equals `MixtureOfSoftmaxes.expert_nll`, but logits exist for `steps` time steps at once: the
    gradient computes them a second time.

    Args:
        latent: Tensor (..., time, K * width).
        targets: Integer tensor (..., time).
        kernel: Tensor (width, V), of the dtype of `latent`.
        bias: Tensor (V,), at least float32.
        steps: Integer or tensor, see `TimeBlocks`.

    Returns:
        Tensor (..., time, K) of the dtype of `bias`.
    """
    blocks = TimeBlocks(latent, steps)
    targets = targets[..., None]
    if blocks.single:
        return _nll(latent, targets, kernel, bias)
    return blocks.join(_nll_of_blocks(blocks.cut(latent), blocks.cut(targets), kernel, bias))


def _logits(latent, kernel, bias):
    """(..., K * width) -> (..., K, V)."""
    width, words = kernel.shape
    logits = ops.matmul(ops.reshape(latent, (-1, width)), kernel)
    logits = ops.cast(logits, bias.dtype) + bias
    return ops.reshape(logits, (*ops.shape(latent)[:-1], latent.shape[-1] // width, words))


def _nll(latent, targets, kernel, bias):
    logits = _logits(latent, kernel, bias)
    targets = ops.repeat(targets, logits.shape[-2], axis=-1)
    nll = ops.sparse_categorical_crossentropy(targets, logits, from_logits=True)
    return ops.cast(nll, logits.dtype)  # on JAX it may be float64


def _nll_of_blocks(latent, targets, kernel, bias):
    """(blocks, positions, K * width) -> (blocks, positions, K)."""

    @ops.custom_gradient
    def nll(latent, kernel, bias):
        def gradient(upstream, **_):
            return _gradient(upstream, latent, targets, kernel, bias)

        # Without stop_gradient, TensorFlow's eager mode would record what it does not need.
        constant = [ops.stop_gradient(weight) for weight in (kernel, bias)]
        values = _scan_blocks(
            lambda latent, targets: _nll(latent, targets, *constant),
            ops.stop_gradient(latent),
            targets,
        )
        return values, gradient

    return nll(latent, kernel, bias)


def _gradient(upstream, latent, targets, kernel, bias):
    """Returns the gradients with respect to latent, kernel and bias."""
    width, words = kernel.shape
    wide = keras.backend.standardize_dtype(bias.dtype)

    def step(carry, now):
        d_kernel, d_bias = carry
        latent, targets, upstream = now
        p = ops.softmax(_logits(latent, kernel, bias), axis=-1)
        d_logits = p - ops.one_hot(targets, words, dtype=wide)
        d_logits = ops.reshape(d_logits * upstream[..., None], (-1, words))
        d_bias = d_bias + ops.sum(d_logits, axis=0)
        d_logits = ops.cast(d_logits, kernel.dtype)
        of_kernel = ops.matmul(ops.transpose(ops.reshape(latent, (-1, width))), d_logits)
        d_kernel = d_kernel + ops.cast(of_kernel, wide)
        d_latent = ops.matmul(d_logits, ops.transpose(kernel))
        return (d_kernel, d_bias), [ops.reshape(d_latent, ops.shape(latent))]

    start = ops.zeros_like(ops.cast(kernel, wide)), ops.zeros_like(bias)
    (d_kernel, d_bias), (d_latent,) = scan(step, start, [latent, targets, upstream])
    return d_latent, ops.cast(d_kernel, kernel.dtype), d_bias
