"""Averaged SGD, and the rule by which the word-level programs go over to it."""

import keras
from keras import ops

from trellis_keras.training.callbacks import remembered
from trellis_keras.training.optimizers import SGD

_NEVER = 2**31 - 1  # the largest step that every backend's integer can count to


@keras.saving.register_keras_serializable("trellis_keras")
class ASGD(SGD):
    """Stochastic gradient descent that also keeps the average of the weights it passes through.

    Polyak & Juditsky (1992), as in PyTorch. With s = 1, 2, ... the step,

        g <- g * min(1, clip_norm / (|g| + 1e-6)) + l2 * w
        r <- learning_rate / (1 + lambd * learning_rate * (s - 1))^alpha
        w <- w - r * (g + lambd * w)
        average <- average + (w - average) / max(1, s - 1 - t0)

    so that the average is w itself up to step t0 + 2, and from there on the mean of all w since.
    The learning rate is that of the step, also where a callback has changed it; PyTorch's `lambd`
    acts with the one before.

    Training goes on with w. `use_average` exchanges weights and averages, for evaluation, and
    `use_weights` takes that back; `ASGDSwitch` calls both in `fit`. Where training goes on without
    `use_weights`, the averaged weights are a new start, and averaging begins anew there.

    Used for the word-level language models of the TrellisNet program (Bai et al., 2019), after
    Merity et al. (2018).

    Args:
        learning_rate: a float, a `keras.optimizers.schedules.LearningRateSchedule`, or a
            callable without arguments that returns the rate. Defaults to `0.01`.
        lambd: decay of weights and learning rate. The word-level programs have 0, which is the
            default here; PyTorch's is 1e-4.
        alpha: power of the learning rate's decay; without `lambd` there is none.
        t0: number of steps after which averaging begins, 0 or more. `None`: when
            `start_averaging` is called; until then this is `SGD`.
        l2: coefficient of the L2 term: `l2 * weight` is added to the gradient, after
            clipping. Weights named to `exclude_from_weight_decay` are left out.
        clip_norm: largest global norm of the gradient, as in `SGD`, or `None`.
        **kwargs: `name`, `loss_scale_factor` and `gradient_accumulation_steps` as in Keras'
            optimizers.

    Raises:
        ValueError: if one of Keras' own `weight_decay`, `clipnorm`, `clipvalue`,
            `global_clipnorm` and `use_ema` or SGD's `momentum` and `nesterov` is given, or a
            coefficient is out of range.

    Example:

    >>> optimizer = trellis_keras.training.ASGD(0.1, t0=0, l2=1e-6, clip_norm=0.225)
    >>> model.compile(optimizer, "mse")
    >>> history = model.fit(x, y)
    >>> optimizer.use_average()
    >>> loss = model.evaluate(x, y)
    """

    def __init__(
        self,
        learning_rate=0.01,
        lambd=0.0,
        alpha=0.75,
        t0=None,
        *,
        l2=0.0,
        clip_norm=None,
        name="asgd",
        **kwargs,
    ):
        for other in ("momentum", "nesterov", "use_ema"):
            if kwargs.pop(other, None):
                raise ValueError(f"ASGD averages plain steps, so that it has no `{other}`.")
        if not (lambd >= 0 and alpha >= 0):
            raise ValueError(
                f"`lambd` and `alpha` must be 0 or more. Received: lambd={lambd}, alpha={alpha}"
            )
        if t0 is not None and not (isinstance(t0, int) and 0 <= t0 < _NEVER):
            raise ValueError(f"`t0` must be None or an integer of 0 or more. Received: t0={t0!r}")
        super().__init__(learning_rate, l2=l2, clip_norm=clip_norm, name=name, **kwargs)
        self.lambd = lambd
        self.alpha = alpha
        self.t0 = t0
        self._start = self._step_variable(_NEVER if t0 is None else t0, "start")
        # The step at which weights and averages changed places; -1: each is in its own.
        self._exchanged = self._step_variable(-1, "exchanged")

    def _step_variable(self, value, name):
        return self.add_variable(
            (),
            keras.initializers.Constant(value),
            dtype="int",
            aggregation="only_first_replica",
            name=name,
        )

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._averages = self.add_optimizer_variables(variables, "average")

    def update_step(self, gradient, variable, learning_rate):
        rate = ops.cast(learning_rate, variable.dtype)
        if self.lambd:
            gradient = ops.add(ops.cast(gradient, variable.dtype), self.lambd * variable)
            before = ops.cast(self.iterations, variable.dtype)
            rate = rate / (1 + self.lambd * rate * before) ** self.alpha
        super().update_step(gradient, variable, rate)
        average = self._state(self._averages, variable)
        averaged = ops.cast(ops.maximum(self.iterations - self._begin(), 1), variable.dtype)
        moved = ops.add(average, ops.divide(ops.subtract(variable, average), averaged))
        # average + (w - average) is not w to the last bit.
        self.assign(average, ops.where(averaged > 1, moved, ops.convert_to_tensor(variable)))

    def _begin(self):
        """The number of steps before averaging. Trained on, exchanged weights are a new start."""
        return ops.maximum(self._start, self._exchanged)

    @property
    def has_start(self):
        """Whether it is settled from which step on the weights are averaged."""
        return _number(self._start) != _NEVER

    @property
    def is_averaging(self):
        """Whether a step was taken since averaging began."""
        return _number(self.iterations) > _number(self._start)

    @property
    def shows_average(self):
        """Whether the model's weights are the averages now."""
        return _number(self._exchanged) == _number(self.iterations)

    def start_averaging(self):
        """Averages the weights from the next step on."""
        self._start.assign(_number(self.iterations))

    def use_average(self):
        """Puts the averages into the model, if there are any, and the weights in their place."""
        if self.is_averaging and not self.shows_average:
            # As numbers: on JAX two variables with one array cannot be trained on.
            self._start.assign(_number(self._begin()))
            self._exchange()
            self._exchanged.assign(_number(self.iterations))

    def use_weights(self):
        """Puts the weights back into the model, to train on."""
        if self.shows_average:
            self._exchange()
            self._exchanged.assign(-1)

    def _exchange(self):
        # By copies: Keras' SwapEMAWeights adds and subtracts on TensorFlow, which rounds.
        for weight, average in zip(self._trainable_variables, self._averages, strict=True):
            if average is not None:  # Keras makes none for variables that are no weights
                value = ops.copy(weight)
                weight.assign(average)
                average.assign(value)

    def get_config(self):
        config = super().get_config()
        for name in ("momentum", "nesterov", "use_ema", "ema_momentum", "ema_overwrite_frequency"):
            config.pop(name, None)
        return config | {"lambd": self.lambd, "alpha": self.alpha, "t0": self.t0}


