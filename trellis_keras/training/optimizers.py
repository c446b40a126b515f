"""SGD, Adam, RMSprop and ASGD with the arithmetic of the programs behind the published results.

Those programs use PyTorch. Its optimizers differ from Keras' in four ways that affect a training
curve: gradients are clipped by their global norm with the factor `min(1, clip / (norm + 1e-6))`;
L2 is added to the clipped gradient instead of decaying the weights separately; epsilon is added
after Adam's bias correction, and outside RMSprop's root; momentum accumulates gradients instead of
steps, so a new learning rate takes effect immediately. Keras has no ASGD (its `use_ema` is an
exponential average).
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_streams.protocol import at_least_float32
from trellis_keras.layers.checks import check_not_negative, check_rates, is_integer
from trellis_keras.types import Tensor

# Keras' arguments: ours that replace them.
_REPLACED = {"weight_decay": "l2"}
_REPLACED |= dict.fromkeys(("clipnorm", "clipvalue", "global_clipnorm"), "clip_norm")
_NOT_SUPPORTED = ("amsgrad", "centered")
_NEVER = 2**31 - 1  # the largest step count that fits every backend's integer


class _ClippedL2Gradient(keras.optimizers.Optimizer):
    """Clips gradients, then adds L2. Mixed in before a Keras optimizer."""

    def __init__(self, *args, l2=0.0, clip_norm=None, **kwargs):
        for name, other in _REPLACED.items():
            if kwargs.pop(name, None) is not None:
                raise ValueError(f"{type(self).__name__} does not support `{name}`: use `{other}`.")
        for name in _NOT_SUPPORTED:
            if kwargs.get(name):
                raise ValueError(f"{type(self).__name__} does not support `{name}`.")
        check_not_negative(l2=l2)
        if clip_norm is not None and not (isinstance(clip_norm, numbers.Real) and clip_norm > 0):
            raise ValueError(
                f"`clip_norm` must be a number > 0 or None. Received: clip_norm={clip_norm!r}"
            )
        super().__init__(*args, **kwargs)
        self.l2 = l2
        self.clip_norm = clip_norm

    def apply(self, grads: Sequence[Tensor], trainable_variables: Any = None) -> None:
        super().apply([_to_dense(g) for g in grads], trainable_variables)

    def _clip_gradients(self, grads):
        if hasattr(super(), "_all_reduce_sum_gradients"):
            return grads  # TensorFlow: clipped below, after the sum over replicas
        return self._clip_by_global_norm(grads)

    def _all_reduce_sum_gradients(self, grads_and_vars):
        summed = super()._all_reduce_sum_gradients(grads_and_vars)
        grads, variables = zip(*summed, strict=True)
        return list(zip(self._clip_by_global_norm(grads), variables, strict=True))

    def _clip_by_global_norm(self, grads):
        if self.clip_norm is None:
            return grads
        squares = [ops.sum(ops.square(ops.cast(g, _wide_dtype(g)))) for g in grads]
        norm = ops.sqrt(sum(squares[1:], start=squares[0]))
        factor = ops.minimum(self.clip_norm / (norm + 1e-6), 1.0)
        return [g * ops.cast(factor, g.dtype) for g in grads]

    def _add_l2(self, gradient, variable):
        gradient = ops.cast(gradient, variable.dtype)
        if self.l2 and self._use_weight_decay(variable):
            gradient = gradient + ops.multiply(variable, self.l2)
        return gradient

    def _slot(self, variables, variable):
        return variables[self._get_variable_index(variable)]

    def get_config(self) -> dict:
        config = super().get_config()
        for name in _REPLACED:
            config.pop(name, None)
        return config | {"l2": self.l2, "clip_norm": self.clip_norm}


@keras.saving.register_keras_serializable("trellis_keras")
class SGD(_ClippedL2Gradient, keras.optimizers.SGD):
    """Stochastic gradient descent with clipping and L2 in the gradient.

        g <- g * min(1, clip_norm / (|g| + 1e-6)) + l2 * w
        m <- momentum * m + g
        w <- w - learning_rate * m          (nesterov: g + momentum * m instead of m)

    Optimizer of the word-level language models of the TrellisNet (Bai et al. 2019, Table 5) and
    TCN (Bai et al. 2018, Section 5) papers.

    Args:
        learning_rate: As in `keras.optimizers.SGD`. Defaults to `0.01`.
        momentum: Float in [0, 1]. Unlike in Keras, it accumulates gradients, not steps. Defaults
            to `0.0`.
        nesterov: Boolean, whether to use Nesterov momentum. Defaults to `False`.
        l2: Float, coefficient of the L2 term that is added to the gradient after clipping.
            Weights passed to `exclude_from_weight_decay` are excluded. Defaults to `0.0`.
        clip_norm: Float, the global norm to which gradients are clipped, or `None` for no
            clipping. Under `tf.distribute` the sum over replicas is clipped. Defaults to
            `None`.
        **kwargs: `name`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
            `loss_scale_factor` and `gradient_accumulation_steps` as in
            `keras.optimizers.Optimizer`.

    Example:

    >>> model.compile(trellis_keras.training.SGD(20.0, l2=1e-6, clip_norm=0.225))
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        *,
        l2: float = 0.0,
        clip_norm: float | None = None,
        name: str = "SGD",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate, momentum, nesterov, l2=l2, clip_norm=clip_norm, name=name, **kwargs
        )

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Tensor) -> None:
        step = self._add_l2(gradient, variable)
        if self.momentum:
            m = self._slot(self.momentums, variable)
            accumulated = ops.multiply(m, self.momentum) + step
            self.assign(m, accumulated)
            step = step + accumulated * self.momentum if self.nesterov else accumulated
        self.assign_sub(variable, step * ops.cast(learning_rate, variable.dtype))


