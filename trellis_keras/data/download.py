"""Downloads that go on after an interruption, and have their name only when they are whole."""

import os
import time

import requests
from filelock import FileLock
from tqdm.auto import tqdm

# Bytes that are written at a time, and lost where the connection breaks.
_BLOCK = 2**16
# How often a broken connection is taken up again in one call, and seconds without any answer.
_ATTEMPTS = 5
_PATIENCE = 60
_PAUSE = 0.5  # seconds before the second attempt; doubled from then on
_BROKEN = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)


def fetch(url, folder, largest):
    """Downloads a file, or finds that of an earlier call.

    What has come down of it lies in `NAME.part`. After a broken connection the rest is asked for,
    in this call and, where it gives up or is killed, in the next one; a server that cannot send a
    rest sends all of it again. Of several processes one downloads and the others wait.

    Whether it is the right file is for the caller to verify, who removes a wrong one.

    Args:
        url: Its address, which ends with its name.
        folder: The `pathlib.Path` where it is kept, made if need be.
        largest: The most bytes that it may have.

    Returns:
        Its path.

    Raises:
        OSError: It cannot be downloaded, or not be stored.
        ValueError: It is larger.
    """
    path = folder / url.rpartition("/")[2]
    partial = path.with_name(f"{path.name}.part")
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f"{path.name}.lock")):
        if not path.exists():
            _fetch_all(url, partial, largest)
            os.replace(partial, path)
    return path


def _fetch_all(url, partial, largest):
    for attempt in range(_ATTEMPTS):
        try:
            return _fetch_rest(url, partial, largest)
        except _BROKEN:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(_PAUSE * 2**attempt)


def _fetch_rest(url, partial, largest):
    start = partial.stat().st_size if partial.exists() else 0
    # As stored: a rest of what was compressed on the way could not be read.
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with requests.get(url, headers=headers, stream=True, timeout=_PATIENCE) as response:
        is_rest = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        if response.status_code == 416 or (response.status_code == 206 and not is_rest):
            partial.unlink(missing_ok=True)
            raise requests.ConnectionError(f"{url} has no rest after {start:,} bytes: begin anew")
        if response.status_code >= 500:
            raise requests.ConnectionError(f"{url} answered {response.status_code}")
        response.raise_for_status()
        if response.status_code != 206:
            start = 0
        size = response.headers.get("Content-Length")
        whole = None if size is None else start + int(size)
        written = _write(response, partial, start, whole, largest)
    if whole is not None and written < whole:
        raise requests.ConnectionError(f"{url} broke off after {written:,} of {whole:,} bytes")


def _write(response, partial, start, whole, largest):
    """Adds a response to what is there of a file, and returns how long that is now."""
    written = start
    # A bar on a terminal only.
    bar = tqdm(
        total=whole, initial=start, unit="B", unit_scale=True, desc=partial.stem, disable=None
    )
    with bar, open(partial, "ab" if start else "wb") as file:
        for block in response.iter_content(_BLOCK):
            written += len(block)
            if written > largest:
                file.truncate(0)
                raise ValueError(f"{response.url} has more than {largest:,} bytes: another file")
            file.write(block)
            bar.update(len(block))
    return written
