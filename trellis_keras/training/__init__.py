"""Optimizers, learning-rate rules and checkpoints of the published recipes."""

from trellis_keras.training.asgd import ASGD, ASGDSwitch
from trellis_keras.training.callbacks import ExponentialDecay, PlateauDecay, StepDecay
from trellis_keras.training.checkpoint import Checkpoint, restore, set_seeds
from trellis_keras.training.checkpoint_files import latest
from trellis_keras.training.early_stopping import EarlyStopping
from trellis_keras.training.gradient_norms import GradientNorms
from trellis_keras.training.optimizers import SGD, Adam, RMSprop
from trellis_keras.training.stop_on_nan import StopOnNaN
from trellis_keras.training.time_limit import TimeLimit

__all__ = [
    "ASGD",
    "SGD",
    "ASGDSwitch",
    "Adam",
    "Checkpoint",
    "EarlyStopping",
    "ExponentialDecay",
    "GradientNorms",
    "PlateauDecay",
    "RMSprop",
    "StepDecay",
    "StopOnNaN",
    "TimeLimit",
    "latest",
    "restore",
    "set_seeds",
]
