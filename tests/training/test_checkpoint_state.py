"""Checkpoints whose checksums are right and whose contents are not."""

import io
import json

import numpy as np
import pytest

from tests.support.checkpoints import assert_same, fit, make_model, values
from trellis_keras.training import Checkpoint, PlateauDecay, checkpoint_files, restore

DELETED = object()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(a trained model, the files of its checkpoint)."""
    folder, model = tmp_path_factory.mktemp("checkpoints"), make_model()
    decay = PlateauDecay.trellisnet_word()
    fit(model, 1, decay, Checkpoint(folder, callbacks=[decay]))
    whole = folder / "epoch-0001"
    return model, {path.name: path.read_bytes() for path in whole.iterdir()}


def rewrite(folder, files, **changed):
    """Writes a checkpoint with other files, and the checksums to match."""
    whole = folder / "epoch-0001"
    whole.mkdir()
    for name, content in files.items():
        (whole / name).write_bytes(changed.get(name.split(".")[0], content))
    names = (checkpoint_files.VARIABLES, checkpoint_files.STATE)
    sums = {name: checkpoint_files._sha256(whole / name) for name in names}
    (whole / checkpoint_files.MANIFEST).write_text(json.dumps({"sha256": sums}))


@pytest.mark.parametrize(
    "place, value, message",
    [
        (["format"], DELETED, "'format'"),
        (["format"], 2, "has format 2, this version reads 1"),
        (["epoch"], "1", "epoch is '1'"),
        (["seed"], None, "seed is None"),
        (["stopped"], 1, "stopped is 1"),
        (["callbacks"], {}, "callbacks is"),
        (["callbacks", 0], 3, "not subscriptable"),
        (["callbacks", 0, "state"], [], "a callback is"),
        (["variables", "model"], DELETED, "'model'"),
        (["variables", "optimizer"], 3, "not iterable"),
        (["variables", "model", 0], {}, "'path'"),
        (["variables", "model", 0, "dtype"], 3, "a variable is"),
    ],
)
def test_a_state_that_is_none(tmp_path, written, place, value, message):
    model, files = written
    state = json.loads(files["state.json"])
    holder = state
    for key in place[:-1]:
        holder = holder[key]
    if value is DELETED:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    rewrite(tmp_path, files, state=json.dumps(state).encode())
    before = values(model)
    with pytest.raises(ValueError, match=f"epoch-0001 is no checkpoint of this version.*{message}"):
        restore(model, tmp_path)
    assert_same(values(model), before)


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"\xff", b"[" * 100_000])
def test_a_state_file_that_is_no_mapping(tmp_path, written, content):
    model, files = written
    rewrite(tmp_path, files, state=content)
    with pytest.raises(ValueError, match="epoch-0001 is no checkpoint of this version"):
        restore(model, tmp_path)


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def test_values_that_are_missing_or_of_another_kind(tmp_path, written):
    model, files = written
    arrays = dict(np.load(io.BytesIO(files["variables.npz"])))
    first = arrays.pop("model.00000")
    before = values(model)
    for number, (content, message) in enumerate(
        [
            (npz(**arrays), "has no value"),
            (npz(**arrays, **{"model.00000": first.astype(str)}), "stored as <U32"),
            (npz(**arrays, **{"model.00000": first.astype("int8")}), "stored as int8"),
            (b"no archive", "Invalid .npz file"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        rewrite(folder, files, variables=content)
        with pytest.raises(ValueError, match=f"epoch-0001 is no.*{message}"):
            restore(model, folder)
        assert_same(values(model), before)


def test_a_callbacks_state_that_is_none(tmp_path, written):
    model, files = written
    state = json.loads(files["state.json"])
    state["callbacks"][0]["state"] = {}
    rewrite(tmp_path, files, state=json.dumps(state).encode())
    decay = PlateauDecay.trellisnet_word()
    with pytest.raises(ValueError, match="epoch-0001 has no state of PlateauDecay: KeyError"):
        fit(model, 2, decay, Checkpoint(tmp_path, callbacks=[decay]))
