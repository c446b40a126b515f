"""Training on windows of a long time series: memory and windows per second.

    python -m benchmarks.series            # 10 million rows by 8 columns, from an .npy file
    python -m benchmarks.series --csv      # the same from a CSV file of about 700 MB

A new process reads the series and trains a small TCN on windows of 168 rows. It prints the rows;
the seconds of reading (for CSV also those of pyarrow alone); the windows per second of the stream
alone and of `fit`, also per second of CPU time, which other programs hardly affect; and the peak
resident memory, which includes mapped pages of the file. `--output benchmarks/results` writes the
figures as JSON.
"""

import contextlib
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
import types
from typing import Annotated

import numpy as np
import pyarrow.csv
import typer

from trellis_keras.zoo.environment import processor

CHANNELS, WINDOW, HORIZON = 8, 168, 24
_BLOCK = 100_000


def write_values(path: pathlib.Path, rows: int) -> None:
    """Writes an .npy file of random values."""
    values = np.lib.format.open_memmap(path, "w+", "float32", (rows, CHANNELS))
    for block in _blocks(rows):
        values[block.start : block.stop] = _random(block)


def write_csv(path: pathlib.Path, rows: int) -> None:
    """Writes a CSV file of random values with a column of timestamps."""
    with open(path, "w") as file:
        file.write(",".join(["time", *(f"c{i}" for i in range(CHANNELS))]) + "\n")
        for block in _blocks(rows):
            table = np.column_stack([np.arange(block.start, block.stop), _random(block)])
            np.savetxt(file, table, ["%d", *["%.4f"] * CHANNELS], delimiter=",")


def _blocks(rows):
    return [range(i, min(i + _BLOCK, rows)) for i in range(0, rows, _BLOCK)]


def _random(block):
    rng = np.random.default_rng(block.start)
    return rng.normal(size=(len(block), CHANNELS)).astype("float32")


def measure(path: str, batches: int, batch_size: int) -> None:
    """Prints the figures for a file as JSON."""
    from trellis_keras.forecasting import Columns, Forecaster, TimeSeries, WindowStream
    from trellis_keras.layers import TCN

    figures = {}
    with _timed() as reading:
        if path.endswith(".csv"):
            names = [f"c{i}" for i in range(CHANNELS)]
            series = TimeSeries.from_csv(path, Columns(names[:1], past=names[1:], time="time"))
        else:
            series = TimeSeries(np.load(path, mmap_mode="r"))
    figures |= {"read_s": round(reading.wall, 2), "read_cpu_s": round(reading.cpu, 2)}
    if path.endswith(".csv"):
        with _timed() as alone:
            for _ in pyarrow.csv.open_csv(path):
                pass
        figures |= {"pyarrow_s": round(alone.wall, 2), "pyarrow_cpu_s": round(alone.cpu, 2)}
    train, _, _ = series.split(WINDOW, HORIZON)
    stream = _first(WindowStream(train, batch_size, shuffle=True), batches)
    with _timed() as alone:
        for i in range(batches):
            stream[i]
    backbone = TCN(4, kernel_size=2, depth=1, return_sequences=False)
    model = Forecaster(backbone, HORIZON, normalize=True)
    model.adapt(series.values[:_BLOCK])
    model.compile("adam")
    model.fit(stream, epochs=1, shuffle=False, verbose=0)  # compiles
    with _timed() as fitted:
        model.fit(stream, epochs=1, shuffle=False, verbose=0)
    count = batches * batch_size
    figures = {
        "rows": len(series.values),
        "windows": len(train),
        **figures,
        "stream_windows_per_s": round(count / alone.wall),
        "stream_windows_per_cpu_s": round(count / alone.cpu),
        "fit_windows_per_s": round(count / fitted.wall),
        "fit_windows_per_cpu_s": round(count / fitted.cpu),
        "memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    print(json.dumps(figures))


@contextlib.contextmanager
def _timed():
    """Yields an object that afterwards has the seconds `wall` and `cpu`."""
    times = types.SimpleNamespace()
    wall, cpu = time.perf_counter(), time.process_time()
    yield times
    times.wall, times.cpu = time.perf_counter() - wall, time.process_time() - cpu


def _first(stream, batches):
    """Returns a stream of only the first batches."""
    import keras

    class First(keras.utils.PyDataset):
        def __len__(self):
            return min(batches, len(stream))

        def __getitem__(self, index):
            return stream[index]

    return First()


def main(
    rows: Annotated[int, typer.Option(help="Rows of the series.")] = 10_000_000,
    csv: Annotated[bool, typer.Option("--csv", help="Read a CSV file.")] = False,
    batches: Annotated[int, typer.Option(help="Batches to train on.")] = 400,
    batch_size: Annotated[int, typer.Option(help="Windows per batch.")] = 256,
    output: Annotated[str | None, typer.Option(help="Folder of the result file.")] = None,
):
    """Measure in a new process, on temporary files."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / ("series.csv" if csv else "series.npy")
        (write_csv if csv else write_values)(path, rows)
        call = f"measure({str(path)!r}, {batches}, {batch_size})"
        code = f"from benchmarks.series import measure; {call}"
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="")
    if output is not None and not done.returncode:
        machine = {"processor": processor(), "cores": os.cpu_count(), "backend": "tensorflow"}
        figures = {"machine": machine, **json.loads(done.stdout.splitlines()[-1])}
        file = pathlib.Path(output) / f"series{'_csv' * csv}-tensorflow.json"
        file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    typer.run(main)
