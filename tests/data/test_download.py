"""Downloads: resumed, whole or not there, and archives that cannot write outside their folder."""

import hashlib
import http.server
import io
import os
import tarfile
import threading
import zipfile

import pytest

pytest.importorskip("tensorflow_datasets")

from trellis_keras.data import builders, download  # noqa: E402

CONTENT = os.urandom(5_000)


class Site(http.server.BaseHTTPRequestHandler):
    """Sends CONTENT, breaking off after 2,000 bytes; sends a rest where it is asked for one."""

    has_ranges = True
    breaks = True
    asked = ()

    def do_GET(self):
        begin = self.headers.get("Range")
        type(self).asked += (begin,)
        start = int(begin.removeprefix("bytes=").rstrip("-")) if begin and self.has_ranges else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        rest = CONTENT[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(rest)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.end_headers()
        self.wfile.write(rest[:2_000] if self.breaks else rest)

    def log_message(self, *args):
        """Keeps the tests' output clean."""


@pytest.fixture
def site(monkeypatch):
    """(a new `Site` class, the address of a file there)."""
    handler = type("NewSite", (Site,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "_PAUSE", 0.0)
    monkeypatch.setattr(download, "_BLOCK", 500)
    yield handler, f"http://127.0.0.1:{server.server_port}/data.bin"
    server.shutdown()
    server.server_close()


def test_a_broken_connection_is_taken_up_where_it_broke(site, tmp_path):
    handler, url = site
    path = download.fetch(url, tmp_path, 10_000)
    assert path.read_bytes() == CONTENT
    assert handler.asked == (None, "bytes=2000-", "bytes=4000-")
    assert download.fetch(url, tmp_path, 10_000) == path and len(handler.asked) == 3
    assert not list(tmp_path.glob("*.part"))


def test_the_next_call_goes_on_with_what_a_killed_one_left(site, tmp_path):
    handler, url = site
    handler.breaks = False
    (tmp_path / "data.bin.part").write_bytes(CONTENT[:1_234])
    assert download.fetch(url, tmp_path, 10_000).read_bytes() == CONTENT
    assert handler.asked == ("bytes=1234-",)


@pytest.mark.parametrize("there", [CONTENT, CONTENT + b"more", b"of another file"])
def test_what_cannot_be_gone_on_with_is_sent_again(site, tmp_path, there):
    handler, url = site
    handler.breaks, handler.has_ranges = False, len(there) >= len(CONTENT)
    (tmp_path / "data.bin.part").write_bytes(there)
    assert download.fetch(url, tmp_path, 10_000).read_bytes() == CONTENT


def test_a_download_that_does_not_end_well_has_no_name(site, tmp_path):
    handler, url = site
    handler.has_ranges = False
    with pytest.raises(OSError, match="broke|Incomplete|incomplete|Connection"):
        download.fetch(url, tmp_path, 10_000)
    assert not (tmp_path / "data.bin").exists()
    with pytest.raises(ValueError, match="has more than 1,000 bytes"):
        download.fetch(url, tmp_path, 1_000)
    assert not (tmp_path / "data.bin").exists()
    assert (tmp_path / "data.bin.part").stat().st_size <= 1_000


# Archives

TEXTS = {split: f"the {split} text" for split in ("train", "valid", "test")}
OUTSIDE = ["../outside", "/tmp/outside", "a/../../../outside", "..\\outside"]


@pytest.fixture
def wikitext(web_site, monkeypatch):
    """`wikitext(zip archive's bytes)`: has the builder of WikiText-103 find it."""
    folder, url = web_site

    def publish(content):
        (folder / "wiki.zip").write_bytes(content)
        monkeypatch.setattr(builders.Wikitext103, "URL", f"{url}/wiki.zip")
        digest = hashlib.md5(content).hexdigest()
        monkeypatch.setattr(builders.Wikitext103, "CHECKSUM", digest)

    return publish


def zipped(members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


def files_in(folder):
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_a_zip_archive_stays_in_its_folder(wikitext, tmp_path):
    link = zipfile.ZipInfo("wikitext-103/link")
    link.external_attr = 0o120777 << 16  # a symbolic link
    members = [(f"wikitext-103/wiki.{split}.tokens", text) for split, text in TEXTS.items()]
    hostile = [(name, "escaped") for name in OUTSIDE]
    hostile += [(f"{name}/wiki.train.tokens", "escaped") for name in OUTSIDE]
    wikitext(zipped([*hostile, *members, (link, "/etc")]))
    before = files_in(tmp_path)
    paths = builders.unpack_files(builders.Wikitext103, tmp_path / "deep" / "cache")
    assert {split: path.read_text() for split, path in paths.items()} == TEXTS
    new = files_in(tmp_path) - before
    assert not {name for name in new if "outside" in name or "link" in name}
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_a_tar_archive_stays_in_its_folder(web_site, tmp_path, monkeypatch):
    folder, url = web_site
    files = {s: (f"data/{s}.txt", hashlib.sha256(t.encode()).hexdigest()) for s, t in TEXTS.items()}
    monkeypatch.setattr(builders.PtbText, "FILES", files)
    monkeypatch.setattr(builders.PtbText, "URL", f"{url}/ptb.tgz")
    with tarfile.open(folder / "ptb.tgz", "w:gz") as archive:
        for name in OUTSIDE:
            _add(archive, name, b"escaped")
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo("data/train.txt")
            link.type, link.linkname = kind, "/etc/hostname"
            archive.addfile(link)
        _add(archive, "/data/valid.txt", b"not this one")
        for split, text in TEXTS.items():
            _add(archive, f"./data/{split}.txt", text.encode())
    contents = builders.read_files(builders.PtbText, tmp_path / "cache")
    assert contents == {split: text.encode() for split, text in TEXTS.items()}
    assert not {name for name in files_in(tmp_path) if "outside" in name}


def _add(archive, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def test_a_file_that_unpacks_to_too_much_is_refused(web_site, tmp_path, monkeypatch):
    folder, url = web_site
    with zipfile.ZipFile(folder / "text8.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("text8", bytes(10**6))
    monkeypatch.setattr(builders.Text8, "URL", f"{url}/text8.zip")
    monkeypatch.setattr(builders.Text8, "LARGEST", 10**5)
    with pytest.raises(ValueError, match="text8 of http.* has more than 100,000 bytes"):
        builders.read_files(builders.Text8, tmp_path / "cache")
