"""What a loader may do with a damaged file: refuse it in clear words, within bounded memory."""

import contextlib
import pathlib
import warnings

try:
    import resource
except ImportError:  # Windows
    resource = None

_STATUS = pathlib.Path("/proc/self/status")
MEMORY = 2**30  # bytes beside those that the process has when the loader begins


class Finding(AssertionError):
    """A loader let another library's error through, or took more memory than it may."""


def attempt(load, path):
    """Returns whether a loader accepts a file; a `Finding` where it neither does nor refuses.

    To refuse is to raise a ValueError or OSError that names the file.
    """
    try:
        with _bounded_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load()
        return True
    except (ValueError, OSError) as error:
        if path.name in str(error) or path.parent.name in str(error):
            return False
        raise Finding(f"{type(error).__name__} does not name the file: {error}") from error
    except Exception as error:
        raise Finding(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _bounded_memory():
    if resource is None or not _STATUS.exists():
        yield
        return
    sizes = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = 1024 * int(sizes["VmSize"].split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
