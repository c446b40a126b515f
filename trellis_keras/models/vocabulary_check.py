"""Whether a file's weights belong to a model's vocabulary."""

import json
import pathlib
import zipfile

import h5py


def check_weights_file(path, model):
    """Refuses the weights of a language model with other tokens.

    A `.keras` file has its model's vocabulary, a `.weights.h5` file only the number of tokens.
    Of any other file nothing is said here.

    Args:
        path: The file.
        model: The `LanguageModel` that is to load it.

    Raises:
        ValueError: Another number of tokens, or a token that is another one.
    """
    path = pathlib.Path(path)
    size, vocabulary = None, None
    if path.suffix == ".keras" and zipfile.is_zipfile(path):
        size, vocabulary = _saved_vocabulary(path)
    elif path.name.endswith(".weights.h5") and h5py.is_hdf5(path):
        size = _embedded_tokens(path)
    if size not in (None, model.vocabulary_size):
        raise ValueError(
            f"{path} holds weights for {size:,} tokens, but the model has vocabulary_size="
            f"{model.vocabulary_size:,}: it belongs to another vocabulary."
        )
    if None not in (vocabulary, model.vocabulary) and vocabulary != list(model.vocabulary.tokens):
        pairs = enumerate(zip(vocabulary, model.vocabulary.tokens, strict=True))
        place, (theirs, ours) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        raise ValueError(
            f"{path} was saved with another vocabulary: token {place} is {theirs!r} there, "
            f"{ours!r} in the model's."
        )


def _saved_vocabulary(path):
    """Returns the number of tokens and the tokens of a saved language model; None: unknown."""
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))["config"]
    vocabulary = config.get("vocabulary")
    return config.get("vocabulary_size"), vocabulary and vocabulary["config"]["tokens"]


def _embedded_tokens(path):
    with h5py.File(path) as file:
        embedding = file.get("embedding/vars/0")
        return None if embedding is None else embedding.shape[0]
