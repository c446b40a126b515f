"""Files of the UCR and UEA archives, and the series in them."""

import gzip

import numpy as np
import pytest

from trellis_keras.forecasting import LabelledSeries, SeriesStream
from trellis_keras.forecasting.archive_file import read_archive_file

TS = """# Comments of PLAID start with one sign, others with another.
%% as here
@problemName Own
@timeStamps false
@missing true
@univariate false
@dimensions 2
@equalLength false
@classLabel true rest 10 2
@data
1,2.5,-3e-1:4,?,6:rest

7,8:9,10:2
"""
ARFF = """% Weka's
@RELATION 'Own'
@attribute relationalAtt relational
@attribute att0 numeric
@attribute att1 numeric
@attribute att2 numeric
@end relationalAtt
@attribute activity {rest, 'ten to', 2}
@data
'1,2.5,-3e-1\\n4,?,6',rest
"7,8,?\\n9,10,?",'ten to'
"""
FLAT = """@relation Own
@attribute 'a 0' real
@attribute a1 Numeric
@attribute target {0,1}
@data
1.5,2,0
?,-1,1
"""


def write(folder, content, name="own.ts"):
    path = folder / name
    content = content.encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def values(file):
    return [each.tolist() for each in np.asarray(file.series, object)]


@pytest.mark.parametrize("name", ["own.ts", "OWN.TS.gz"])
def test_ts(tmp_path, name):
    found = read_archive_file(write(tmp_path, "\ufeff" + TS, name.lower()))
    first, second = found.series
    np.testing.assert_array_equal(first, np.float32([[1, 4], [2.5, np.nan], [-0.3, 6]]))
    np.testing.assert_array_equal(second, [[7, 9], [8, 10]])
    assert found.labels == ["rest", "2"] and found.classes == ("rest", "10", "2")


def test_ts_without_classes(tmp_path):
    text = TS.replace("true rest 10 2", "false").replace(":rest", "").replace(":2\n", "\n")
    found = read_archive_file(write(tmp_path, text))
    assert found.labels == [] and found.classes == () and found.series[0].shape == (3, 2)


def test_arff(tmp_path):
    found = read_archive_file(write(tmp_path, ARFF, "own.arff"))
    np.testing.assert_array_equal(found.series[0], np.float32([[1, 4], [2.5, np.nan], [-0.3, 6]]))
    np.testing.assert_array_equal(found.series[1], [[7, 9], [8, 10]])  # not its padding
    assert found.labels == ["rest", "ten to"] and found.classes == ("rest", "ten to", "2")
    found = read_archive_file(write(tmp_path, FLAT, "own.arff"))
    np.testing.assert_array_equal(found.series, [[[1.5], [2]], [[np.nan], [-1]]])
    assert found.labels == ["0", "1"]


@pytest.mark.parametrize("separator", ["\t", "  ", ","])
def test_the_format_of_the_ucr_archive(tmp_path, separator):
    rows = [["1.0e+01", "1", "2", "NaN"], ["-1", "3", "nan", "4"], ["2", "5", "6", "7"]]
    text = "\n".join(separator.join(row) for row in rows)
    found = read_archive_file(write(tmp_path, text, "own.tsv"))
    assert [len(each) for each in found.series] == [2, 3, 3]
    assert found.labels == ["10", "-1", "2"] and found.classes == ("-1", "2", "10")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("2.5", "two", "line 11: Values must be finite numbers, .* Received: 'two'"),
        ("2.5", "1_0", "line 11: .* Received: '1_0'"),
        ("2.5", "inf", "line 11: .* Received: 'inf'"),
        ("2.5", "1e999", "line 11: .* Received: '1e999'"),
        ("4,?,6", "4,?", "line 11: .* equally long. Received: 3, 2 values"),
        ("7,8:9,10", "7,8", "line 13: All series must have the 2 channels of the first. .* 1"),
        ("7,8:9,10", "?,?:?,NaN", "line 13: The series has no values"),
        (":2\n", ":3\n", "line 13: The class must be one of .* rest, 10, 2. Received: '3'"),
        ("@data\n", "@date\n", "line 10: Unknown header. Received: '@date'"),
        ("@data\n", "", "line 10: Expected @data before the series. Received: '1,2.5"),
        ("Stamps false", "Stamps true", "line 4: Series with timestamps .* are not supported"),
        ("@missing", "@targetLabel", "line 5: Regression targets .@targetLabel. are not supported"),
        ("true rest 10 2", "maybe", "line 10: Expected true or false. Received: 'maybe'"),
        ("true rest 10 2", "true", "line 10: @classLabel true must be followed by the class names"),
        (TS[TS.index("1,2.5") :], "", "has no series"),
    ],
)
def test_ts_that_is_refused(tmp_path, old, new, message):
    path = write(tmp_path, TS.replace(old, new))
    with pytest.raises(ValueError, match=f"own.ts,? ?{message}"):
        read_archive_file(path)


