"""Classifies the series in a file of the UCR or UEA archive with a trained run."""

import csv
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_streams.files import atomic_write
from trellis_keras.forecasting import LabelledSeries, SeriesStream
from trellis_keras.models import SequenceClassifier
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.registry import read_recipe


def classify(
    folder: str | os.PathLike,
    path: str | os.PathLike,
    output: str | os.PathLike,
    overwrite: bool = False,
    average_with: Sequence[str | os.PathLike] = (),
) -> dict[str, Any]:
    """Predicts the classes of the series in a file of the UCR or UEA archive.

    Each row of the output is a series, in the order of the file: its number, from 1, its class in
    the file, if the file has classes, the predicted class, and the probability of each class.

    Args:
        folder: Folder of a run of a classifier of whole series.
        path: The file, `.ts`, `.arff`, `.tsv` or `.txt`. A series longer than the model's window is
            truncated, with a warning.
        output: CSV file to write.
        overwrite: Boolean, whether to replace an existing output. Defaults to `False`.
        average_with: Folders of other runs with the same classes, such as runs with other seeds,
            whose probabilities are averaged with those of `folder`. Defaults to none.

    Returns:
        A dict of `series`, their number, and `accuracy`, the fraction of series predicted
        correctly, or `None` if the file has no classes.

    Raises:
        ValueError: If the run is not a classifier of whole series, or the file does not match it.
        OSError: If a file cannot be read or written.
    """
    output = runs.check_output(output, [path], overwrite)
    models = [_load(each) for each in (folder, *average_with)]
    names = models[0][1].class_names
    for other, (_, model) in zip(average_with, models[1:], strict=True):
        if model.class_names != names:
            raise ValueError(
                f"Averaged runs must have the same classes. Received: {', '.join(names)} "
                f"of {folder}, and {', '.join(model.class_names)} of {other}"
            )
    found = [_probabilities(recipe, model, path) for recipe, model in models]
    series, probabilities = found[0][0], np.mean([each for _, each in found], axis=0)
    classes = probabilities.argmax(axis=-1)
    has_labels = series.labels[0] >= 0
    with atomic_write(output) as temporary, open(temporary, "w", encoding="utf-8", newline="") as f:
        table = csv.writer(f)
        label = ["label"] if has_labels else []
        table.writerow(["series", *label, "class", *(f"p({name})" for name in names)])
        for i, row in enumerate(probabilities):
            label = [names[series.labels[i]]] if has_labels else []
            table.writerow([i + 1, *label, names[classes[i]], *(f"{p:.6g}" for p in row)])
    accuracy = float(np.mean(classes == series.labels)) if has_labels else None
    return {"series": len(series), "accuracy": accuracy}


def _load(folder):
    """Returns the recipe and model of a run of a classifier for whole series."""
    recipe = read_recipe(folder)
    if recipe.data != "whole_series":
        raise ValueError(
            f"{folder} is a run of {recipe.name} on {recipe.data}: it does not classify whole "
            "series."
        )
    return recipe, runs.load_best(folder, SequenceClassifier)


def _probabilities(recipe, model, path):
    """Returns the series of a file and their class probabilities."""
    series = LabelledSeries.from_file(path, model.class_names, recipe.arguments["window"])
    if series.channels != recipe.channels:
        raise ValueError(
            f"{path} must have the {recipe.channels} channels that the model reads. "
            f"Received: {series.channels}"
        )
    stream = SeriesStream(series, recipe.training.batch_size)
    return series, model.predict_proba(stream, verbose=0)[: len(series)]
