"""Writes SavedModels for TensorFlow Serving: numbered folders, each complete or absent."""

import contextlib
import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Sequence

import keras

from keras_streams import GraphStream
from keras_streams.endpoints import add_endpoint
from keras_streams.files import annotate_error, sync_folder
from trellis_keras.export.endpoints import ServedEndpoint, endpoints_of
from trellis_keras.files import write_error
from trellis_keras.layers.checks import check_integer
from trellis_keras.models import LanguageModel
from trellis_keras.models.sequence_model import SequenceModel

if keras.backend.backend() == "tensorflow":  # `export` rejects the other backends
    import tensorflow as tf


def write_saved_model(
    model: LanguageModel | SequenceModel | GraphStream,
    path: pathlib.Path,
    version: int | None,
    warmup: bool,
) -> pathlib.Path:
    """Writes a version of a model to a folder and returns the version's path; see `export`."""
    _check_version(path, version)
    if warmup:
        _check_warmup()
    found, vocabulary = endpoints_of(model), getattr(model, "vocabulary", None)

    def write(folder):
        write_archive(found, folder)
        extra = folder / "assets.extra"  # for files that the graphs do not read
        extra.mkdir()
        _write_json(extra / "signatures.json", {e.name: e.describe() for e in found})
        if vocabulary is not None:
            vocabulary.save(extra / "vocabulary.json")
        if getattr(model, "class_names", None) is not None:
            _write_json(extra / "class_names.json", list(model.class_names))
        if warmup:
            _write_warmup(found, path.resolve().name, extra / "tf_serving_warmup_requests")

    return _write_version(path, version, write)


def write_archive(endpoints: Sequence[ServedEndpoint], folder: pathlib.Path) -> None:
    """Writes endpoints as a SavedModel."""
    archive = keras.export.ExportArchive()
    for endpoint in endpoints:
        for table in endpoint.tables:
            archive.track(table)
        add_endpoint(archive, endpoint.name, endpoint.served, endpoint.input_specs())
    # A served model needs no gradients.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    archive.write_out(str(folder), options=options, verbose=False)


def _write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_version(path, version):
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file. `path` must be the folder of the model's versions.")
    if _is_version(path.name) or (path / "saved_model.pb").exists():
        raise ValueError(
            f"{path} looks like one version of a model. `path` must be the folder of all versions, "
            f"such as {path.parent}; `version` is the number of its subfolder."
        )
    if version is None:
        return
    check_integer("version", version, minimum=1)
    if (path / str(version)).exists():
        raise _version_exists(path / str(version))


def _version_exists(path):
    return ValueError(f"{path} already exists. Choose another version, or remove it first.")


def _is_version(name):
    return name.isascii() and name.isdecimal()


def _write_version(path, version, write):
    """Calls `write(folder)`, then renames the folder to its version.

    Until then the folder's name is not a number, so no server loads it.
    """
    created = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    folder = path / f".exporting-{secrets.token_hex(4)}"
    try:
        with annotate_error(path, folder):
            try:
                write(folder)
            except tf.errors.OpError as error:
                if (written := write_error(error, folder)) is None:
                    raise
                raise written from error
            for file in folder.rglob("*"):  # flushed to disk before the rename marks it complete
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
            with contextlib.suppress(OSError):  # another process is exporting to it
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
        except OSError as error:  # another process may have taken the number
            if not target.exists():
                raise
            if version is not None:
                raise _version_exists(target) from error


# Requests that TensorFlow Serving runs before it serves a version


def _check_warmup():
    try:
        import tensorflow_serving.apis.prediction_log_pb2  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "Warm-up requests need tensorflow-serving-api: pip install tensorflow-serving-api, "
            "or export with warmup=False."
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