class ASGDSwitch(keras.callbacks.Callback):
    """Begins to average the weights when a value has stopped getting better.

    The non-monotone trigger of Merity et al. (2018): the value after this epoch is worse than the
    best of all earlier epochs but the last `window`. In the TrellisNet program (Bai et al., 2019,
    word-level) it is the same as that of `PlateauDecay.trellisnet_word` and takes its place: the
    learning rate stays as it is, before and after.

    From the next epoch on the optimizer, an `ASGD`, averages. From then on the model holds the
    averages after each epoch: validation, and what other callbacks evaluate and save, is of them.
    Training goes on with the weights themselves, which come back at the begin of an epoch. After
    `fit` the model keeps the averages; a later `fit` with this callback goes on as if it had not
    been interrupted. With an `ASGD` that has a `t0` of its own there is nothing to trigger.

    Put it before the callbacks that save the model, and `Checkpoint`, which must have it in
    `callbacks`, last: a checkpoint then holds the averages as the model's weights, and what is
    needed to resume beside them.

    Args:
        window: number of epochs, 1 or more. 10 in the TrellisNet program, 5 in that of Merity et
            al.
        monitor: name of the value in the logs of an epoch. It must be there after every epoch
            until averaging begins.
        mode: `"min"` if smaller values are better, `"max"` if larger ones are.
        verbose: 1 prints a line when averaging begins.

    Raises:
        ValueError: for settings out of range; when training begins with an optimizer other than
            `ASGD`; after the first epoch without `monitor`.

    Example:

    >>> model.compile(trellis_keras.training.ASGD(0.1), "mse")
    >>> switch = trellis_keras.training.ASGDSwitch(window=5)
    >>> checkpoint = trellis_keras.training.Checkpoint("run/averaged", callbacks=[switch])
    >>> model.fit(train, validation_data=valid, epochs=500, shuffle=False,
    ...     callbacks=[switch, checkpoint])
    """

    def __init__(self, window=10, monitor="val_loss", *, mode="min", verbose=0):
        super().__init__()
        if not window >= 1:
            raise ValueError(f"`window` must be 1 or more. Received: window={window}")
        if mode not in ("min", "max"):
            raise ValueError(f"`mode` must be 'min' or 'max'. Received: mode={mode!r}")
        self.window = window
        self.monitor = monitor
        self.mode = mode
        self.verbose = verbose
        self._values = []

    def get_state(self):
        """Returns the trigger's memory as a JSON-able dict."""
        return {"values": list(self._values)}

    def set_state(self, state):
        """Takes up the memory that `get_state` returned."""
        self._values = [remembered(value) for value in state["values"]]

    def on_train_begin(self, logs=None):
        if not isinstance(self._optimizer, ASGD):
            raise ValueError(
                "ASGDSwitch needs an optimizer that averages: compile the model with "
                f"`trellis_keras.training.ASGD`. Received: {type(self._optimizer).__name__}"
            )

    def on_epoch_begin(self, epoch, logs=None):
        self._optimizer.use_weights()

    def on_test_begin(self, logs=None):
        self._optimizer.use_average()

    def on_epoch_end(self, epoch, logs=None):
        if not self._optimizer.has_start and self._is_triggered(logs or {}):
            self._optimizer.start_averaging()
            if self.verbose:
                print(f"\nEpoch {epoch + 1}: from now on ASGDSwitch averages the weights.")
        self._optimizer.use_average()  # where there was no validation

    @property
    def _optimizer(self):
        """The model's own optimizer, also where Keras wraps it to scale the loss."""
        return getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)

    def _is_triggered(self, logs):
        if self.monitor not in logs:
            raise ValueError(
                f"ASGDSwitch watches {self.monitor!r}, which this epoch did not produce. It has "
                f"{sorted(logs)}. Set `monitor` to one of these, or give `fit` the "
                "`validation_data` for it (and `validation_freq=1`)."
            )
        value = float(logs[self.monitor])
        value = value if self.mode == "min" else -value
        earlier = self._values[: -self.window]
        self._values.append(remembered(value))
        return bool(earlier) and value > min(earlier)


def _number(variable):
    return int(ops.convert_to_numpy(variable))
