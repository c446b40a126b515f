"""A language model around any causal backbone layer."""

import inspect
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.exported_stream import ExportedStream
from keras_streams.graph import StreamOptions
from keras_streams.graph_stream import GraphStream
from keras_streams.protocol import at_least_float32, check_built, check_shape, streams_itself
from trellis_keras._keras_internals import all_layers, no_automatic_dependency_tracking
from trellis_keras.layers.checks import (
    check_choice,
    check_not_negative,
    check_positive,
    check_rates,
)
from trellis_keras.layers.heads import DenseHead, Head
from trellis_keras.layers.regularization import Dropout, EmbeddingDropout, VariationalDropout
from trellis_keras.layers.seeds import sub_seed
from trellis_keras.layers.stateful import StatefulLayer
from trellis_keras.models import losses
from trellis_keras.models.base import (
    BackboneModel,
    check_is_layer,
    check_rank,
    check_tokens,
    embed,
    serialize_unbuilt,
    token_ids,
)
from trellis_keras.models.generation import TextGenerator
from trellis_keras.saved_files import saved_tokens
from trellis_keras.types import Cache, Initializer, Shape, Tensor

_INPUT_DROPOUTS = {"variational": VariationalDropout, "element": Dropout}


@keras.saving.register_keras_serializable("trellis_keras")
class LanguageModel(TextGenerator, BackboneModel):
    """Embedding, causal backbone and output head, trained on next-token prediction.

    `fit` and `evaluate` take token ids x (batch, time) and targets y (batch, n), n <= time: the
    next tokens at the last n positions. The positions before them are context, which is read but
    not scored (effective-history training, TrellisNet appendix B.2); a `TrellisLayer` or a `TCN`
    skips positions that no scored output depends on. With dropouts D, the model is

        h = backbone(D_input(D_embedding(embedding(x))))      output = D_output(h)
        log p = head(output)

    and the training loss, with means over the scored tokens, is

        mean(-log p(y)) + aux_weight * sum_a mean(-log p_a(y))
            + activation_reg * mean(output_t^2) + temporal_activation_reg * mean((h_t - h_{t-1})^2),

    where p_a are the head's probabilities for the backbone's auxiliary outputs. The validation
    loss is the first term. Values reported for an epoch are exact means over all its tokens.

    Reference:

    - [Merity et al., 2018](https://arxiv.org/abs/1708.02182), for AR and TAR

    Args:
        vocabulary_size: Positive integer, number of tokens V.
        embedding_dim: Positive integer, width of the embedding.
        backbone: Causal layer from (batch, time, embedding_dim) to (batch, time, channels): a
            `TrellisLayer`, a `TCN`, a `StackedRNN` of Keras' recurrent layers, or any other, such
            as `keras.layers.LSTM(..., return_sequences=True)`. With `return_aux=True` it also
            returns auxiliary outputs. With `stateful=True` it carries its states from batch to
            batch.
        head: `layers.Head`. Defaults to `DenseHead(vocabulary_size)`.
        tie_embeddings: Boolean, whether the head's output matrix is tied to the embedding.
            Defaults to `True`.
        embedding_dropout: Float in [0, 1), rate of word dropout (each word type is dropped or kept
            for a whole batch). Defaults to `0`.
        input_dropout: Float in [0, 1), dropout rate of the embedded input. Defaults to `0`.
        input_dropout_kind: `"variational"` drops the same channels at all steps of a row (the
            TrellisNet authors' code), `"element"` individual values (the TCN authors' code).
            Defaults to `"variational"`.
        output_dropout: Float in [0, 1), variational dropout rate of the backbone's output and
            auxiliary outputs. Defaults to `0`.
        aux_weight: Float, weight of the sum of the auxiliary losses. Defaults to `0`.
        activation_reg: Float, weight of the mean square of the output, AR of Merity et al. (2018).
            Defaults to `0`.
        temporal_activation_reg: Float, weight of the mean squared change between steps, TAR of
            Merity et al. (2018). Defaults to `0`.
        embeddings_initializer: Initializer for the embedding. Defaults to U(-0.1, 0.1), as in the
            TrellisNet authors' code.
        vocabulary: `data.Vocabulary` to save with the model, so that it can read and write text.
            Defaults to `None`.
        seed: Integer seed of the dropouts and the default initializers. Defaults to `None`.

    Call arguments:
        tokens: Integer tensor (batch, time); or, as in a step of `fit` and `evaluate`, a tuple of
            the tokens, the targets (batch, n) and optional weights (batch,) or (batch, n).
        training: Boolean, whether dropout is active. Defaults to `False`.

    Returns:
        Log-probabilities, at least float32: of all tokens at each position (batch, time, V), or
        of the targets (batch, n).

    Example:

    >>> backbone = TrellisLayer(units=24, depth=6, output_units=16)
    >>> model = LanguageModel(vocabulary_size=50, embedding_dim=16, backbone=backbone)
    >>> model.compile("adam")
    >>> tokens = np.random.randint(0, 50, (8, 21))
    >>> _ = model.fit(tokens[:, :-1], tokens[:, 1:], verbose=0)
    >>> model.predict(tokens, verbose=0).shape
    (8, 21, 50)

    With a recurrent backbone of Keras layers that carries its states from batch to batch:

    >>> lstm = keras.layers.LSTM(16, return_sequences=True, return_state=True)
    >>> model = LanguageModel(50, 16, StackedRNN([lstm], stateful=True))
    >>> model.compile("adam")
    >>> _ = model.fit(tokens[:, :-1], tokens[:, 1:], batch_size=4, verbose=0)
    >>> model.generate(tokens[:2, :3], max_length=10).shape
    (2, 10)
    """

    def __init__(
        self,
        vocabulary_size: int,
        embedding_dim: int,
        backbone: keras.Layer,
        *,
        head: Head | None = None,
        tie_embeddings: bool = True,
        embedding_dropout: float = 0.0,
        input_dropout: float = 0.0,
        input_dropout_kind: str = "variational",
        output_dropout: float = 0.0,
        aux_weight: float = 0.0,
        activation_reg: float = 0.0,
        temporal_activation_reg: float = 0.0,
        embeddings_initializer: Initializer = None,
        vocabulary: Any = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        vocabulary_size, embedding_dim = check_positive(
            vocabulary_size=vocabulary_size, embedding_dim=embedding_dim
        )
        check_rates(input_dropout=input_dropout)
        check_not_negative(
            aux_weight=aux_weight,
            activation_reg=activation_reg,
            temporal_activation_reg=temporal_activation_reg,
        )
        check_choice("input_dropout_kind", input_dropout_kind, _INPUT_DROPOUTS)
        _check_backbone(backbone)
        if aux_weight and not getattr(backbone, "return_aux", False):
            raise ValueError(
                "`aux_weight` needs a backbone with auxiliary outputs (return_aux=True). "
                f"Received: aux_weight={aux_weight}, backbone={backbone}"
            )
        if vocabulary is not None and len(vocabulary) != vocabulary_size:
            raise ValueError(
                f"The vocabulary has {len(vocabulary)} tokens, but vocabulary_size="
                f"{vocabulary_size}"
            )
        self.autocast = False  # the inputs are integers; the layers do their own casting
        self.vocabulary_size = vocabulary_size
        self.embedding_dim = embedding_dim
        self.input_dropout_kind = input_dropout_kind
        self.seed = seed
        self.tie_embeddings = tie_embeddings
        self.aux_weight = aux_weight
        self.activation_reg = activation_reg
        self.temporal_activation_reg = temporal_activation_reg
        self.vocabulary = vocabulary
        policy = self.dtype_policy
        if embeddings_initializer is None:
            embeddings_initializer = self._uniform("embedding")
        self.embedding = keras.layers.Embedding(
            vocabulary_size,
            embedding_dim,
            embeddings_initializer,
            # JAX would add up the gradients of a frequent token in half precision, and in bfloat16
            # 256 + 1 is 256.
            dtype=self.variable_dtype,
            name="embedding",
        )
        self.embedding_dropout = EmbeddingDropout(
            embedding_dropout, vocabulary_size, self._seed_of("embedding_dropout"), dtype=policy
        )
        self.input_dropout = _INPUT_DROPOUTS[input_dropout_kind](
            input_dropout, seed=self._seed_of("input_dropout"), dtype=policy
        )
        self.backbone = backbone
        self._takes_output_length = "output_length" in inspect.signature(backbone.call).parameters
        self.output_dropout, self.aux_dropout = (
            VariationalDropout(output_dropout, self._seed_of(name), dtype=policy)
            for name in ("output_dropout", "aux_dropout")
        )
        if head is None:
            initializer = self._uniform("head")
            head = DenseHead(
                vocabulary_size, kernel_initializer=initializer, name="head", dtype=policy
            )
        if getattr(head, "vocabulary_size", vocabulary_size) != vocabulary_size:
            raise ValueError(
                f"The head has vocabulary_size={head.vocabulary_size}, but the model has "
                f"vocabulary_size={self.vocabulary_size}"
            )
        self.head = head
        if tie_embeddings:
            head.tie(self.embedding)
        self._token_metrics: list[keras.metrics.Metric] = []
        self._compiled_rows: dict[str, int] = {}

    def _seed_of(self, part):
        return sub_seed(self.seed, type(self).__name__, part)

    def _uniform(self, part):
        return keras.initializers.RandomUniform(-0.1, 0.1, seed=self._seed_of(part))

    @property
    def input_dtype(self) -> str:
        """The dtype of the inputs in the signature that Keras' export derives."""
        return "int32"

    def build(self, input_shape: Shape) -> None:
        if isinstance(input_shape[0], (list, tuple)):  # of tokens and targets
            input_shape = input_shape[0]
        if len(input_shape) != 2:
            raise ValueError(f"Tokens have axes (batch, time). Received: shape {input_shape}")
        self.embedding.build(input_shape)
        embedded = (*input_shape, self.embedding_dim)
        if not self.backbone.built:
            self.backbone.build(embedded)
        hidden = self.backbone.compute_output_shape(embedded)
        if not self.head.built:
            self.head.build(hidden[0] if isinstance(hidden[0], tuple) else hidden)

    # Forward pass

    def call(self, tokens: Tensor | tuple[Tensor, ...], training: bool = False) -> Tensor:
        if isinstance(tokens, (list, tuple)):
            return self._target_log_probs(*tokens, training=training)
        output = self.output_dropout(self.encode(tokens, training)["hidden"], training=training)
        return self.head(output, training=training)

    def encode(
        self, tokens: Tensor, training: bool = False, output_length: int | Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns the backbone's outputs.

        Args:
            tokens: Integer tensor (batch, time).
            training: Boolean, whether dropout is active. Defaults to `False`.
            output_length: Number of last positions to return. Defaults to `None`, all of them.

        Returns:
            A dict with `"hidden"` (batch, output_length, channels), the head's input before output
            dropout, and, if the backbone has auxiliary outputs, `"aux"`
            (batch, number, output_length, channels).
        """
        tokens = token_ids(tokens)
        within = ops.clip(tokens, 0, self.vocabulary_size - 1)
        x = self.embedding_dropout(self.embed(tokens), within, training=training)
        x = self.input_dropout(x, training=training)
        options = {}
        if self._takes_output_length and isinstance(output_length, int):
            options["output_length"] = output_length
        outputs = self.backbone(x, training=training, **options)
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        if output_length is not None:
            outputs = [output[..., -output_length:, :] for output in outputs]
        return dict(zip(("hidden", "aux"), outputs, strict=False))

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the embedding of tokens (...), NaN for ids outside [0, vocabulary_size)."""
        return ops.cast(embed(self.embedding, tokens), self.compute_dtype)

    def _target_log_probs(self, tokens, targets, sample_weight=None, *, training=False):
        """Returns the log-probabilities of the targets, and adds the terms of the training loss.

        Only the last positions are computed, as many as there are targets, and the head need not
        compute the log-probabilities of all tokens.
        """
        outputs = self.encode(tokens, training, ops.shape(targets)[1])
        hidden = outputs["hidden"]
        output = self.output_dropout(hidden, training=training)
        nll = self.head.loss(output, targets, training=training)
        weight = losses.token_weights(sample_weight, nll)
        if training and self.aux_weight and "aux" in outputs:
            aux = self.aux_dropout(outputs["aux"], training=True)
            targets = ops.repeat(targets[:, None], aux.shape[1], axis=1)
            aux_nll = ops.sum(self.head.loss(aux, targets, training=True), axis=1)
            self.add_loss(self.aux_weight * losses.weighted_mean(aux_nll, weight))
        if training and self.activation_reg:
            self.add_loss(self.activation_reg * losses.activation_reg(output, weight))
        if training and self.temporal_activation_reg:
            reg = losses.temporal_activation_reg(hidden, weight)
            self.add_loss(self.temporal_activation_reg * reg)
        return -nll

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*input_shape, self.vocabulary_size)

    def compute_output_spec(self, tokens: Tensor, training: bool = False) -> keras.KerasTensor:
        shape = self.compute_output_shape(tokens.shape)
        return keras.KerasTensor(shape, at_least_float32(self.head.compute_dtype))

    # Loss

    def compute_loss(
        self,
        x: Any = None,
        y: Tensor = None,
        y_pred: Tensor = None,
        sample_weight: Tensor = None,
        training: bool = True,
    ) -> Tensor:
        """Returns the loss of a batch and updates the metrics. See the class for the formula.

        `y_pred` are the log-probabilities of the targets, `model(model.loss_inputs(x, y, weight))`.
        """
        weight = losses.token_weights(sample_weight, y_pred)
        loss = losses.weighted_mean(-y_pred, weight)
        if training:
            loss = loss + sum(self.losses)
        for metric in self._token_metrics:
            metric.update_state(-y_pred, sample_weight=weight)
        return self._counted(loss, ops.sum(weight))

    def loss_inputs(self, x: Tensor, y: Tensor, sample_weight: Tensor = None) -> Any:
        if y is None:
            raise ValueError(
                "A language model is trained and evaluated on (tokens, next tokens). "
                "Received no targets."
            )
        steps, targets = x.shape[1], y.shape[1]
        if None not in (steps, targets) and targets > steps:
            raise ValueError(
                "Targets are the next tokens at the last positions of x, at most one per position. "
                f"Received: x of shape {tuple(x.shape)}, y of shape {tuple(y.shape)}"
            )
        return (x, y) if sample_weight is None else (x, y, sample_weight)

    @no_automatic_dependency_tracking  # Keras allows no new metrics in a built model.
    def compile(  # type: ignore[override]  # its loss is the head's
        self,
        optimizer: str | keras.optimizers.Optimizer = "rmsprop",
        metrics: Sequence[keras.metrics.Metric] | keras.metrics.Metric | None = None,
        *,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = True,
    ) -> None:
        """Configures training. The head defines the loss, so there is no `loss` argument.

        Args:
            optimizer: Keras optimizer, or its name. Defaults to `"rmsprop"`.
            metrics: Metrics of the negative log-likelihood per token in nats, such as
                `Perplexity()`, `BitsPerCharacter()` or any `keras.metrics.Metric` with
                `update_state(values, sample_weight)`. Defaults to `None`.
            run_eagerly, steps_per_execution, auto_scale_loss: As in Keras.
            jit_compile: See `BackboneModel.compile`.
        """
        metrics = [] if metrics is None else metrics
        metrics = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
        for metric in metrics:
            if not isinstance(metric, keras.metrics.Metric):
                raise ValueError(
                    "The head defines a language model's loss, so `compile` takes none. `metrics` "
                    "must be metric objects that take the negative log-likelihood per token, such "
                    f"as models.Perplexity(). Received: {metric!r}"
                )
        super().compile(
            optimizer,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=jit_compile,
            auto_scale_loss=auto_scale_loss,
        )
        self._token_metrics = metrics

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        # Keras' own loss tracker would weight a batch by its rows.
        return [self._mean_loss, *self._token_metrics] if self.compiled else []

    def compute_metrics(
        self, x: Any, y: Any, y_pred: Any, sample_weight: Tensor | None = None
    ) -> dict:
        return self.get_metrics_result()  # `compute_loss` has updated them

    def get_compile_config(self) -> dict | None:
        config = super().get_compile_config()
        if not config:
            return None
        for name in ("loss", "loss_weights", "weighted_metrics"):
            config.pop(name, None)
        metrics = [keras.saving.serialize_keras_object(m) for m in self._token_metrics]
        return {**config, "metrics": metrics}

    # fit, evaluate and predict

    def fit(
        self,
        x: Any = None,
        y: Tensor | None = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: list | None = None,
        *,
        shuffle: bool | None = None,
        **kwargs: Any,
    ) -> keras.callbacks.History:
        """Trains the model as `keras.Model.fit` does, with the batches of a text in order.

        Token ids in arrays, tensors, `data.TokenStream`s and the first batch of a `PyDataset` are
        checked first. The states of a stateful backbone are reset at the start of each epoch.

        Args:
            x, y, batch_size, epochs, verbose, callbacks: As in Keras.
            shuffle: Boolean. Defaults to `True` for arrays, and to `False` for a `PyDataset`, whose
                batches Keras would shuffle, and with a stateful backbone.
            **kwargs: Other arguments of `keras.Model.fit`, except `class_weight`.
        """
        self._encode_class_weight(kwargs.get("class_weight"))
        validation = kwargs.get("validation_data")
        validation = validation if isinstance(validation, (tuple, list)) else [validation]
        self._check_data(x, y, kwargs.get("sample_weight"))
        self._check_data(*validation)
        self._build_for_tokens()
        self._check_causal()
        if shuffle is None:
            shuffle = not (self._is_stateful or isinstance(x, keras.utils.PyDataset))
        if self._is_stateful:
            if shuffle:
                raise ValueError("A stateful backbone needs batches in order: use shuffle=False.")
            trained, held_out = x, validation[0]
            if held_out is None and (split := kwargs.get("validation_split")):
                end = math.floor(len(x) * (1 - split))
                trained, held_out = x[:end], x[end:]
            if held_out is not None:  # checked now, before an epoch is trained
                rows = kwargs.get("validation_batch_size") or batch_size
                _rows_per_batch(held_out, rows, "validation data of ")
            self.allocate_states(trained, batch_size, training=True)
            reset = keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda *_: self.backbone.reset_state(training=True)
            )
            callbacks = [reset, *keras.tree.flatten(callbacks or [])]
        return super().fit(x, y, batch_size, epochs, verbose, callbacks, shuffle=shuffle, **kwargs)

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Evaluates as `keras.Model.evaluate` does; a stateful backbone starts from zero states."""
        self._check_data(x, y, sample_weight)
        self._build_for_tokens()
        if self._is_stateful:
            self.allocate_states(x, batch_size, training=False)
        return super().evaluate(x, y, batch_size, verbose, sample_weight, *args, **kwargs)

    def predict(
        self, x: Any, batch_size: int | None = None, *args: Any, **kwargs: Any
    ) -> np.ndarray:
        """Predicts as `keras.Model.predict` does; a stateful backbone starts from zero states."""
        self._check_tokens(x)
        if self._is_stateful:
            self.allocate_states(x, batch_size, training=False)
        return super().predict(x, batch_size, *args, **kwargs)

    def _checked_data(self, x, y=None):  # tokens outside the vocabulary give NaN in a batch
        self._build_for_tokens()
        return x, y

    def _build_for_tokens(self):
        """Builds the model; Keras would do so, and save it, for the shapes of a batch's targets."""
        if not self.built:
            self.build((None, None))

    def _check_data(self, x, y=None, sample_weight=None):
        """Checks what `fit` and `evaluate` take, before JAX gives the variables to a step."""
        self._check_tokens(x, y)
        if not hasattr(x, "shape"):
            return
        if y is not None and not hasattr(y, "shape"):
            raise ValueError(f"`y` must be an array like `x`. Received: a {type(y).__name__}")
        self.loss_inputs(x, y)
        if 0 in y.shape:
            raise ValueError(f"`y` must have at least one target. Received: shape {tuple(y.shape)}")
        if sample_weight is not None:
            rows, *steps = np.shape(sample_weight) or [0]
            if rows != y.shape[0] or math.prod(steps) not in (1, y.shape[1]):
                raise ValueError(
                    "`sample_weight` must have shape (batch,), or that of y. Received: shape "
                    f"{np.shape(sample_weight)} with y of shape {tuple(y.shape)}"
                )

    def _check_tokens(self, *sources):
        for source in sources:
            if ops.is_tensor(source):
                source = ops.convert_to_numpy(source)
            if isinstance(source, np.ndarray):
                check_rank("tokens", source, "(batch, time)")
                check_tokens(source, self.vocabulary_size)
            elif hasattr(source, "token_range"):  # a data.TokenStream
                check_tokens(np.array(source.token_range), self.vocabulary_size)
            elif isinstance(source, keras.utils.PyDataset):
                self._check_tokens(*keras.utils.unpack_x_y_sample_weight(source[0])[:2])

    @property
    def _is_stateful(self):
        return getattr(self.backbone, "stateful", False)

    def allocate_states(self, x: Any, batch_size: int | None, training: bool) -> None:
        """Allocates zero states of a stateful backbone for the batch size that Keras will use."""
        rows = _rows_per_batch(x, batch_size)
        self.backbone.reset_state(rows, training)
        # A function compiled for any batch size would keep the states of a single one.
        for function in ["train_function"] if training else ["test_function", "predict_function"]:
            if self._compiled_rows.get(function) != rows:
                setattr(self, function, None)
                self._compiled_rows[function] = rows

    # Streaming

    def stream(self) -> Any:
        stream = super().stream()
        _check_stream(stream)
        return stream

    def _check_causal(self):
        """Raises ValueError if the backbone reads later tokens, as far as its stream tells."""
        try:
            # Without the proof of `to_stream`, which takes seconds.
            itself = streams_itself(self.backbone)
            stream = self.backbone if itself else GraphStream(self.backbone, StreamOptions())
        except Exception:  # whatever a backbone raises that does not stream
            return
        _check_stream(stream)

    def export_stream(self) -> ExportedStream:
        """Returns the stream that exporters of steps write: from tokens to logits.

        The log-probabilities of a head without logits are logits too.
        """
        logits = self.head.logits if type(self.head) is DenseHead else self.head
        return self._exported_stream(
            self.hidden_step,
            self.hidden_prefill,
            logits,
            inputs=self.vocabulary_size,
            takes_token=True,
        )

    def hidden_step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Returns hidden states (batch, channels) after tokens (batch,), and the new cache."""
        stream = self.stream()
        return stream.step(self._embed_checked(tokens, (None,)), cache)

    def hidden_prefill(self, tokens: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Returns hidden states (batch, time, channels) after tokens, and the cache."""
        stream = self.stream()
        embedded = self._embed_checked(tokens, (None, None))
        if embedded.shape[1] == 0:
            raise ValueError("`prefill` needs at least one token. Received: shape (batch, 0)")
        return stream.prefill(embedded, cache)

    def _embed_checked(self, tokens, shape):
        tokens = ops.convert_to_tensor(tokens)
        check_shape("tokens", tokens, shape)
        return self.embed(tokens)

    def next_log_probs(self, hidden: Tensor, cache: Cache) -> Tensor:
        """Returns log-probabilities (batch, V) after the last hidden states (batch, channels)."""
        return self.head(hidden)

    def text_loss(self, tokens: Tensor) -> Tensor:
        """Returns the loss of tokens[:, 1:] in nats (batch, time - 1), in one forward pass."""
        return self.head.loss(self.encode(tokens[:, :-1])["hidden"], tokens[:, 1:])

    def segment_loss(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Returns a segment's `text_loss` after a cache, and the cache before the last token."""
        hidden, cache = self.hidden_prefill(tokens[:, :-1], cache)
        return self.head.loss(hidden, tokens[:, 1:]), cache

    # Serialization

    def load_weights(
        self, filepath: str | os.PathLike, skip_mismatch: bool = False, **kwargs: Any
    ) -> None:
        """Loads weights as `keras.Model.load_weights` does, after checking the vocabulary."""
        if not skip_mismatch:
            self._check_vocabulary(filepath)
        super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def _check_vocabulary(self, path):
        tokens = saved_tokens(path)
        if None in (tokens, self.vocabulary):
            return
        pairs = enumerate(itertools.zip_longest(tokens, self.vocabulary.tokens))
        for place, (theirs, ours) in pairs:
            if theirs != ours:
                raise ValueError(
                    f"{path} was saved with another vocabulary: token {place} is {theirs!r} in the "
                    f"file and {ours!r} in the model."
                )

    def get_config(self) -> dict:
        serialize = keras.saving.serialize_keras_object
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "embedding_dim": self.embedding_dim,
            "backbone": serialize_unbuilt(self.backbone),
            "head": serialize_unbuilt(self.head),
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
    def from_config(cls, config: dict) -> "LanguageModel":
        objects = {
            name: keras.saving.deserialize_keras_object(config[name])
            for name in ("backbone", "head", "embeddings_initializer", "vocabulary")
        }
        return cls(**{**config, **objects})


def check_language_model(model: Any) -> None:
    """Raises ValueError unless a model is a built `LanguageModel`."""
    if not isinstance(model, LanguageModel):
        raise ValueError(f"`model` must be a LanguageModel. Received: {model!r}")
    check_built(model)


def _check_stream(stream):
    """Raises ValueError if outputs are not those of the tokens so far, one for each."""
    delay, rate = getattr(stream, "delay", 0), getattr(stream, "rate", 1)
    if (delay, rate) != (0, 1):
        raise ValueError(
            "The backbone of a language model must return one output per token, which does not "
            f"depend on later tokens. Received: outputs with delay={delay} and rate={rate}"
        )


def _reads_later_steps(layer):
    is_wide = getattr(layer, "kernel_size", None) != (1,)
    is_centered = is_wide and getattr(layer, "padding", None) == "same"
    is_backwards = getattr(layer, "go_backwards", False) or not getattr(layer, "is_causal", True)
    return isinstance(layer, keras.layers.Bidirectional) or is_backwards or is_centered


def _check_backbone(backbone):
    """Raises ValueError unless a backbone has one output per step and carries states safely."""
    check_is_layer(backbone)
    needed = {"return_state": False, "return_sequences": True, "output_length": None}
    for name, value in needed.items():
        if getattr(backbone, name, value) != value:
            raise ValueError(
                f"The backbone of a language model must have {name}={value}. "
                f"Received: {name}={getattr(backbone, name)}"
            )
    parts = all_layers(backbone)
    if any(_reads_later_steps(part) for part in parts):
        raise ValueError(
            "The outputs of a language model's backbone must not depend on later tokens: use "
            'go_backwards=False, padding="causal", and no Bidirectional layer. '
            f"Received: {backbone}"
        )
    if any(getattr(part, "stateful", False) for part in parts if part is not backbone):
        raise ValueError(
            "A stateful layer must itself be the backbone, so that its states are reset: use "
            "stateful=False, or pass the layer without the layers around it. "
            f"Received: {backbone} with stateful layers in it"
        )
    if getattr(backbone, "stateful", False) and not isinstance(backbone, StatefulLayer):
        raise ValueError(
            "A stateful backbone must keep separate states for training and validation, as "
            "TrellisLayer and StackedRNN do (Keras' own recurrent layers do not: wrap them "
            f"in a StackedRNN(..., stateful=True)). Received: {backbone}"
        )


def _rows_per_batch(x, batch_size, data=""):
    """Returns the number of rows of the batches that Keras will read from x, in all processes."""
    rows, received = None, type(x).__name__
    if isinstance(x, keras.utils.PyDataset):
        rows = len(keras.utils.unpack_x_y_sample_weight(x[0])[0])
    elif hasattr(x, "element_spec"):  # a tf.data.Dataset
        rows = keras.tree.flatten(x.element_spec)[0].shape[0]
    elif hasattr(x, "__len__"):
        batch_size = min(batch_size or 32, len(x))
        rows = None if len(x) % batch_size else batch_size
        received = f"{len(x)} rows with batch_size={batch_size}"
    if rows is None:
        raise ValueError(
            "A stateful backbone needs batches of equal size, known in advance: arrays, a "
            "`keras.utils.PyDataset`, or a `tf.data.Dataset` of batch(..., drop_remainder=True). "
            f"Received: {data}{received}"
        )
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.auto_shard_dataset:
        return rows
    import jax

    return rows * jax.process_count()  # which divide the rows of every batch among them
