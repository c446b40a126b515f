"""How far a job has come: one line that renews itself on a terminal, a few lines in a file."""

import sys
import time

_SHOWN_EVERY = 0.5  # seconds
_LINES = 10


class Progress:
    """Reports bytes of a file on the standard error stream.

    Args:
        size: Bytes in all.
        done: Bytes that an earlier process has done.
        verbose: 0: nothing; 1: one line that renews itself; 2: a line for each tenth of the file.
    """

    def __init__(self, size, done=0, verbose=0):
        self._size, self._first, self._verbose = max(size, 1), done, verbose
        self._started, self._shown = time.monotonic(), -_SHOWN_EVERY
        self._tenth = _LINES * done // self._size

    def update(self, done, last=False):
        """Reports that so many bytes are done."""
        seconds = time.monotonic() - self._started
        tenth = int(_LINES * done // self._size)
        if self._verbose == 1 and (last or seconds - self._shown > _SHOWN_EVERY):
            self._shown = seconds
            print(f"\r{self._line(done, seconds):60}", end="\n" if last else "", file=sys.stderr)
            sys.stderr.flush()
        if self._verbose == 2 and tenth > self._tenth:
            self._tenth = tenth
            print(self._line(done, seconds), file=sys.stderr, flush=True)

    def _line(self, done, seconds):
        rate = (done - self._first) / max(seconds, 1e-9)
        left = _clock((self._size - done) / rate) if rate else "unknown time"
        part = f"{done / 1e6:,.1f} of {self._size / 1e6:,.1f} MB"
        return f"{part}, {rate / 1e6:.3g} MB/s, {left} left"


def _clock(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
