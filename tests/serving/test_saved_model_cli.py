"""TensorFlow's own `saved_model_cli` shows and runs what is exported."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.support.processes import child_environment
from tests.support.served import inputs, scores, small_model
from trellis_keras import serving, zoo

pytest.importorskip("tensorflow")


def saved_model_cli(*arguments):
    command = [pathlib.Path(sys.executable).parent / "saved_model_cli", *map(str, arguments)]
    return subprocess.run(
        command, env=child_environment(), check=True, capture_output=True, text=True
    ).stdout


def run(path, endpoint, folder, **arrays):
    """Returns the outputs of a request, {name: array}."""
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"in-{name}.npy", array)
    given = ";".join(f"{name}={folder}/in-{name}.npy" for name in arrays)
    options = ["--tag_set", "serve", "--signature_def", endpoint, "--inputs", given]
    saved_model_cli("run", "--dir", path, *options, "--outdir", folder / "out")
    return {file.stem: np.load(file) for file in (folder / "out").iterdir()}


def check(model, path, folder):
    name, array = inputs(model, 2, 9)
    ((answer, found),) = run(path, "serving_default", folder, **{name: array}).items()
    expected_name, expected = scores(model, array)
    assert answer == expected_name and found.dtype == "float32"
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_show_and_run(exported, tmp_path):
    model, path = exported("trellisnet_char")
    shown = saved_model_cli("show", "--dir", path, "--all")
    for endpoint in serving.endpoints_of(serving.without_history(model)):
        assert f"signature_def['{endpoint}']" in shown
    assert (
        "inputs['tokens'] tensor_info:\n        dtype: DT_INT32\n        shape: (-1, -1)" in shown
    )
    check(model, path, tmp_path / "request")


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.list_models())
def test_every_model_of_the_zoo(name, tmp_path):
    model = small_model(name)
    path = serving.export(model, tmp_path / "model")
    check(model, path, tmp_path / "request")
    if inputs(model, 1, 1)[0] == "tokens":
        prompts = inputs(model, 2, 4)[1]
        options = {"max_length": np.int32(9), "temperature": np.float32(0), "seed": np.int32(0)}
        ids = run(path, "generate", tmp_path / "generate", tokens=prompts, **options)["tokens"]
        best = scores(model, ids)[1].argmax(axis=-1)
        np.testing.assert_array_equal(ids[:, 4:], best[:, 3:-1])
