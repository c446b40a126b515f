"""What the data tests share."""

import http.server
import os
import pathlib
import threading

import pytest


@pytest.fixture(scope="session")
def local_data():
    """`local_data(name)`: the folder of the real data sets, or a skip if it lacks `name`."""
    folder = os.environ.get("TRELLIS_KERAS_DATA")

    def check(name):
        if not folder or not (pathlib.Path(folder) / name).is_dir():
            pytest.skip(f"no local copy of {name}/: set TRELLIS_KERAS_DATA to its folder")
        return pathlib.Path(folder)

    return check


@pytest.fixture(scope="session")
def data_dir(local_data):
    """The folder of the real data sets, or a skip where there is no Penn Treebank."""
    return local_data("ptb")


@pytest.fixture
def tiny_ptb(tmp_path, monkeypatch):
    """A folder with three small files in PTB's layout, and the sizes to match them."""
    from trellis_keras.data import corpora, sources

    texts = {
        "train": " the cat sat \n the <unk> ran \n",
        "valid": " the cat ran \n",
        "test": " the <unk> sat \n",
    }
    (tmp_path / "ptb").mkdir()
    for split, text in texts.items():
        (tmp_path / "ptb" / f"ptb.{split}.txt").write_bytes(text.encode())
    sizes = {"train": 8, "valid": 4, "test": 4, "vocabulary": 6}
    monkeypatch.setattr(corpora, "PTB_WORDS", sizes)
    monkeypatch.delenv(sources.ENVIRONMENT_VARIABLE, raising=False)
    return tmp_path


@pytest.fixture
def web_site(tmp_path, monkeypatch):
    """A local web site: its folder and its address."""
    folder = tmp_path / "site"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=folder)

        def log_message(self, *args):
            """Keeps the tests' output clean."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
