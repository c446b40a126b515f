"""What the models of whole sequences share: backbone, dropouts, head, losses, streaming."""

import keras
import numpy as np
from keras import ops

from trellis_keras.layers import streaming
from trellis_keras.layers.base import FrozenPartsMixin, at_least_float32, resolve_mask
from trellis_keras.models import checks, devices


class SequenceModel(FrozenPartsMixin, keras.Model):
    """Dropout, causal backbone, dropout and a linear head, on the last step or on each.

    The base class of `SequenceClassifier`, `SequenceRegressor` and `PolyphonicModel`, which say
    what the outputs mean: `_default_loss`, `_default_metrics` and `_check_targets`.

    Losses and figures are means over what counts: over the sequences of a last-step model, over
    the steps of a per-step one, weighted by `sample_weight` ((batch,) or (batch, time)) and without
    the steps that a mask leaves out. Those of an epoch are exact over the whole split; they are
    no means of batch means. A loss of another kind is the mean that its `reduction` says: Keras'
    usual one weights a step's loss, but divides by the number of steps.
    """

    def __init__(
        self,
        backbone,
        units,
        *,
        per_step,
        input_dropout=0.0,
        output_dropout=0.0,
        kernel_initializer=None,
        bias_initializer="zeros",
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if getattr(backbone, "stateful", False):
            raise ValueError(
                "Sequences are independent of each other: the backbone must have stateful=False. "
                f"Received: {backbone}"
            )
        if kernel_initializer is None:
            kernel_initializer = keras.initializers.GlorotUniform(seed=seed)
        self.backbone = backbone
        self.per_step = per_step
        self.seed = seed
        self.input_dropout = self._dropout(input_dropout, seed)
        self.output_dropout = self._dropout(output_dropout, None if seed is None else seed + 1)
        self.head = keras.layers.Dense(
            units,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            dtype=at_least_float32(self.compute_dtype),
            name="head",
        )
        self.supports_masking = True
        self._mean_loss = keras.metrics.Mean(name="loss")
        self._own_loss = False

    def _dropout(self, rate, seed):
        return keras.layers.Dropout(rate, seed=seed, dtype=self.dtype_policy)

    def build(self, input_shape):
        if len(input_shape) != 3 or input_shape[-1] is None:
            raise ValueError(
                f"{self.name} takes inputs (batch, time, channels) with a known number of "
                f"channels. Received: shape {tuple(input_shape)}"
            )
        inputs = (None, None, input_shape[-1])
        if not self.backbone.built:
            self.backbone.build(inputs)
        hidden = self.backbone.compute_output_shape(inputs)
        self._check_hidden(hidden)
        self.head.build(hidden)
        self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: input_shape[-1]})

    def _check_hidden(self, shape):
        if isinstance(shape[0], (tuple, list)):
            raise ValueError(
                "The backbone must have one output: set return_state=False (and, of a "
                f"TrellisLayer, return_aux=False) on it. Received: outputs of shapes {shape}"
            )
        if len(shape) != 2 + self.per_step:
            steps = "each step" if self.per_step else "the last step only"
            raise ValueError(
                f"{self.name} needs a backbone that returns {steps}: set return_sequences="
                f"{self.per_step} on it. Received: per_step={self.per_step} and a backbone "
                f"with outputs of shape {tuple(shape)}"
            )

    def call(self, inputs, training=False, mask=None):
        x = self.input_dropout(ops.cast(inputs, self.compute_dtype), training=training)
        masked = {} if mask is None else {"mask": mask}
        hidden = self.backbone(x, training=training, **masked)
        return self.head(self.output_dropout(hidden, training=training))

    def compute_mask(self, inputs, previous_mask):
        # Of a per-step model the head's output has the backbone's mask already.
        return None

    def compute_output_shape(self, input_shape):
        return self.head.compute_output_shape(self.backbone.compute_output_shape(input_shape))

    def compute_output_spec(self, inputs, training=False, mask=None):
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), self.head.compute_dtype)

    def quantize(self, *args, **kwargs):
        """Not supported: `export.export(format="litert", quantization="int8")` has it.

        Raises:
            ValueError: Always.
        """
        checks.refuse_quantization(self)

    # Training and evaluation

    def compile(
        self, optimizer="rmsprop", loss=None, *, metrics=None, weighted_metrics=None, **kwargs
    ):
        """As `keras.Model.compile`, with the model's own loss and metrics unless others are given.

        Args:
            optimizer: Keras optimizer.
            loss: Default: the model's own, see the class.
            metrics, weighted_metrics: As in Keras: only `weighted_metrics` are given the sample
                weights (and the mask). Default: with the model's own loss, its own metrics.
            **kwargs: Keras' other arguments.
        """
        if loss is None and metrics is None and weighted_metrics is None:
            weighted_metrics = self._default_metrics()
        options = {"jit_compile": "auto", "steps_per_execution": 1, "auto_scale_loss": True}
        options |= kwargs
        devices.check_compile(self, options["jit_compile"], options["steps_per_execution"])
        super().compile(
            optimizer,
            loss=self._default_loss() if loss is None else loss,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            **kwargs,
        )
        self._own_loss = loss is None
        self._auto_scale_loss = options["auto_scale_loss"]

    def get_compile_config(self):
        config = super().get_compile_config()
        if not config:
            return config
        # Keras' losses forget their precision; the model's own is made anew.
        own = {"loss": None} if self._own_loss else {}
        return {**config, **own, "auto_scale_loss": self._auto_scale_loss}

    def compile_from_config(self, config):
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    @property
    def metrics(self):
        # Keras' own loss tracker weighs a batch by its rows; ours by what counts in it.
        others = [m for m in super().metrics if m not in (self._loss_tracker, self._mean_loss)]
        return [self._mean_loss, *others] if self.compiled else others

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Returns the loss of a batch, and feeds the metrics."""
        weight = self._weight(y_pred, sample_weight)
        # Keras divides by the number of replicas, whatever their weights are.
        loss = super().compute_loss(x, y, y_pred, weight, training) * devices.replicas()
        counted = ops.sum(weight if self._divides_by_weights() else self._weight(y_pred, None))
        self._mean_loss.update_state(loss, sample_weight=counted)
        super().compute_metrics(x, y, y_pred, weight)
        return devices.share(loss, counted)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        # `compute_loss` has fed them: on JAX the outputs lose their mask on the way here.
        if self._compile_metrics is None or self._compile_metrics.built:
            return self.get_metrics_result()
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def _divides_by_weights(self):
        (loss,) = keras.tree.flatten(self.loss)
        return getattr(loss, "reduction", None) == "mean_with_sample_weight"

    def _weight(self, y_pred, sample_weight):
        """How much each output counts: (batch,), of a per-step model (batch, time)."""
        shape = ops.shape(y_pred)[:-1]
        weight = ops.ones(shape, y_pred.dtype)
        if sample_weight is not None:
            # By reshape: a weight per row and one per step are both right.
            ranked = (shape[0], -1) if self.per_step else (shape[0],)
            weight = weight * ops.reshape(ops.cast(sample_weight, weight.dtype), ranked)
        mask = resolve_mask(y_pred, None)
        return weight if mask is None else weight * ops.cast(mask, weight.dtype)

    def fit(
        self,
        x=None,
        y=None,
        batch_size=None,
        epochs=1,
        verbose="auto",
        callbacks=None,
        *,
        sample_weight=None,
        validation_data=None,
        **kwargs,
    ):
        """As `keras.Model.fit`, after a check of arrays and of a `PyDataset`'s first batch.

        Raises:
            ValueError: Inputs, targets or weights that do not fit the model.
        """
        if self.per_step:
            checks.check_class_weight(kwargs)
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
            **kwargs,
        )

    def evaluate(
        self, x=None, y=None, batch_size=None, verbose="auto", sample_weight=None, **kwargs
    ):
        """As `keras.Model.evaluate`, after the checks of `fit`."""
        self._check_data(x, y, sample_weight)
        return super().evaluate(x, y, batch_size, verbose, sample_weight, **kwargs)

    def _check_data(self, x, y=None, sample_weight=None):
        if isinstance(x, keras.utils.PyDataset):
            # Its weights may be 0 in whole rows, with which it fills up the last batch.
            x, y, _ = keras.utils.unpack_x_y_sample_weight(x[0])
        x, y, sample_weight = map(_as_array, (x, y, sample_weight))
        if isinstance(x, np.ndarray):
            self._check_inputs(x)
            if y is None:
                raise ValueError(f"{self.name} is trained and evaluated on (x, y). Received no y.")
        # Another loss may want other targets.
        if isinstance(y, np.ndarray) and self._own_loss:
            self._check_targets(y)
        if isinstance(sample_weight, np.ndarray):
            checks.check_weights(sample_weight)

    def _check_inputs(self, x):
        checks.check_rank("x", x, "(batch, time, channels)")
        channels = self.input_spec.axes[-1] if self.built else x.shape[-1]
        if x.shape[-1] != channels:
            raise ValueError(
                f"{self.name} was built for inputs with {channels} channels. "
                f"Received: x of shape {x.shape}"
            )

    def _default_loss(self):
        raise NotImplementedError

    def _default_metrics(self):
        return []

    def _check_targets(self, y):
        raise NotImplementedError

    # Streaming

    def initial_cache(self, batch_size):
        """Returns the backbone's cache before the first step, see `layers.streaming`.

        Raises:
            ValueError: The model is not built, or its backbone does not stream.
        """
        self._check_streams()
        return self.backbone.initial_cache(batch_size)

    def step(self, x, cache):
        """Reads one step of each row; its work does not depend on how many came before.

        Args:
            x: Tensor (batch, channels).
            cache: What `initial_cache`, `step` or `prefill` returned.

        Returns:
            This step's output (batch, units), as in a call without dropout, and the new cache. The
            output of a last-step model is what it would be if the sequence ended with this step.

        Raises:
            ValueError: As `initial_cache`, or x and cache do not fit.
        """
        self._check_streams()
        hidden, cache = self.backbone.step(ops.cast(x, self.compute_dtype), cache)
        return self.head(hidden), cache

    def prefill(self, x, cache=None):
        """Reads a piece x (batch, time, channels) at once.

        Returns:
            The outputs (batch, time, units), and the cache after the last step.

        Raises:
            ValueError: As `step`, or the model is not per-step.
        """
        self._check_streams()
        if not self.per_step:
            raise ValueError(
                f"{self.name} has no output for each step of a piece: call `step`, or use "
                "per_step=True and a backbone with return_sequences=True."
            )
        hidden, cache = self.backbone.prefill(ops.cast(x, self.compute_dtype), cache)
        return self.head(hidden), cache

    def _check_streams(self):
        streaming.check_built(self)
        streaming.check_streams(self.backbone)

    # Serialization

    def get_config(self):
        backbone = keras.saving.serialize_keras_object(self.backbone)
        backbone.pop("build_config", None)  # the model builds it
        return {
            **super().get_config(),
            "backbone": backbone,
            "input_dropout": self.input_dropout.rate,
            "output_dropout": self.output_dropout.rate,
            "kernel_initializer": keras.initializers.serialize(self.head.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.head.bias_initializer),
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config):
        backbone = keras.saving.deserialize_keras_object(config["backbone"])
        return cls(**{**config, "backbone": backbone})


def _as_array(value):
    return ops.convert_to_numpy(value) if ops.is_tensor(value) else value
