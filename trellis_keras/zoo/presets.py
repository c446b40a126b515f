"""Loads presets, from the zoo, a folder or Hugging Face."""

import os
import pathlib
from typing import Any

import keras

from trellis_keras.models import SequenceClassifier
from trellis_keras.saved_files import load_model
from trellis_keras.zoo import registry, results
from trellis_keras.zoo.datasets.registry import suggestion

_HUGGING_FACE = "hf://"
# The files of a preset; a repository may have more.
_FILES = ["config.json", "metadata.json", "model.weights.h5", "assets/*"]


def from_preset(
    preset: str | os.PathLike, *, num_classes: int | None = None, **options: Any
) -> keras.Model:
    """Returns a pretrained model, or a classifier on a pretrained backbone.

    Args:
        preset: One of

            - the name of a zoo model with pretrained weights
              (`zoo.list_models(pretrained=True)`), or of a variant, such as `"tcn_adding/T=200"`;
            - a folder written by `model.save_to_preset`;
            - `"hf://user/model"`, a Hugging Face repository with the files of such a folder.

            Untrusted files are checked before Keras loads them, see docs/untrusted_input.md.
        num_classes: Integer of at least 2, for a `SequenceClassifier` of whole sequences with the
            preset's backbone (and, for a language model, its embedding) and a new head. Defaults to
            `None`, the preset's own model.
        **options: Other arguments of the `SequenceClassifier`, such as `class_names`, except
            `embedding` and `normalize`, which are the preset's.

    Returns:
        The model. A zoo model is compiled; compile any other model before training it.

    Raises:
        ValueError: If there is no such preset, its files are damaged, or its backbone cannot return
            only the last step.
        ImportError: If `huggingface_hub` is not installed, and the preset starts with `"hf://"`.

    Examples:

    >>> model = zoo.from_preset("tcn_adding/T=200")
    >>> classifier = zoo.from_preset("trellisnet_char", num_classes=2)
    >>> classifier.backbone.trainable = False  # train only the head
    >>> classifier.compile("adam")
    """
    if options and num_classes is None:
        raise ValueError(f"{sorted(options)} are for a classifier: also pass `num_classes`.")
    model = _load(preset)
    if num_classes is None:
        return model
    return SequenceClassifier.from_model(model, num_classes, **options)


def _load(preset):
    runs = [run for run in results.all_runs() if run.has_weights]
    by_name = {f"{run.model}/{run.variant}".rstrip("/"): run for run in runs}
    models = {run.model for run in runs}
    name = preset if isinstance(preset, str) else ""  # a path is a folder's
    if name in by_name:
        run = by_name[name]
        return registry.run_recipe(run.model, run.variant).build(weights="pretrained")
    if name in models:
        return registry.recipe(name).build(weights="pretrained")
    if name.startswith(_HUGGING_FACE):
        return load_model(_download(name.removeprefix(_HUGGING_FACE)))
    folder = pathlib.Path(preset).expanduser()
    if not folder.is_dir():
        raise ValueError(
            "`preset` must be a folder, 'hf://user/model', or a model that has weights in the zoo, "
            "such as those of zoo.list_models(pretrained=True). Received: "
            f"{preset!r}.{suggestion(name, [*models, *by_name])}"
        )
    return load_model(folder)


def _download(repository):
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            "Presets on Hugging Face need the package huggingface_hub: pip install huggingface-hub"
        ) from error
    return huggingface_hub.snapshot_download(repository, allow_patterns=_FILES)
