"""Hides what TensorFlow logs while it is imported, and below the level of fatal errors later."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# What fails raises an exception in Python, too.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Lines of TensorFlow's libraries in C++, with and without absl's format.
_LOGGED = re.compile(
    rb"[IWE]\d{4} [\d:.]+ |\d{4}-\d\d-\d\d [\d:.]+: [IWE] |"
    rb"WARNING: All log messages before absl::InitializeLog|To enable the following instructions: "
)


@contextlib.contextmanager
def hidden_logs() -> Iterator[None]:
    """Hides what TensorFlow's libraries log within the block, which no log level would.

    Other lines are written to the standard error stream at the end of the block; if it raises, all
    lines are. With TF_CPP_MIN_LOG_LEVEL=0 nothing is hidden.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0" or sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    stderr, hidden = os.dup(2), _LOGGED
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        except BaseException:
            hidden = re.compile(b"$^")  # nothing
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            log.seek(0)
            for line in log:
                if not hidden.match(line):
                    os.write(2, line)
