"""Models of sequences: classification, regression and polyphonic music over a causal backbone."""

import keras
import numpy as np
from keras import ops

from trellis_keras.layers.base import (
    at_least_float32,
    check_positive,
    resolve_mask,
    sub_seed,
)
from trellis_keras.models.base import (
    BackboneModel,
    check_no_class_weight,
    check_rank,
    serialize_unbuilt,
)
from trellis_keras.models.losses import (
    FrameLoss,
    SquaredError,
    num_replicas,
    scale_loss_for_replicas,
)
from trellis_keras.models.metrics import FrameNLL
from trellis_keras.types import Cache, Initializer, Shape, Tensor


class SequenceModel(BackboneModel):
    """The base class of models with a linear head on the last step or on each one.

        y = D_output(backbone(D_input(x))) W + b,

    D being element-wise dropout. A subclass says what the outputs mean: its default loss and
    metrics, and the check of its targets.

    Losses and figures are means over what counts: over the sequences of a last-step model, over
    the steps of a per-step one, weighted by `sample_weight` ((batch,) or (batch, time)) and without
    the steps that a mask leaves out. Those of an epoch are exact over the whole split, not means of
    batch means. A loss of your own is the mean that its `reduction` says: Keras' default weights
    a step's loss, but divides by the number of steps.

    Args:
        backbone: Layer from (batch, time, channels) to (batch, hidden), the last step
            (`return_sequences=False`), or with `per_step` to (batch, time, hidden).
        units: Positive integer, number of outputs.
        per_step: Boolean, whether there are outputs for each step.
        input_dropout: Float in [0, 1), rate of dropped inputs. Defaults to 0.
        output_dropout: Float in [0, 1), rate of dropped outputs of the backbone. Defaults to 0.
        kernel_initializer: Initializer for W. Defaults to Glorot uniform.
        bias_initializer: Initializer for b. Defaults to `"zeros"`.
        seed: Integer seed of the dropouts and the default initializer. Defaults to `None`.
    """

    def __init__(
        self,
        backbone: keras.Layer,
        units: int,
        *,
        per_step: bool,
        input_dropout: float = 0.0,
        output_dropout: float = 0.0,
        kernel_initializer: Initializer = None,
        bias_initializer: Initializer = "zeros",
        seed: int | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if getattr(backbone, "stateful", False):
            raise ValueError(
                "Sequences are independent of each other: the backbone must have stateful=False. "
                f"Received: {backbone}"
            )
        if kernel_initializer is None:
            kernel_initializer = keras.initializers.GlorotUniform(
                seed=sub_seed(seed, "SequenceModel", "head")
            )
        policy = self.dtype_policy
        self.backbone = backbone
        self.per_step = per_step
        self.seed = seed
        input_seed, output_seed = (
            sub_seed(seed, "SequenceModel", name) for name in ("input_dropout", "output_dropout")
        )
        self.input_dropout = keras.layers.Dropout(input_dropout, seed=input_seed, dtype=policy)
        self.output_dropout = keras.layers.Dropout(output_dropout, seed=output_seed, dtype=policy)
        self.head = keras.layers.Dense(
            units,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            dtype=at_least_float32(self.compute_dtype),
            name="head",
        )
        self.supports_masking = True
        self._has_own_loss = False

    def build(self, input_shape: Shape) -> None:
        if len(input_shape) != 3 or input_shape[-1] is None:
            raise ValueError(
                f"{self.name} takes inputs (batch, time, channels) with a known number of "
                f"channels. Received: shape {tuple(input_shape)}"
            )
        inputs = (None, None, input_shape[-1])
        if not self.backbone.built:
            self.backbone.build(inputs)
        hidden = self.backbone.compute_output_shape(inputs)
        if isinstance(hidden[0], (tuple, list)):
            raise ValueError(
                "The backbone must have one output: set return_state=False (and, of a "
                f"TrellisLayer, return_aux=False) on it. Received: outputs of shapes {hidden}"
            )
        if len(hidden) != 2 + self.per_step:
            steps = "each step" if self.per_step else "the last step only"
            raise ValueError(
                f"{self.name} needs a backbone that returns {steps}: set return_sequences="
                f"{self.per_step} on it. Received: per_step={self.per_step} and a backbone "
                f"with outputs of shape {tuple(hidden)}"
            )
        self.head.build(hidden)
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: input_shape[-1]})

    def call(self, inputs: Tensor, training: bool = False, mask: Tensor = None) -> Tensor:
        x = self.input_dropout(ops.cast(inputs, self.compute_dtype), training=training)
        masked = {} if mask is None else {"mask": mask}
        hidden = self.backbone(x, training=training, **masked)
        return self.head(self.output_dropout(hidden, training=training))

    def compute_mask(self, inputs, previous_mask):
        return None  # the head's output already has the backbone's mask

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return self.head.compute_output_shape(self.backbone.compute_output_shape(input_shape))

    def compute_output_spec(self, inputs, training=False, mask=None):
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), self.head.compute_dtype)

    # Loss and metrics

    def _default_loss(self):
        raise NotImplementedError

    def _default_metrics(self):
        return []

    def compile(
        self, optimizer="rmsprop", loss=None, *, metrics=None, weighted_metrics=None, **kwargs
    ) -> None:
        """Configures training as `keras.Model.compile`, with a default loss and default metrics.

        Args:
            optimizer: Keras optimizer, or its name. Defaults to `"rmsprop"`.
            loss: As in Keras. Defaults to the loss that the class describes.
            metrics, weighted_metrics: As in Keras: only `weighted_metrics` are given the sample
                weights (and the mask). With the default loss they default to those that the class
                describes.
            **kwargs: Keras' other arguments.
        """
        if loss is None and metrics is None and weighted_metrics is None:
            weighted_metrics = self._default_metrics()
        super().compile(
            optimizer,
            loss=self._default_loss() if loss is None else loss,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            **kwargs,
        )
        self._has_own_loss = loss is None

    def get_compile_config(self) -> dict | None:
        config = super().get_compile_config()
        # Keras' losses do not save their dtype; the default one is made anew.
        return {**config, "loss": None} if config and self._has_own_loss else config

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        # Keras' own loss tracker would weigh a batch by its rows.
        others = [m for m in super().metrics if m not in (self._loss_tracker, self._mean_loss)]
        return [self._mean_loss, *others] if self.compiled else others

    def compute_loss(
        self,
        x: Tensor = None,
        y: Tensor = None,
        y_pred: Tensor = None,
        sample_weight: Tensor = None,
        training: bool = True,
    ) -> Tensor:
        """Returns the loss of a batch, and feeds the metrics."""
        weight = self._weights(y_pred, sample_weight)
        # Keras divides by the number of replicas, whatever their weights are.
        loss = super().compute_loss(x, y, y_pred, weight, training) * num_replicas()
        (function,) = keras.tree.flatten(self.loss)
        by_weights = getattr(function, "reduction", None) == "mean_with_sample_weight"
        counted = ops.sum(weight if by_weights else self._weights(y_pred, None))
        self._mean_loss.update_state(loss, sample_weight=counted)
        super().compute_metrics(x, y, y_pred, weight)
        return scale_loss_for_replicas(loss, counted)

    def compute_metrics(self, x, y, y_pred, sample_weight=None) -> dict:
        # `compute_loss` has fed them: on JAX the outputs lose their mask on the way here.
        if self._compile_metrics is None or self._compile_metrics.built:
            return self.get_metrics_result()
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def _weights(self, y_pred, sample_weight):
        """The weight of each output: (batch,), or (batch, time) of a per-step model."""
        shape = ops.shape(y_pred)[:-1]
        weight = ops.ones(shape, y_pred.dtype)
        if sample_weight is not None:
            # By reshape: a per-step model takes a weight per row too.
            ranked = (shape[0], -1) if self.per_step else (shape[0],)
            weight = weight * ops.reshape(ops.cast(sample_weight, weight.dtype), ranked)
        mask = resolve_mask(y_pred, None)
        return weight if mask is None else weight * ops.cast(mask, weight.dtype)

    # Data, checked before training begins

    def fit(
        self,
        x=None,
        y=None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: list | None = None,
        *,
        sample_weight=None,
        validation_data=None,
        class_weight: dict | None = None,
        **kwargs,
    ) -> keras.callbacks.History:
        """Trains as `keras.Model.fit`, after a check of arrays and of a `PyDataset`'s first batch.

        Raises:
            ValueError: If inputs, targets or weights do not fit the model.
        """
        if self.per_step:
            check_no_class_weight(class_weight)
        self._check_data(x, y, sample_weight)
        if isinstance(validation_data, (tuple, list)):
            self._check_data(*validation_data)
        else:
            self._check_data(validation_data)
        return super().fit(
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            verbose=verbose,
            callbacks=callbacks,
            sample_weight=sample_weight,
            validation_data=validation_data,
            class_weight=class_weight,
            **kwargs,
        )

    def evaluate(
        self,
        x=None,
        y=None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight=None,
        **kwargs,
    ):
        """Evaluates as `keras.Model.evaluate`, after the checks of `fit`."""
        self._check_data(x, y, sample_weight)
        return super().evaluate(x, y, batch_size, verbose, sample_weight, **kwargs)

    def _check_data(self, x, y=None, sample_weight=None):
        if isinstance(x, keras.utils.PyDataset):
            # Its weights may be 0 in whole rows, which fill up the last batch.
            x, y, _ = keras.utils.unpack_x_y_sample_weight(x[0])
        x, y, sample_weight = (
            ops.convert_to_numpy(value) if ops.is_tensor(value) else value
            for value in (x, y, sample_weight)
        )
        if isinstance(x, np.ndarray):
            self._check_inputs(x)
            if y is None:
                raise ValueError(f"{self.name} is trained and evaluated on (x, y). Received no y.")
        # A loss of one's own may want other targets.
        if isinstance(y, np.ndarray) and self._has_own_loss:
            self._check_targets(y)
        if isinstance(sample_weight, np.ndarray):
            _check_weights(sample_weight)

    def _check_inputs(self, x):
        check_rank("x", x, "(batch, time, channels)")
        channels = self.input_spec.axes[-1] if self.built else x.shape[-1]
        if x.shape[-1] != channels:
            raise ValueError(
                f"{self.name} was built for inputs with {channels} channels. "
                f"Received: x of shape {x.shape}"
            )

    def _check_targets(self, y):
        raise NotImplementedError

    # Streaming

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Reads one step of each row; its work does not depend on how many came before.

        Args:
            x: Tensor (batch, channels).
            cache: What `initial_cache`, `step` or `prefill` returned.

        Returns:
            This step's output (batch, units), as in a call without dropout, and the new cache. The
            output of a last-step model is what it would be if the sequence ended with this step.

        Raises:
            ValueError: As `initial_cache`, or if x and cache do not fit.
        """
        self._check_streams()
        hidden, cache = self.backbone.step(ops.cast(x, self.compute_dtype), cache)
        return self.head(hidden), cache

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Reads a segment x (batch, time, channels) at once.

        Returns:
            The outputs (batch, time, units), and the cache after the last step.

        Raises:
            ValueError: As `step`, or if the model is not per-step.
        """
        self._check_streams()
        if not self.per_step:
            raise ValueError(
                f"{self.name} has no output for each step of a segment: call `step`, or use "
                "per_step=True and a backbone with return_sequences=True."
            )
        hidden, cache = self.backbone.prefill(ops.cast(x, self.compute_dtype), cache)
        return self.head(hidden), cache

    # Serialization

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "backbone": serialize_unbuilt(self.backbone),
            "input_dropout": self.input_dropout.rate,
            "output_dropout": self.output_dropout.rate,
            "kernel_initializer": keras.initializers.serialize(self.head.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.head.bias_initializer),
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: dict) -> "SequenceModel":
        backbone = keras.saving.deserialize_keras_object(config["backbone"])
        return cls(**{**config, "backbone": backbone})


