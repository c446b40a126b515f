"""Polyphonic music as piano rolls: JSB Chorales and Nottingham."""

import dataclasses
import io
import zlib

from trellis_keras.data.registry import register
from trellis_keras.data.sources import SPLITS, check_count, checksum, read_files
from trellis_keras.data.splits import Splits
from trellis_keras.data.streams import PianoRollStream, check_piano_roll

JSB_SIZES = {"train": (229, 13_807), "valid": (76, 4_602), "test": (77, 4_725)}
NOTTINGHAM_SIZES = {"train": (694, 176_561), "valid": (173, 45_513), "test": (170, 44_463)}

# sha256 of the .mat files published with the TCN paper's programs.
CHECKSUMS = {
    "JSB_Chorales": "ac0e608527cc411c7e21ef7d38be47f0de7fb6b13b3ae168b8eccf1c2a9b18d4",
    "Nottingham": "d154f7ca2e90799dc1dc011d8fc048f2fc6ef3f7c69d974b9cf27a471634fbea",
}

_VARIABLES = {"train": "traindata", "valid": "validdata", "test": "testdata"}


@dataclasses.dataclass(frozen=True, eq=False)  # arrays cannot be compared so
class PianoRolls:
    """Pieces of music of different lengths.

    Attributes:
        rolls: Tuple of uint8 arrays of shape (frames, 88), 1 where a key is pressed.
    """

    rolls: tuple = dataclasses.field(repr=False)

    def __len__(self):
        return len(self.rolls)

    def stream(self, batch_size, *, buckets=4, seed=0, shuffle=False):
        """The pieces in padded batches, a `PianoRollStream`."""
        return PianoRollStream(self.rolls, batch_size, buckets=buckets, seed=seed, shuffle=shuffle)


@register
def jsb(data_dir):
    """JSB Chorales: 229, 76 and 77 pieces."""
    return _read_music("jsb", "JSB_Chorales", "Jsb", JSB_SIZES, data_dir)


@register
def nottingham(data_dir):
    """Nottingham: 694, 173 and 170 pieces."""
    return _read_music("nottingham", "Nottingham", "Nottingham", NOTTINGHAM_SIZES, data_dir)


def parse_piano_rolls(source):
    """Reads the piano rolls of a MATLAB file of known origin.

    SciPy ends the whole process on some files that were tampered with.

    Args:
        source: A `Source`: the file's bytes and the name that error messages give it. Its
            variables `traindata`, `validdata` and `testdata` are cell arrays of piano rolls.

    Returns:
        A dict from split to a tuple of uint8 arrays of shape (frames, 88).

    Raises:
        ValueError: If the file is cut off, lacks a variable, or holds what is no piano roll.
    """
    variables = _read_mat(source)
    rolls = {}
    for split, name in _VARIABLES.items():
        if name not in variables:
            raise ValueError(
                f"{source.label} is cut off or another file: it lacks the variable {name!r}. "
                f"Received: {sorted(key for key in variables if not key.startswith('__'))}"
            )
        cells = variables[name].ravel()
        for i, roll in enumerate(cells):
            check_piano_roll(roll, f"{source.label}, {name} {i},")
        rolls[split] = tuple(roll.astype("uint8") for roll in cells)
    return rolls


def _read_mat(source):
    import scipy.io

    try:
        return scipy.io.loadmat(io.BytesIO(source.content))
    # All of these were seen with files cut off at one place or another.
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
        raise ValueError(f"{source.label} is no MATLAB file, or cut off: {error}") from error


def _read_music(name, file, builder_name, sizes, data_dir):
    (source,) = read_files({"whole": f"poly_music/{file}.mat"}, data_dir, builder_name)
    found = checksum([source.content])
    if found != CHECKSUMS[file]:
        raise ValueError(
            f"{source.label} is not the published file: expected sha256 {CHECKSUMS[file]}, "
            f"found {found}"
        )
    rolls = parse_piano_rolls(source)
    for split in SPLITS:
        pieces, frames = sizes[split]
        check_count(source, f"{split} pieces", pieces, len(rolls[split]))
        check_count(source, f"{split} frames", frames, sum(map(len, rolls[split])))
    parts = {split: PianoRolls(rolls[split]) for split in SPLITS}
    return Splits(name, checksum=found, **parts)
