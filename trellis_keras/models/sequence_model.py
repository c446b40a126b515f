"""The base class of models that classify sequences and predict values or music."""

import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.exported_stream import ExportedStream
from keras_streams.protocol import at_least_float32
from trellis_keras._keras_internals import (
    all_layers,
    set_loss_dtype,
    unscale_loss_for_distribution,
)
from trellis_keras.layers.checks import check_rates
from trellis_keras.layers.regularization import Dropout
from trellis_keras.layers.seeds import sub_seed
from trellis_keras.layers.time_steps import resolve_mask
from trellis_keras.models.base import (
    BackboneModel,
    check_is_layer,
    check_rank,
    check_tokens,
    embed,
    serialize_unbuilt,
)
from trellis_keras.models.losses import counted_targets
from trellis_keras.models.normalization import Standardization, arrays_of
from trellis_keras.types import Cache, Initializer, Shape, Tensor


class SequenceModel(BackboneModel):
    """Base class of models with a linear head on the last step or on each step.

        y = D_output(backbone(D_input(x))) W + b,

    where D is element-wise dropout. A subclass defines its default loss and metrics, and the
    checks of its targets.

    Losses and metrics are weighted means over sequences in a last-step model, or over unmasked
    steps in a per-step model, with weights `sample_weight`, (batch,) or (batch, time). Values
    reported for an epoch are exact means over the whole split, not means of batch means. A custom
    loss uses its own `reduction`: Keras' default weights each step's loss and divides by the number
    of steps.

    Args:
        backbone: Layer from (batch, time, channels) to (batch, hidden), the last step
            (`return_sequences=False`), or, with `per_step`, to (batch, time, hidden).
        units: Positive integer, number of outputs.
        per_step: Boolean, whether the model has outputs at each step.
        embedding: `keras.layers.Embedding` for inputs that are token ids (batch, time). Defaults to
            `None`.
        normalize: Boolean, whether the model standardizes its inputs, with the statistics that
            `adapt` computes from the training data. Defaults to `False`.
        input_dropout: Float in [0, 1), dropout rate of the inputs. Defaults to `0`.
        output_dropout: Float in [0, 1), dropout rate of the backbone's outputs. Defaults to `0`.
        kernel_initializer: Initializer for W. Defaults to Glorot uniform.
        bias_initializer: Initializer for b. Defaults to `"zeros"`.
        activation: String, name of the outputs' activation. Defaults to `None`.
        seed: Integer seed of the dropouts and the default initializer. Defaults to `None`.
    """

    def __init__(
        self,
        backbone: keras.Layer,
        units: int,
        *,
        per_step: bool,
        embedding: keras.layers.Embedding | None = None,
        normalize: bool = False,
        input_dropout: float = 0.0,
        output_dropout: float = 0.0,
        kernel_initializer: Initializer = None,
        bias_initializer: Initializer = "zeros",
        activation: str | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_rates(input_dropout=input_dropout, output_dropout=output_dropout)
        check_is_layer(backbone)
        parts = all_layers(backbone)
        if any(getattr(part, "stateful", False) for part in parts):
            raise ValueError(
                "Sequences are independent, so the backbone must have stateful=False. "
                f"Received: {backbone}"
            )
        if not isinstance(activation, str | None):
            raise ValueError(
                f"`activation` must be the name of an activation. Received: {activation!r}"
            )
        if embedding is not None and normalize:
            raise ValueError("Token ids cannot be normalized: `embedding` needs normalize=False.")
        has_masking = any(isinstance(part, keras.layers.Masking) for part in parts)
        if has_masking and (normalize or input_dropout):
            raise ValueError(
                "A `Masking` layer in the backbone would not find its value after normalization or "
                "dropout. Pass `mask=` to the call instead, or use normalize=False, with inputs "
                "that you have scaled, and input_dropout=0. "
                f"Received: normalize={normalize}, input_dropout={input_dropout}"
            )
        if kernel_initializer is None:
            kernel_initializer = keras.initializers.GlorotUniform(
                seed=sub_seed(seed, "SequenceModel", "head")
            )
        policy = self.dtype_policy
        self.embedding = embedding
        self.backbone = backbone
        self.per_step = per_step
        self.normalize = normalize
        self.activation = activation
        self.seed = seed
        self.autocast = False  # inputs are standardized in float32
        self.input_normalization = self._normalization("input_normalization")
        input_seed, output_seed = (
            sub_seed(seed, "SequenceModel", name) for name in ("input_dropout", "output_dropout")
        )
        self.input_dropout = Dropout(input_dropout, seed=input_seed, dtype=policy)
        self.output_dropout = Dropout(output_dropout, seed=output_seed, dtype=policy)
        self.head = keras.layers.Dense(
            units,
            activation=activation,
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            dtype=at_least_float32(self.compute_dtype),
            name="head",
        )
        self.supports_masking = True
        self._uses_default_loss = False

    def _normalization(self, name):
        """Returns a layer of statistics, or None without `normalize`."""
        dtype = at_least_float32(self.compute_dtype)
        return Standardization(dtype=dtype, name=name) if self.normalize else None

    @property
    def input_dtype(self) -> str:
        """The dtype of the inputs in the signature that Keras' export derives."""
        return self.compute_dtype if self.embedding is None else "int32"

    def build(self, input_shape: Shape) -> None:
        if self.embedding is not None:
            if len(input_shape) != 2:
                raise ValueError(
                    f"{self.name} has an embedding: it takes token ids (batch, time). "
                    f"Received: shape {tuple(input_shape)}"
                )
            if not self.embedding.built:
                self.embedding.build((None, None))
            inputs = (None, None, self.embedding.output_dim)
            self.input_spec = keras.layers.InputSpec(ndim=2)
        else:
            if len(input_shape) != 3 or input_shape[-1] is None:
                raise ValueError(
                    f"{self.name} takes inputs (batch, time, channels) with a known number of "
                    f"channels. Received: shape {tuple(input_shape)}"
                )
            inputs = (None, None, input_shape[-1])
            self.input_spec = keras.layers.InputSpec(ndim=3, axes={-1: input_shape[-1]})
        if self.input_normalization is not None and not self.input_normalization.built:
            self.input_normalization.build(inputs)
        if not self.backbone.built:
            self.backbone.build(inputs)
        hidden = self.backbone.compute_output_shape(inputs)
        if isinstance(hidden[0], (tuple, list)):
            raise ValueError(
                "The backbone must have one output: set return_state=False (and, for a "
                f"TrellisLayer, return_aux=False). Received: outputs of shapes {hidden}"
            )
        if len(hidden) != 2 + self.per_step:
            steps = "each step" if self.per_step else "only the last step"
            raise ValueError(
                f"{self.name} needs a backbone that returns {steps}: set return_sequences="
                f"{self.per_step} on it. Received: per_step={self.per_step} and a backbone "
                f"with outputs of shape {tuple(hidden)}"
            )
        if not self.head.built:
            self.head.build(hidden)

    def call(self, inputs: Tensor, training: bool = False, mask: Tensor = None) -> Tensor:
        return self._outputs(self._hidden(inputs, training, mask))

    def _hidden(self, inputs, training, mask):
        """The head's inputs."""
        if mask is None and self.embedding is not None:
            mask = self.embedding.compute_mask(inputs)
        x = self.input_dropout(self._features(inputs), training=training)
        if mask is None:
            hidden = self.backbone(x, training=training)
        else:
            with warnings.catch_warnings():
                # Keras warns about every model used as a layer; its layers may take the mask.
                if isinstance(self.backbone, keras.Model):
                    name = re.escape(self.backbone.name)
                    warnings.filterwarnings("ignore", f"Layer '{name}'.*does not support masking")
                hidden = self.backbone(x, training=training, mask=mask)
        return self.output_dropout(hidden, training=training)

    def _features(self, inputs):
        """The backbone's inputs, in the compute dtype."""
        if self.embedding is not None:
            return ops.cast(embed(self.embedding, inputs), self.compute_dtype)
        if self.input_normalization is not None:
            inputs = self.input_normalization(inputs)
        return ops.cast(inputs, self.compute_dtype)

    def _outputs(self, hidden):
        """Maps the backbone's outputs (..., hidden) to the model's outputs."""
        return self.head(hidden)

    def compute_mask(self, inputs: Tensor, previous_mask: Tensor | None) -> None:
        return None  # the outputs already have the backbone's mask

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        if self.embedding is not None:
            input_shape = (*input_shape, self.embedding.output_dim)
        return self.head.compute_output_shape(self.backbone.compute_output_shape(input_shape))

    def compute_output_spec(
        self, inputs: Tensor, training: bool = False, mask: Tensor | None = None
    ) -> keras.KerasTensor:
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), self.head.compute_dtype)

    # Normalization

    def adapt(self, inputs: np.ndarray | Sequence[np.ndarray]) -> None:
        """Computes the statistics of each input channel, for a model with `normalize=True`.

        Call it before `fit`, only with training data. Missing values (NaN) are ignored; the model
        replaces them with the channel mean. A constant channel is only centered. The model clips
        inputs to 10 standard deviations from the mean.

        Args:
            inputs: Array (..., channels), or a sequence of such arrays. Arrays are read in blocks,
                so they may be memory-mapped.
        """
        if self.input_normalization is None:
            raise ValueError("`adapt` needs a model with normalize=True.")
        inputs = arrays_of(inputs)
        if not self.built:
            self.build((None, None, inputs[0].shape[-1]))
        self.input_normalization.adapt(inputs)

    def check_adapted(self) -> None:
        """Raises ValueError if the model needs `adapt` and it has not been called."""
        layer = self.input_normalization
        if layer is not None and not layer.is_adapted:
            raise ValueError(
                f"{self.name} normalizes its inputs: call model.adapt(training_data) first."
            )

    # Loss and metrics

    # Whether the outputs are logits, for which Keras' cross-entropies need from_logits=True.
    _outputs_are_logits = False

    def _default_loss(self):
        """Returns the default loss of `compile`."""
        raise NotImplementedError(f"{type(self).__name__} must define `_default_loss()`.")

    def _default_metrics(self):
        """Returns the default metrics of `compile`, a list."""
        raise NotImplementedError(f"{type(self).__name__} must define `_default_metrics()`.")

    def compile(
        self,
        optimizer: str | keras.optimizers.Optimizer = "rmsprop",
        loss: Any = None,
        *,
        metrics: Any = None,
        weighted_metrics: Any = None,
        **kwargs: Any,
    ) -> None:
        """Configures training as `keras.Model.compile`, with a default loss and default metrics.

        Args:
            optimizer: Keras optimizer, or its name. Defaults to `"rmsprop"`.
            loss: As in Keras. Defaults to the loss described in the class. If the outputs are
                logits, losses and metrics given by name use `from_logits=True`, and those that only
                accept probabilities raise an error.
            metrics, weighted_metrics: As in Keras: only `weighted_metrics` receive the sample
                weights (and the mask). With the default loss they default to the metrics described
                in the class.
            **kwargs: Other arguments of `keras.Model.compile`.
        """
        if loss is not None:
            losses = keras.tree.flatten(loss)  # Keras also takes a list of one
            if len(losses) != 1:
                raise ValueError(
                    f"{self.name} has one output, so it takes one loss. Received: loss={loss!r}"
                )
            loss = self._checked_loss(losses[0])
        elif metrics is None and weighted_metrics is None:
            weighted_metrics = self._default_metrics()
        super().compile(
            optimizer,
            loss=self._default_loss() if loss is None else loss,
            metrics=self._checked_metrics(metrics),
            weighted_metrics=self._checked_metrics(weighted_metrics),
            **kwargs,
        )
        # Keras would cast every loss to floatx.
        set_loss_dtype(self, self.head.compute_dtype)
        self._uses_default_loss = loss is None

    def _checked_loss(self, loss):
        """Returns the loss to use for one given to `compile`, or raises ValueError."""
        return _loss_of_logits(loss) if self._outputs_are_logits else loss

    def _checked_metrics(self, metrics):
        """Returns the metrics to use for those given to `compile`, or raises ValueError."""
        if metrics is None or not self._outputs_are_logits:
            return metrics
        return keras.tree.map_structure(_metric_of_logits, metrics)

    def get_compile_config(self) -> dict | None:
        config = super().get_compile_config()
        # Keras' losses do not save their dtype; the default loss is recreated.
        return {**config, "loss": None} if config and self._uses_default_loss else config

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        # Keras' own loss tracker would weight a batch by its rows.
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
        """Returns the loss of a batch, and updates the metrics."""
        y = self._checked_targets(y, y_pred)
        weight = self._weights(y_pred, sample_weight)
        # Keras divides by the number of replicas, regardless of their weights.
        terms = self._loss_terms(x, y, y_pred, weight)
        loss = unscale_loss_for_distribution(self._compile_loss(*terms))
        loss = loss + sum(ops.sum(penalty) for penalty in self.losses)
        (function,) = keras.tree.flatten(self.loss)
        by_weights = getattr(function, "reduction", None) == "mean_with_sample_weight"
        counted = ops.sum(terms[2] if by_weights else self._weights(y_pred, None))
        super().compute_metrics(x, y, y_pred, weight)
        return self._counted(loss, counted)

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Tensor | None = None
    ) -> dict:
        # `compute_loss` has updated them: on JAX the outputs lose their mask on the way here.
        if self._compile_metrics is None or self._compile_metrics.built:
            return self.get_metrics_result()
        # Keras builds them here, from a symbolic batch.
        weight = self._weights(y_pred, sample_weight)
        return super().compute_metrics(x, self._checked_targets(y, y_pred), y_pred, weight)

    def _checked_targets(self, y, y_pred):
        """Returns `_shaped_targets`, or raises ValueError."""
        if self.per_step and self._uses_default_loss:
            targets, outputs = y.shape[1], y_pred.shape[1]
            # A single step of targets would be broadcast to all steps.
            if None not in (targets, outputs) and targets != outputs:
                raise ValueError(
                    "Per-step targets must have as many steps as the outputs. "
                    f"Received: {targets} steps of targets, {outputs} of outputs"
                )
        return self._shaped_targets(y, y_pred)

    def _weights(self, y_pred, sample_weight):
        """The weight of each output: (batch,), or (batch, time) in a per-step model."""
        shape = ops.shape(y_pred)[:-1]
        weight = ops.ones(shape, y_pred.dtype)
        if sample_weight is not None:
            self._check_weights(sample_weight.shape, y_pred.shape)
            # By reshape: a per-step model also accepts one weight per row.
            ranked = (shape[0], -1) if self.per_step else (shape[0],)
            weight = weight * ops.reshape(ops.cast(sample_weight, weight.dtype), ranked)
        mask = resolve_mask(y_pred, None)
        return weight if mask is None else weight * ops.cast(mask, weight.dtype)

    def _check_weights(self, shape, outputs):
        sizes = [1, outputs[1]] if self.per_step else [1]
        if None not in (*shape[1:], *sizes) and math.prod(shape[1:]) not in sizes:
            axes = f"(batch,) or (batch, {outputs[1]})" if self.per_step else "(batch,)"
            raise ValueError(
                f"`sample_weight` must have shape {axes}. Received: shape {tuple(shape)}"
            )

    def _shaped_targets(self, y, y_pred):
        """Returns targets with the axes of the outputs."""
        return y

    def _loss_terms(self, x, y, y_pred, weight):
        """Returns targets, outputs and weights as the loss takes them."""
        if self._uses_default_loss:  # other losses may take targets of other shapes
            y = counted_targets(y, weight)
        return y, y_pred, weight

    # Data, checked before training begins

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: list | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict | None = None,
        **kwargs: Any,
    ) -> keras.callbacks.History:
        """Trains as `keras.Model.fit`, after checking arrays or a `PyDataset`'s first batch."""
        class_weight = self._encode_class_weight(class_weight)
        x, y = self._checked_data(x, y)
        if isinstance(validation_data, (tuple, list)):
            inputs, targets, *weights = validation_data
            validation_data = (*self._checked_data(inputs, targets), *weights)
        else:
            self._checked_data(validation_data)
        options = (batch_size, epochs, verbose, callbacks, validation_split, validation_data)
        return super().fit(x, y, *options, shuffle, class_weight, **kwargs)

    def evaluate(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Evaluates as `keras.Model.evaluate`, after the checks of `fit`."""
        x, y = self._checked_data(x, y)
        return super().evaluate(x, y, *args, **kwargs)

    def predict(self, x: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        """Predicts as `keras.Model.predict`, after checking arrays and that `adapt` was called."""
        self.check_adapted()
        self._check_shape(x)
        return super().predict(x, *args, **kwargs)

    def predict_on_batch(self, x: Any) -> np.ndarray:
        """Predicts as `keras.Model.predict_on_batch`, after the check of `predict`."""
        self.check_adapted()
        self._check_shape(x)
        return super().predict_on_batch(x)

    def _checked_data(self, x, y=None):
        """Returns inputs and targets, those of pandas as arrays and names of classes as numbers."""
        self.check_adapted()
        x, y = (v.to_numpy() if hasattr(v, "to_numpy") else v for v in (x, y))
        y = self._encode_targets(y)
        self._check_data(x, y)
        return x, y

    def _check_data(self, x, y):
        if isinstance(x, keras.utils.PyDataset):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(x[0])
        x, y = (ops.convert_to_numpy(v) if ops.is_tensor(v) else v for v in (x, y))
        if isinstance(x, np.ndarray):
            self._check_inputs(x)
            if y is None:
                raise ValueError(f"{self.name} is trained and evaluated on (x, y). Received no y.")
        # A custom loss may take other targets.
        if isinstance(y, np.ndarray) and self._uses_default_loss:
            self._check_targets(y)

    def _check_inputs(self, x):
        """Raises ValueError for inputs that the model is not trained on."""
        self._check_shape(x)

    def _check_shape(self, x):
        if not isinstance(x, np.ndarray):
            return
        if self.embedding is None:
            check_rank("x", x, "(batch, time, channels)")
            if self.built and x.shape[-1] != self.input_spec.axes[-1]:
                raise ValueError(
                    f"{self.name} was built for inputs of {self.input_spec.axes[-1]} channels. "
                    f"Received: x of shape {x.shape}"
                )
        else:
            check_rank("x", x, "(batch, time)")
            check_tokens(x, self.embedding.input_dim)

    def _check_targets(self, y):
        """Raises ValueError for targets that do not suit the default loss."""
        raise NotImplementedError(f"{type(self).__name__} must define `_check_targets(y)`.")

    def _encode_targets(self, y):
        """Returns targets as numbers."""
        return y

    def _encode_class_weight(self, class_weight):
        return super()._encode_class_weight(class_weight) if self.per_step else class_weight

    # Streaming

    def stream(self) -> Any:
        """Returns the backbone's stream, see `keras_streams.to_stream`.

        Raises:
            ValueError: If the backbone does not stream, or the model masks padding.
        """
        if any(isinstance(part, keras.layers.Masking) for part in all_layers(self.backbone)):
            raise ValueError(
                f"{self.name} has a `Masking` layer, but a stream has no masked steps. Build the "
                "model without it, copy the weights with `set_weights`, and do not feed padding to "
                "the stream."
            )
        if self.embedding is not None and self.embedding.mask_zero:
            raise ValueError(
                f"{self.name} has an embedding with mask_zero=True, but a stream has no masked "
                "steps. Set mask_zero=False and do not feed padding to the stream."
            )
        return super().stream()

    def step(self, x: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Reads one step of each row, with constant work per step.

        Args:
            x: Tensor (batch, channels), or token ids (batch,) for a model with an embedding.
            cache: Result of `initial_cache`, `step` or `prefill`.

        Returns:
            This step's output (batch, units), as in a call without dropout, and the new cache. A
            last-step model returns its output for the sequence that ends with this step.
        """
        hidden, cache = self.stream().step(self._features(x), cache)
        return self._outputs(hidden), cache

    def prefill(self, x: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Reads a segment, with the shape of a call's inputs, in one pass.

        Returns:
            The outputs (batch, time, units), see `step`, and the cache after the last step.
        """
        hidden, cache = self.stream().prefill(self._features(x), cache)
        return self._outputs(hidden), cache

    def export_stream(self) -> ExportedStream:
        """Returns the stream that exporters of steps write, with its outputs for a reader."""
        self.check_adapted()
        self.stream()  # raises if the model does not stream
        embedding = self.embedding
        return self._exported_stream(
            self.step,
            self.prefill,
            self._read_out,
            inputs=self.input_spec.axes[-1] if embedding is None else embedding.input_dim,
            takes_token=embedding is not None,
            example=None if embedding is not None else self._random_inputs,
            notes=self._export_notes(),
            fills_missing_values=self.normalize,
        )

    def _read_out(self, outputs):
        """Returns the outputs as a reader of an exported stream wants them."""
        return outputs

    def _random_inputs(self, rng, steps):
        """Returns random inputs (steps, channels) in the units of the data."""
        x = rng.normal(size=(steps, self.input_spec.axes[-1])).astype(self.compute_dtype)
        if self.input_normalization is not None:
            x = np.array(ops.convert_to_numpy(self.input_normalization.invert(x)))
            x[1, 0] = np.nan  # missing: the mean
        return x.astype(self.compute_dtype)

    def _export_notes(self):
        """Returns lines that describe the outputs."""
        return []

    # Serialization

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "backbone": serialize_unbuilt(self.backbone),
            "embedding": None if self.embedding is None else serialize_unbuilt(self.embedding),
            "normalize": self.normalize,
            "input_dropout": self.input_dropout.rate,
            "output_dropout": self.output_dropout.rate,
            "kernel_initializer": keras.initializers.serialize(self.head.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.head.bias_initializer),
            "activation": self.activation,
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: dict) -> "SequenceModel":
        layers = {
            name: keras.saving.deserialize_keras_object(config.get(name))
            for name in ("backbone", "embedding")
        }
        return cls(**{**config, **layers})


_CROSS_ENTROPIES = {
    "sparse_categorical_crossentropy": keras.losses.SparseCategoricalCrossentropy,
    "categorical_crossentropy": keras.losses.CategoricalCrossentropy,
    "categorical_focal_crossentropy": keras.losses.CategoricalFocalCrossentropy,
    "binary_crossentropy": keras.losses.BinaryCrossentropy,
    "binary_focal_crossentropy": keras.losses.BinaryFocalCrossentropy,
}
# These have no argument `from_logits`.
_OF_PROBABILITIES = (
    keras.losses.KLDivergence,
    keras.losses.Poisson,
    keras.losses.Dice,
    keras.losses.Tversky,
    keras.metrics.KLDivergence,
    keras.metrics.Poisson,
)


def _loss_of_logits(loss):
    """Returns a loss; a cross-entropy given by name gets `from_logits=True`."""
    if isinstance(loss, str):
        if loss.lower() in ("ce", "crossentropy"):  # Keras' short names
            loss = "sparse_categorical_crossentropy"
        found = keras.losses.get(loss)
        kind = _CROSS_ENTROPIES.get(getattr(found, "__name__", getattr(found, "name", None)))
        if kind is not None:
            return kind(from_logits=True)
        _check_takes_logits(found)
        return loss
    _check_takes_logits(loss)
    return loss


def _metric_of_logits(metric):
    """Returns a metric; one given by name gets `from_logits=True`, if it has this argument."""
    if not isinstance(metric, str):
        _check_takes_logits(metric)
    elif metric.lower() not in ("acc", "accuracy"):  # which Keras chooses by the shapes
        found = keras.metrics.get(metric)
        if "from_logits" in found.get_config():
            return type(found)(name=metric, from_logits=True)
        _check_takes_logits(found)
    return metric


def _check_takes_logits(function):
    """Raises ValueError for a loss or metric of probabilities."""
    if _takes_probabilities(function):
        raise ValueError(
            "The model's outputs are logits: a loss or metric needs from_logits=True or the "
            "threshold 0, the logit of 1/2, if it has one. Or omit it, or (in a "
            f"SequenceClassifier) set activation='softmax'. Received: {function!r}"
        )


def _takes_probabilities(function):
    if not isinstance(function, (keras.losses.Loss, keras.metrics.Metric)):
        names = *_CROSS_ENTROPIES, "kl_divergence", "poisson", "dice", "tversky"
        return function in [keras.losses.get(name) for name in names]
    if isinstance(function, _OF_PROBABILITIES):
        return True
    config = function.get_config()
    if "from_logits" in config:
        return not config["from_logits"]
    is_keras = type(function).__module__.startswith("keras.")  # others may mean anything
    thresholds = getattr(function, "thresholds", [getattr(function, "threshold", None)])
    return is_keras and any(threshold is not None and threshold > 0 for threshold in thresholds)
