"""Corpora, vocabularies and streams of batches."""

from trellis_keras.data.corpora import Corpus, list_datasets, load
from trellis_keras.data.streams import TokenStream
from trellis_keras.data.vocabulary import Vocabulary
from trellis_keras.tokens import check_tokens

__all__ = ["Corpus", "TokenStream", "Vocabulary", "check_tokens", "list_datasets", "load"]
