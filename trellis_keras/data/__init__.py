"""Vocabularies, and streams of batches for `fit`."""

from trellis_keras.data.streams import (
    EpochOrder,
    PianoRollStream,
    SequenceStream,
    TokenStream,
)
from trellis_keras.data.vocabulary import Vocabulary

__all__ = [
    "EpochOrder",
    "PianoRollStream",
    "SequenceStream",
    "TokenStream",
    "Vocabulary",
]
