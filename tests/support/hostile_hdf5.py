"""HDF5 files that lead elsewhere: the ways in which an array may be somewhere else.

Each function takes a group that is open for writing, the name of an array to make in it, its shape,
and the path of another HDF5 file with an array `values` of that shape and dtype float32.
"""

import io
import os

import h5py
import numpy as np


def external_link(group, name, shape, secret):
    group[name] = h5py.ExternalLink(secret, "values")


def external_group(group, name, shape, secret):
    group[name] = h5py.ExternalLink(secret, "/")


def soft_link(group, name, shape, secret):
    group["other"] = np.zeros(shape, "float32")
    group[name] = h5py.SoftLink("other")


def loop_of_links(group, name, shape, secret):
    group["other"] = h5py.SoftLink(name)
    group[name] = h5py.SoftLink("other")


def link_to_a_pipe(group, name, shape, secret):
    group[name] = h5py.ExternalLink(_pipe(secret), "values")


def external_storage(group, name, shape, secret):
    size = 4 * int(np.prod(shape))
    group.create_dataset(name, shape, "float32", external=[(secret, 0, size)])


def virtual_array(group, name, shape, secret):
    layout = h5py.VirtualLayout(shape, "float32")
    layout[:] = h5py.VirtualSource(secret, "values", shape)
    group.create_virtual_dataset(name, layout)


def virtual_pipe(group, name, shape, secret):
    """Its shape is that of an array behind the pipe."""
    any_length = (None, *shape[1:])
    layout = h5py.VirtualLayout(shape, "float32", any_length)
    source = h5py.VirtualSource(_pipe(secret), "values", shape, maxshape=any_length)
    layout[: h5py.h5s.UNLIMITED] = source[: h5py.h5s.UNLIMITED]
    group.create_virtual_dataset(name, layout)


def texts(group, name, shape, secret):
    """Elements of any length; several may be the same bytes of the file."""
    group.create_dataset(name, shape, h5py.string_dtype())[...] = "x" * 10_000


def large_chunk(group, name, shape, secret):
    """A chunk of 64 MiB for a few numbers, which a reader must decompress as a whole."""
    chunks = 2**24 // int(np.prod(shape[1:])), *shape[1:]
    options = {"maxshape": (None, *shape[1:]), "chunks": chunks, "compression": "gzip"}
    group.create_dataset(name, shape, "float32", **options)[...] = 0


def attribute_of_texts(group, name, shape, secret):
    group[name] = np.zeros(shape, "float32")
    group[name].attrs.create("dtype", ["bfloat16"] * 3, dtype=h5py.string_dtype())


def deep(group, name, shape, secret):
    group = group.id
    for _ in range(3000):
        group = h5py.h5g.create(group, b"a")


LINK, ELSEWHERE = "is a link to something else", "stores its values in other files"
# {what makes it: what the error says}
HOSTILE = {
    external_link: LINK,
    external_group: LINK,
    soft_link: LINK,
    loop_of_links: LINK,
    link_to_a_pipe: LINK,
    external_storage: ELSEWHERE,
    virtual_array: ELSEWHERE,
    virtual_pipe: ELSEWHERE,
    large_chunk: "is stored in chunks",
    texts: "has elements of varying length",
    attribute_of_texts: "an attribute of '.*' has elements of varying length",
    deep: "its groups are nested more than 100 levels deep",
}


def replace_array(path, name, hostile, secret):
    """Puts something hostile in place of an array of an HDF5 file, such as "embedding/vars/0"."""
    with h5py.File(path, "a") as file:
        group, _, last = name.rpartition("/")
        shape = file[name].shape
        with h5py.File(secret, "w") as other:
            other["values"] = np.full(shape, SECRET, "float32")
        del file[name]
        hostile(file[group], last, shape, secret)


def arrays_of_nothing():
    """The bytes of a file that claims 40 GB of numbers, of which it has none."""
    file = io.BytesIO()
    with h5py.File(file, "w") as content:
        content.create_dataset("a", (10**10,), "float32")
    return file.getvalue()


SECRET = 7.25e7  # what no weights of a test hold


def _pipe(secret):
    pipe = secret.with_name("pipe")
    if not pipe.exists():
        os.mkfifo(pipe)
    return pipe
