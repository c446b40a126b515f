"""A run: a folder in which a model is trained by a recipe, and training resumes after a kill."""

from trellis_keras.zoo.run.description import describe
from trellis_keras.zoo.run.evaluation import (
    SPLITS,
    evaluate,
    evaluate_model,
    load_best,
    representative_data,
)
from trellis_keras.zoo.run.failures import explained
from trellis_keras.zoo.run.folder import (
    BEST,
    ENVIRONMENT,
    FILE_OPTIONS,
    RECIPE,
    best_path,
    check_no_file_of_a_run,
    check_output,
    epochs_done,
    flat,
    flat_settings,
    has_run,
    is_finished,
    read_paths,
    read_settings,
    recipe_path,
    resuming,
    without_paths,
)
from trellis_keras.zoo.run.training import train

__all__ = [
    "BEST",
    "ENVIRONMENT",
    "FILE_OPTIONS",
    "RECIPE",
    "SPLITS",
    "best_path",
    "check_no_file_of_a_run",
    "check_output",
    "describe",
    "epochs_done",
    "evaluate",
    "evaluate_model",
    "explained",
    "flat",
    "flat_settings",
    "has_run",
    "is_finished",
    "load_best",
    "read_paths",
    "read_settings",
    "recipe_path",
    "representative_data",
    "resuming",
    "train",
    "without_paths",
]
