"""SGD, Adam and RMSprop with the arithmetic of the programs behind the published results.

Those programs use PyTorch, whose optimizers differ from Keras' in four ways that show in a
training curve: the gradient is clipped by its global norm with the factor
`min(1, clip / (norm + 1e-6))`; L2 is added to the clipped gradient instead of shrinking the
weights on the side; epsilon is added after Adam's bias correction, and outside RMSprop's root;
momentum accumulates gradients, not steps, so that a change of the learning rate acts at once.
"""

import math

import keras
from keras import ops

_KERAS_ARGUMENTS = {
    "weight_decay": "`l2`, the coefficient that is multiplied by the weight and added to the "
    "gradient (`weight_decay` would be decoupled from it)",
    "clipnorm": "`clip_norm`, which clips by the norm over all gradients together",
    "clipvalue": "`clip_norm`, which clips by the norm over all gradients together",
    "global_clipnorm": "`clip_norm`, which clips by the norm over all gradients together",
}

_COMMON_ARGS = """learning_rate: a float, a `keras.optimizers.schedules.LearningRateSchedule`, or a
            callable without arguments that returns the rate."""

_GRADIENT_ARGS = """l2: coefficient of the L2 term: `l2 * weight` is added to the gradient, after
            clipping. Weights named to `exclude_from_weight_decay` are left out.
        clip_norm: largest global norm of the gradient, over all weights together, or `None`.
            Computed in float32 at least. Under `tf.distribute` the gradient is clipped after
            it was summed over the replicas.
        **kwargs: `name`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency`,
            `loss_scale_factor` and `gradient_accumulation_steps` as in Keras' optimizers."""

_RAISES = """ValueError: if one of Keras' own `weight_decay`, `clipnorm`, `clipvalue` and
            `global_clipnorm` is given, or a coefficient is out of range."""


def _document(cls):
    """Fills in the parts of the docstring that the three optimizers share."""
    if cls.__doc__ is not None:  # None under `python -OO`
        for placeholder, text in (
            ("{{common}}", _COMMON_ARGS),
            ("{{gradient}}", _GRADIENT_ARGS),
            ("{{raises}}", _RAISES),
        ):
            cls.__doc__ = cls.__doc__.replace(placeholder, text)
    return cls


class _ClippedL2Gradient:
    """Clip, then L2, ahead of a Keras optimizer's own update. Goes before it in the bases."""

    def __init__(self, *args, l2=0.0, clip_norm=None, **kwargs):
        for name, instead in _KERAS_ARGUMENTS.items():
            if kwargs.pop(name, None) is not None:
                raise ValueError(
                    f"{type(self).__name__} does not take Keras' `{name}`. Use {instead}."
                )
        if not l2 >= 0:
            raise ValueError(f"`l2` must be 0 or more. Received: l2={l2}")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(
                f"`clip_norm` must be more than 0, or None for no clipping. "
                f"Received: clip_norm={clip_norm}"
            )
        super().__init__(*args, **kwargs)
        self.l2 = l2
        self.clip_norm = clip_norm

    def apply(self, grads, trainable_variables=None):
        super().apply([_dense(g) for g in grads], trainable_variables)

    def _clip_gradients(self, grads):
        if hasattr(super(), "_all_reduce_sum_gradients"):
            return grads  # the TensorFlow backend: clipped below, once the replicas are summed
        return self._clip_by_global_norm(grads)

    def _all_reduce_sum_gradients(self, grads_and_vars):
        summed = super()._all_reduce_sum_gradients(grads_and_vars)
        grads, variables = zip(*summed, strict=True)
        return list(zip(self._clip_by_global_norm(grads), variables, strict=True))

    def _clip_by_global_norm(self, grads):
        if self.clip_norm is None:
            return grads
        squares = [ops.sum(ops.square(ops.cast(g, _at_least_float32(g)))) for g in grads]
        norm = ops.sqrt(sum(squares[1:], start=squares[0]))
        factor = ops.minimum(self.clip_norm / (norm + 1e-6), 1.0)
        return [ops.multiply(g, ops.cast(factor, g.dtype)) for g in grads]

    def _with_l2(self, gradient, variable):
        gradient = ops.cast(gradient, variable.dtype)
        if self.l2 and self._use_weight_decay(variable):
            gradient = ops.add(gradient, ops.multiply(variable, self.l2))
        return gradient

    def _state(self, variables, variable):
        return variables[self._get_variable_index(variable)]

    def get_config(self):
        config = super().get_config()
        for name in _KERAS_ARGUMENTS:
            config.pop(name, None)
        return config | {"l2": self.l2, "clip_norm": self.clip_norm}


