"""Code shared by the models: backbone and head, streaming, an exact mean loss, saving."""

import functools
import io
import os
import pathlib
import shutil
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_streams import to_stream
from keras_streams.exported_stream import ExportedStream
from keras_streams.protocol import at_least_float32, check_built
from trellis_keras._keras_internals import save_to_file, set_initial_epoch
from trellis_keras.files import atomic_folder
from trellis_keras.layers.saving import SublayersMixin
from trellis_keras.models.metrics import MeanLoss
from trellis_keras.saved_files import README, check_file, check_preset_folder, check_weights_name
from trellis_keras.types import Cache, Tensor

if keras.backend.backend() == "tensorflow":
    from trellis_keras import _tensorflow


class BackboneModel(SublayersMixin, keras.Model):
    """Base class of models that put a head on a causal backbone.

    The loss of an epoch is the weighted mean over all its steps or sequences, not a mean of batch
    means: a subclass's `compute_loss` returns `_counted(loss, weight)`.

    Attributes:
        backbone: Causal layer.
        head: Layer that maps the backbone's outputs to the model's outputs.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        dtype = at_least_float32(self.compute_dtype)
        self._mean_loss = MeanLoss(dtype=dtype)
        self._asked_to_compile: bool | str = "auto"

    # Training

    def compile(
        self,
        optimizer: str | keras.optimizers.Optimizer = "rmsprop",
        *,
        steps_per_execution: int = 1,
        jit_compile: bool | str = "auto",
        **kwargs: Any,
    ) -> None:
        """Configures the model as `keras.Model.compile` does.

        With `jit_compile="auto"` TensorFlow also compiles with XLA on a CPU, if the backbone is
        faster with it: if its attribute `prefers_xla` is true and it computes in float32. (XLA does
        not use a CPU's bfloat16 units. In float64, XLA in TensorFlow 2.21 has computed wrong
        gradients of gated activations on a CPU: `jit_compile=True` warns.) A `PolyphonicModel`,
        whose inputs differ in length, is compiled without XLA. On other devices Keras decides.
        """
        self._check_replicas(jit_compile, steps_per_execution)
        self._asked_to_compile = jit_compile
        if jit_compile == "auto" and not kwargs.get("run_eagerly"):
            jit_compile = True if self._prefers_xla() else "auto"
        elif (
            jit_compile is True
            and keras.backend.backend() == "tensorflow"
            and self.backbone.compute_dtype == "float64"
        ):
            warnings.warn(
                "TensorFlow 2.21 with XLA has computed wrong gradients of gated activations in "
                'float64 on a CPU. Leave `jit_compile` at "auto", which does not use XLA there.',
                stacklevel=2,
            )
        super().compile(
            optimizer, steps_per_execution=steps_per_execution, jit_compile=jit_compile, **kwargs
        )

    def fit(self, x: Any = None, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains as `keras.Model.fit`, and then restores the backbone's depth."""
        if not self.built and hasattr(x, "shape"):
            self.build((None, *x.shape[1:]))
        depth = getattr(self.backbone, "depth", None)
        try:
            return super().fit(x, *args, **kwargs)
        finally:  # Keras tells no callback, such as `training.GrowingDepth`, of an interruption
            self.set_depth(depth)
            set_initial_epoch(self, None)  # of `training.Checkpoint`

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: dict | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Trains as `keras.Model.train_on_batch`, on what `fit` takes as data and class weights."""
        x, y = self._checked_data(x, y)
        class_weight = self._encode_class_weight(class_weight)
        return super().train_on_batch(x, y, sample_weight, class_weight, return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Evaluates as `keras.Model.test_on_batch`, on what `evaluate` takes as data."""
        return super().test_on_batch(*self._checked_data(x, y), sample_weight, return_dict)

    def _checked_data(self, x, y=None):
        """Returns inputs and targets as Keras takes them."""
        return x, y

    def _encode_class_weight(self, class_weight):
        """Returns the class weights keyed by class number; targets with a time axis have none."""
        if class_weight is not None:
            raise ValueError(
                "`class_weight` does not support targets (batch, time): Keras would take them for "
                "one-hot rows. Pass sample_weight=np.vectorize(class_weight.get)(y)"
            )

    def set_depth(self, depth: int | None) -> None:
        """Changes the backbone's depth, and discards the functions compiled with the old one."""
        if depth != getattr(self.backbone, "depth", None):
            self.backbone.depth = depth
            self.make_train_function(force=True)
            self.make_test_function(force=True)
            self.make_predict_function(force=True)

    def make_train_function(self, force: bool = False) -> Callable:
        # Each variable initializer traced within a step leaves a graph that TensorFlow never frees.
        if self.built and not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)
        return super().make_train_function(force)

    def train_step(self, *args: Any) -> Any:
        step, args = super().train_step, self._with_loss_inputs(*args)
        scaled = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        if keras.backend.backend() != "tensorflow" or scaled:
            return step(*args)
        return _tensorflow.outside_replica(lambda: step(*args))

    def test_step(self, *args: Any) -> Any:
        return super().test_step(*self._with_loss_inputs(*args))

    def loss_inputs(self, x: Any, y: Any, sample_weight: Any = None) -> Any:
        """Returns the inputs of a call from a batch, in training and evaluation."""
        return x

    def _counted(self, loss, weight):
        """Counts a batch's mean loss, and returns the term whose gradient is taken.

        The gradients of a batch's replicas are summed, so each returns its share of the mean over
        all of them.

        Args:
            loss: Scalar, the mean loss of this replica's targets.
            weight: Scalar, their number or total weight.
        """
        self._mean_loss.update_state(loss, weight)
        replicas = self._replicas()
        if replicas == 1:
            return loss
        everywhere = _tensorflow.sum_over_replicas(weight)
        if everywhere is None:
            everywhere = weight * replicas
        return ops.divide_no_nan(loss * weight, everywhere)

    def _with_loss_inputs(self, *args):
        """Replaces the inputs of the batch, the last argument of Keras' steps."""
        *state, data = args
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        return *state, (self.loss_inputs(x, y, sample_weight), y, sample_weight)

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        # On several replicas Keras passes the mean of their batches: tokens would become floats.
        if data_batch is not None and self.input_dtype == "int32":
            x, *others = keras.utils.unpack_x_y_sample_weight(data_batch)
            data_batch = keras.utils.pack_x_y_sample_weight(ops.cast(x, "int32"), *others)
        super()._symbolic_build(iterator=iterator, data_batch=data_batch)

    def _prefers_xla(self):
        """Whether the backbone is faster with XLA (on TensorFlow and a CPU)."""
        if keras.backend.backend() != "tensorflow" or self._replicas() > 1:
            return False
        is_float32 = self.backbone.compute_dtype == "float32"
        prefers = is_float32 and getattr(self.backbone, "prefers_xla", False)
        return prefers and _tensorflow.has_only_cpus()

    def _replicas(self):
        """The number of replicas of `tf.distribute`."""
        strategy = getattr(self, "distribute_strategy", None)
        return 1 if strategy is None else strategy.num_replicas_in_sync

    def _check_replicas(self, jit_compile, steps_per_execution):
        """Raises ValueError for options that would fail under `tf.distribute` during training."""
        if self._replicas() == 1:
            return
        if jit_compile is True or steps_per_execution != 1:
            raise ValueError(
                "Under tf.distribute with several replicas, TensorFlow can neither compile a step "
                "with XLA nor run several steps per execution: use jit_compile=False (also an "
                "argument of the zoo's models) and steps_per_execution=1. Received: "
                f"jit_compile={jit_compile}, steps_per_execution={steps_per_execution}"
            )
        if getattr(self.backbone, "stateful", False):
            raise ValueError(
                "A stateful backbone cannot be trained on several replicas of tf.distribute, "
                "because each has only some of the rows. Use keras.distribution on the JAX "
                "backend, or stateful=False. Received: a backbone with stateful=True"
            )

    def get_compile_config(self) -> dict | None:
        config = super().get_compile_config()
        return {**config, "jit_compile": self._asked_to_compile} if config else {}

    def compile_from_config(self, config: dict) -> None:
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def save_weights(self, filepath: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """Saves weights as `keras.Model.save_weights` does, but not in several files."""
        check_weights_name(filepath)
        super().save_weights(filepath, *args, **kwargs)

    def load_weights(
        self, filepath: str | os.PathLike, skip_mismatch: bool = False, **kwargs: Any
    ) -> None:
        """Loads weights as `keras.Model.load_weights` does, safely from untrusted files."""
        check_file(filepath)
        try:
            super().load_weights(filepath, skip_mismatch=skip_mismatch, **kwargs)
        except ValueError as error:
            raise ValueError(f"{filepath} does not fit this model: {error}") from error

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError, because a model quantized by Keras could not be loaded again."""
        raise ValueError(
            "A model of this class could not be loaded again after Keras' quantization. Use "
            'trellis_keras.export.export(model, path, format="litert", quantization="int8"). '
            f"Received: {self.name}"
        )

    # Saving

    def save_to_preset(self, preset: str | os.PathLike) -> None:
        """Saves the model as a preset, a folder that `zoo.from_preset` loads, as in KerasHub.

        A preset contains the architecture, the weights, and what the model stores with them, such
        as a vocabulary, class names and data statistics. It does not contain the optimizer: compile
        the loaded model to train it. `keras.saving.load_model` also reads presets.

        Args:
            preset: Path of a folder, created if needed, or `"hf://user/model"`, a Hugging Face
                repository to which Keras uploads (this needs the package `huggingface_hub` and
                your login). An existing preset of the same model class is replaced; a README.md
                beside it is kept.

        Raises:
            ValueError: If the model is not built, or the folder contains anything else.
            OSError: If the folder cannot be written. Its contents are then unchanged.

        Example:

        >>> model = zoo.trellisnet_char(depth=2, hidden_units=4, embedding_dim=4)
        >>> model.save_to_preset("my_preset")
        >>> zoo.from_preset("my_preset").count_params() == model.count_params()
        True
        """
        check_built(self)
        is_remote = str(preset).startswith("hf://")
        folder = pathlib.Path(preset).expanduser().resolve()
        if not is_remote:
            check_preset_folder(folder, self)
        copy = type(self).from_config(self.get_config())
        copy.build_from_config(self.get_build_config())
        copy.set_weights(self.get_weights())
        if is_remote:
            keras.saving.save_model(copy, preset, zipped=False)
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as temporary:
            # In memory first: HDF5 can neither close nor forget a file that the disk refused.
            save_to_file(copy, saved := io.BytesIO())
            with zipfile.ZipFile(saved) as archive:
                archive.extractall(temporary)
            if (folder / README).exists():
                shutil.copy2(folder / README, temporary)

    # Streaming

    def initial_cache(self, batch_size: int) -> Cache:
        """Returns the backbone's cache before the first step of `batch_size` rows."""
        return self.stream().initial_cache(batch_size)

    def stream(self) -> Any:
        """Returns the backbone's stream, see `keras_streams.to_stream`."""
        check_built(self)
        return self._stream

    def __dir__(self) -> list[str]:
        # Keras reads every listed attribute when it saves or loads: these would plan the stream.
        return [name for name in super().__dir__() if name not in ("_stream", "delay", "rate")]

    @functools.cached_property
    def _stream(self):
        return to_stream(self.backbone)

    def _exported_stream(self, step, prefill, read_out, **options):
        """Returns the stream that exporters of steps write.

        Args:
            step, prefill: Functions of inputs and a cache.
            read_out: Function that maps their outputs to those of the exported stream.
            **options: Other fields of `ExportedStream`.
        """

        def read_step(x, cache):
            y, cache = step(x, cache)
            return read_out(y), cache

        return ExportedStream(
            self,
            self.initial_cache,
            read_step,
            lambda x: read_out(prefill(x)[0]),
            delay=self.delay,
            rate=self.rate,
            receptive_field=getattr(self.stream(), "receptive_field", None),
            **options,
        )

    @property
    def delay(self) -> Any:
        """Number of steps by which outputs are delayed, see `keras_streams.to_stream`."""
        return getattr(self.stream(), "delay", 0)

    @property
    def rate(self) -> Any:
        """Number of input steps per output, see `keras_streams.to_stream`."""
        return getattr(self.stream(), "rate", 1)


def token_ids(tokens: Tensor) -> Tensor:
    """Returns tokens as an integer tensor that can be compared with any vocabulary size."""
    tokens = ops.convert_to_tensor(tokens)
    dtype = keras.backend.standardize_dtype(tokens.dtype)
    if not keras.backend.is_int_dtype(dtype):
        raise ValueError(f"Tokens must be integers. Received: dtype {dtype}")
    return tokens if dtype in ("int32", "int64") else ops.cast(tokens, "int32")


def embed(embedding: keras.layers.Embedding, tokens: Tensor) -> Tensor:
    """Returns the embedding of tokens (...), NaN for ids outside the vocabulary."""
    tokens = token_ids(tokens)
    # On some backends a lookup outside the vocabulary finds another token.
    is_token = (tokens >= 0) & (tokens < embedding.input_dim)
    embedded = embedding(ops.where(is_token, tokens, 0))
    return ops.where(is_token[..., None], embedded, np.nan)


def serialize_unbuilt(layer: keras.Layer) -> dict:
    """Serializes a layer without its build config, because the model builds it (after tying)."""
    serialized = keras.saving.serialize_keras_object(layer)
    serialized.pop("build_config", None)
    return serialized


# Checks of data


def check_tokens(tokens: Any, vocabulary_size: int) -> None:
    """Raises ValueError unless `tokens` is an array of integers in [0, vocabulary_size).

    Embedding lookups outside this range are silent on some backends.
    """
    tokens = np.asanyarray(tokens)
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"Token ids must be integers in [0, {vocabulary_size}). "
            f"Received: an array of type {tokens.dtype}"
        )
    if tokens.size == 0:
        return
    for value in (tokens.min(), tokens.max()):
        if not 0 <= value < vocabulary_size:
            raise ValueError(f"Token ids must lie in [0, {vocabulary_size}). Received: {value}")


def text_rows(tokens: np.ndarray, vocabulary_size: int) -> np.ndarray:
    """Returns texts (time,) or (batch, time) of at least two tokens as an int32 array of rows."""
    if tokens.ndim not in (1, 2) or tokens.size == 0 or tokens.shape[-1] < 2:
        raise ValueError(
            "`tokens` must have axes (time,) or (batch, time), with two steps or more. "
            f"Received: shape {tokens.shape}"
        )
    check_tokens(tokens, vocabulary_size)
    return np.atleast_2d(tokens).astype("int32")


def check_is_layer(backbone: Any) -> None:
    """Raises ValueError for a backbone that is no layer."""
    if not isinstance(backbone, keras.Layer):
        raise ValueError(f"`backbone` must be a layer. Received: {backbone!r}")


def check_rank(name: str, array: np.ndarray, axes: str) -> None:
    """Raises ValueError unless an array has the axes, such as "(batch, time, channels)"."""
    if array.ndim != axes.count(",") + 1:
        raise ValueError(f"`{name}` must have axes {axes}. Received: shape {array.shape}")
