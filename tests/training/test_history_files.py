"""Files of a run: their folders, and histories that are damaged."""

import pytest

from trellis_keras.training.records import BestModel, HistoryCSV, read_history
from trellis_keras.training.summaries import Summaries


@pytest.mark.parametrize("callback", [HistoryCSV, BestModel])
def test_the_folder_is_there_before_the_first_epoch(callback, tmp_path):
    callback(tmp_path / "new" / "folder" / "file.keras").on_train_begin()
    assert (tmp_path / "new" / "folder").is_dir()


@pytest.mark.parametrize("callback", [HistoryCSV, BestModel])
def test_a_tilde_is_the_home_folder(callback, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    callback("~/run/file.keras").on_train_begin()
    assert (tmp_path / "run").is_dir()
    (tmp_path / "run" / "history.csv").write_text("epoch,loss\n1,2.0\n")
    assert len(read_history("~/run/history.csv")) == 1


def test_also_of_tensorboards_logs(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    Summaries("~/logs").scalars(0, {"loss": 1.0})
    assert list((tmp_path / "logs").iterdir())


def test_a_history(tmp_path):
    path = tmp_path / "history.csv"
    assert read_history(path) == []
    path.write_bytes(b"epoch,loss,val_loss\r\n1,nan,\r\n2,0.5,1e-3\r\n")
    assert [row["loss"] for row in read_history(path)] == ["nan", "0.5"]


@pytest.mark.parametrize(
    "content",
    [
        b"epoch,loss\n1,a\n",
        b"epoch,loss\nx,1\n",
        b"epoch,loss\n0,1\n",
        b"epoch,loss\n1,2,3\n",
        b"loss\n1\n",
        b"epoch\n\xff\n",
        b'epoch\n"1\n',
        b"epoch\n" + b"1" * 200_000,
    ],
)
def test_a_damaged_history_is_named(tmp_path, content):
    path = tmp_path / "history.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="history.csv is no history of epochs, or damaged"):
        read_history(path)
