"""CSV files: forms, blocks, line numbers, and files that would exhaust memory or time."""

import gzip
import os
import subprocess
import sys

import pytest

from tests.support.processes import ROOT
from trellis_keras.forecasting import Columns, TimeSeries
from trellis_keras.forecasting.csv_file import _LONGEST, CSVFile

COLUMNS = Columns("y", time="t")


def write(folder, content, name="own.csv"):
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def read(path):
    file = CSVFile(path)
    blocks = list(file.blocks({name: i for i, name in enumerate(file.header)}))
    return {name: [text for b in blocks for text in b[name].to_pylist()] for name in file.header}


@pytest.mark.parametrize("name", ["own.csv", "own.csv.gz"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a,b\n1,2\n3,4", {"a": ["1", "3"], "b": ["2", "4"]}),
        (b"\xef\xbb\xbfa;b\r\n1,5;2\r\n", {"a": ["1,5"], "b": ["2"]}),
        (b"a\tb\r1\t2\r", {"a": ["1"], "b": ["2"]}),
        (b'"a, b\nc",d\n"1\n2","say ""x"""\n', {"a, b\nc": ["1\n2"], "d": ['say "x"']}),
        (b"a,b\n\n1,\n\n\n,2\n", {"a": ["1", ""], "b": ["", "2"]}),
        (b"a\n1\n\n3\n\n\n", {"a": ["1", "", "3"]}),
        (b"a,b", {"a": [], "b": []}),
        (b"", {}),
    ],
)
def test_forms_of_csv(tmp_path, name, content, expected):
    assert read(write(tmp_path, content, name)) == expected


def test_blocks_join_seamlessly(tmp_path):
    rows = _LONGEST // 3
    path = write(tmp_path, b"t,y\n" + b"".join(b"%d,%d\n" % (i, i % 7) for i in range(rows)))
    series = TimeSeries.from_csv(path, COLUMNS)
    assert series.values[:, 0].tolist() == [i % 7 for i in range(rows)] and series.step == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b't,y\n\n"1",2\n\n2,x\n',
            "column 'y' must hold numbers such as 12.5. Received: 'x' in line 5",
        ),
        (b'"t",y,"a\nb"\n1,2,"\n"\n\n3,4\n', "line 6 has 2 fields, the header 3"),
        (b"t,y\n1,2\n\xff\n", "line 3 has 1 fields, the header 2"),
        (
            b"t,y\n1,1_000\n",
            "column 'y' must hold numbers such as 12.5. Received: '1_000' in line 2",
        ),
        (
            "t,y\n1,\uff11\n".encode(),
            "column 'y' must hold numbers such as 12.5. Received: '\uff11' in line 2",
        ),
        ("t,y\n\uff11,1\n".encode(), "column 't' must hold times .*Received: '\uff11' in line 2"),
        (b"t,y\n1,1\0\n", "column 'y' must hold numbers such as 12.5. Received: '1.x00' in line 2"),
        (b"t,y\n1,2\n2,\xff\n", "not CSV in UTF-8: column 'y', line 3"),
        ("t,y\n1,2\n".encode("utf-16"), "not CSV in UTF-8. Received: header"),
        (b"t,y\n1,2\n" + _LONGEST * b"3,4" + b"\n", "a line after row 1 is longer than 1,048,576"),
        (b't,y\n1,"2\n' + _LONGEST * b"3,4\n", "or a quote is open"),
        (b"t,y," + _LONGEST * b"z", "line 1 has more than 1,048,576 characters"),
        (b'"t,y\n1,2\n' + _LONGEST * b"3,4\n", "own.csv is not CSV: field larger"),
        (
            b",".join(b"%d" % i for i in range(99)),
            r"no column 'y'. Its columns: 0, .*, 19, \.\.\.$",
        ),
    ],
)
def test_errors_name_the_line(tmp_path, content, message):
    with pytest.raises(ValueError, match=message) as error:
        TimeSeries.from_csv(write(tmp_path, content), COLUMNS)
    assert "own.csv" in str(error.value)


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(FileNotFoundError, match="There is no file .*pipe.csv"):
        CSVFile(tmp_path / "pipe.csv")


_CHILD = """
import resource, sys
from trellis_keras.forecasting import Columns, TimeSeries
used = lambda: resource.getrusage(resource.RUSAGE_SELF)
for path in sys.argv[1:]:
    before = used()
    try:
        TimeSeries.from_csv(path, Columns("y", time="t"))
    except ValueError as error:
        assert used().ru_maxrss - before.ru_maxrss < 2**18, "KiB"
        assert used().ru_utime - before.ru_utime < 10, "seconds"
        print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_bombs_take_little_memory_and_time(tmp_path):
    bombs = {  # a beginning, what follows in each of so many MiB, and the message
        "line": (b"1,", b"2", 257, "would unpack to more than 268,435,456 bytes"),
        "quote": (b'1,"', b"2,2\n", 64, "or a quote is open"),
    }
    paths = []
    for name, (start, part, count, _) in bombs.items():
        paths.append(tmp_path / f"{name}.csv.gz")
        block = gzip.compress(part * (2**20 // len(part)))
        end = gzip.compress(b"1\n")
        paths[-1].write_bytes(gzip.compress(b"t,y\n" + start) + count * block + end)
    child = [sys.executable, "-c", _CHILD, *map(str, paths)]
    done = subprocess.run(child, capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stderr[-2000:]
    for path, line, (*_, message) in zip(
        paths, done.stdout.splitlines(), bombs.values(), strict=True
    ):
        assert path.name in line and message in line
