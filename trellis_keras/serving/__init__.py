from trellis_keras.serving.endpoint import Endpoint, Field
from trellis_keras.serving.endpoints import endpoints_of
from trellis_keras.serving.export import export, without_history

__all__ = ["Endpoint", "Field", "endpoints_of", "export", "without_history"]