@keras.saving.register_keras_serializable("trellis_keras")
class Adam(_ClippedL2Gradient, keras.optimizers.Adam):
    """Adam (Kingma & Ba 2015, Algorithm 1) with clipping and L2 in the gradient.

        g <- g * min(1, clip_norm / (|g| + 1e-6)) + l2 * w
        m <- beta_1 * m + (1 - beta_1) * g
        v <- beta_2 * v + (1 - beta_2) * g^2
        w <- w - learning_rate * m / (1 - beta_1^s) / (sqrt(v / (1 - beta_2^s)) + epsilon)

    at step s = 1, 2, ... Keras' Adam adds epsilon to sqrt(v), before the bias correction.

    Args:
        learning_rate: As in `SGD`. Defaults to `0.001`.
        beta_1: Float, decay rate of the first moment. Defaults to `0.9`.
        beta_2: Float, decay rate of the second moment. Defaults to `0.999`.
        epsilon: Float, added to the corrected root of the second moment. Defaults to `1e-8`.
        l2, clip_norm, **kwargs: As in `SGD`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        *,
        l2: float = 0.0,
        clip_norm: float | None = None,
        name: str = "adam",
        **kwargs: Any,
    ) -> None:
        check_rates(beta_1=beta_1, beta_2=beta_2)
        check_not_negative(epsilon=epsilon)
        moments = (beta_1, beta_2, epsilon)
        super().__init__(learning_rate, *moments, l2=l2, clip_norm=clip_norm, name=name, **kwargs)

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Tensor) -> None:
        gradient = self._add_l2(gradient, variable)
        m = self._slot(self._momentums, variable)
        v = self._slot(self._velocities, variable)
        self.assign_add(m, ops.subtract(gradient, m) * (1 - self.beta_1))
        self.assign_add(v, ops.subtract(ops.square(gradient), v) * (1 - self.beta_2))
        root = ops.sqrt(ops.divide(v, self._bias_correction(self.beta_2, variable)))
        rate = ops.cast(learning_rate, variable.dtype)
        rate = rate / self._bias_correction(self.beta_1, variable)
        self.assign_sub(variable, ops.multiply(m, rate) / (root + self.epsilon))

    def _bias_correction(self, beta, variable):
        """1 - beta^s. A float32 power subtracted from 1 would leave only five digits."""
        step = ops.cast(self.iterations + 1, _wide_dtype(variable))
        log_beta = math.log(beta) if beta else -math.inf
        return ops.cast(-ops.expm1(step * log_beta), variable.dtype)


@keras.saving.register_keras_serializable("trellis_keras")
class RMSprop(_ClippedL2Gradient, keras.optimizers.RMSprop):
    """RMSprop (Hinton 2012, lecture 6e) with clipping and L2 in the gradient.

        g <- g * min(1, clip_norm / (|g| + 1e-6)) + l2 * w
        v <- rho * v + (1 - rho) * g^2
        w <- w - learning_rate * g / (sqrt(v) + epsilon)

    Keras' RMSprop adds epsilon under the root and has other defaults. With `momentum`,
    `m <- momentum * m + g / (sqrt(v) + epsilon)` replaces the fraction in the last line.

    Optimizer of the copying memory task of the TCN paper (Bai et al. 2018, Table 2).

    Args:
        learning_rate: As in `SGD`. Defaults to `0.01`.
        rho: Float, decay rate of the mean square. Defaults to `0.99`.
        momentum: Float >= 0. Unlike in Keras, it accumulates scaled gradients, not steps. Defaults
            to `0.0`.
        epsilon: Float, added to the root of the mean square. Defaults to `1e-8`.
        l2, clip_norm, **kwargs: As in `SGD`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        rho: float = 0.99,
        momentum: float = 0.0,
        epsilon: float = 1e-8,
        *,
        l2: float = 0.0,
        clip_norm: float | None = None,
        name: str = "rmsprop",
        **kwargs: Any,
    ) -> None:
        check_rates(rho=rho)
        check_not_negative(momentum=momentum, epsilon=epsilon)
        settings = (rho, momentum, epsilon)
        super().__init__(learning_rate, *settings, l2=l2, clip_norm=clip_norm, name=name, **kwargs)

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Tensor) -> None:
        gradient = self._add_l2(gradient, variable)
        v = self._slot(self._velocities, variable)
        mean_square = ops.multiply(v, self.rho) + ops.square(gradient) * (1 - self.rho)
        self.assign(v, mean_square)
        step = gradient / (ops.sqrt(mean_square) + self.epsilon)
        if self.momentum > 0:
            m = self._slot(self._momentums, variable)
            step = ops.multiply(m, self.momentum) + step
            self.assign(m, step)
        self.assign_sub(variable, step * ops.cast(learning_rate, variable.dtype))


