"""Models around a causal backbone, with their losses and metrics."""

from trellis_keras.models.dynamic_evaluation import DynamicEvaluation
from trellis_keras.models.language_model import LanguageModel
from trellis_keras.models.losses import FrameLoss, SquaredError
from trellis_keras.models.metrics import (
    BitsPerCharacter,
    CrossEntropy,
    DigitsRecalled,
    FrameNLL,
    Perplexity,
)
from trellis_keras.models.neural_cache import NeuralCache
from trellis_keras.models.polyphonic_model import PolyphonicModel
from trellis_keras.models.sequence_classifier import SequenceClassifier
from trellis_keras.models.sequence_regressor import SequenceRegressor

__all__ = [
    "BitsPerCharacter",
    "CrossEntropy",
    "DigitsRecalled",
    "DynamicEvaluation",
    "FrameLoss",
    "FrameNLL",
    "LanguageModel",
    "NeuralCache",
    "Perplexity",
    "PolyphonicModel",
    "SequenceClassifier",
    "SequenceRegressor",
    "SquaredError",
]