@keras.saving.register_keras_serializable("trellis_keras")
class SequenceClassifier(SequenceModel):
    """Class logits of a sequence, or of each of its steps, from any causal backbone.

    On the last step it classifies images read pixel by pixel (TrellisNet, section 5.2; TCN, section
    4), with `per_step=True` it is the copy-memory model of the TCN paper. (The TrellisNet authors'
    pixel program has its output dropout on the logits, and switches neither of its dropouts off in
    evaluation. The paper describes an output dropout, as here.)

    `compile` defaults to the cross-entropy and the accuracy. See `SequenceModel` for what counts.

    Args:
        backbone: Layer from (batch, time, channels) to (batch, hidden), the last step
            (`return_sequences=False`), or with `per_step` to (batch, time, hidden): a
            `TrellisLayer`, a `TCN`, a Keras RNN layer, a `keras.Sequential` of such.
        num_classes: Positive integer, number of classes.
        per_step: Boolean, whether each step is classified. Defaults to `False`.
        input_dropout: Float in [0, 1), rate of dropped inputs, each by itself. Defaults to 0.
        output_dropout: Float in [0, 1), rate of dropped outputs of the backbone, each by itself.
            Defaults to 0.
        kernel_initializer: Initializer for W. Defaults to Glorot uniform.
        bias_initializer: Initializer for b. Defaults to `"zeros"`.
        seed: Integer seed of the dropouts and the default initializer. Defaults to `None`.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        training: Whether dropout is active.
        mask: Boolean (batch, time), False where a step is padding. The backbone must take it. For
            a mask that comes with the data, put a `keras.layers.Masking` first in a
            `keras.Sequential` backbone.

    Returns:
        Logits (batch, num_classes), or with `per_step` (batch, time, num_classes), at least
        float32.

    Raises:
        ValueError: If arguments are out of range, the backbone has other outputs, inputs are of
            the wrong shape, labels lie outside [0, num_classes), or all sample weights of a row
            are 0.

    Example:

    >>> backbone = TrellisLayer(units=8, depth=4, return_sequences=False)
    >>> model = SequenceClassifier(backbone, num_classes=3)
    >>> model.compile("adam")
    >>> x, y = np.random.rand(8, 12, 1), np.random.randint(0, 3, 8)
    >>> sorted(model.fit(x, y, verbose=0).history)
    ['accuracy', 'loss']
    >>> model.predict(x, verbose=0).shape
    (8, 3)
    """

    def __init__(
        self, backbone: keras.Layer, num_classes: int, *, per_step: bool = False, **kwargs
    ):
        check_positive(num_classes=num_classes)
        super().__init__(backbone, num_classes, per_step=per_step, **kwargs)
        self.num_classes = num_classes

    def _default_loss(self):
        return keras.losses.SparseCategoricalCrossentropy(
            from_logits=True,
            reduction="mean_with_sample_weight",
            dtype=self.head.compute_dtype,
        )

    def _default_metrics(self):
        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]

    def _check_targets(self, y):
        if y.ndim == 2 + self.per_step and y.shape[-1] == 1:  # Keras takes such labels too
            y = y[..., 0]
        check_rank("y", y, "(batch, time)" if self.per_step else "(batch)")
        whole = np.issubdtype(y.dtype, np.integer) or np.all(np.floor(y) == y)
        if not whole or y.size and not 0 <= y.min() <= y.max() < self.num_classes:
            raise ValueError(
                f"Labels must be whole numbers in [0, {self.num_classes}), also where the sample "
                f"weight is 0. Received: values from {y.min()} to {y.max()} of type {y.dtype}"
            )

    def get_config(self) -> dict:
        own = {"num_classes": self.num_classes, "per_step": self.per_step}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable("trellis_keras")