@_document
@keras.saving.register_keras_serializable("trellis_keras")
class SGD(_ClippedL2Gradient, keras.optimizers.SGD):
    """Stochastic gradient descent with clipping and L2 in the gradient.

        g <- g * min(1, clip_norm / (|g| + 1e-6)) + l2 * w
        m <- momentum * m + g
        w <- w - learning_rate * m          (nesterov: g + momentum * m in place of m)

    Used for the word-level language models of the TrellisNet (Bai et al., 2019, Table 5) and
    TCN (Bai et al., 2018, section 5) papers.

    Args:
        {{common}} Defaults to `0.01`.
        momentum: float in [0, 1]. Unlike Keras', it accumulates gradients, not steps.
        nesterov: whether to use Nesterov's momentum.
        {{gradient}}

    Raises:
        {{raises}}

    Example:

    >>> optimizer = trellis_keras.training.SGD(20.0, l2=1e-6, clip_norm=0.225)
    >>> model.compile(optimizer)
    """

    def __init__(
        self,
        learning_rate=0.01,
        momentum=0.0,
        nesterov=False,
        *,
        l2=0.0,
        clip_norm=None,
        name="SGD",
        **kwargs,
    ):
        super().__init__(
            learning_rate, momentum, nesterov, l2=l2, clip_norm=clip_norm, name=name, **kwargs
        )

    def update_step(self, gradient, variable, learning_rate):
        step = self._with_l2(gradient, variable)
        if self.momentum:
            m = self._state(self.momentums, variable)
            accumulated = ops.add(ops.multiply(m, self.momentum), step)
            self.assign(m, accumulated)
            ahead = ops.add(step, ops.multiply(accumulated, self.momentum))
            step = ahead if self.nesterov else accumulated
        self.assign_sub(variable, ops.multiply(step, ops.cast(learning_rate, variable.dtype)))


@_document
@keras.saving.register_keras_serializable("trellis_keras")
class Adam(_ClippedL2Gradient, keras.optimizers.Adam):
    """Adam (Kingma & Ba, 2015, Algorithm 1) with clipping and L2 in the gradient.

        g <- g * min(1, clip_norm / (|g| + 1e-6)) + l2 * w
        m <- beta_1 * m + (1 - beta_1) * g
        v <- beta_2 * v + (1 - beta_2) * g^2
        w <- w - learning_rate * m / (1 - beta_1^s) / (sqrt(v / (1 - beta_2^s)) + epsilon)

    at step s = 1, 2, ... Keras' Adam adds epsilon to sqrt(v) instead, before the bias correction.

    Args:
        {{common}} Defaults to `0.001`.
        beta_1: decay of the first moment.
        beta_2: decay of the second moment.
        epsilon: added to the corrected root of the second moment.
        amsgrad: whether to use the largest v so far.
        {{gradient}}

    Raises:
        {{raises}}

    Example:

    >>> optimizer = trellis_keras.training.Adam(2e-3, l2=1e-6, clip_norm=0.2)
    >>> model.compile(optimizer)
    """

    def __init__(
        self,
        learning_rate=0.001,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-8,
        amsgrad=False,
        *,
        l2=0.0,
        clip_norm=None,
        name="adam",
        **kwargs,
    ):
        super().__init__(
            learning_rate,
            beta_1,
            beta_2,
            epsilon,
            amsgrad,
            l2=l2,
            clip_norm=clip_norm,
            name=name,
            **kwargs,
        )

    def update_step(self, gradient, variable, learning_rate):
        gradient = self._with_l2(gradient, variable)
        m = self._state(self._momentums, variable)
        v = self._state(self._velocities, variable)
        self.assign_add(m, ops.multiply(ops.subtract(gradient, m), 1 - self.beta_1))
        self.assign_add(v, ops.multiply(ops.subtract(ops.square(gradient), v), 1 - self.beta_2))
        if self.amsgrad:
            largest = self._state(self._velocity_hats, variable)
            self.assign(largest, ops.maximum(largest, v))
            v = largest
        root = ops.sqrt(ops.divide(v, self._bias_correction(self.beta_2, variable)))
        rate = ops.cast(learning_rate, variable.dtype)
        rate = ops.divide(rate, self._bias_correction(self.beta_1, variable))
        self.assign_sub(variable, ops.divide(ops.multiply(m, rate), ops.add(root, self.epsilon)))

    def _bias_correction(self, beta, variable):
        """Returns 1 - beta^s. Subtracting a float32 power from 1 would leave only five digits."""
        step = ops.cast(self.iterations + 1, _at_least_float32(variable))
        log_beta = math.log(beta) if beta else -math.inf
        return ops.cast(-ops.expm1(ops.multiply(step, log_beta)), variable.dtype)


