"""A language model around any causal backbone layer."""

import contextlib
import inspect
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams.exported import ExportedStream
from keras_streams.protocol import at_least_float32, check_shape
from trellis_keras._keras_internals import all_layers
from trellis_keras.layers.checks import check_positive, check_tokens
from trellis_keras.layers.heads import DenseHead, Head
from trellis_keras.layers.regularization import Dropout, EmbeddingDropout, VariationalDropout
from trellis_keras.layers.seeds import sub_seed
from trellis_keras.layers.stateful import StatefulLayer
from trellis_keras.models import generation, losses
from trellis_keras.models.base import (
    BackboneModel,
    check_no_class_weight,
    check_rank,
    embed,
    serialize_unbuilt,
    token_ids,
)
from trellis_keras.models.saved_files import saved_tokens
from trellis_keras.types import Cache, Initializer, Logs, Shape, Tensor


@keras.saving.register_keras_serializable("trellis_keras")
class LanguageModel(BackboneModel):
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

    Args:
        vocabulary_size: Positive integer, number of tokens V.
        embedding_dim: Positive integer, width of the embedding.
        backbone: Causal layer from (batch, time, embedding_dim) to (batch, time, channels): a
            `TrellisLayer`, a `TCN`, a `StackedRNN` of Keras' recurrent layers, or (without
            `generate`) any other, such as `keras.layers.LSTM(..., return_sequences=True)`. With
            `return_aux=True` it also returns auxiliary outputs. With `stateful=True` it carries
            its states from batch to batch.
        head: `layers.Head`. Defaults to `DenseHead(vocabulary_size)`.
        tie_embeddings: Boolean, whether the head's output matrix is tied to the embedding.
            Defaults to `True`.
        embedding_dropout: Float in [0, 1), rate of word dropout (each word type is dropped or kept
            for a whole batch). Defaults to 0.
        input_dropout: Float in [0, 1), dropout rate of the embedded input. Defaults to 0.
        input_dropout_kind: `"variational"` drops the same channels at all steps of a row (the
            TrellisNet authors' code), `"element"` individual values (the TCN authors' code).
            Defaults to `"variational"`.
        output_dropout: Float in [0, 1), variational dropout rate of the backbone's output and
            auxiliary outputs. Defaults to 0.
        aux_weight: Float, weight of the sum of the auxiliary losses. Defaults to 0.
        activation_reg: Float, weight of the mean square of the output, AR of Merity et al. (2018).
            Defaults to 0.
        temporal_activation_reg: Float, weight of the mean squared change between steps, TAR of
            Merity et al. (2018). Defaults to 0.
        embeddings_initializer: Initializer for the embedding. Defaults to U(-0.1, 0.1), as in the
            TrellisNet authors' code.
        vocabulary: `data.Vocabulary` to save with the model, so that it can read and write text.
            Defaults to `None`.
        seed: Integer seed of the dropouts and the default initializers. Defaults to `None`.

    Call arguments:
        tokens: Integer tensor (batch, time).
        training: Whether dropout is active.

    Returns:
        Log-probabilities (batch, time, V), at least float32.

    Raises:
        ValueError: If arguments are inconsistent, or tokens are not integers or lie outside
            the vocabulary.

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
        self.autocast = False  # the inputs are integers; the layers do their own casting
        _check_backbone(backbone, aux_weight)
        if vocabulary is not None and len(vocabulary) != vocabulary_size:
            raise ValueError(
                f"The vocabulary has {len(vocabulary)} tokens, but vocabulary_size="
                f"{vocabulary_size}"
            )
        self.vocabulary_size = vocabulary_size
        self.embedding_dim = embedding_dim
        self.tie_embeddings = tie_embeddings
        self.input_dropout_kind = input_dropout_kind
        self.aux_weight = aux_weight
        self.activation_reg = activation_reg
        self.temporal_activation_reg = temporal_activation_reg
        self.vocabulary = vocabulary
        self.seed = seed

        def seed_of(part):
            return sub_seed(seed, "LanguageModel", part)

        def uniform(part):
            return keras.initializers.RandomUniform(-0.1, 0.1, seed=seed_of(part))

        policy = {"dtype": self.dtype_policy}
        self.embedding = keras.layers.Embedding(
            vocabulary_size,
            embedding_dim,
            uniform("embedding") if embeddings_initializer is None else embeddings_initializer,
            # JAX would add up the gradients of a frequent token in half precision, and in bfloat16
            # 256 + 1 is 256.
            dtype=self.variable_dtype,
            name="embedding",
        )
        self.embedding_dropout = EmbeddingDropout(
            embedding_dropout, vocabulary_size, seed_of("embedding_dropout"), **policy
        )
        kinds = {"variational": VariationalDropout, "element": Dropout}
        if input_dropout_kind not in kinds:
            raise ValueError(
                f"`input_dropout_kind` must be one of {sorted(kinds)}. "
                f"Received: {input_dropout_kind!r}"
            )
        self.input_dropout = kinds[input_dropout_kind](
            input_dropout, seed=seed_of("input_dropout"), **policy
        )
        self.backbone = backbone
        self.output_dropout = VariationalDropout(
            output_dropout, seed_of("output_dropout"), **policy
        )
        self.aux_dropout = VariationalDropout(output_dropout, seed_of("aux_dropout"), **policy)
        if head is None:
            head = DenseHead(vocabulary_size, uniform("head"), name="head", **policy)
        self.head = head
        self._check_head()
        if tie_embeddings:
            head.tie(self.embedding)

        self._takes_output_length = "output_length" in inspect.signature(backbone.call).parameters
        self._counted = None
        self._compiled_rows: dict[str, int] = {}
        # Hidden from Keras' tracking, which forbids new metrics in a built model.
        object.__setattr__(self, "_token_metrics", [])

    def _check_head(self):
        if getattr(self.head, "vocabulary_size", self.vocabulary_size) != self.vocabulary_size:
            raise ValueError(
                f"The head has vocabulary_size={self.head.vocabulary_size}, but the model has "
                f"vocabulary_size={self.vocabulary_size}"
            )
        ties = hasattr(self.head, "tie")
        if self.tie_embeddings and (not ties or self.head.built):
            reason = "is already built" if ties else "has no method `tie`"
            raise ValueError(
                "tie_embeddings=True needs an unbuilt head with a method `tie`. Set "
                "tie_embeddings=False, or pass another head. "
                f"Received: {self.head!r}, which {reason}"
            )

    @property
    def input_dtype(self) -> str:
        """The dtype of the inputs in the signature that Keras' export derives."""
        return "int32"

    def build(self, input_shape: Shape) -> None:
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

    def call(self, tokens: Tensor, training: bool = False) -> Tensor:
        if self._counted is not None:
            return self.encode(tokens, training, self._counted)
        return self.head(self.encode(tokens, training)["hidden"])

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

        Raises:
            ValueError: If the tokens are not integers.
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
        """Returns the embedding of tokens, NaN for ids outside [0, vocabulary_size).

        Args:
            tokens: Integer tensor (...).

        Raises:
            ValueError: If the tokens are not integers.
        """
        return ops.cast(embed(self.embedding, tokens), self.compute_dtype)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        return (*input_shape, self.vocabulary_size)

    def compute_output_spec(self, tokens: Tensor, training: bool = False) -> keras.KerasTensor:
        shape = self.compute_output_shape(tokens.shape)
        return keras.KerasTensor(shape, at_least_float32(self.head.compute_dtype))

    # Loss

    def compute_loss(
        self,
        x: Tensor = None,
        y: Tensor = None,
        y_pred: Any = None,
        sample_weight: Tensor = None,
        training: bool = True,
    ) -> Tensor:
        """Returns the loss of a batch and updates the metrics. See the class for the formula.

        Args:
            x: Unused.
            y: Integer tensor (batch, n), the targets.
            y_pred: The model's result within `loss_mode`.
            sample_weight: Tensor (batch,) or (batch, n). Defaults to 1 for every token.
            training: Boolean, whether to add the terms of the training loss.

        Raises:
            ValueError: If `y_pred` was not computed within `loss_mode`, as in `train_step` and
                `test_step`.
        """
        if not isinstance(y_pred, dict):
            raise ValueError(
                "`compute_loss` needs the outputs of a call in `train_step` or `test_step`. In a "
                "custom training loop, compute the loss from the log-probabilities returned by a "
                "call, or call `super().train_step(data)`. "
                f"Received: y_pred of type {type(y_pred).__name__}"
            )
        hidden = y_pred["hidden"]
        output = self.output_dropout(hidden, training=training)
        nll = self.head.loss(output, y, training=training)
        weight = losses.token_weights(sample_weight, nll)
        loss = losses.weighted_mean(nll, weight)
        if training and self.aux_weight:
            aux = self.aux_dropout(y_pred["aux"], training=True)
            targets = ops.repeat(y[:, None], aux.shape[1], axis=1)
            aux_nll = ops.sum(self.head.loss(aux, targets, training=True), axis=1)
            loss = loss + self.aux_weight * losses.weighted_mean(aux_nll, weight)
        if training and self.activation_reg:
            loss = loss + self.activation_reg * losses.activation_reg(output, weight)
        if training and self.temporal_activation_reg:
            reg = losses.temporal_activation_reg(hidden, weight)
            loss = loss + self.temporal_activation_reg * reg
        if training:
            loss = loss + sum(self.losses)

        counted = ops.sum(weight)
        for metric in self._token_metrics:
            metric.update_state(nll, sample_weight=weight)
        self._mean_loss.update_state(loss, sample_weight=counted)
        return losses.scale_loss_for_replicas(loss, counted)

    @contextlib.contextmanager
    def loss_mode(self, data: tuple) -> Iterator[None]:
        """Context in which a call returns what `compute_loss` needs for the scored positions.

        During training and evaluation the head computes the loss from the hidden states, without
        the log-probabilities of all words.

        Args:
            data: (x, y) or (x, y, sample_weight); y (batch, n) determines how many positions are
                scored.

        Raises:
            ValueError: If there are no targets.
        """
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        if y is None:
            raise ValueError(
                "A language model is trained and evaluated on (tokens, next tokens). "
                "Received no targets."
            )
        _check_lengths(x, y)
        self._counted = ops.shape(y)[1]
        try:
            yield
        finally:
            self._counted = None

    def train_step(self, *args: Any) -> Any:
        with self.loss_mode(args[-1]):
            return super().train_step(*args)

    def test_step(self, *args: Any) -> Any:
        with self.loss_mode(args[-1]):
            return super().test_step(*args)

    def compile(  # type: ignore[override]  # its loss is the head's
        self,
        optimizer: Any = "rmsprop",
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
            jit_compile: Boolean or `"auto"`, which also compiles with XLA on a CPU if the backbone
                is faster with it, see `BackboneModel.compile`. Defaults to `"auto"`.

        Raises:
            ValueError: If a metric is not a metric object, or an option is not supported on several
                replicas of `tf.distribute`.
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
        object.__setattr__(self, "_token_metrics", metrics)

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
        validation_data: Any = None,
        shuffle: bool | None = None,
        class_weight: None = None,
        **kwargs: Any,
    ) -> keras.callbacks.History:
        """Trains the model as `keras.Model.fit` does, with the batches of a text in order.

        Token ids in arrays, tensors, `data.TokenStream`s and the first batch of a `PyDataset` are
        checked first. The states of a stateful backbone are reset at the start of each epoch.

        Args:
            x, y, batch_size, epochs, verbose, callbacks, validation_data: As in Keras.
            shuffle: Boolean. Defaults to `True` for arrays, and to `False` for a `PyDataset`, whose
                batches Keras would shuffle, and with a stateful backbone.
            class_weight: Must be `None`.
            **kwargs: Other arguments of `keras.Model.fit`.

        Raises:
            ValueError: If tokens lie outside the vocabulary, or the batches are unsuitable for a
                stateful backbone.
        """
        check_no_class_weight(class_weight)
        is_tuple = isinstance(validation_data, tuple)
        self._check_tokens(x, y, *(validation_data[:2] if is_tuple else [validation_data]))
        if y is not None:
            _check_lengths(x, y)
        if shuffle is None:
            shuffle = not (self._is_stateful or isinstance(x, keras.utils.PyDataset))
        if self._is_stateful:
            if shuffle:
                raise ValueError("A stateful backbone needs batches in order: use shuffle=False.")
            split = kwargs.get("validation_split")
            trained = x[: math.floor(len(x) * (1 - split))] if split else x
            self.allocate_states(trained, batch_size, training=True)
            callbacks = [_ResetStates(), *keras.tree.flatten(callbacks or [])]
        return super().fit(
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            verbose=verbose,
            callbacks=callbacks,
            validation_data=validation_data,
            shuffle=shuffle,
            **kwargs,
        )

    def evaluate(
        self, x: Any = None, y: Tensor | None = None, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        """Evaluates as `keras.Model.evaluate` does; a stateful backbone starts from zero states."""
        self._check_tokens(x, y)
        if y is not None:
            _check_lengths(x, y)
        if self._is_stateful:
            self.allocate_states(x, batch_size, training=False)
        return super().evaluate(x, y, batch_size=batch_size, **kwargs)

    def predict(self, x: Any, batch_size: int | None = None, **kwargs: Any) -> np.ndarray:
        """Predicts as `keras.Model.predict` does; a stateful backbone starts from zero states."""
        self._check_tokens(x)
        if self._is_stateful:
            self.allocate_states(x, batch_size, training=False)
        return super().predict(x, batch_size=batch_size, **kwargs)

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
        """Allocates zero states of a stateful backbone for the batch size that Keras will use.

        Args:
            x: The data passed to `fit`, `evaluate` or `predict`.
            batch_size: As in Keras.
            training: Boolean, whether to allocate the states of training or of evaluation.

        Raises:
            ValueError: If the batch size varies or is not known in advance.
        """
        rows = _rows(x, batch_size) * _processes()
        self.backbone.reset_state(rows, training)
        # A function compiled for any batch size would keep the states of a single one.
        for function in ["train_function"] if training else ["test_function", "predict_function"]:
            if self._compiled_rows.get(function) != rows:
                setattr(self, function, None)
                self._compiled_rows[function] = rows

    # Streaming and generation

    def step(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Reads one token per row, with constant work per token.

        Use `keras_streams.compiled_step(model)` for a compiled function.

        Args:
            tokens: Integer tensor (batch,).
            cache: Result of `initial_cache`, `step` or `prefill`.

        Returns:
            Log-probabilities (batch, V) of the next token, and the new cache.

        Raises:
            ValueError: If the backbone does not stream, the model is not built, or tokens and cache
                do not match.

        Example:

        >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
        >>> model.build((None, None))
        >>> log_probs, cache = model.step(np.array([1, 5]), model.initial_cache(2))
        >>> tuple(log_probs.shape)
        (2, 7)
        """
        hidden, cache = self.hidden_step(tokens, cache)
        return self.next_log_probs(hidden, cache), cache

    def prefill(self, tokens: Tensor, cache: Cache = None) -> tuple[Tensor, Cache]:
        """Reads a whole prompt in one forward pass.

        Args:
            tokens: Integer tensor (batch, time).
            cache: The cache to continue from. Defaults to `None`, the initial cache.

        Returns:
            Log-probabilities (batch, V) of the token after the prompt, and the cache.

        Raises:
            ValueError: As in `step`, or if there are no tokens.
        """
        hidden, cache = self.hidden_prefill(tokens, cache)
        return self.next_log_probs(hidden[:, -1], cache), cache

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

    def export_stream(self) -> ExportedStream:
        """Returns the stream that exporters of steps write: from tokens to logits.

        The log-probabilities of a head without logits are logits too.
        """
        stream = self.stream()
        logits = self.head.logits if type(self.head) is DenseHead else self.head

        def step(tokens, cache):
            hidden, cache = self.hidden_step(tokens, cache)
            return logits(hidden), cache

        return ExportedStream(
            self,
            self.initial_cache,
            step,
            lambda tokens: logits(self.hidden_prefill(tokens)[0]),
            inputs=self.vocabulary_size,
            takes_token=True,
            delay=self.delay,
            rate=self.rate,
            receptive_field=getattr(stream, "receptive_field", None),
        )

    def next_log_probs(self, hidden: Tensor, cache: Cache) -> Tensor:
        """Returns log-probabilities (batch, V) of the next token.

        Args:
            hidden: Tensor (batch, channels), the last hidden states.
            cache: The cache after them.
        """
        return self.head(hidden)

    def text_loss(self, tokens: Tensor) -> Tensor:
        """Returns the loss of tokens[:, 1:] in nats (batch, time - 1), in one forward pass."""
        return self.head.loss(self.encode(tokens[:, :-1])["hidden"], tokens[:, 1:])

    def segment_loss(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Returns the `text_loss` of a segment, and the cache before tokens[:, -1].

        Args:
            tokens: Integer tensor (batch, time).
            cache: The cache before tokens[:, 0].
        """
        hidden, cache = self.hidden_prefill(tokens[:, :-1], cache)
        return self.head.loss(hidden, tokens[:, 1:]), cache

    def generate(
        self,
        prompts: Any,
        max_length: int,
        sampler: Any = "top_p",
        *,
        seed: int | None = None,
        stop_tokens: Any = None,
    ) -> np.ndarray | str | list[str]:
        """Continues prompts, token by token.

        The prompts may differ in length: their common length is read in one pass, and the rest of
        the longer prompts while the other rows are generated. With a deterministic sampler each row
        equals the result for that prompt alone (except for rounding, when two tokens are equally
        good); the other samplers draw for all rows together.

        Different lengths cause few compilations. Prompts are read in segments of 32, 64, 128, ...
        tokens, and their last tokens one at a time; the loop has room for a power of two of tokens.
        Each combination of these sizes, batch size, stop tokens, and sampler settings (each object
        of a custom sampler class counts as new) is compiled once. New prompts, seeds and weights
        cause no compilation. The model keeps the 16 most recently used functions.

        Args:
            prompts: A string or a list of strings (for a model with a vocabulary), or rows of
                token ids, such as integers (batch, time). Each has at least one token.
            max_length: Positive integer, number of tokens in each row of the result, including the
                prompt, so it must be greater than the length of the longest prompt.
            sampler: `"greedy"`, `"random"`, `"top_k"`, `"top_p"`, `"beam"` or `"contrastive"`,
                with Keras-NLP's defaults, or a `keras_nlp.samplers.Sampler`, such as
                `TopPSampler(p=0.9, temperature=0.8)`. Temperature 0 is greedy. Beam search ranks
                texts by the sum of their tokens' log-probabilities up to the first stop token.
                Defaults to `"top_p"`.
            seed: Integer; the same seed gives the same text. Defaults to `None`: a sampler given by
                name starts from a random seed, a sampler object continues from its state.
            stop_tokens: Token or list of tokens (ids, or strings of one token each) after which
                a row ends. Defaults to `None`.

        Returns:
            Strings if the prompts were strings, else ids (batch, length), including the prompt.
            A row ends with its first stop token after the prompt; shorter rows of ids are padded
            with it.

        Raises:
            ValueError: If there are no prompts, or one is empty or has unknown tokens, if
                `max_length` is not greater than the longest prompt, if the sampler is unknown, has
                settings out of their range (such as a temperature of NaN) or is unsupported
                (speculative decoding needs a draft model, and a cache that can return
                to an earlier token), or if the backbone does not stream.

        Example:

        >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
        >>> model.build((None, None))
        >>> model.generate([[1, 2], [3, 4, 5]], max_length=10, sampler="greedy").shape
        (2, 10)
        """
        return generation.generate(self, prompts, max_length, sampler, seed, stop_tokens)

    def generate_stream(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        max_length: int,
        sampler: Any = "top_p",
        *,
        seed: int | None = None,
        stop_tokens: Any = None,
    ) -> Iterator:
        """Continues one prompt and yields the result as it is generated.

        Joined, the pieces equal the result of `generate` for the same arguments, starting with
        the prompt. Samplers that choose token by token (greedy, random, top_k, top_p, and
        custom ones with a `get_next_token`) yield each token as soon as it is chosen; beam and
        contrastive search, which compare continuations, yield everything after the prompt at the
        end. The former compile one step, whatever `max_length` is; for the latter see `generate`.

        Args:
            prompt: A string, or token ids (time,).
            max_length, sampler, seed, stop_tokens: As in `generate`.

        Returns:
            An iterator over non-empty pieces of text (never part of a multi-byte character), or
            over integers for token ids. Iteration may stop at any point.

        Raises:
            ValueError: As in `generate`, before the first piece.

        Example:

        >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
        >>> model.build((None, None))
        >>> len(list(model.generate_stream([1, 2], max_length=5)))
        5
        """
        return generation.generate_stream(self, prompt, max_length, sampler, seed, stop_tokens)

    # Serialization

    def load_weights(
        self, filepath: str | os.PathLike, skip_mismatch: bool = False, **kwargs: Any
    ) -> None:
        """Loads weights as `keras.Model.load_weights` does, after checking the vocabulary.

        Raises:
            ValueError: If the file is damaged, refers to other files, belongs to a model with a
                different vocabulary, or does not match the model.
        """
        if not skip_mismatch:
            self._check_vocabulary(filepath)
        super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def _check_vocabulary(self, path):
        size, tokens = saved_tokens(path)
        if size not in (None, self.vocabulary_size):
            raise ValueError(
                f"{path} holds weights for {size:,} tokens, but the model has vocabulary_size="
                f"{self.vocabulary_size:,}: it belongs to a different vocabulary."
            )
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


def _check_lengths(x, y):
    """Raises ValueError if targets (batch, n) have more steps than tokens (batch, time)."""
    shapes = [tuple(a.shape if hasattr(a, "shape") else np.shape(a)) for a in (x, y)]
    steps, targets = (shape[1:2] for shape in shapes)
    if None not in (*steps, *targets) and targets > steps:
        raise ValueError(
            "Targets are the next tokens at the last positions of x, at most one per position. "
            f"Received: x of shape {shapes[0]}, y of shape {shapes[1]}"
        )


class _ResetStates(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.model.backbone.reset_state(training=True)


def _reads_later_steps(layer):
    return isinstance(layer, keras.layers.Bidirectional) or not getattr(layer, "is_causal", True)


def _check_backbone(backbone, aux_weight):
    """Raises ValueError unless a backbone has one output per step and carries states safely."""
    if aux_weight and not getattr(backbone, "return_aux", False):
        raise ValueError(
            "`aux_weight` needs a backbone with auxiliary outputs (return_aux=True). "
            f"Received: aux_weight={aux_weight}, backbone={backbone}"
        )
    if getattr(backbone, "return_state", False):
        raise ValueError("The backbone of a language model must have return_state=False.")
    if not getattr(backbone, "return_sequences", True):
        raise ValueError("The backbone of a language model must have return_sequences=True.")
    parts = all_layers(backbone)
    inner = [part for part in parts if part is not backbone]
    if any(_reads_later_steps(part) for part in parts):
        raise ValueError(
            "The outputs of a language model's backbone must not depend on later tokens: use "
            'go_backwards=False, padding="causal" in a TCN, and no Bidirectional layer. '
            f"Received: {backbone}"
        )
    if any(getattr(part, "stateful", False) for part in inner):
        raise ValueError(
            "A stateful layer must itself be the backbone, so that its states are reset: use "
            "stateful=False, or pass the layer without the layers around it. "
            f"Received: {backbone} with stateful layers in it"
        )
    if getattr(backbone, "output_length", None) is not None:
        raise ValueError(
            "The backbone of a language model must have output_length=None: the targets determine "
            f"which outputs count. Received: output_length={backbone.output_length}"
        )
    if getattr(backbone, "stateful", False) and not isinstance(backbone, StatefulLayer):
        raise ValueError(
            "A stateful backbone must keep separate states for training and validation, as "
            "TrellisLayer and StackedRNN do (Keras' own recurrent layers do not: wrap them "
            f"in a StackedRNN(..., stateful=True)). Received: {backbone}"
        )


def _rows(x, batch_size):
    """Returns the number of rows per batch that this process will read from x."""
    if isinstance(x, keras.utils.PyDataset):
        return len(keras.utils.unpack_x_y_sample_weight(x[0])[0])
    if hasattr(x, "element_spec"):  # a tf.data.Dataset
        spec = x.element_spec[0] if isinstance(x.element_spec, tuple) else x.element_spec
        if spec.shape[0] is None:
            raise ValueError(
                "A stateful backbone needs batches of equal size: batch(..., drop_remainder=True)."
            )
        return spec.shape[0]
    if not hasattr(x, "__len__"):
        raise ValueError(
            "A stateful backbone needs batches of equal size, known in advance: arrays, a "
            "`keras.utils.PyDataset`, or a `tf.data.Dataset` of batch(..., drop_remainder=True). "
            f"Received: {type(x).__name__}"
        )
    rows = min(batch_size or 32, len(x))
    if len(x) % rows:
        raise ValueError(
            "A stateful backbone needs batches of equal size. "
            f"Received: {len(x)} rows with batch_size={rows}"
        )
    return rows


def _processes():
    """Returns the number of processes among which the rows of every batch are divided."""
    distribution = keras.distribution.distribution()
    if distribution is None or distribution.auto_shard_dataset:
        return 1
    import jax

    return jax.process_count()