@pytest.mark.parametrize(
    ("text", "old", "new", "message"),
    [
        (FLAT, "2,0", "2,2", "line 6: The class must be one of .* 0, 1. Received: '2'"),
        (FLAT, "2,0", "0", "line 6: The header has 3 attributes. Received: 2 values"),
        (FLAT, "Numeric", "string", "line 5: Expected numeric attributes .* numeric, string"),
        (FLAT, "{0,1}", "{0,1", "line 4: The classes must end with a brace"),
        (FLAT, "a1 Numeric", "a1", "line 3: An attribute must have a name and a type"),
        (FLAT, "@data\n", "", "line 5: Expected @attribute or @data. Received: '1.5,2,0'"),
        (ARFF, "4,?,6", "4,?,x", "line 10: Values must be finite numbers, .* Received: 'x'"),
    ],
)
def test_arff_that_is_refused(tmp_path, text, old, new, message):
    path = write(tmp_path, text.replace(old, new), "own.arff")
    with pytest.raises(ValueError, match=f"own.arff, {message}"):
        read_archive_file(path)


def test_files_that_are_refused(tmp_path):
    for name, content, message in [
        ("own.csv", "1,2", "must end with one of .ts, .arff, .tsv, .txt, or .gz"),
        ("own.tsv", "1\n", "line 1: Expected a class and values. Received: '1'"),
        ("own.ts", "", "is empty"),
        ("own.tsv", "1\t1000000000\t1000000001\n", "channel 0: .* too close to each other"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_archive_file(write(tmp_path, content, name))
    with pytest.raises(FileNotFoundError, match="There is no file .*none.ts"):
        read_archive_file(tmp_path / "none.ts")


def test_series_of_a_file(tmp_path):
    path = write(tmp_path, TS)
    series = LabelledSeries.from_file(path)
    x, y = series.read(np.array([1, 0]))
    assert x.shape == (2, 3, 2) and x.dtype == "float32" and y.tolist() == [2, 0]
    np.testing.assert_array_equal(x[0], [[7, 9], [8, 10], [np.nan, np.nan]])
    assert [rows.shape for rows in series.rows()] == [(3, 2), (2, 2)]
    with pytest.warns(UserWarning, match="of 1 of 2 series only the first 2 steps are read"):
        cut = LabelledSeries.from_file(path, ("2", "rest"), window=2)
    assert cut.read(np.array([0]))[0].shape == (1, 2, 2) and cut.labels.tolist() == [1, 0]
    assert cut.checksum != series.checksum == LabelledSeries.from_file(path).checksum
    with pytest.raises(ValueError, match="classes must be among a, 2. Received: rest"):
        LabelledSeries.from_file(path, ("a", "2"))


def test_a_share_of_each_class():
    series = [np.full((2, 1), i) for i in range(10)]
    series = LabelledSeries(series, [0, 1] * 4 + [1, 1], ("a", "b"))
    first, last = series.split(0.25)
    assert [each[0, 0] for each in last.series] == [6, 8, 9] and len(first) == 7
    with pytest.raises(ValueError, match="10 series are too few .* 2 classes. .*share=0.01"):
        series.split(0.01)


def test_series_that_do_not_fit():
    with pytest.raises(ValueError, match=r"must be arrays \(steps, channels\)"):
        LabelledSeries([np.zeros((2, 1)), np.zeros((2, 2))])
    with pytest.raises(ValueError, match=r"`labels` must have the shape \(1,\)"):
        LabelledSeries([np.zeros((2, 1))], [0, 1])


def test_an_epoch_reads_each_series_equally_often():
    series = LabelledSeries([np.full((2, 1), i) for i in range(3)], [0, 1, 0], ("a", "b"))
    stream = SeriesStream(series, batch_size=4, shuffle=True, times=3)
    batches = [stream[i] for i in range(len(stream))]
    x = np.concatenate([x[w > 0] for x, _, w in batches])
    assert np.bincount(x[:, 0, 0].astype(int)).tolist() == [3, 3, 3]
    assert len(SeriesStream(series, batch_size=4)) == 1
