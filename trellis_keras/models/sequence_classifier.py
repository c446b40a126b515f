"""Classification of sequences, or of each of their steps."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.exported_stream import ExportedStream
from keras_streams.protocol import check_built
from trellis_keras.layers.checks import check_choice, check_integer
from trellis_keras.models.base import BackboneModel
from trellis_keras.models.sequence_model import SequenceModel

_BINARY_LOSSES = "bce", "binarycrossentropy", "binaryfocalcrossentropy"


@keras.saving.register_keras_serializable("trellis_keras")
class SequenceClassifier(SequenceModel):
    """Classifies sequences, or each of their steps, with any causal backbone.

    With a last-step backbone it classifies images read pixel by pixel (TrellisNet, section 5.2;
    TCN, section 4); with `per_step=True` it is the copy-memory model of the TCN paper. (The
    TrellisNet authors' pixel program applies output dropout to the logits, and does not disable
    its dropouts in evaluation. The paper describes output dropout as implemented here.)

    `compile` defaults to cross-entropy and accuracy. See `SequenceModel` for their means.

    Args:
        backbone: Layer from (batch, time, channels) to (batch, hidden), the last step
            (`return_sequences=False`), or, with `per_step`, to (batch, time, hidden): a
            `TrellisLayer`, a `TCN`, a Keras RNN layer, or a `keras.Sequential` of such layers.
        num_classes: Integer of at least 2, number of classes.
        per_step: Boolean, whether each step is classified. Defaults to `False`.
        activation: `None` for logits, or `"softmax"` for probabilities. Defaults to `None`.
        class_names: Sequence of strings, the class names, saved with the model. `fit` and
            `evaluate` then accept arrays of names as labels. Defaults to `None`.
        embedding: `keras.layers.Embedding` for inputs that are token ids (batch, time), with
            `mask_zero=True` if id 0 is padding. Defaults to `None`.
        nan_padding: Boolean, whether sequences of different lengths are padded with NaN: steps
            after the last value of a sequence are masked. (Earlier missing values are handled
            by `normalize`.) Defaults to `False`.
        **kwargs: `normalize`, `input_dropout`, `output_dropout`, `kernel_initializer`,
            `bias_initializer` and `seed`, as in `SequenceModel`.

    Call arguments:
        inputs: Tensor (batch, time, channels), or token ids (batch, time) with an `embedding`.
        mask: Boolean (batch, time), False where a step is padding. The backbone must support it.
            To derive the mask from the data, start a `keras.Sequential` backbone with a
            `keras.layers.Masking` layer (without `normalize` and `input_dropout`, which are applied
            before it).

    Returns:
        Logits (batch, num_classes), or (batch, time, num_classes) with `per_step`, at least
        float32; probabilities with activation="softmax".

    Example:

    >>> backbone = TrellisLayer(units=8, depth=4, return_sequences=False)
    >>> model = SequenceClassifier(backbone, num_classes=3)
    >>> model.compile("adam")
    >>> x, y = np.random.rand(8, 12, 1), np.random.randint(0, 3, 8)
    >>> sorted(model.fit(x, y, verbose=0).history)
    ['accuracy', 'loss']
    >>> model.predict_proba(x, verbose=0).shape
    (8, 3)
    """

    def __init__(
        self,
        backbone: keras.Layer,
        num_classes: int,
        *,
        per_step: bool = False,
        activation: str | None = None,
        class_names: Sequence[str] | None = None,
        embedding: keras.layers.Embedding | None = None,
        nan_padding: bool = False,
        **kwargs: Any,
    ) -> None:
        num_classes = check_integer("num_classes", num_classes, 2)
        if nan_padding and embedding is not None:
            raise ValueError("Token ids are never NaN: `embedding` needs nan_padding=False.")
        check_choice("activation", activation, (None, "softmax"))
        if class_names is not None:
            class_names = [str(name) for name in class_names]
            if len(set(class_names)) != num_classes or len(class_names) != num_classes:
                raise ValueError(
                    f"`class_names` must be {num_classes} different names. Received: {class_names}"
                )
        super().__init__(
            backbone,
            num_classes,
            per_step=per_step,
            activation=activation,
            embedding=embedding,
            **kwargs,
        )
        self.num_classes = num_classes
        self.class_names = class_names
        self.nan_padding = nan_padding

    def _hidden(self, inputs, training, mask):
        if mask is None and self.nan_padding:
            mask = _before_padding(inputs)
            # Keras' recurrent layers multiply masked inputs by zero gradients.
            inputs = ops.where(mask[..., None], inputs, ops.zeros_like(inputs))
        return super()._hidden(inputs, training, mask)

    @classmethod
    def from_model(
        cls, model: keras.Model, num_classes: int, **options: Any
    ) -> "SequenceClassifier":
        """Returns a classifier of whole sequences with the weights of a trained model.

        Args:
            model: A model of this package, whose backbone has the argument `return_sequences`. The
                classifier gets a copy of the backbone, and of an embedding or a normalization.
            num_classes: Integer of at least 2, number of classes.
            **options: Other arguments of the classifier, except `embedding` and `normalize`, which
                are the model's.
        """
        if taken := {"embedding", "normalize"} & set(options):
            raise ValueError(
                f"`embedding` and `normalize` are the model's. Received: {sorted(taken)}"
            )
        old: Any = getattr(model, "backbone", None)
        config = {} if old is None else old.get_config()
        if not isinstance(model, BackboneModel) or "return_sequences" not in config:
            raise ValueError(
                "A classifier needs a model of trellis_keras whose backbone has the argument "
                f"`return_sequences`. Received: {model.name} with the backbone {old!r}"
            )
        check_built(model)
        wanted = {
            "return_sequences": False,
            "return_state": False,
            "return_aux": False,
            "stateful": False,
            "output_length": None,
        }
        config |= {name: value for name, value in wanted.items() if name in config}
        if (embedding := getattr(model, "embedding", None)) is not None:
            options["embedding"] = type(embedding).from_config(embedding.get_config())
        elif model.normalize:
            options["normalize"] = True
        classifier = cls(type(old).from_config(config), num_classes, **options)
        built: Any = model.get_build_config()
        classifier.build(built["input_shape"] if embedding is None else (None, None))
        for part in ("embedding", "input_normalization", "backbone"):
            if (new := getattr(classifier, part)) is not None:
                new.set_weights(getattr(model, part).get_weights())
        return classifier

    @property
    def _outputs_are_logits(self):
        return self.activation is None

    def predict_proba(self, x: Any, *args: Any, **kwargs: Any) -> np.ndarray:
        """Returns class probabilities, with the arguments of `keras.Model.predict`."""
        outputs = self.predict(x, *args, **kwargs)
        if self.activation is None:
            outputs = np.exp(outputs - outputs.max(axis=-1, keepdims=True))
            outputs = outputs / outputs.sum(axis=-1, keepdims=True)
        return outputs

    def export_stream(self) -> ExportedStream:
        return dataclasses.replace(super().export_stream(), names=self.class_names or ())

    def _read_out(self, outputs):
        return ops.softmax(outputs) if self.activation is None else outputs

    def _export_notes(self):
        return ["Outputs: the probabilities of the classes"]

    def _default_loss(self):
        return keras.losses.SparseCategoricalCrossentropy(
            from_logits=self._outputs_are_logits,
            reduction="mean_with_sample_weight",
            dtype=self.head.compute_dtype,
        )

    def _default_metrics(self):
        dtype = self.head.compute_dtype
        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy", dtype=dtype)]

    def _checked_loss(self, loss):
        name = getattr(loss, "__name__", getattr(loss, "name", loss))
        if str(name).lower().replace("_", "") in _BINARY_LOSSES:
            raise ValueError(
                "A SequenceClassifier chooses one class: for two classes, omit the loss and set "
                "num_classes=2. For several labels, use SequenceRegressor(backbone, labels, "
                f'activation="sigmoid"). Received: loss={loss!r}'
            )
        return super()._checked_loss(loss)

    def _loss_terms(self, x, y, y_pred, weight):
        if not self._uses_default_loss:
            return y, y_pred, weight
        if len(y.shape) == len(y_pred.shape) and y.shape[-1] != 1:
            raise ValueError(
                "Labels must be class numbers rather than one-hot rows, or pass "
                f'loss="categorical_crossentropy". Received: labels of shape {tuple(y.shape)}'
            )
        if keras.backend.standardize_dtype(y.dtype) == "string":
            raise ValueError(
                "Labels of a dataset must be class numbers. For names, map them with "
                "keras.layers.StringLookup(vocabulary=class_names, num_oov_indices=0), or pass "
                "arrays to `fit`. Received: strings"
            )
        # On some backends a label out of range has a loss of 0.
        y = ops.reshape(y, ops.shape(y_pred)[:-1])
        if not keras.backend.is_float_dtype(y.dtype):
            y = ops.cast(y, "int32")  # in uint8 there is no 256
        is_class = (y >= 0) & (y < self.num_classes)
        zeros = ops.zeros_like(y)
        weight = ops.where(is_class | (weight == 0), weight, np.nan)
        return ops.where(is_class, y, zeros), y_pred, weight

    def _encode_targets(self, y):
        labels = np.asarray(y) if isinstance(y, (np.ndarray, list, tuple)) else np.zeros(0)
        if self.class_names is None or labels.dtype.kind not in "OSU":
            return y
        labels = labels.astype(str)
        unknown = np.setdiff1d(labels, self.class_names)
        if unknown.size:
            raise ValueError(
                f"Labels must be among class_names={self.class_names}. Received: "
                f"{unknown[:5].tolist()}"
            )
        order = np.argsort(self.class_names)
        return order[np.searchsorted(self.class_names, labels, sorter=order)]

    def _encode_class_weight(self, class_weight):
        if super()._encode_class_weight(class_weight) is None:
            return None
        if not isinstance(class_weight, dict):
            raise ValueError(
                f"`class_weight` must be a dict from classes to weights. Received: {class_weight!r}"
            )
        numbers = {name: number for number, name in enumerate(self.class_names or ())}
        by_number = {numbers.get(key, key): weight for key, weight in class_weight.items()}
        unknown = [key for key in by_number if key not in range(self.num_classes)]
        if unknown:
            raise ValueError(
                f"The keys of `class_weight` must be classes from 0 to {self.num_classes - 1}, or "
                f"names in class_names={self.class_names}. Received: {unknown}"
            )
        # Keras' table for data sets ends with the largest of its keys.
        return {number: by_number.get(number, 1.0) for number in range(self.num_classes)}

    def _check_targets(self, y):
        if y.dtype.kind in "OSU":
            raise ValueError(
                f"Labels must be whole numbers in [0, {self.num_classes}), or, in arrays, names "
                f"among `class_names`, here {self.class_names}. Received: labels such as "
                f"{str(y.flat[0])!r}"
            )
        if y.ndim == 2 + self.per_step and y.shape[-1] == 1:  # Keras takes such labels too
            y = y[..., 0]
        if y.ndim != 1 + self.per_step:
            axes = "(batch, time)" if self.per_step else "(batch)"
            raise ValueError(
                f"`y` must have axes {axes}, with class numbers rather than one-hot rows. "
                f"Received: shape {y.shape}"
            )
        whole = np.issubdtype(y.dtype, np.integer) or np.all(np.floor(y) == y)
        if not whole or y.size and not 0 <= y.min() <= y.max() < self.num_classes:
            raise ValueError(
                f"Labels must be whole numbers in [0, {self.num_classes}), even where the sample "
                f"weight is 0. Received: values from {y.min()} to {y.max()} of type {y.dtype}"
            )

    def get_config(self) -> dict:
        return {
            **super().get_config(),
            "num_classes": self.num_classes,
            "per_step": self.per_step,
            "class_names": None if self.class_names is None else list(self.class_names),
            "nan_padding": self.nan_padding,
        }


def _before_padding(x):
    """Returns a mask (batch, time), True up to the last value of x (batch, time, channels)."""
    if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(x.dtype)):
        x = ops.cast(x, "float32")  # for `isnan`
    has_value = ops.cast(ops.any(ops.logical_not(ops.isnan(x)), axis=-1), "int32")
    return ops.flip(ops.cumsum(ops.flip(has_value, axis=1), axis=1), axis=1) > 0
