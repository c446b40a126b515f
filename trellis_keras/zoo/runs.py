"""A run: a folder with a recipe, and what training by that recipe leaves in it.

recipe.json    all settings; what the other commands start from
history.csv    a row per epoch
best.keras     the model of the best validation loss, with its vocabulary
checkpoints/   where an interrupted run goes on
tensorboard/   logs for TensorBoard
"""

import json
import math
import os
import pathlib

import keras

from trellis_keras.files import replacing
from trellis_keras.training import Checkpoint
from trellis_keras.training.records import BestModel, HistoryCSV
from trellis_keras.zoo import registry

RECIPE = "recipe.json"
BEST = "best.keras"


def train(recipe, folder, data_dir=None, verbose="auto"):
    """Trains a model by its recipe, or goes on with a run that was interrupted.

    Args:
        recipe: A `Recipe`. If `folder` holds a run, it must be that run's, though it may have
            more epochs.
        folder: The run's folder, made if need be.
        data_dir: Folder of local copies of the data.
        verbose: As in `keras.Model.fit`.

    Returns:
        The trained model.

    Raises:
        ValueError: The folder cannot be written to, or holds a run of another recipe.
    """
    folder = _writable(folder)
    _check_same_run(recipe, folder)
    corpus = recipe.load_data(data_dir)
    recipe = recipe.replace(vocabulary_size=len(corpus.vocabulary))
    model = registry.get_model(recipe.name, vocabulary=corpus.vocabulary, **vars(recipe.model))
    print(describe(recipe, model, corpus), flush=True)
    train_stream, valid_stream = recipe.stream(corpus.train), recipe.stream(corpus.valid)
    with replacing(folder / RECIPE) as temporary:
        temporary.write_text(recipe.to_json())
    model.fit(
        train_stream,
        validation_data=valid_stream,
        epochs=recipe.training.epochs,
        callbacks=_callbacks(recipe, folder),
        verbose=verbose,
    )
    return model


def read_recipe(folder):
    """Returns the recipe of the run in `folder`.

    Raises:
        FileNotFoundError: There is no run.
    """
    path = pathlib.Path(folder) / RECIPE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run: {RECIPE} is missing.")
    text = path.read_text()
    return registry.recipe(json.loads(text)["name"]).from_json(text)


def load_best(folder):
    """Returns the best model of the run in `folder`.

    Raises:
        FileNotFoundError: There is no run, or it has not finished an epoch.
    """
    read_recipe(folder)
    path = pathlib.Path(folder) / BEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {BEST}: the run has not finished an epoch yet.")
    return keras.saving.load_model(path)


def evaluate(folder, split="test", protocol="exact", data_dir=None, verbose=0):
    """Evaluates the best model of a run.

    Args:
        folder: The run's folder.
        split: `"train"`, `"valid"` or `"test"`.
        protocol: `"exact"` counts each target once; `"authors"` counts as the authors' program
            does, see `data.TokenStream`.
        data_dir: Folder of local copies of the data.
        verbose: As in `keras.Model.evaluate`.

    Returns:
        A dict of the metrics, with `targets`, the number of counted targets.
    """
    recipe, model = read_recipe(folder), load_best(folder)
    corpus = recipe.load_data(data_dir)
    if corpus.vocabulary != model.vocabulary:
        raise ValueError(
            f"The vocabulary of {recipe.training.data} ({len(corpus.vocabulary)} tokens) is not "
            f"the saved model's ({len(model.vocabulary)} tokens): the data have changed."
        )
    stream = recipe.stream(getattr(corpus, split), protocol)
    results = model.evaluate(stream, return_dict=True, verbose=verbose)
    return {**results, "targets": stream.targets_counted}


def describe(recipe, model, corpus):
    """Returns a few lines on a run: model, data, recipe."""
    training = recipe.training
    sizes = ", ".join(f"{s} {len(getattr(corpus, s)):,}" for s in ("train", "valid", "test"))
    unit = "words" if corpus.unit == "word" else "characters"
    uniform = math.log(len(corpus.vocabulary))
    baseline = math.exp(uniform) if training.metric == "perplexity" else uniform / math.log(2)
    config = recipe.model
    return "\n".join(
        [
            f"{recipe.name}: {model.count_params():,} parameters, {config.depth} levels, "
            f"{config.hidden_units} hidden + {config.output_units or config.embedding_dim} output "
            "units",
            f"{training.data}: {sizes} {unit}, vocabulary {len(corpus.vocabulary):,} "
            f"(a uniform guess: {training.metric} {baseline:.4g})",
            f"batches of {training.batch_size} x {recipe.segment} tokens, history "
            f"{config.history}, horizon {recipe.horizon}, auxiliary losses "
            + (f"every {config.aux_every} levels" if config.aux_every else "none"),
            f"{config.optimizer} {config.learning_rate:g}, {training.epochs} epochs"
            + (f"; published {training.metric} {training.published}" if training.published else ""),
        ]
    )


def _callbacks(recipe, folder):
    decay = recipe.callbacks()
    best = BestModel(folder / BEST)
    callbacks = [*decay, HistoryCSV(folder / "history.csv"), best, *_tensorboard(folder)]
    # Last, so that it saves what the others remember of the epoch.
    checkpoint = Checkpoint(
        folder / "checkpoints", seed=recipe.model.seed or 0, callbacks=[*decay, best]
    )
    return [*callbacks, checkpoint]


def _tensorboard(folder):
    try:
        import tensorflow  # noqa: F401
    except ImportError:
        print("TensorFlow is not installed: no TensorBoard logs are written.")
        return []
    return [keras.callbacks.TensorBoard(folder / "tensorboard")]


def _writable(folder):
    folder = pathlib.Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"The output folder {folder} cannot be made: {error}") from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"The output folder {folder} cannot be written to.")
    return folder


def _check_same_run(recipe, folder):
    """A folder belongs to one recipe; only the number of epochs may grow."""
    if not (folder / RECIPE).exists():
        return
    old, new = read_recipe(folder).fields(), recipe.fields()
    free = {"epochs", "vocabulary_size"}  # the vocabulary's size is the data's
    different = [
        f"{name}: {old[name]!r} there, {new[name]!r} here"
        for name in new
        if name not in free and old.get(name) != new[name]
    ]
    if read_recipe(folder).name != recipe.name or different:
        raise ValueError(
            f"{folder} holds a run of {read_recipe(folder).name} with other settings "
            f"({'; '.join(different) or 'another model'}). Choose another folder, or go on with "
            f"that run: trellis-keras train --output {folder}"
        )
