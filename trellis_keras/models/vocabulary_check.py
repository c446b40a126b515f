"""Whether a file's weights belong to a model's vocabulary."""

import itertools
import pathlib

import h5py

from trellis_keras.files import open_archive
from trellis_keras.models.saved_files import check_claims, read_config


def check_weights_file(path, model):
    """Refuses the weights of a language model with other tokens.

    A `.keras` file has its model's vocabulary, a `.weights.h5` file only the number of tokens.
    Of any other file nothing is said here.

    Args:
        path: The file.
        model: The `LanguageModel` that is to load it.

    Raises:
        ValueError: Another number of tokens, or a token that is another one, or a damaged file.
        OSError: It cannot be read.
    """
    path = pathlib.Path(path)
    check_claims(path)
    size, vocabulary = None, None
    if path.suffix == ".keras":
        size, vocabulary = _saved_vocabulary(path)
    elif path.name.endswith(".weights.h5"):
        size = _embedded_tokens(path)
    if size not in (None, model.vocabulary_size):
        raise ValueError(
            f"{path} holds weights for {size:,} tokens, but the model has vocabulary_size="
            f"{model.vocabulary_size:,}: it belongs to another vocabulary."
        )
    if None not in (vocabulary, model.vocabulary) and vocabulary != list(model.vocabulary.tokens):
        pairs = enumerate(itertools.zip_longest(vocabulary, model.vocabulary.tokens))
        place, (theirs, ours) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        raise ValueError(
            f"{path} was saved with another vocabulary: token {place} is {theirs!r} there, "
            f"{ours!r} in the model's."
        )


def _saved_vocabulary(path):
    """Returns the number of tokens and the tokens of a saved language model; None: unknown."""
    with open(path, "rb") as file, open_archive(file) as archive:
        config = read_config(archive)["config"]
    try:
        vocabulary = config.get("vocabulary")
        tokens = None if vocabulary is None else list(vocabulary["config"]["tokens"])
        return int(config["vocabulary_size"]), tokens
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} holds no language model: {error!r}") from error


def _embedded_tokens(path):
    with h5py.File(path) as file:
        embedding = file.get("embedding/vars/0")
        return embedding.shape[0] if isinstance(embedding, h5py.Dataset) else None
