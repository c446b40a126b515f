"""The tests of this folder keep what they compile for themselves, and compile it quickly."""

import os

import pytest

from keras_streams import native_stream


@pytest.fixture(autouse=True, scope="session")
def cache_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        # What zig makes once for each target takes it half a minute.
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        patch.setenv("ZIG_GLOBAL_CACHE_DIR", os.path.join(home, "zig"))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        options = [option.replace("-O3", "-O1") for option in native_stream.OPTIONS]
        patch.setattr(native_stream, "OPTIONS", options)
        yield
