"""Optimizers, schedules, checkpoints and monitors of the published recipes."""

from trellis_keras.training.checkpoint import (
    Checkpoint,
    RestOfEpoch,
    latest,
    progress,
    restore,
    set_seeds,
)
from trellis_keras.training.monitors import (
    BestModel,
    GradientNorms,
    HistoryCSV,
    StopOnNaN,
    TextSamples,
    TimeLimit,
)
from trellis_keras.training.optimizers import ASGD, SGD, Adam, RMSprop
from trellis_keras.training.schedules import (
    ASGDSwitch,
    EarlyStopping,
    ExponentialDecay,
    GrowingDepth,
    PlateauDecay,
    StepDecay,
)

__all__ = [
    "ASGD",
    "SGD",
    "ASGDSwitch",
    "Adam",
    "BestModel",
    "Checkpoint",
    "EarlyStopping",
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
    "latest",
    "progress",
    "restore",
    "set_seeds",
]
