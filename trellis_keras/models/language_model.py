"""A language model around any causal backbone layer."""

import contextlib
import inspect

import keras
from keras import ops

from trellis_keras.generation import Generation
from trellis_keras.layers.base import FrozenPartsMixin, at_least_float32
from trellis_keras.layers.heads import DenseHead
from trellis_keras.layers.regularization import EmbeddingDropout, VariationalDropout
from trellis_keras.models import checks, devices, token_loss
from trellis_keras.models.language_backbone import check_backbone
from trellis_keras.models.ordered_batches import OrderedBatches
from trellis_keras.models.vocabulary_check import check_weights_file


@keras.saving.register_keras_serializable("trellis_keras")
class LanguageModel(FrozenPartsMixin, Generation, OrderedBatches, keras.Model):
    """Embedding, causal backbone and output head, trained on next-token prediction.

    `fit` and `evaluate` take token ids x (batch, time) and targets y (batch, n), n <= time: the
    next tokens of the last n positions. The positions before them are history: they are read, but
    not counted (effective-history training, TrellisNet appendix B.2), and a `TrellisLayer` leaves
    out what no counted position can see. The training loss is

        CE + aux_weight * sum_a CE_a + AR * mean(output^2) + TAR * mean((raw_{t+1} - raw_t)^2),

    CE_a being the cross-entropies of the backbone's auxiliary outputs, `raw` the backbone's
    output before the output dropout and `output` after it; the validation loss is CE alone. Means
    are over counted tokens, so that the figures of an epoch are exact over the split.

    Args:
        vocabulary_size: Number of tokens V.
        embedding_dim: Width of the embedding.
        backbone: Causal layer from (batch, time, embedding_dim) to (batch, time, channels): a
            `TrellisLayer`, a `TCN`, a `StackedRNN` of Keras' recurrent layers, or (without
            `generate`) any other, such as `keras.layers.LSTM(..., return_sequences=True)`. One
            with `return_aux=True` gives auxiliary outputs. With `stateful=True` it carries its
            states from batch to batch.
        head: Output head (see `layers.heads`). Default: `DenseHead(vocabulary_size)`.
        tie_embeddings: Whether the head uses the embedding's matrix.
        embedding_dropout: Rate of dropped words (whole words, for a whole batch).
        input_dropout: Dropout rate of the embedded input.
        input_dropout_kind: `"variational"` drops the same channels at all steps of a row (the
            TrellisNet authors' programs), `"element"` every number by itself (the TCN authors').
        output_dropout: Variational dropout rate of the output and the auxiliary outputs.
        aux_weight: Weight of the sum of the auxiliary losses.
        activation_reg: AR, weight of the mean square of the output (Merity et al. 2018).
        temporal_activation_reg: TAR, weight of the mean squared step-to-step change.
        embeddings_initializer: Default: U(-0.1, 0.1), the authors'.
        vocabulary: `data.Vocabulary` that is saved with the model, or None.
        seed: Integer seed of the dropouts and the default initialisers.

    Call arguments:
        tokens: Integer tensor (batch, time).
        training: Whether dropout is active.

    Returns:
        Log-probabilities (batch, time, V).

    Raises:
        ValueError: Arguments that do not fit each other, tokens that are not integers or lie
            outside the vocabulary.

    Example:

    >>> backbone = TrellisLayer(units=24, depth=6, output_units=16)
    >>> model = LanguageModel(vocabulary_size=50, embedding_dim=16, backbone=backbone)
    >>> model.compile("adam")
    >>> tokens = np.random.randint(0, 50, (8, 21))
    >>> _ = model.fit(tokens[:, :-1], tokens[:, 1:], verbose=0)
    >>> model.predict(tokens, verbose=0).shape
    (8, 21, 50)

    Keras' recurrent layers as a backbone, which here carries its states from batch to batch:

    >>> lstm = keras.layers.LSTM(16, return_sequences=True, return_state=True)
    >>> model = LanguageModel(50, 16, StackedRNN([lstm], stateful=True))
    >>> model.compile("adam")
    >>> _ = model.fit(tokens[:, :-1], tokens[:, 1:], batch_size=4, verbose=0)
    >>> model.generate(tokens[:2, :3], max_length=10).shape
    (2, 10)
    """

    def __init__(
        self,
        vocabulary_size,
        embedding_dim,
        backbone,
        *,
        head=None,
        tie_embeddings=True,
        embedding_dropout=0.0,
        input_dropout=0.0,
        input_dropout_kind="variational",
        output_dropout=0.0,
        aux_weight=0.0,
        activation_reg=0.0,
        temporal_activation_reg=0.0,
        embeddings_initializer=None,
        vocabulary=None,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.autocast = False  # the layers do so; tokens of another type than integers are refused
        check_backbone(backbone, aux_weight)
        if vocabulary is not None and len(vocabulary) != vocabulary_size:
            raise ValueError(
                f"The vocabulary has {len(vocabulary)} tokens, but vocabulary_size="
                f"{vocabulary_size}"
            )
        self.vocabulary_size = vocabulary_size
        self.embedding_dim = embedding_dim
        self.tie_embeddings = tie_embeddings
        self.aux_weight = aux_weight
        self.activation_reg = activation_reg
        self.temporal_activation_reg = temporal_activation_reg
        self.vocabulary = vocabulary
        self.seed = seed
        policy = {"dtype": self.dtype_policy}
        self.embedding = keras.layers.Embedding(
            vocabulary_size,
            embedding_dim,
            embeddings_initializer=_uniform(seed)
            if embeddings_initializer is None
            else embeddings_initializer,
            name="embedding",
            **policy,
        )
        self.embedding_dropout = EmbeddingDropout(
            embedding_dropout, vocabulary_size, _sub(seed, 1), **policy
        )
        self.input_dropout_kind = input_dropout_kind
        self.input_dropout = _input_dropout(input_dropout_kind)(
            input_dropout, seed=_sub(seed, 2), **policy
        )
        self.backbone = backbone
        self.output_dropout = VariationalDropout(output_dropout, _sub(seed, 3), **policy)
        self.aux_dropout = VariationalDropout(output_dropout, _sub(seed, 4), **policy)
        if head is None:
            head = DenseHead(vocabulary_size, _uniform(_sub(seed, 5)), name="head", **policy)
        if getattr(head, "vocabulary_size", vocabulary_size) != vocabulary_size:
            raise ValueError(
                f"The head has vocabulary_size={head.vocabulary_size}, but the model has "
                f"vocabulary_size={vocabulary_size}"
            )
        self.head = head
        if tie_embeddings:
            _check_ties(head)
            head.tie(self.embedding)

        self._backbone_takes_length = _takes(backbone.call, "output_length")
        self._head_takes_training = _takes(self.head.loss, "training")
        self._counted = None
        self._mean_loss = keras.metrics.Mean(name="loss")
        self._set_token_metrics([])

    @property
    def input_dtype(self):
        # What Keras' own export, also of a model around this one, takes for the signature.
        return "int32"

    def build(self, input_shape):
        if len(input_shape) != 2:
            raise ValueError(f"Tokens have axes (batch, time). Received: shape {input_shape}")
        batch, time = input_shape
        self.embedding.build((batch, time))
        embedded = (batch, time, self.embedding_dim)
        if not self.backbone.built:
            self.backbone.build(embedded)
        hidden = self.backbone.compute_output_shape(embedded)
        if not self.head.built:
            self.head.build(hidden[0] if isinstance(hidden[0], tuple) else hidden)

    # Forward pass

    def call(self, tokens, training=False):
        outputs = self._encode(tokens, training)
        # In `fit` and `evaluate` the loss is the head's: no log-probabilities are made.
        if self._counted is not None:
            return outputs
        return self.head(outputs["raw"])

    def _encode(self, tokens, training=False):
        """Returns the backbone's outputs before the output dropout: raw and, if any, aux."""
        if not keras.backend.is_int_dtype(tokens.dtype):
            raise ValueError(f"Tokens must be integers. Received: dtype {tokens.dtype}")
        x = self.embedding_dropout(self.embedding(tokens), tokens, training=training)
        x = self.input_dropout(x, training=training)
        length = {}
        if self._backbone_takes_length and isinstance(self._counted, int):
            length["output_length"] = self._counted
        outputs = self.backbone(x, training=training, **length)
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        if self._counted is not None:
            outputs = [output[..., -self._counted :, :] for output in outputs]
        return dict(zip(("raw", "aux"), outputs, strict=False))

    def compute_output_shape(self, input_shape):
        return (*input_shape, self.vocabulary_size)

    def compute_output_spec(self, tokens, training=False):
        shape = self.compute_output_shape(tokens.shape)
        return keras.KerasTensor(shape, at_least_float32(self.head.compute_dtype))

    def quantize(self, *args, **kwargs):
        """Not supported: `export.export(format="litert", quantization="int8")` has it.

        Raises:
            ValueError: Always.
        """
        checks.refuse_quantization(self)

    # Training and evaluation

    def compile(
        self,
        optimizer="rmsprop",
        metrics=None,
        *,
        run_eagerly=False,
        steps_per_execution=1,
        jit_compile="auto",
        auto_scale_loss=True,
    ):
        """Configures training. The loss is the head's, so there is no `loss` argument.

        Args:
            optimizer: Keras optimizer.
            metrics: Metrics that are fed the negative log-likelihood per token in nats, with the
                tokens' weights: `models.Perplexity()`, `models.BitsPerCharacter()`,
                or any `keras.metrics.Metric` with `update_state(values, sample_weight)`.
            run_eagerly, steps_per_execution, jit_compile, auto_scale_loss: As in Keras.
        """
        metrics = [] if metrics is None else metrics
        metrics = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
        for metric in metrics:
            if not isinstance(metric, keras.metrics.Metric):
                raise ValueError(
                    "A language model's loss is its head's: `compile` takes no other. `metrics` "
                    "must be metric objects that take the negative log-likelihood per token, such "
                    f"as models.Perplexity(). Received: {metric!r}"
                )
        devices.check_compile(self, jit_compile, steps_per_execution)
        super().compile(
            optimizer=optimizer,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
            auto_scale_loss=auto_scale_loss,
        )
        self._auto_scale_loss = auto_scale_loss
        self._set_token_metrics(metrics)

    def _set_token_metrics(self, metrics):
        # Past Keras' tracking, which would refuse metrics in a model that is built already.
        object.__setattr__(self, "_token_metrics", metrics)

    @property
    def metrics(self):
        # Keras' own loss tracker weighs a batch by its rows; ours by its counted tokens.
        return [self._mean_loss, *self._token_metrics] if self.compiled else []

    def get_compile_config(self):
        if not self.compiled:
            return None
        return {
            "optimizer": keras.saving.serialize_keras_object(self.optimizer),
            "metrics": [keras.saving.serialize_keras_object(m) for m in self._token_metrics],
            "run_eagerly": self.run_eagerly,
            "steps_per_execution": self.steps_per_execution,
            "jit_compile": self.jit_compile,
            "auto_scale_loss": self._auto_scale_loss,
        }

    def compile_from_config(self, config):
        deserialize = keras.saving.deserialize_keras_object
        objects = {
            "optimizer": deserialize(config["optimizer"]),
            "metrics": [deserialize(m) for m in config["metrics"]],
        }
        self.compile(**{**config, **objects})
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def train_step(self, *args):
        with self._counting(args[-1]):
            return super().train_step(*args)

    def test_step(self, *args):
        with self._counting(args[-1]):
            return super().test_step(*args)

    @contextlib.contextmanager
    def _counting(self, data):
        """While it is open, `call` returns what `compute_loss` needs for the last n outputs."""
        _, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        if y is None:
            raise ValueError(
                "A language model is trained and evaluated on (tokens, next tokens). "
                "Received no targets."
            )
        # An integer where the length is static; the backbone can only be told such a one.
        self._counted = ops.shape(y)[1]
        try:
            yield
        finally:
            self._counted = None

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Returns the loss of a batch and feeds the metrics; see the class for the formula.

        Raises:
            ValueError: It is called outside of `train_step` and `test_step`, within which the
                model's outputs are what it needs.
        """
        if not isinstance(y_pred, dict):
            raise ValueError(
                "Only within a LanguageModel's own `train_step` and `test_step` does a call return "
                "what its loss is made of. In a loop of your own make a loss of the "
                "log-probabilities that it returns, or call `super().train_step(data)`."
            )
        raw = y_pred["raw"]
        output = self.output_dropout(raw, training=training)
        nll = self._nll(output, y, training)
        weight = token_loss.token_weight(sample_weight, nll)
        counted = ops.sum(weight)
        loss = token_loss.mean(nll, weight)
        self._update_metrics(nll, weight)
        if training:
            loss = loss + self._auxiliary_loss(y_pred, y, weight)
            loss = loss + self._penalties(raw, output, weight)
            loss = loss + sum(self.losses)
        self._mean_loss.update_state(loss, sample_weight=counted)
        return devices.share(loss, counted)

    def _nll(self, hidden, targets, training):
        # Only a head with dropout of its own needs to know.
        options = {"training": training} if self._head_takes_training else {}
        return self.head.loss(hidden, targets, **options)

    def _auxiliary_loss(self, y_pred, y, weight):
        if not self.aux_weight:
            return 0.0
        aux = self.aux_dropout(y_pred["aux"], training=True)
        nll = self._nll(aux, ops.repeat(y[:, None], aux.shape[1], axis=1), training=True)
        # A sum over the auxiliary outputs of means over tokens.
        return self.aux_weight * token_loss.mean(ops.sum(nll, axis=1), weight)

    def _penalties(self, raw, output, weight):
        penalty = 0.0
        if self.activation_reg:
            penalty += self.activation_reg * token_loss.activation(output, weight)
        if self.temporal_activation_reg:
            penalty += self.temporal_activation_reg * token_loss.change(raw, weight)
        return penalty

    def _update_metrics(self, nll, weight):
        for metric in self._token_metrics:
            metric.update_state(nll, sample_weight=weight)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return self.get_metrics_result()

    # Serialization

    def load_weights(self, filepath, skip_mismatch=False, **options):
        """As `keras.Model.load_weights`, but refuses the weights of another vocabulary.

        Raises:
            ValueError: The file is that of a model with other tokens, or does not fit otherwise.
        """
        if not skip_mismatch:
            check_weights_file(filepath, self)
        try:
            super().load_weights(filepath, skip_mismatch=skip_mismatch, **options)
        except ValueError as error:
            raise ValueError(f"{filepath} does not fit this model: {error}") from error

    def get_config(self):
        serialize = keras.saving.serialize_keras_object
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "embedding_dim": self.embedding_dim,
            "backbone": _serialize_unbuilt(self.backbone),
            "head": _serialize_unbuilt(self.head),
            "tie_embeddings": self.tie_embeddings,
            "embedding_dropout": self.embedding_dropout.rate,
            "input_dropout": self.input_dropout.rate,
            "input_dropout_kind": self.input_dropout_kind,
            "output_dropout": self.output_dropout.rate,
            "aux_weight": self.aux_weight,
            "activation_reg": self.activation_reg,
            "temporal_activation_reg": self.temporal_activation_reg,
            "embeddings_initializer": serialize(self.embedding.embeddings_initializer),
            "vocabulary": None if self.vocabulary is None else serialize(self.vocabulary),
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config):
        layers = {
            name: keras.saving.deserialize_keras_object(config[name])
            for name in ("backbone", "head", "embeddings_initializer", "vocabulary")
        }
        return cls(**{**config, **layers})


def _serialize_unbuilt(layer):
    """Leaves the building to the model: a head must be tied before it is built."""
    serialized = keras.saving.serialize_keras_object(layer)
    serialized.pop("build_config", None)
    return serialized


def _uniform(seed):
    return keras.initializers.RandomUniform(-0.1, 0.1, seed=seed)


def _check_ties(head):
    if not hasattr(head, "tie") or head.built:
        reason = "is built already" if hasattr(head, "tie") else "has no method `tie`"
        raise ValueError(
            "With tie_embeddings=True the head takes the embedding's matrix, before it is built. "
            f"Set tie_embeddings=False, or pass another head. Received: {head!r}, which {reason}"
        )


def _input_dropout(kind):
    kinds = {"variational": VariationalDropout, "element": keras.layers.Dropout}
    if kind not in kinds:
        raise ValueError(f"`input_dropout_kind` must be one of {sorted(kinds)}. Received: {kind!r}")
    return kinds[kind]


def _takes(method, argument):
    return argument in inspect.signature(method).parameters


def _sub(seed, offset):
    """A seed of its own for every random layer."""
    return None if seed is None else seed + offset