class SequenceRegressor(SequenceModel):
    """Real-valued outputs of a sequence, or of each of its steps, from any causal backbone.

    On the last step it is the adding-problem model of the TCN paper (Bai et al. 2018). `compile`
    defaults to the mean squared error. See `SequenceModel` for what counts.

    Args:
        backbone: Layer from (batch, time, channels) to (batch, hidden), the last step
            (`return_sequences=False`), or with `per_step` to (batch, time, hidden).
        units: Positive integer, number of outputs. Defaults to 1.
        per_step: Boolean, whether there are outputs for each step. Defaults to `False`.
        input_dropout: Float in [0, 1), rate of dropped inputs, each by itself. Defaults to 0.
        output_dropout: Float in [0, 1), rate of dropped outputs of the backbone, each by itself.
            Defaults to 0.
        kernel_initializer: Initializer for W. Defaults to Glorot uniform.
        bias_initializer: Initializer for b. Defaults to `"zeros"`.
        seed: Integer seed of the dropouts and the default initializer. Defaults to `None`.

    Call arguments:
        inputs: Tensor (batch, time, channels).
        training: Whether dropout is active.
        mask: Boolean (batch, time), see `SequenceClassifier`.

    Returns:
        Tensor (batch, units), or with `per_step` (batch, time, units), at least float32.

    Raises:
        ValueError: If arguments are out of range, the backbone has other outputs, inputs or
            targets are of the wrong shape, or all sample weights of a row are 0.

    Example:

    >>> model = SequenceRegressor(keras.layers.GRU(8))
    >>> model.compile("adam")
    >>> x = np.random.rand(8, 12, 2)
    >>> list(model.fit(x, x.sum(axis=(1, 2)), verbose=0).history)
    ['loss']
    >>> model.predict(x, verbose=0).shape
    (8, 1)
    """

    def __init__(self, backbone: keras.Layer, units: int = 1, *, per_step: bool = False, **kwargs):
        check_positive(units=units)
        super().__init__(backbone, units, per_step=per_step, **kwargs)
        self.units = units

    def _default_loss(self):
        return SquaredError(dtype=self.head.compute_dtype)

    def _check_targets(self, y):
        if self.units == 1 and y.ndim == 1 + self.per_step:
            return
        check_rank("y", y, "(batch, time, units)" if self.per_step else "(batch, units)")
        if y.shape[-1] != self.units:
            raise ValueError(f"`y` must have {self.units} units. Received: shape {y.shape}")

    def get_config(self) -> dict:
        return {**super().get_config(), "units": self.units, "per_step": self.per_step}


