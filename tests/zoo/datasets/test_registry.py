import numpy as np
import pytest

from tests.support.processes import run_script
from trellis_keras.data import PianoRollStream, SequenceStream, TokenStream, Vocabulary
from trellis_keras.zoo.datasets import Dataset, info, list_datasets, load
from trellis_keras.zoo.datasets.sources import Source

NAMES = {
    *("ptb", "char_ptb", "wt2", "wt103", "text8", "enwik8", "war_and_peace", "lambada", "pydoc"),
    *("text", "seq_mnist", "permuted_mnist", "seq_cifar10", "jsb", "nottingham"),
    *("adding", "copy_memory"),
}


def test_names_and_terms():
    assert set(list_datasets()) == NAMES
    for name in NAMES:
        found = info(name)
        assert found.name == name and found.citation and found.license
        assert f'"{name}"' in load.__doc__
        assert found.source is None or isinstance(found.source, Source)
    assert info("text8").options == {"split": None, "first": None, "train_fraction": 1.0}


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("ptb_word", {}, r"Unknown data set. Received: 'ptb_word'; known: \['adding', .*'wt2'\]"),
        ("mnist", {}, "Did you mean 'seq_mnist'"),
        ("text", {"unti": "word"}, "option of the data set 'text'.*'unti'; .* mean 'unit'"),
        ("ptb", {"first": 9}, r"Received: 'first'; known: \[\]"),
        ("text", {}, "'text' needs the option `path`"),
        ("adding", {}, "needs the option `T`"),
    ],
)
def test_unknown_names_and_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        load(name, **options)


def order(stream):
    return np.concatenate([x for x, _, _ in stream]).tolist()


def test_streams_shuffle_the_training_split_of_sequences_only():
    split = np.arange(30), np.arange(30)
    dataset = Dataset("some", split, split, split, "", SequenceStream)
    assert dataset.sizes == {"train": 30, "valid": 30, "test": 30}
    assert order(dataset.stream("valid", 10)) == list(range(30))
    assert order(dataset.stream("train", 10)) != list(range(30))
    assert order(dataset.stream("train", 10, shuffle=False)) == list(range(30))
    with pytest.raises(ValueError, match="split='dev'"):
        dataset.stream("dev", 10)


def test_streams_of_texts_and_music():
    tokens, vocabulary = np.arange(30), Vocabulary("abc", "character")
    dataset = Dataset("some", tokens, tokens, tokens, "", TokenStream, vocabulary)
    stream = dataset.stream("train", 2, sequence_length=5, stateful=True)
    assert isinstance(stream, TokenStream) and stream.stateful
    rolls = [np.zeros((4, 88))] * 3
    dataset = Dataset("some", rolls, rolls, rolls, "", PianoRollStream)
    assert dataset.sizes["test"] == 3
    assert dataset.stream("test", 2).lengths == (3,)


_WITHOUT_TENSORFLOW = """
from trellis_keras.zoo import datasets

stream = datasets.load("pydoc").stream("train", 4, sequence_length=16, context_length=4)
assert stream[0][1].shape == (4, 12)
try:
    datasets.load("seq_mnist")
except ImportError as error:
    assert "no local copy of mnist" in str(error) and "TRELLIS_KERAS_DATA" in str(error)
else:
    raise AssertionError("no error without tensorflow-datasets")
"""


def test_neither_tensorflow_nor_tensorflow_datasets_is_needed():
    run_script(
        _WITHOUT_TENSORFLOW,
        backend="jax",
        block=("tensorflow", "tensorflow_datasets", "keras_nlp"),
    )
