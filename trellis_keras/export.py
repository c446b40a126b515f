"""Models as files that other programs run: SavedModel for TensorFlow Serving, LiteRT and ONNX.

`export` collects the endpoints of a model and writes them with `keras.export.ExportArchive`. An
endpoint is a pure function of named tensors: the answer to a request follows from the request and
the weights alone, and the cache of a stream travels with the requests.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import secrets
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from trellis_keras import kernels
from trellis_keras.data import Vocabulary
from trellis_keras.data.vocabulary import EOS
from trellis_keras.files import annotate_error, atomic_write, sync_folder, write_error
from trellis_keras.layers.base import at_least_float32, without_carried_states
from trellis_keras.models import LanguageModel, PolyphonicModel, SequenceClassifier
from trellis_keras.models.sequence_models import SequenceModel

if keras.backend.backend() == "tensorflow":  # `export` refuses the other backends
    import tensorflow as tf

# Limits of one request, which bound its memory.
_MAX_NEW_TOKENS = 2**20  # over all rows
_MAX_CACHE_ROWS = 2**12

_NO_STEPS = "Each row needs at least one step. Received rows of length:"
_NO_TOKENS = "Each row needs at least one token. Received rows of length:"

_ONNX_OPSET = 18  # of 2022, so that older runtimes read it too


def export(
    model: LanguageModel | SequenceModel,
    path: str | os.PathLike,
    version: int | None = None,
    *,
    format: str = "saved_model",
    quantization: str | None = None,
    warmup: bool = False,
    series: dict[str, Any] | None = None,
) -> pathlib.Path:
    """Writes a model for a program that serves it.

    A SavedModel has endpoints with named and typed inputs and outputs: `serving_default` for whole
    sequences; `initial_cache` and `step` for streams; for a language model also `prefill` and
    `generate`; and with a vocabulary `score_text` and `generate_text`. docs/serving.md describes
    them. No request changes anything on the server, and random numbers follow from the request's
    seed. A stateful model starts each request with empty states. A model whose backbone does not
    stream has the endpoints for whole sequences only, and a warning says so.

    Args:
        model: Built `LanguageModel`, `SequenceClassifier`, `SequenceRegressor` or
            `PolyphonicModel`.
        path: For a SavedModel the folder of all versions of the model, which TensorFlow Serving
            watches; for other formats the file.
        version: Positive integer, the version of a SavedModel. Its folder appears complete or not
            at all. Defaults to one more than the highest version in `path`.
        format: `"saved_model"`, or `"litert"` (a `.tflite` file) or `"onnx"` for the endpoint
            `step` alone. Defaults to `"saved_model"`.
        quantization: `None` or `"int8"`, for LiteRT: matrices are stored as 8-bit integers.
            Defaults to `None`.
        warmup: Boolean, whether a SavedModel gets requests that TensorFlow Serving runs before it
            offers the version. They need tensorflow-serving-api (the extra `serving`). Defaults to
            `False`.
        series: Dict for JSON, what the channels of a model of time series are; a SavedModel gets it
            as `assets.extra/series.json`. Defaults to `None`.

    Returns:
        The path that was written: for a SavedModel the folder of the version.

    Raises:
        ValueError: `path` or the version exists or is of the wrong kind; an option does not belong
            to the format; the model has another class, is not built, or draws random numbers in
            inference; or Keras' backend is not TensorFlow.
        ImportError: The format or the warm-up needs a package that is not installed.

    Example:

    >>> from trellis_keras.export import export
    >>> model = trellis_keras.zoo.trellisnet_char(depth=2, hidden_units=4, embedding_dim=4)
    >>> export(model, "serving/trellisnet_char").as_posix()
    'serving/trellisnet_char/1'
    """
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "Models are exported on the TensorFlow backend. Save the model as a .keras file and "
            "export it in a process with KERAS_BACKEND=tensorflow. "
            f"Received: the backend {keras.backend.backend()!r}"
        )
    if format not in ("saved_model", "litert", "onnx"):
        raise ValueError(
            f"`format` must be 'saved_model', 'litert' or 'onnx'. Received: {format!r}"
        )
    if format != "saved_model" and (version is not None or warmup or series is not None):
        raise ValueError(
            "`version`, `warmup` and `series` belong to format='saved_model'. Received: "
            f"format={format!r}, version={version}, warmup={warmup}, series={series}"
        )
    if quantization is not None and (format != "litert" or quantization != "int8"):
        raise ValueError(
            "`quantization` must be None, or 'int8' with format='litert'. "
            f"Received: quantization={quantization!r}, format={format!r}"
        )
    if not isinstance(model, (LanguageModel, SequenceModel)):
        raise ValueError(
            "`model` must be a LanguageModel, SequenceClassifier, SequenceRegressor or "
            f"PolyphonicModel. Received: {model!r}"
        )
    if not model.built:
        has_channels = isinstance(model, SequenceModel) and model.embedding is None
        shape = "None, None" + ", channels" * has_channels
        raise ValueError(f"Build the model before exporting it: model.build(({shape})).")
    path = pathlib.Path(path).expanduser()
    if format == "saved_model":
        return _export_saved_model(model, path, version, warmup, series)
    return _export_step(model, path, format, quantization)


# SavedModels, in numbered folders


def _export_saved_model(model, path, version, warmup, series):
    _check_version(path, version)
    if warmup:
        _check_warmup()
    endpoints, vocabulary = _endpoints(model), getattr(model, "vocabulary", None)

    def write(folder):
        _write_archive(endpoints, folder)
        extra = folder / "assets.extra"  # for files that the graphs do not read
        extra.mkdir()
        _write_json(extra / "signatures.json", {e.name: e.describe() for e in endpoints})
        if vocabulary is not None:
            vocabulary.save(extra / "vocabulary.json")
        if getattr(model, "class_names", None) is not None:
            _write_json(extra / "class_names.json", list(model.class_names))
        if series is not None:
            _write_json(extra / "series.json", series)
        if warmup:
            _write_warmup(endpoints, path.resolve().name, extra / "tf_serving_warmup_requests")

    return _write_version(path, version, write)


def _write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_archive(endpoints, folder, rows=None):
    archive = keras.export.ExportArchive()
    for endpoint in endpoints:
        for table in endpoint.tables:
            archive.track(table)
        answer = endpoint.served if rows is None else endpoint.checked
        function = tf.function(answer, autograph=False)
        _check_pure(endpoint, function.get_concrete_function(**endpoint.input_specs(rows)))
        archive.add_endpoint(endpoint.name, function)
    # Nobody differentiates a served model.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    archive.write_out(str(folder), options=options, verbose=False)


def _check_pure(endpoint, function):
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    found = {
        node.op
        for node in nodes
        if re.search("Assign|Random|Multinomial|^Stateful[A-Z]", node.op)
        and node.op != "StatefulPartitionedCall"  # only calls one of these functions
        and not (endpoint.draws and node.op.startswith("Stateless"))
    }
    if found:
        raise ValueError(
            f"The endpoint `{endpoint.name}` would not be a function of the request: its graph has "
            f"{', '.join(sorted(found))}. A layer draws random numbers or assigns variables in "
            "inference, as Keras' recurrent layers with dropout do (put them into a StackedRNN)."
        )


def _check_version(path, version):
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file. `path` must be the folder of the model's versions.")
    if _is_version(path.name) or (path / "saved_model.pb").exists():
        raise ValueError(
            f"{path} looks like one version of a model. `path` must be the folder of all versions, "
            f"such as {path.parent}; `version` is the number of the folder in it."
        )
    if version is None:
        return
    if isinstance(version, bool) or not isinstance(version, (int, np.integer)) or version < 1:
        raise ValueError(f"`version` must be a positive integer. Received: {version!r}")
    if (path / str(version)).exists():
        raise _version_exists(path / str(version))


def _version_exists(path):
    return ValueError(f"{path} already exists. Choose another version, or remove it first.")


def _is_version(name):
    return name.isascii() and name.isdecimal()


def _write_version(path, version, write):
    """Calls `write(folder)`, then renames the folder to its version.

    Until then its name is not a number, so no server takes it for a version.
    """
    created = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    folder = path / f".exporting-{secrets.token_hex(4)}"
    try:
        with annotate_error(path, folder):
            try:
                write(folder)
            except tf.errors.OpError as error:
                raise write_error(error, folder) or error from error
            for file in folder.rglob("*"):  # on the disk before a number says that it is complete
                if file.is_dir():
                    sync_folder(file)
                else:
                    with open(file, "rb+") as opened:
                        os.fsync(opened.fileno())
            sync_folder(folder)
        target = _rename_to_version(folder, path, version)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if created:
            with contextlib.suppress(OSError):  # another process exports into it
                path.rmdir()
        raise
    sync_folder(path)
    return target


def _rename_to_version(folder, path, version):
    while True:
        highest = max((int(p.name) for p in path.iterdir() if _is_version(p.name)), default=0)
        target = path / str(version or highest + 1)
        try:
            return folder.rename(target)
        except OSError as error:  # another process may have taken the number in between
            if not target.exists():
                raise
            if version is not None:
                raise _version_exists(target) from error


# Requests that TensorFlow Serving runs before it offers a version


def _check_warmup():
    try:
        import tensorflow_serving.apis.prediction_log_pb2  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Warm-up requests need tensorflow-serving-api: pip install tensorflow-serving-api. "
            "Or export with warmup=False."
        ) from error


def _write_warmup(endpoints, model_name, path):
    from tensorflow_serving.apis import model_pb2, predict_pb2, prediction_log_pb2

    with tf.io.TFRecordWriter(str(path)) as writer:
        for endpoint in endpoints:
            spec = model_pb2.ModelSpec(name=model_name, signature_name=endpoint.name)
            request = predict_pb2.PredictRequest(model_spec=spec)
            for name, field in endpoint.inputs.items():
                request.inputs[name].CopyFrom(tf.make_tensor_proto(field.filled()))
            log = prediction_log_pb2.PredictLog(request=request)
            writer.write(prediction_log_pb2.PredictionLog(predict_log=log).SerializeToString())


# LiteRT and ONNX, of one step


def _export_step(model, path, format, quantization):
    suffix = ".tflite" if format == "litert" else ".onnx"
    if path.suffix != suffix:
        raise ValueError(f"`path` must end in {suffix} with format={format!r}. Received: {path}")
    if path.exists():
        raise ValueError(f"{path} already exists. Choose another name, or remove it first.")
    model.stream()  # raises if the model does not stream
    dtypes = {model.compute_dtype, model.backbone.compute_dtype}
    if dtypes != {"float32"}:
        raise ValueError(
            f"format={format!r} computes in float32. Build the model with dtype='float32' and load "
            f"its weights. Received: a model that computes in {', '.join(sorted(dtypes))}"
        )
    if any(np.any(leaf) for leaf in keras.tree.flatten(model.initial_cache(1))):
        raise ValueError(f"format={format!r} starts from zeros. Received: another initial cache")
    endpoint = next(endpoint for endpoint in _endpoints(model) if endpoint.name == "step")
    with kernels.disabled():  # the converters do not take the kernels' loops
        content = _to_litert(endpoint, quantization) if format == "litert" else _to_onnx(endpoint)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)
    return path


def _to_litert(endpoint, quantization):
    # Not `Model.export(format="litert")`, which exports `call` and allows operations that only
    # runtimes with TensorFlow inside have.
    if not hasattr(tf, "lite"):
        raise ImportError(
            f"TensorFlow {tf.__version__} has no LiteRT converter: pip install tensorflow==2.21.*"
        )
    with tempfile.TemporaryDirectory() as folder:
        _write_archive([endpoint], folder, rows=1)
        converter = tf.lite.TFLiteConverter.from_saved_model(folder, signature_keys=["step"])
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS]
        if quantization is not None:
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        return converter.convert()


def _to_onnx(endpoint):
    # Not `Model.export(format="onnx")`, which exports `call`.
    try:
        import onnx
        import tf2onnx
    except ImportError as error:
        raise ImportError(
            "format='onnx' needs tf2onnx: pip install tf2onnx onnx onnxruntime"
        ) from error
    specs = endpoint.input_specs()

    def step(*tensors):
        outputs = endpoint.checked(**dict(zip(specs, tensors, strict=True)))
        # A name stands for one tensor in ONNX.
        return {f"next_{name}" if name in specs else name: outputs[name] for name in outputs}

    signature = list(specs.values())
    function = tf.function(step, input_signature=signature, autograph=False)
    model, _ = tf2onnx.convert.from_function(function, signature, opset=_ONNX_OPSET)
    onnx.checker.check_model(model, full_check=True)  # tf2onnx skips operations unknown to it
    return model.SerializeToString()


# Endpoints


@dataclasses.dataclass(frozen=True)
class _Field:
    """An input or output of an endpoint.

    Attributes:
        dtype: Name of its dtype.
        shape: Tuple of sizes; a name, such as "batch", stands for any size.
        example: Value that fills it in a warm-up request.
    """

    dtype: str
    shape: tuple
    example: Any = 0

    def spec(self, name, rows=None):
        sizes = [rows if size == "batch" else size for size in self.shape]
        sizes = [None if isinstance(size, str) else size for size in sizes]
        return tf.TensorSpec(sizes, self.dtype, name)

    def filled(self):
        sizes = [1 if isinstance(size, str) else size for size in self.shape]
        return np.full(sizes, self.example, object if self.dtype == "string" else self.dtype)


@dataclasses.dataclass(frozen=True)
class _Endpoint:
    """A request that a served model answers.

    Attributes:
        function: Takes the inputs as keyword arguments and returns a dict with the outputs. Its
            name is that of the endpoint, its docstring describes it.
        inputs, outputs: Dicts from name to `_Field`.
        draws: Whether it draws random numbers, which must follow from its inputs.
        tables: Lookup tables that it reads.
    """

    function: Callable
    inputs: dict
    outputs: dict
    draws: bool = False
    tables: tuple = ()

    @property
    def name(self):
        return self.function.__name__

    def input_specs(self, rows=None):
        return {name: field.spec(name, rows) for name, field in self.inputs.items()}

    def served(self, **inputs):
        """Calls the function for a server, which does not compare requests with the signature."""
        placeholder = tf.compat.v1.placeholder_with_default
        # Of unknown shape, or TensorFlow would trust the signature and drop the comparison.
        unknown = {name: placeholder(value, None, name) for name, value in inputs.items()}
        specs = self.input_specs()
        return self.checked(
            **{name: tf.ensure_shape(value, specs[name].shape) for name, value in unknown.items()}
        )

    def checked(self, **inputs):
        """Calls the function, with the same number of rows in all inputs."""
        batched = [name for name, field in self.inputs.items() if "batch" in field.shape]
        if len(batched) > 1:
            # Some layers would broadcast a single row.
            rows = tf.stack([tf.shape(inputs[name])[0] for name in batched])
            message = "All inputs must have the same number of rows. Received:"
            first = batched[0]
            inputs[first] = _require(inputs[first], rows == rows[0], message, rows)
        outputs = self.function(**inputs)
        # TensorFlow does not infer every size.
        return {
            name: tf.ensure_shape(ops.cast(outputs[name], field.dtype), field.spec(name).shape)
            if field.dtype != "string"
            else outputs[name]
            for name, field in self.outputs.items()
        }

    def describe(self):
        """Returns what `signatures.json` says of the endpoint."""

        def fields(of):
            return {name: {"dtype": f.dtype, "shape": f.shape} for name, f in of.items()}

        return {
            "description": " ".join(self.function.__doc__.split()),
            "inputs": fields(self.inputs),
            "outputs": fields(self.outputs),
        }


def _require(tensor, condition, message, *values):
    """Returns `tensor` if all of `condition` holds; otherwise the request fails with a message."""
    check = tf.debugging.Assert(tf.reduce_all(condition), [message, *values], summarize=8)
    with tf.control_dependencies([check]):
        return tf.identity(tensor)


class _Cache:
    """The cache of a backbone as a flat dict of tensors.

    A tensor's name is its place in the cache, such as `cache_inputs` or `cache_states_0_1`. Half
    precision becomes float32, which every client can send.
    """

    def __init__(self, model):
        self._model = model
        # Only its structure and dtypes count.
        self._like = model.initial_cache(1)
        self.fields = {
            name: _Field(
                at_least_float32(keras.backend.standardize_dtype(leaf.dtype)),
                ("batch", *leaf.shape[1:]),
            )
            for name, leaf in self.flatten(self._like).items()
        }

    def flatten(self, cache):
        leaves = keras.tree.flatten_with_path(cache)
        return {"_".join(["cache", *map(str, path)]): leaf for path, leaf in leaves}

    def pack(self, tensors):
        leaves = [
            ops.cast(tensors[name], leaf.dtype) for name, leaf in self.flatten(self._like).items()
        ]
        return keras.tree.pack_sequence_as(self._like, leaves)

    def endpoint(self):
        def initial_cache(batch_size):
            """Returns the cache before the first step, for `batch_size` rows."""
            batch_size = _require(
                batch_size,
                (batch_size >= 1) & (batch_size <= _MAX_CACHE_ROWS),
                f"`batch_size` must be in [1, {_MAX_CACHE_ROWS}]. Received:",
                batch_size,
            )
            return self.flatten(self._model.initial_cache(batch_size))

        return _Endpoint(initial_cache, {"batch_size": _Field("int32", (), 1)}, self.fields)


def _endpoints(model):
    make = _language_endpoints if isinstance(model, LanguageModel) else _sequence_endpoints
    return make(model)


def _streams(model):
    """Whether a model has endpoints for streams; warns if it has not."""
    try:
        model.stream()
    except ValueError as error:
        warnings.warn(
            f"{model.name} is exported for whole sequences only, without `step`. {error}",
            stacklevel=6,
        )
        return False
    return True


def _sequence_endpoints(model):
    model.check_adapted()
    # Numbers, or token ids.
    dtype, channels = "int32", ()
    if model.embedding is None:
        dtype, channels = "float32", (model.input_spec.axes[-1],)
    output = model.compute_output_shape((None, None, *channels))[1 + model.per_step :]
    name, activation = "predictions", keras.activations.linear
    if isinstance(model, SequenceClassifier):
        name = "probabilities"
        activation = ops.softmax if model.activation is None else activation
    elif isinstance(model, PolyphonicModel):
        name, activation = "probabilities", ops.sigmoid

    def serving_default(inputs):
        """Returns the outputs for whole sequences, at each step or at the last one."""
        if not model.per_step:
            length = tf.shape(inputs)[1]
            inputs = _require(inputs, length >= 1, _NO_STEPS, length)
        return {name: activation(model(inputs, training=False))}

    steps = ("batch", "time") if model.per_step else ("batch",)
    inputs = {"inputs": _Field(dtype, ("batch", "time", *channels))}
    found = [_Endpoint(serving_default, inputs, {name: _Field("float32", (*steps, *output))})]
    if not _streams(model):
        return found
    cache = _Cache(model)

    def step(inputs, **tensors):
        """Reads one step of each row, and returns the output as if the sequence ended there."""
        outputs, after = model.step(inputs, cache.pack(tensors))
        return {name: activation(outputs), **cache.flatten(after)}

    inputs = {"inputs": _Field(dtype, ("batch", *channels)), **cache.fields}
    outputs = {name: _Field("float32", ("batch", *output)), **cache.fields}
    return [*found, cache.endpoint(), _Endpoint(step, inputs, outputs)]


def _language_endpoints(model):
    size = model.vocabulary_size
    tokens, prompts = _Field("int32", ("batch",)), _Field("int32", ("batch", "time"))
    next_token = {"log_probabilities": _Field("float32", ("batch", size))}
    sampling = {"temperature": _Field("float32", (), 1.0), "seed": _Field("int32", ())}

    def checked_tokens(tokens):
        # Embeddings read ids below zero from their end, and on a GPU zeros for ids too large.
        message = f"Token ids must be in [0, {size}). Received:"
        return _require(tokens, (tokens >= 0) & (tokens < size), message, tokens)

    def checked_prompts(tokens):
        length = tf.shape(tokens)[1]
        return _require(checked_tokens(tokens), length >= 1, _NO_TOKENS, length)

    def serving_default(tokens):
        """Scores each token as the next one after every prefix of the rows, in nats."""
        return {"log_probabilities": model.head(_hidden_states(model, checked_tokens(tokens)))}

    every_token = {"log_probabilities": _Field("float32", ("batch", "time", size))}
    found = [_Endpoint(serving_default, {"tokens": prompts}, every_token)]
    streams = _streams(model)
    if streams:
        cache = _Cache(model)

        def step(tokens, **tensors):
            """Reads one token of each row and scores the next one."""
            log_p, after = model.step(checked_tokens(tokens), cache.pack(tensors))
            return {"log_probabilities": log_p, **cache.flatten(after)}

        def prefill(tokens):
            """Reads whole rows and scores the next token; `step` continues from the cache."""
            log_p, after = model.prefill(checked_prompts(tokens))
            return {"log_probabilities": log_p, **cache.flatten(after)}

        def generate(tokens, max_length, temperature, seed):
            """Continues prompts of equal lengths up to `max_length`, the prompt included.

            A temperature of 0 chooses the most probable token; the same seed draws the same tokens.
            """
            tokens = checked_prompts(tokens)
            rows, time = tf.shape(tokens)[0], tf.shape(tokens)[1]
            lengths = tf.fill([rows], time)
            ids = _generate(model, tokens, lengths, max_length - time, temperature, seed)
            return {"tokens": ids}

        after = {**next_token, **cache.fields}
        found += [
            cache.endpoint(),
            _Endpoint(step, {"tokens": tokens, **cache.fields}, after),
            _Endpoint(prefill, {"tokens": prompts}, after),
            _Endpoint(
                generate,
                {"tokens": prompts, "max_length": _Field("int32", (), 2), **sampling},
                {"tokens": _Field("int32", ("batch", "max_length"))},
                draws=True,
            ),
        ]
    if _has_text(model.vocabulary):
        found += _text_endpoints(model, streams, sampling)
    return found


def _text_endpoints(model, streams, sampling):
    codec = _Text(model.vocabulary)
    texts = _Field("string", ("batch",), model.vocabulary.tokens[0].encode(codec.encoding))

    def score_text(text):
        """Sums the log-probabilities of the tokens after the first, in nats, and counts them."""
        ids, lengths = codec.encode(text)
        return {
            "log_probability": _log_probability(model, ids, lengths),
            "num_tokens": tf.maximum(lengths - 1, 0),
        }

    def generate_text(text, max_new_tokens, temperature, seed):
        """Continues texts by `max_new_tokens` tokens; see `generate`."""
        ids, lengths = codec.encode(text)
        lengths = _require(lengths, lengths >= 1, _NO_TOKENS, lengths)
        ids = _generate(model, ids, lengths, max_new_tokens, temperature, seed)
        return {"text": codec.decode(ids, lengths + max_new_tokens)}

    scores = {
        "log_probability": _Field("float32", ("batch",)),
        "num_tokens": _Field("int32", ("batch",)),
    }
    tables = (codec.table,)
    found = [_Endpoint(score_text, {"text": texts}, scores, tables=tables)]
    if streams:
        inputs = {"text": texts, "max_new_tokens": _Field("int32", (), 1), **sampling}
        found.append(_Endpoint(generate_text, inputs, {"text": texts}, draws=True, tables=tables))
    return found


def _hidden_states(model, tokens):
    """The backbone's output (batch, time, channels), from empty states."""
    with without_carried_states(model):
        outputs = model.backbone(model.embed(tokens), training=False)
    return outputs[0] if isinstance(outputs, (list, tuple)) else outputs