@keras.saving.register_keras_serializable("trellis_keras")
class ASGD(SGD):
    """Averaged SGD (Polyak & Juditsky 1992): SGD that also tracks the mean of its weights.

        g <- g * min(1, clip_norm / (|g| + 1e-6)) + l2 * w
        r <- learning_rate / (1 + lambd * learning_rate * (s - 1))^alpha
        w <- w - r * (g + lambd * w)
        average <- average + (w - average) / max(1, s - 1 - t0)

    at step s = 1, 2, ... Up to step t0 + 2 the average is w itself, afterwards the mean of all w
    since. The learning rate is that of the current step, even if a callback has changed it; PyTorch
    applies `lambd` with the rate of the previous step.

    Training updates w. `use_average` swaps the averages into the model for evaluation and
    `use_weights` swaps them out again; `ASGDSwitch` calls both in `fit`. Training with the averages
    swapped in starts from them and restarts averaging.

    Optimizer of the word-level language models of the TrellisNet program (Bai et al. 2019), after
    Merity et al. (2018).

    Args:
        learning_rate: As in `SGD`. Defaults to `0.01`.
        lambd: Float, decay of weights and learning rate. Defaults to `0.0`, as in the word-level
            programs; PyTorch's default is 1e-4.
        alpha: Float, power of the learning rate's decay. Defaults to `0.75`.
        t0: Integer, the step after which averaging starts. Defaults to `None`: it starts when
            `start_averaging` is called, and until then this is `SGD`.
        l2, clip_norm: As in `SGD`.
        **kwargs: `name`, `loss_scale_factor` and `gradient_accumulation_steps` as in
            `keras.optimizers.Optimizer`.

    Example:

    >>> optimizer = trellis_keras.training.ASGD(0.1, t0=0, l2=1e-6, clip_norm=0.225)
    >>> model.compile(optimizer, "mse")
    >>> history = model.fit(x, y)
    >>> optimizer.use_average()
    >>> loss = model.evaluate(x, y)
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        lambd: float = 0.0,
        alpha: float = 0.75,
        t0: int | None = None,
        *,
        l2: float = 0.0,
        clip_norm: float | None = None,
        name: str = "asgd",
        **kwargs: Any,
    ) -> None:
        for other in ("momentum", "nesterov", "use_ema"):
            if kwargs.pop(other, None):
                raise ValueError(f"ASGD does not support `{other}`.")
        check_not_negative(lambd=lambd, alpha=alpha)
        if t0 is not None and not (is_integer(t0, minimum=0) and t0 < _NEVER):
            raise ValueError(f"`t0` must be None or an integer >= 0. Received: t0={t0!r}")
        super().__init__(learning_rate, l2=l2, clip_norm=clip_norm, name=name, **kwargs)
        self.lambd = lambd
        self.alpha = alpha
        self.t0 = t0
        self._start = self._step_variable(_NEVER if t0 is None else t0, "start")
        # The step at which the averages were swapped in; -1 while they are not.
        self._swapped = self._step_variable(-1, "swapped")

    def _step_variable(self, value, name):
        options = {"dtype": "int", "aggregation": "only_first_replica", "name": name}
        return self.add_variable((), keras.initializers.Constant(value), **options)

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._averages = self.add_optimizer_variables(variables, "average")

    def update_step(self, gradient: Tensor, variable: Any, learning_rate: Tensor) -> None:
        rate = ops.cast(learning_rate, variable.dtype)
        if self.lambd:
            gradient = ops.cast(gradient, variable.dtype) + ops.multiply(variable, self.lambd)
            previous_steps = ops.cast(self.iterations, variable.dtype)
            rate = rate / (1 + self.lambd * rate * previous_steps) ** self.alpha
        super().update_step(gradient, variable, rate)
        average = self._slot(self._averages, variable)
        count = ops.maximum(self.iterations - self._averaging_start(), 1)
        count = ops.cast(count, variable.dtype)
        mean = ops.add(average, ops.subtract(variable, average) / count)
        # For a count of 1 the mean would be w only up to rounding.
        self.assign(average, ops.where(count > 1, mean, ops.convert_to_tensor(variable)))

    def _averaging_start(self):
        """The last step before averaging. Training from swapped-in averages restarts it."""
        return ops.maximum(self._start, self._swapped)

    @property
    def has_start(self) -> bool:
        """Whether the first step to average is known."""
        return _to_int(self._start) != _NEVER

    @property
    def uses_average(self) -> bool:
        """Whether the model's weights are the averages now."""
        return _to_int(self._swapped) == _to_int(self.iterations)

    def start_averaging(self) -> None:
        """Starts averaging the weights at the next step."""
        self._start.assign(_to_int(self.iterations))

    def use_average(self) -> None:
        """Swaps the averages into the model. Does nothing before averaging starts."""
        is_averaging = _to_int(self.iterations) > _to_int(self._start)
        if is_averaging and not self.uses_average:
            # As Python integers: JAX cannot train two variables that share one array.
            self._start.assign(_to_int(self._averaging_start()))
            self._swap()
            self._swapped.assign(_to_int(self.iterations))

    def use_weights(self) -> None:
        """Swaps the weights back into the model, to continue training."""
        if self.uses_average:
            self._swap()
            self._swapped.assign(-1)

    def _swap(self):
        # By copies: Keras' SwapEMAWeights adds and subtracts on TensorFlow, which rounds.
        for weight, average in zip(self._trainable_variables, self._averages, strict=True):
            if average is not None:  # Keras creates none for variables that are not weights
                value = ops.copy(weight)
                weight.assign(average)
                average.assign(value)

    def get_config(self) -> dict:
        config = super().get_config()
        for name in ("momentum", "nesterov", "use_ema", "ema_momentum", "ema_overwrite_frequency"):
            config.pop(name, None)
        return config | {"lambd": self.lambd, "alpha": self.alpha, "t0": self.t0}


def _to_dense(gradient):
    """Sums the repeated rows in TensorFlow's gradient of an embedding lookup.

    The norm of its `IndexedSlices` is not that of the gradient, and L2 applies to every row.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        if isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
    return gradient


def _wide_dtype(x):
    return at_least_float32(keras.backend.standardize_dtype(x.dtype))


def _to_int(x):
    return int(ops.convert_to_numpy(x))