@keras.saving.register_keras_serializable("trellis_keras")
class PolyphonicModel(SequenceModel):
    """Which keys sound in the next frame of a piano roll (Bai et al. 2018, section 4).

    Given the past, the keys are independent, each with the probability sigmoid(logit). The loss of
    a frame is its negative log-likelihood in nats, the sum over keys of the binary cross-entropy.
    `compile` defaults to its mean over frames (the authors' code trains on the sum over a piece's
    frames, so there a bound on the gradient's norm means more), and to the metric
    `models.FrameNLL`, which leaves regularizers out.

    Pieces of music differ in length. Pad them at the end, with any 0/1 frames, and give
    `sample_weight` (batch, time), 1 for a real frame and 0 for padding: the backbone is causal, so
    the figures are those of the pieces one by one. (A frame of zeros is a rest, so it cannot mark
    padding.)

    Args:
        backbone: Causal layer from (batch, time, keys) to (batch, time, hidden), with
            `return_sequences=True`.
        keys: Positive integer, number of keys. Defaults to 88, a piano's.
        input_dropout: Float in [0, 1), rate of dropped inputs, each by itself. Defaults to 0.
        output_dropout: Float in [0, 1), rate of dropped outputs of the backbone, each by itself.
            Defaults to 0.
        kernel_initializer: Initializer for W. Defaults to Glorot uniform.
        bias_initializer: Initializer for b. Defaults to `"zeros"`.
        seed: Integer seed of the dropouts and the default initializer. Defaults to `None`.

    Call arguments:
        inputs: Tensor (batch, time, keys) of 0 and 1.
        training: Whether dropout is active.
        mask: Boolean (batch, time), see `SequenceClassifier`.

    Returns:
        Logits (batch, time, keys) of the next frames, at least float32. `keras.ops.sigmoid` makes
        probabilities of them.

    Raises:
        ValueError: If arguments are out of range, the backbone has other outputs, a piano roll has
            another number of keys or values other than 0 and 1, or all sample weights of a row
            are 0.

    Example:

    >>> model = PolyphonicModel(TrellisLayer(units=12, depth=4), keys=88)
    >>> model.compile("adam")
    >>> rolls = np.random.randint(0, 2, (8, 13, 88))
    >>> sorted(model.fit(rolls[:, :-1], rolls[:, 1:], verbose=0).history)
    ['frame_nll', 'loss']
    >>> probabilities = keras.ops.sigmoid(model.predict(rolls, verbose=0))
    >>> tuple(probabilities.shape)
    (8, 13, 88)
    """

    def __init__(self, backbone: keras.Layer, keys: int = 88, **kwargs):
        check_positive(keys=keys)
        super().__init__(backbone, keys, per_step=True, **kwargs)
        self.keys = keys

    def build(self, input_shape: Shape) -> None:
        if input_shape[-1] != self.keys:
            raise ValueError(
                f"The inputs must be piano rolls (batch, time, {self.keys}): set `keys` to their "
                f"number of keys. Received: keys={self.keys}, inputs of shape {tuple(input_shape)}"
            )
        super().build(input_shape)

    def _default_loss(self):
        return FrameLoss(dtype=self.head.compute_dtype)

    def _default_metrics(self):
        return [FrameNLL()]

    def _check_inputs(self, x):
        self._check_roll("x", x)

    def _check_targets(self, y):
        self._check_roll("y", y)

    def _check_roll(self, name, roll):
        check_rank(name, roll, "(batch, time, keys)")
        if roll.shape[-1] != self.keys:
            raise ValueError(f"`{name}` must have {self.keys} keys. Received: shape {roll.shape}")
        wrong = ~np.isin(roll, (0, 1))
        if wrong.any():
            row, time, key = np.argwhere(wrong)[0]
            raise ValueError(
                f"`{name}` must hold 0 (silent) and 1 (sounds) only. "
                f"Received: {roll[row, time, key]} in row {row}, frame {time}, key {key}"
            )

    def get_config(self) -> dict:
        return {**super().get_config(), "keys": self.keys}


def _check_weights(weights):
    """Raises ValueError if all sample weights (batch, time) of a row are 0."""
    if weights.ndim < 2:
        return
    empty = np.flatnonzero(~np.any(weights.reshape(len(weights), -1), axis=1))
    if empty.size:
        raise ValueError(
            f"Row {empty[0]} has no step that counts: all its sample weights are 0. "
            f"Leave such rows out ({empty.size} of {len(weights)})."
        )