def _generate(model, ids, lengths, new_tokens, temperature, seed):
    """Continues prompts token by token.

    One forward pass reads as many tokens as the shortest prompt has. Then all rows advance together
    and longer prompts are read first.

    Args:
        ids: int32 (batch, longest), prompts, padded at the end.
        lengths: int32 (batch,), their lengths.

    Returns:
        int32 (batch, longest + new_tokens), valid up to `lengths + new_tokens`.
    """
    rows, longest = tf.shape(ids)[0], tf.shape(ids)[1]
    new_tokens = _require(
        new_tokens,
        (rows >= 1) & (new_tokens >= 1) & (new_tokens <= _MAX_NEW_TOKENS // tf.maximum(rows, 1)),
        f"A request generates 1 to {_MAX_NEW_TOKENS} tokens over all its rows. "
        "Received new tokens and rows:",
        new_tokens,
        rows,
    )
    temperature = _require(
        temperature,
        (temperature >= 0) & (temperature < np.inf),
        "`temperature` must be finite and not negative. Received:",
        temperature,
    )
    with tf.control_dependencies([new_tokens]):  # or another operation would fail on no rows
        ids = tf.identity(ids)
    shortest, last = tf.reduce_min(lengths), longest + new_tokens - 1

    def token_at(place, log_p):
        drawn = _sample(log_p, temperature, tf.stack([seed, place]))
        given = ids[:, tf.minimum(place, longest - 1)]
        return tf.where(place < lengths, given, drawn)

    def advance(place, token, cache, written):
        written = written.write(place - shortest, token)
        log_p, cache = model.step(token, cache)
        return place + 1, token_at(place + 1, log_p), cache, written

    log_p, cache = model.prefill(ids[:, :shortest])
    written = tf.TensorArray(tf.int32, last - shortest + 1, element_shape=ids.shape[:1])
    first = shortest, token_at(shortest, log_p), cache, written
    _, token, _, written = tf.while_loop(lambda place, *_: place < last, advance, first)
    written = written.write(last - shortest, token)
    return tf.concat([ids[:, :shortest], tf.transpose(written.stack())], axis=1)


def _sample(log_p, temperature, seed):
    """Draws a token of each row by the Gumbel-max trick."""
    uniform = tf.random.stateless_uniform(tf.shape(log_p), seed, dtype=log_p.dtype)
    tiny = log_p.dtype.as_numpy_dtype(1e-20)
    gumbel = -tf.math.log(-tf.math.log(uniform + tiny) + tiny)
    return tf.argmax(log_p + tf.cast(temperature, log_p.dtype) * gumbel, -1, tf.int32)


def _log_probability(model, ids, lengths):
    """Sums the log-probabilities of the tokens after the first of each row, (batch,)."""
    ids = tf.pad(ids, [[0, 0], [0, tf.maximum(2 - tf.shape(ids)[1], 0)]])
    # The head's loss: with many words it computes fewer scores than `serving_default`.
    nll = model.head.loss(_hidden_states(model, ids[:, :-1]), ids[:, 1:])
    counted = tf.range(1, tf.shape(ids)[1]) < lengths[:, None]
    return -tf.reduce_sum(tf.where(counted, nll, 0), axis=1)


# A vocabulary in the graph


def _has_text(vocabulary):
    """Whether there is a vocabulary and UTF-8 can encode its tokens, which excludes surrogates."""
    if vocabulary is None:
        return False
    try:
        "".join(vocabulary.tokens).encode()
    except UnicodeEncodeError:
        return False
    return True


class _Text:
    """`Vocabulary.encode(text, final_eos=False)` and `Vocabulary.decode` for batches of strings."""

    def __init__(self, vocabulary: Vocabulary):
        self.unit, self.unknown = vocabulary.unit, vocabulary.unknown
        self.encoding = "latin-1" if self.unit == "byte" else "utf-8"
        tokens = [token.encode(self.encoding) for token in vocabulary.tokens]
        default = -1 if self.unknown is None else vocabulary.tokens.index(self.unknown)
        entries = tf.lookup.KeyValueTensorInitializer(tokens, np.arange(len(tokens), dtype="int32"))
        self.table = tf.lookup.StaticHashTable(entries, default)
        self._symbols = [b"\n" if token == EOS.encode() else token for token in tokens]
        # `tf.strings.split` knows the white space of ASCII only.
        white = "".join(c for c in map(chr, range(sys.maxunicode)) if c.isspace())
        self._white = f"[{white}]+"

    def encode(self, texts):
        """Returns int32 ids (batch, longest), padded with zeros, and their numbers (batch,)."""
        if self.unit == "word":
            texts = tf.strings.regex_replace(texts, "\n", f" {EOS} ")
            symbols = tf.strings.split(tf.strings.regex_replace(texts, self._white, " "))
        elif self.unit == "character":
            symbols = tf.strings.unicode_split(texts, "UTF-8")
        else:
            symbols = tf.strings.bytes_split(texts)
        ids = self.table.lookup(symbols.values)
        if self.unknown is None:
            message = "The vocabulary has no unknown token. The text has symbols unknown to it:"
            ids = _require(ids, ids >= 0, message, tf.boolean_mask(symbols.values, ids < 0))
        lengths = tf.cast(symbols.row_lengths(), tf.int32)
        return symbols.with_values(ids).to_tensor(), lengths

    def decode(self, ids, lengths):
        """Returns strings (batch,) of the first `lengths` ids of each row (batch, time)."""
        symbols = tf.RaggedTensor.from_tensor(tf.gather(self._symbols, ids), lengths)
        separator = " " if self.unit == "word" else ""
        texts = tf.strings.reduce_join(symbols, axis=-1, separator=separator)
        if self.unit == "byte":
            return tf.strings.unicode_transcode(texts, "UTF-8", "UTF-8")
        if self.unit == "word":
            texts = tf.strings.regex_replace(texts, " \n", "\n")
            return tf.strings.regex_replace(texts, "\n ", "\n")
        return texts
