import pytest

from tests.support.processes import run_script
from trellis_keras.zoo.datasets import info, list_datasets, load, register
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
        assert found.source is None or isinstance(found.source, Source)
    assert info("text8").options == {"split": None, "first": None, "train_fraction": 1.0}


def test_a_data_set_is_not_replaced():
    def text(data_dir):
        pass

    with pytest.raises(ValueError, match="already a data set 'text'"):
        register("mine", "mine")(text)
    assert "unit" in info("text").options


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("ptb_word", {}, r"Unknown data set. Received: 'ptb_word'; known: \['adding', .*'wt2'\]"),
        ("mnist", {}, "Did you mean 'seq_mnist'"),
        ("text", {"unti": "word"}, "option of the data set 'text'.*'unti'; .* mean 'unit'"),
        ("ptb", {"first": 9}, r"Received: 'first'; known: \[\]"),
        ("text", {}, "'text' needs the option `path`"),
        ("text", {"path": 5}, "`path` must be .*path=5"),
        ("text", {"path": "a", "unit": "word", "unknown": []}, r"`unknown` must be .*\[\]"),
        ("adding", {}, "needs the option `T`"),
    ],
)
def test_unknown_names_and_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        load(name, **options)


_WITHOUT_TENSORFLOW = """
from trellis_keras.zoo import datasets

assert sum(datasets.load("pydoc").sizes.values()) > 100_000
try:
    datasets.load("seq_mnist")
except ImportError as error:
    assert "no local copy of mnist" in str(error) and "TRELLIS_KERAS_DATA" in str(error)
else:
    raise AssertionError("no error without tensorflow-datasets")
"""


def test_neither_tensorflow_nor_tensorflow_datasets_is_needed():
    run_script(
        _WITHOUT_TENSORFLOW, backend="jax", block=("tensorflow", "tensorflow_datasets", "keras_nlp")
    )
