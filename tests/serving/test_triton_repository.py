"""The examples of serving that need no server. `test_triton.py` asks one."""

import runpy

import pytest

from tests.support.processes import ROOT

EXAMPLES = ROOT / "examples" / "serving"


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
