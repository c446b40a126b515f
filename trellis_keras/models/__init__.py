"""Models around a causal backbone, with their losses and metrics."""

from trellis_keras.models.language_model import LanguageModel
from trellis_keras.models.losses import FrameLoss, PinballLoss, SquaredError
from trellis_keras.models.metrics import (
    MASE,
    BitsPerCharacter,
    Coverage,
    CrossEntropy,
    DigitsRecalled,
    FrameNLL,
    MeanPinball,
    Perplexity,
    mase_scale,
)
from trellis_keras.models.sequence_models import (
    PolyphonicModel,
    SequenceClassifier,
    SequenceRegressor,
)

__all__ = [
    "MASE",
    "BitsPerCharacter",
    "Coverage",
    "CrossEntropy",
    "DigitsRecalled",
    "FrameLoss",
    "FrameNLL",
    "LanguageModel",
    "MeanPinball",
    "Perplexity",
    "PinballLoss",
    "PolyphonicModel",
    "SequenceClassifier",
    "SequenceRegressor",
    "SquaredError",
    "mase_scale",
]
