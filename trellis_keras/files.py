"""Writing files that never look whole while they are not."""

import contextlib
import os
import pathlib
import secrets

_ASIDE = ".writing-"


@contextlib.contextmanager
def replacing(path):
    """Yields a temporary path beside `path` that takes its place when the block ends well.

    Args:
        path: The file to write. Its folder must exist.

    Example:

    >>> with replacing("notes.txt") as temporary:
    ...     _ = temporary.write_text("whole or not at all")
    """
    path = pathlib.Path(path)
    # The name's end stays: some writers choose their format by it.
    temporary = path.with_name(f"{_ASIDE}{secrets.token_hex(4)}-{path.name}")
    temporary.touch(exist_ok=False)  # with the user's usual permissions, unlike `tempfile`
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(folder):
    """Removes what killed processes left of `replacing` in a folder."""
    for path in pathlib.Path(folder).glob(f"{_ASIDE}*"):
        path.unlink(missing_ok=True)
