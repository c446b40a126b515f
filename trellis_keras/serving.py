"""SavedModels for TensorFlow Serving."""

import pathlib
import shutil
import tempfile

import keras


def export(model, path):
    """Writes a language model as a SavedModel.

    Its signature `serving_default` takes `tokens`, int32 (batch, time), any batch and any length,
    and returns `log_probabilities`, float32 (batch, time, vocabulary) of the next tokens. It draws
    no random numbers and assigns no variables: a model trained with a carried history
    (`stateful=True`) is exported as one that starts each request with an empty one.

    Args:
        model: A built `LanguageModel`.
        path: Folder to write, which must not exist yet. It appears in one step.

    Returns:
        The path.

    Raises:
        ValueError: `path` exists, or the model is not built, or Keras does not run on TensorFlow.

    Example:

    >>> model = trellis_keras.zoo.trellisnet_char()
    >>> export(model, "serving/trellisnet_char/1")
    """
    path = pathlib.Path(path).expanduser()
    _check_backend()
    if path.exists():
        raise ValueError(f"{path} exists already. Choose a new folder, or remove it first.")
    if not model.built:
        raise ValueError("Build the model before exporting it: model.build((None, None)).")
    model = without_history(model)
    # The archive finds the endpoint's variables. It is not told of the model: of a loaded one it
    # would make a signature of its own, with float tokens.
    archive = keras.export.ExportArchive()
    archive.add_endpoint(
        "serving_default",
        lambda tokens: {"log_probabilities": model(tokens, training=False)},
        input_signature=[_tokens_spec()],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(dir=path.parent, prefix=".exporting-"))
    try:
        archive.write_out(folder / "model", verbose=False)
        (folder / "model").rename(path)
    finally:
        shutil.rmtree(folder)
    return path


def without_history(model):
    """Returns the model itself, or a copy of a stateful one that carries no history."""
    if not getattr(model.backbone, "stateful", False):
        return model
    config = model.get_config()
    config["backbone"]["config"]["stateful"] = False
    copy = type(model).from_config(config)
    copy.build((None, None))
    copy.set_weights(model.get_weights())
    return copy


def _check_backend():
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "A SavedModel is written by TensorFlow, but Keras runs on "
            f"{keras.backend.backend()}. Save the model as a .keras file and export it in a "
            "process with KERAS_BACKEND=tensorflow (a run's folder: trellis-keras export)."
        )


def _tokens_spec():
    import tensorflow as tf

    return tf.TensorSpec([None, None], tf.int32, name="tokens")
