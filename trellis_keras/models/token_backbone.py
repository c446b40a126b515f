"""The first half of a language model: from tokens to hidden states."""

import inspect
from typing import Any

import keras
from keras import ops

from keras_streams.protocol import check_shape
from trellis_keras._keras_internals import all_layers
from trellis_keras.layers.checks import check_choice, check_positive, check_rates
from trellis_keras.layers.regularization import Dropout, EmbeddingDropout, VariationalDropout
from trellis_keras.layers.seeds import sub_seed
from trellis_keras.layers.stateful import StatefulLayer
from trellis_keras.models.base import BackboneModel, embed, token_ids
from trellis_keras.types import Cache, Initializer, Tensor

_INPUT_DROPOUTS = {"variational": VariationalDropout, "element": Dropout}


class TokenBackbone(BackboneModel):
    """Embedding, input dropouts and a causal backbone.

        h = backbone(D_input(D_embedding(embedding(x))))

    The arguments are those of `LanguageModel`, its subclass.
    """

    def __init__(
        self,
        vocabulary_size: int,
        embedding_dim: int,
        backbone: keras.Layer,
        *,
        embedding_dropout: float,
        input_dropout: float,
        input_dropout_kind: str,
        embeddings_initializer: Initializer,
        seed: int | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        vocabulary_size, embedding_dim = check_positive(
            vocabulary_size=vocabulary_size, embedding_dim=embedding_dim
        )
        check_rates(input_dropout=input_dropout)
        check_choice("input_dropout_kind", input_dropout_kind, _INPUT_DROPOUTS)
        _check_backbone(backbone)
        self.autocast = False  # the inputs are integers; the layers do their own casting
        self.vocabulary_size = vocabulary_size
        self.embedding_dim = embedding_dim
        self.input_dropout_kind = input_dropout_kind
        self.seed = seed
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
            embedding_dropout,
            vocabulary_size,
            self._seed_of("embedding_dropout"),
            dtype=self.dtype_policy,
        )
        self.input_dropout = _INPUT_DROPOUTS[input_dropout_kind](
            input_dropout, seed=self._seed_of("input_dropout"), dtype=self.dtype_policy
        )
        self.backbone = backbone
        self._takes_output_length = "output_length" in inspect.signature(backbone.call).parameters

    def _seed_of(self, part):
        return sub_seed(self.seed, type(self).__name__, part)

    def _uniform(self, part):
        return keras.initializers.RandomUniform(-0.1, 0.1, seed=self._seed_of(part))

    @property
    def input_dtype(self) -> str:
        """The dtype of the inputs in the signature that Keras' export derives."""
        return "int32"

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

    # Streaming

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


def _reads_later_steps(layer):
    return isinstance(layer, keras.layers.Bidirectional) or not getattr(layer, "is_causal", True)


def _check_backbone(backbone):
    """Raises ValueError unless a backbone has one output per step and carries states safely."""
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
