from trellis_keras.models.language_model import LanguageModel
from trellis_keras.models.losses import FrameLoss, SquaredError
from trellis_keras.models.polyphonic import PolyphonicModel
from trellis_keras.models.sequence_classifier import SequenceClassifier
from trellis_keras.models.sequence_regressor import SequenceRegressor

__all__ = [
    "FrameLoss",
    "LanguageModel",
    "PolyphonicModel",
    "SequenceClassifier",
    "SequenceRegressor",
    "SquaredError",
]
