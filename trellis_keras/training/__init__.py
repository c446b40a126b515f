"""Optimizers, schedules and callbacks of the published recipes."""

from trellis_keras.training.best_model import BestModel
from trellis_keras.training.checkpoint import (
    Checkpoint,
    RestOfEpoch,
    restore_checkpoint,
    set_seeds,
)
from trellis_keras.training.checkpoint_files import checkpoint_progress, latest_checkpoint
from trellis_keras.training.gradient_norms import GradientNorms
from trellis_keras.training.history import HistoryCSV
from trellis_keras.training.optimizers import ASGD, SGD, Adam, RMSprop
from trellis_keras.training.schedules import (
    ASGDSwitch,
    ExponentialDecay,
    GrowingDepth,
    PlateauDecay,
    StepDecay,
)
from trellis_keras.training.stopping import EarlyStopping, EpochInterrupted, StopOnNaN, TimeLimit
from trellis_keras.training.tensorboard import TextSamples

__all__ = [
    "ASGD",
    "SGD",
    "ASGDSwitch",
    "Adam",
    "BestModel",
    "Checkpoint",
    "EarlyStopping",
    "EpochInterrupted",
    "ExponentialDecay",
    "GradientNorms",
    "GrowingDepth",
    "HistoryCSV",
    "PlateauDecay",
    "RMSprop",
    "RestOfEpoch",
    "StepDecay",
    "StopOnNaN",
    "TextSamples",
    "TimeLimit",
    "checkpoint_progress",
    "latest_checkpoint",
    "restore_checkpoint",
    "set_seeds",
]
