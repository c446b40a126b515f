"""tensorflow-datasets builders that download, verify and cache text files.

They hand on the bytes of the files as they are; `corpora.py` is the one reader of them. This is
the only module of the package that needs tensorflow-datasets at import.
"""

import hashlib
import tarfile

import tensorflow as tf
import tensorflow_datasets as tfds
from etils import epath

from trellis_keras.data.corpora import SPLITS, local_copy_hint

# What a broken connection, a missing page or a page that is no archive raises.
_DOWNLOAD_ERRORS = (
    OSError,
    EOFError,
    tarfile.TarError,
    tf.errors.OpError,
    tfds.download.DownloadError,
)


class PtbText(tfds.core.GeneratorBasedBuilder):
    """Penn Treebank text in Mikolov's preparation; one example, the whole file, per split."""

    VERSION = tfds.core.Version("1.0.0")
    # Given, because tensorflow-datasets 4.9 finds it with `importlib_resources`, which it does
    # not install on Python 3.9 and later.
    code_path = epath.Path(__file__)
    URL = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
    # Split: file inside the archive, sha256 of its bytes.
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

    def _info(self):
        return self.dataset_info_from_configs(
            description="Penn Treebank, prepared by Tomas Mikolov: 10,000 words, three files.",
            homepage=self.URL,
            features=tfds.features.FeaturesDict(
                {"content": tfds.features.Tensor(shape=(), dtype=tf.string)}
            ),
        )

    def _split_generators(self, dl_manager):
        archive = dl_manager.download(self.URL)
        try:
            contents = self._read_archive(archive)
        except Exception:
            # Left in the cache, a bad archive (or its .INFO file) would spoil the next attempt.
            for path in archive.parent.glob(f"{archive.name}*"):
                path.unlink()
            raise
        return {split: self._generate_examples(contents[split]) for split in SPLITS}

    def _generate_examples(self, content):
        yield 0, {"content": content}

    def _read_archive(self, archive):
        splits = {member: split for split, (member, _) in self.FILES.items()}
        contents = {}
        stream = tfds.download.ExtractMethod.TAR_STREAM
        for member, file in tfds.download.iter_archive(archive, stream):
            member = member.removeprefix("./")
            if member in splits:
                contents[splits[member]] = file.read()
        for split, (member, expected) in self.FILES.items():
            if split not in contents:
                raise ValueError(f"{self.URL} has no file {member}. {local_copy_hint()}")
            found = hashlib.sha256(contents[split]).hexdigest()
            if found != expected:
                raise ValueError(
                    f"{member} of {self.URL} is not the published file: expected sha256 "
                    f"{expected}, found {found}. {local_copy_hint()}"
                )
        return contents


def read_files(builder_class, cache_dir=None):
    """Downloads a data set's files, or takes them from the cache of an earlier call.

    Args:
        builder_class: A builder with one example per split whose feature `content` is bytes.
        cache_dir: tensorflow-datasets' folder; by default its own (`~/tensorflow_datasets`, or
            the environment variable `TFDS_DATA_DIR`).

    Returns:
        A dict from split name to bytes.

    Raises:
        OSError: If the download fails.
        ValueError: If what came down is not the published data set.
    """
    try:
        builder = builder_class(data_dir=cache_dir)
        builder.download_and_prepare()
    except _DOWNLOAD_ERRORS as error:
        raise OSError(
            f"Could not download {builder_class.URL} ({error}). {local_copy_hint()}"
        ) from error
    return {split: _only_content(builder, split) for split in SPLITS}


def _only_content(builder, split):
    (example,) = tfds.as_numpy(builder.as_dataset(split=split))
    return example["content"]
