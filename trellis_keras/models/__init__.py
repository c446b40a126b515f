from trellis_keras.models.language_model import LanguageModel

__all__ = ["LanguageModel"]