@_document
@keras.saving.register_keras_serializable("trellis_keras")
class RMSprop(_ClippedL2Gradient, keras.optimizers.RMSprop):
    """RMSprop (Hinton, 2012, lecture 6e) with clipping and L2 in the gradient.

        g <- g * min(1, clip_norm / (|g| + 1e-6)) + l2 * w
        v <- rho * v + (1 - rho) * g^2
        w <- w - learning_rate * g / (sqrt(v) + epsilon)

    Keras' RMSprop adds epsilon under the root and has other defaults. With `momentum`,
    `m <- momentum * m + g / (sqrt(v) + epsilon)` takes the place of the last fraction.

    Used for the copying memory task of the TCN paper (Bai et al., 2018, Table 2).

    Args:
        {{common}} Defaults to `0.01`.
        rho: decay of the mean square.
        momentum: float, 0 or more. Unlike Keras', it accumulates scaled gradients, not steps.
        epsilon: added to the root of the mean square.
        centered: whether to subtract the square of the mean gradient from the mean square.
        {{gradient}}

    Raises:
        {{raises}}

    Example:

    >>> optimizer = trellis_keras.training.RMSprop(5e-4, clip_norm=1.0)
    >>> model.compile(optimizer)
    """

    def __init__(
        self,
        learning_rate=0.01,
        rho=0.99,
        momentum=0.0,
        epsilon=1e-8,
        centered=False,
        *,
        l2=0.0,
        clip_norm=None,
        name="rmsprop",
        **kwargs,
    ):
        super().__init__(
            learning_rate,
            rho,
            momentum,
            epsilon,
            centered,
            l2=l2,
            clip_norm=clip_norm,
            name=name,
            **kwargs,
        )

    def update_step(self, gradient, variable, learning_rate):
        gradient = self._with_l2(gradient, variable)
        variance = self._decayed(self._velocities, variable, ops.square(gradient))
        if self.centered:
            mean = self._decayed(self._average_gradients, variable, gradient)
            # Rounding may leave a little less than nothing of it.
            variance = ops.maximum(ops.subtract(variance, ops.square(mean)), 0)
        step = ops.divide(gradient, ops.add(ops.sqrt(variance), self.epsilon))
        if self.momentum > 0:
            m = self._state(self._momentums, variable)
            step = ops.add(ops.multiply(m, self.momentum), step)
            self.assign(m, step)
        self.assign_sub(variable, ops.multiply(step, ops.cast(learning_rate, variable.dtype)))

    def _decayed(self, averages, variable, value):
        """Moves the variable's running average towards the value and returns the new one."""
        average = self._state(averages, variable)
        new = ops.add(ops.multiply(average, self.rho), ops.multiply(value, 1 - self.rho))
        self.assign(average, new)
        return new


def _dense(gradient):
    """Sums the repeated rows of TensorFlow's gradient of an embedding look-up.

    The norm of its IndexedSlices is not the gradient's, and L2 concerns every row.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        if isinstance(gradient, tf.IndexedSlices):
            return tf.convert_to_tensor(gradient)
    return gradient


def _at_least_float32(x):
    # Not `keras.backend.result_type`: on JAX that makes float32 of float64, even with x64 on.
    return "float64" if keras.backend.standardize_dtype(x.dtype) == "float64" else "float32"
