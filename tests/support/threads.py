"""Functions that several threads call at once."""

import concurrent.futures
import sys


def in_threads(function, arguments, threads=8):
    """Returns the results of a function, called by threads that are interrupted all the time."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            return list(pool.map(function, arguments))
    finally:
        sys.setswitchinterval(interval)
