"""Logs of a run for TensorBoard. They do not affect training."""

import json
import os
import pathlib
import sys
from typing import Any

import keras

from trellis_keras.files import checksum
from trellis_keras.training.gradient_norms import GradientNorms
from trellis_keras.training.tensorboard import TextSamples, summary_writer, write_graph
from trellis_keras.zoo.run.folder import TENSORBOARD, flat, without_paths

_PROMPT = 64  # tokens


def observers(
    folder: pathlib.Path,
    model: keras.Model,
    stream: Any,
    loaded: Any,
    batches: int,
    gradient_norms: int = 0,
    sample_length: int = 0,
    graph: bool = False,
    profile: tuple[int, int] | None = None,
) -> list[keras.callbacks.Callback]:
    """Writes the graph, and returns the callbacks for `fit`.

    Args:
        folder: The run's folder.
        model: The model.
        stream: Batches of the training data, in the same order each time.
        loaded: The data. A language model continues the start of its `valid` split.
        batches: Number of batches left to train on.
        gradient_norms, sample_length, graph, profile: As in `train`.

    Raises:
        ValueError: A value is out of range, or a profile is wanted without TensorFlow.
    """
    has_tensorflow = _has_tensorflow()
    if profile is not None:
        _check_profile(profile, batches, has_tensorflow)
    # First, because the others write the logs that it adds.
    callbacks = [GradientNorms(stream, steps=gradient_norms)] if gradient_norms else []
    if not has_tensorflow:
        print("TensorFlow is not installed: no TensorBoard logs are written.", flush=True)
        return callbacks
    # One folder each: TensorBoard may follow only the newest of several files in a folder.
    logs = folder / TENSORBOARD
    # Keras cannot write the graph of a subclassed model; `write_graph` can.
    board = keras.callbacks.TensorBoard(logs, write_graph=False, profile_batch=profile or 0)
    callbacks.append(board)
    if sample_length and getattr(model, "vocabulary", None) is not None:
        try:
            samples = TextSamples(loaded.valid[:_PROMPT], logs / "samples", length=sample_length)
            callbacks.append(samples)
        except ImportError as error:
            print(f"No text samples are written. {error}", flush=True)
    if graph and keras.backend.backend() == "tensorflow":
        write_graph(model, stream[0], logs / "graph")
    return callbacks


def _check_profile(profile, batches, has_tensorflow):
    if not 1 <= profile[0] <= profile[1]:
        raise ValueError(
            f"`profile` must be the first and the last batch, counted from 1. Received: {profile}"
        )
    if not has_tensorflow:
        raise ValueError("Profiling requires TensorFlow, which is not installed.")
    if keras.backend.backend() == "jax" and sys.version_info < (3, 12):
        raise ValueError(
            "On JAX, profiling requires Python 3.12 or newer: omit `profile`, or use "
            "another Python, or TensorFlow."
        )
    if profile[1] > batches:
        raise ValueError(
            f"The last batch to profile, {profile[1]}, is beyond the {batches} batches "
            "left in this run."
        )


def write_settings(recipe: Any, folder: pathlib.Path) -> None:
    """Writes a new run's recipe as a row of TensorBoard's HParams tab, if there is TensorFlow."""
    if not _has_tensorflow():
        return
    from tensorboard.plugins.hparams import api

    settings, _ = without_paths(recipe.to_dict())
    values = {
        name: value if isinstance(value, (bool, int, float, str)) else json.dumps(value)
        for name, value in flat(settings).items()
        if value is not None
    }
    writer = summary_writer(folder / TENSORBOARD)
    with writer.as_default(step=0):
        digest = checksum([os.fsencode(folder.resolve())])
        api.hparams(values, trial_id=f"{folder.name} {digest[:8]}")
    writer.close()


def _has_tensorflow():
    try:
        import tensorflow  # noqa: F401
    except ImportError:
        return False
    return True
