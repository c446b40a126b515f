import concurrent.futures
import errno
import hashlib
import io
import tarfile
import threading

import pytest

from trellis_keras.data import load, sources

pytest.importorskip("tensorflow_datasets")

from trellis_keras.data import builders  # noqa: E402

CONTENTS = {
    "train": b" the cat sat \n the <unk> ran \n",
    "valid": b" the cat ran \n",
    "test": b" the <unk> sat \n",
}


@pytest.fixture
def site(web_site, monkeypatch):
    """A local web site whose folder is returned; the builder looks for the archive there."""
    folder, url = web_site
    files = {
        split: (member, hashlib.sha256(CONTENTS[split]).hexdigest())
        for split, (member, _) in builders.PtbText.FILES.items()
    }
    monkeypatch.setattr(builders.PtbText, "URL", f"{url}/simple-examples.tgz")
    monkeypatch.setattr(builders.PtbText, "FILES", files)
    return folder


def write_archive(folder, contents):
    with tarfile.open(folder / "simple-examples.tgz", "w:gz") as archive:
        members = {"train": "./simple-examples/data/ptb.train.txt"}
        add(archive, "./simple-examples/README", b"other files are passed over")
        for split, content in contents.items():
            member = members.get(split, f"simple-examples/data/ptb.{split}.txt")
            add(archive, member, content)


def add(archive, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def test_download_verify_cache(site, tmp_path):
    write_archive(site, CONTENTS)
    assert builders.read_files(builders.PtbText, tmp_path / "cache") == CONTENTS
    # The second time nothing is downloaded.
    (site / "simple-examples.tgz").unlink()
    assert builders.read_files(builders.PtbText, tmp_path / "cache") == CONTENTS


def test_load_downloads_where_there_is_no_local_copy(site, tmp_path, tiny_ptb, monkeypatch):
    write_archive(site, CONTENTS)
    monkeypatch.setattr(
        builders, "read_files", lambda cls, read=builders.read_files: read(cls, tmp_path / "cache")
    )
    downloaded, local = load("ptb"), load("ptb", data_dir=tiny_ptb)
    assert downloaded.checksum == local.checksum
    assert downloaded.vocabulary == local.vocabulary


def test_failed_download_points_to_local_copies(site, tmp_path):
    message = (
        f"Could not download {builders.PtbText.URL}.*404.*"
        f"`data_dir`.*{sources.ENVIRONMENT_VARIABLE}"
    )
    with pytest.raises(OSError, match=message):
        builders.read_files(builders.PtbText, tmp_path / "cache")


@pytest.mark.parametrize(
    "write, error, message",
    [
        (
            lambda site: write_archive(site, {**CONTENTS, "valid": b" other \n"}),
            ValueError,
            "ptb.valid.txt of .* is not the published file: expected sha256 .*, found .*data_dir",
        ),
        (
            lambda site: write_archive(site, {"train": CONTENTS["train"]}),
            ValueError,
            "has no file simple-examples/data/ptb.valid.txt.*data_dir",
        ),
        (
            lambda site: (site / "simple-examples.tgz").write_text("<html>moved</html>"),
            OSError,
            "Could not download .*data_dir",
        ),
    ],
)
def test_bad_archives_are_named_and_not_kept(site, tmp_path, write, error, message):
    write(site)
    with pytest.raises(error, match=message):
        builders.read_files(builders.PtbText, tmp_path / "cache")
    write_archive(site, CONTENTS)
    assert builders.read_files(builders.PtbText, tmp_path / "cache") == CONTENTS


def test_a_download_stays_where_the_disk_was_too_full_to_unpack_it(site, tmp_path, monkeypatch):
    def full(self, download):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_archive(site, CONTENTS)
    with monkeypatch.context() as patch:
        patch.setattr(builders.PtbText, "_read", full)
        with pytest.raises(OSError, match="No space left"):
            builders.read_files(builders.PtbText, tmp_path / "cache")
    (site / "simple-examples.tgz").unlink()
    assert builders.read_files(builders.PtbText, tmp_path / "cache") == CONTENTS


def test_who_comes_second_waits(site, tmp_path, monkeypatch):
    """Both would prepare the data, and one could not put them where the other's are."""
    write_archive(site, CONTENTS)
    read, reading, second = builders.PtbText._read, [], threading.Event()

    def slow(self, download):
        reading.append(None)
        second.wait(2)  # which the second one must not get to
        return read(self, download)

    monkeypatch.setattr(builders.PtbText, "_read", slow)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(builders.read_files, builders.PtbText, tmp_path / "cache") for _ in range(2)
        ]
        assert [run.result() for run in runs] == [CONTENTS] * 2
    assert len(reading) == 1
