"""Writing files that never look whole while they are not."""

import contextlib
import os
import pathlib
import tempfile


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
    # The suffix stays: some writers choose their format by it.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-", suffix=path.suffix)
    os.close(handle)
    temporary = pathlib.Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
