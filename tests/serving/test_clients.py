"""The parts of the example clients that need no server. `test_triton.py` asks one."""

import runpy
import sys

import numpy as np
import pytest

from tests.support.processes import ROOT
from trellis_keras.data import Vocabulary

EXAMPLES = ROOT / "examples" / "serving"
sys.path.insert(0, str(EXAMPLES))

import serving_client as client  # noqa: E402


def test_sampling_follows_the_probabilities():
    log_p = np.log(np.tile([[0.6, 0.1, 0.3]], (20_000, 1)))
    drawn = client.sample(log_p, 0.5, np.random.default_rng(0))
    wanted = np.array([0.36, 0.01, 0.09]) / 0.46
    np.testing.assert_allclose(np.bincount(drawn) / len(drawn), wanted, atol=0.02)


@pytest.mark.parametrize("unit", ["word", "character", "byte"])
def test_vocabularies_agree(unit, tmp_path):
    text = "aé b\na  aé\n\nb"
    vocabulary = Vocabulary.from_text(text, unit)
    vocabulary.save(tmp_path / "vocabulary.json")
    read = client.Vocabulary(tmp_path / "vocabulary.json")
    ids = vocabulary.encode(text, final_eos=False)
    np.testing.assert_array_equal(read.encode(text), ids)
    assert read.decode(ids).split() == vocabulary.decode(ids).split()
    if unit != "word":
        assert read.decode(ids) == text
    with pytest.raises(ValueError, match="does not know 'z'"):
        read.encode("a z")
    Vocabulary(vocabulary.tokens, unit, unknown="b").save(tmp_path / "unknown.json")
    np.testing.assert_array_equal(
        client.Vocabulary(tmp_path / "unknown.json").encode("a z"), read.encode("a b")
    )


def test_triton_repositories_refuse_links_in_an_export(tmp_path):
    """A link in a stranger's export would copy another file of this machine."""
    repository = runpy.run_path(str(EXAMPLES / "triton" / "repository.py"))
    (tmp_path / "tiny" / "1").mkdir(parents=True)
    (tmp_path / "tiny" / "1" / "variables").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="variables is a symbolic link"):
        repository["write"](tmp_path / "tiny", tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize("name", ['b" dims: [1] }\nbackend: "c', "b\n", "", "\u00e9"])
def test_triton_configurations_hold_no_foreign_text(name):
    repository = runpy.run_path(str(EXAMPLES / "triton" / "repository.py"))
    field = {"dtype": "float32", "shape": ["batch"]}
    for inputs, outputs in (({name: field}, {}), ({}, {name: field})):
        with pytest.raises(ValueError, match="is not the name of a tensor"):
            repository["config"]("step", {"inputs": inputs, "outputs": outputs})
