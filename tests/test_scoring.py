"""Scores of files: equal to one forward pass, in order, and the same after an interruption."""

import csv
import io
import json
import math
import sys

import keras
import numpy as np
import pytest

from tests.support.small_runs import tiny_run
from trellis_keras import cli, layers, scoring
from trellis_keras.breakdown import METRICS
from trellis_keras.data import Vocabulary
from trellis_keras.models import LanguageModel
from trellis_keras.scoring import job, output, reader
from trellis_keras.zoo import runs

CHARACTERS = Vocabulary("abcé ", unit="character")
LINES = Vocabulary("\nabcé ", unit="character")
WORDS = Vocabulary(["<eos>", "<unk>", "a", "b", "cat"], unknown="<unk>")
BYTES = Vocabulary(["\x00", "a", "b", "\xff"], unit="byte")
BATCH = 32  # in one row or in two

BACKBONES = {
    "trellis": lambda: layers.TrellisLayer(
        units=6, depth=3, output_units=4, dilation_rate=[1, 2], aux_every=2, return_aux=True, seed=1
    ),
    "dilated": lambda: layers.TrellisLayer(
        units=6, depth=2, output_units=4, dilation_rate=[1, 20], stateful=True, seed=1
    ),
    "tcn": lambda: layers.TCN(4, kernel_size=3, depth=3, seed=1),
    "lru": lambda: layers.LRU(4, depth=2, return_sequences=True, seed=1),
}
# Whether the layers stream on JAX, their own tests say.
ELSEWHERE = pytest.param("trellis", marks=pytest.mark.both_backends)


def language_model(vocabulary, backbone="trellis", dtype="float32"):
    # Far from uniform: a mistake would not show otherwise.
    wide = keras.initializers.RandomUniform(-1.5, 1.5, seed=2)
    model = LanguageModel(
        len(vocabulary),
        4,
        BACKBONES[backbone](),
        embeddings_initializer=wide,
        vocabulary=vocabulary,
        seed=0,
        name="scored",
        dtype=dtype,
    )
    model.build((None, None))
    return model


@pytest.fixture(scope="module")
def model():
    return language_model(LINES)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    """Every size is small, so that a text of some hundred characters meets all of them."""
    monkeypatch.setattr(reader, "PIECE", 64)
    monkeypatch.setattr(job, "_BATCHES", 4)


def text(lengths, symbols="abcé ", seed=0):
    rng = np.random.default_rng(seed)
    return "\n".join("".join(rng.choice(list(symbols), n)) for n in lengths)


def write(folder, content, name="text.txt"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path):
    """The columns of a file of scores."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["line"]) for row in rows] == list(range(1, len(rows) + 1))
    sums = np.array([float(row["log_probability"]) for row in rows])
    return sums, np.array([int(row["num_tokens"]) for row in rows]), rows


def forward(model, ids):
    """Log-probabilities of the tokens after the first, by one forward pass."""
    if len(ids) < 2:
        return np.zeros(0)
    # Longer than the dilations; what follows changes nothing before it.
    padded = np.pad(ids, (0, max(0, 40 - len(ids))))[None]
    if getattr(model.backbone, "stateful", False):
        model.backbone.reset_state(1)
    scores = np.asarray(model(padded[:, :-1], training=False)[0], "float64")
    return scores[np.arange(len(ids) - 1), ids[1:]]


def check_lines(model, lines, path, start=()):
    """Each line's score is the forward pass' over its ids."""
    sums, counts, rows = read(path)
    expected = [forward(model, np.concatenate([start, ids]).astype("int32")) for ids in lines]
    assert counts.tolist() == [len(log_p) for log_p in expected]
    np.testing.assert_allclose(sums, [log_p.sum() for log_p in expected], rtol=1e-5, atol=1e-5)
    for total, count, row in zip(sums, counts, rows, strict=True):
        value = float(row["perplexity"]) if count else row["perplexity"]
        assert value == (pytest.approx(math.exp(-total / count), rel=1e-4) if count else "")


# Equal to one forward pass


@pytest.mark.parametrize("backbone", [ELSEWHERE, "dilated", "tcn", "lru"])
def test_lines_are_documents(backbone, tmp_path):
    """Of a batch, of several segments, and longer than is read at a time."""
    model = language_model(CHARACTERS, backbone)
    content = text([0, 1, 2, 17, 45, 3, 0, 200, 20, 33, 34, 16, 63, 64, 65, 5])
    path, table = write(tmp_path, content), tmp_path / "scores.csv"
    totals = scoring.score(model, path, table, batch_tokens=BATCH)
    check_lines(model, [CHARACTERS.encode(line) for line in content.split("\n")], table)
    sums, counts, _ = read(table)
    assert (totals["lines"], totals["num_tokens"]) == (len(sums), counts.sum())
    assert totals["log_probability"] == pytest.approx(sums.sum(), abs=1e-4)
    assert totals["perplexity"] == pytest.approx(math.exp(-sums.sum() / counts.sum()), rel=1e-5)
    assert [file.name for file in tmp_path.iterdir() if file not in (path, table)] == []


@pytest.mark.parametrize("backbone", [ELSEWHERE, "tcn", "lru"])
def test_a_whole_text(backbone, tmp_path):
    """The model reads on from line to line."""
    model = language_model(LINES, backbone)
    content = text([5, 0, 70, 30, 0, 0, 150, 31]) + "\n"
    path, table = write(tmp_path, content), tmp_path / "scores.csv"
    scoring.score(model, path, table, whole=True, batch_tokens=BATCH)
    log_p = forward(model, LINES.encode(content))
    # Of the tokens after the first; a line's end belongs to it.
    line = np.cumsum(np.array(list(content)) == "\n")[:-1]
    sums, counts, _ = read(table)
    assert counts.tolist() == np.bincount(line).tolist()
    np.testing.assert_allclose(sums, np.bincount(line, log_p), rtol=1e-5, atol=1e-5)


def test_a_start_token(model, tmp_path):
    """The first token counts too: of each document, or of the whole text."""
    content = text([0, 4, 90, 20])
    path, table = write(tmp_path, content), tmp_path / "scores.csv"
    scoring.score(model, path, table, start="\n", batch_tokens=BATCH)
    check_lines(model, [LINES.encode(line) for line in content.split("\n")], table, start=[0])
    whole = scoring.score(model, path, tmp_path / "whole.csv", whole=True, start="\n")
    log_p = forward(model, LINES.encode("\n" + content))
    assert whole["num_tokens"] == len(content)
    assert whole["log_probability"] == pytest.approx(log_p.sum(), rel=1e-5)


def test_words(tmp_path):
    """A line ends with <eos>, also the last one; a word is never cut."""
    model = language_model(WORDS)
    lines = ["a cat", "", "dog\tcat b", " a" * 70, "a  " * 50, "b cat"]
    path, table = write(tmp_path, "\n".join(lines)), tmp_path / "scores.csv"
    scoring.score(model, path, table, batch_tokens=16)
    check_lines(model, [WORDS.encode(line + "\n") for line in lines], table)
    whole = scoring.score(model, path, tmp_path / "whole.csv", whole=True, batch_tokens=16)
    log_p = forward(model, WORDS.encode("\n".join(lines)))
    assert whole["num_tokens"] == len(log_p)
    assert whole["log_probability"] == pytest.approx(log_p.sum(), rel=1e-5)


def test_bytes(tmp_path):
    model = language_model(BYTES)
    path, table = write(tmp_path, b"ab\xff\x00" * 20 + b"\na\xff"), tmp_path / "scores.csv"
    scoring.score(model, path, table, batch_tokens=16)
    check_lines(model, [BYTES.encode(line) for line in path.read_bytes().split(b"\n")], table)


def documents(path, vocabulary):
    """What a reader yields, as a text for each line."""
    found = {}
    lines = reader.Reader(path, vocabulary)
    for ids, line, _ in lines:
        found[line] = found.get(line, "") + vocabulary.decode(ids)
    assert lines.offset == path.stat().st_size
    return list(found.values())


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, model):
    mark = b"\xef\xbb\xbf"
    words = write(tmp_path, mark + b"a cat\r\na cat\r\n")
    assert [ids.tolist() for ids, *_ in reader.Reader(words, WORDS)] == [[2, 4, 0], [2, 4, 0]]
    assert documents(write(tmp_path, mark + b"ab\n"), CHARACTERS) == ["ab"]
    assert documents(write(tmp_path, mark), CHARACTERS) == []
    lines = write(tmp_path, mark + b'{"text": "ab"}\n')
    assert [ids.tolist() for ids, *_ in reader.Reader(lines, CHARACTERS, field="text")] == [[0, 1]]
    with pytest.raises(ValueError, match="line 2.*ufeff"):
        documents(write(tmp_path, b"ab\n" + mark), CHARACTERS)
    path, tables = write(tmp_path, mark + text([40] * 20).encode()), []
    for name, marked in (
        ("marked.csv", path),
        ("plain.csv", write(tmp_path, text([40] * 20), "p")),
    ):
        scoring.score(model, marked, tmp_path / name, batch_tokens=BATCH)
        tables.append((tmp_path / name).read_text())
    assert tables[0] == tables[1]


@pytest.mark.parametrize("unit", ["character", "byte"])
def test_lines_that_end_as_on_windows(unit, tmp_path):
    """Also where a part that is read ends between the two characters."""
    lines = ["", *("ab" * 100)[:5], "ab" * 31, "ab" * 31 + "a", "ab" * 32, "ab" * 63 + "a", "b"]
    for end in ("\r\n", "\n"):
        path = write(tmp_path, end.join(lines))
        assert documents(path, Vocabulary("ab", unit=unit)) == lines
    # Anywhere else it is a symbol.
    lines = ["a\rb", "a" * 63 + "\rb", "b\r"]
    path = write(tmp_path, "\r\n".join(lines))
    assert documents(path, Vocabulary("\rab", unit=unit)) == lines


def test_json(model, tmp_path):
    """A document of a field, with its own line ends; a JSON object per row."""
    documents = ["ab\ncé", "", "a" * 100, "b"]
    lines = [json.dumps({"id": i, "text": each}) + "\n" for i, each in enumerate(documents)]
    path, table = write(tmp_path, "".join(lines)), tmp_path / "scores.jsonl"
    options = {"field": "text", "metric": "bpc", "batch_tokens": BATCH}
    scoring.score(model, path, table, **options)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    for number, (document, row) in enumerate(zip(documents, rows, strict=True), start=1):
        log_p = forward(model, LINES.encode(document))
        assert list(row) == ["line", "log_probability", "num_tokens", "bpc"]
        assert (row["line"], row["num_tokens"]) == (number, len(log_p))
        assert row["log_probability"] == pytest.approx(log_p.sum(), rel=1e-5, abs=1e-5)
        bpc = METRICS["bpc"](-log_p.mean()) if len(log_p) else None
        assert row["bpc"] == (bpc and pytest.approx(bpc, rel=1e-4))


def test_an_empty_file(model, tmp_path):
    totals = scoring.score(model, write(tmp_path, ""), tmp_path / "scores.csv")
    assert totals == {"lines": 0, "num_tokens": 0, "log_probability": 0.0, "perplexity": None}
    header = "line,log_probability,num_tokens,perplexity\n"
    assert (tmp_path / "scores.csv").read_text() == header


# Interruptions


class Killed(Exception):
    pass


def interrupt(monkeypatch, after):
    """Ends a job in its `after`-th attempt to save, either before or after it has saved."""
    save, calls = output.Unfinished.save, []

    def interrupted(self, *arguments):
        calls.append(None)
        if len(calls) == after // 2 and after % 2:
            arguments[0].flush()  # rows that no state knows
            raise Killed
        save(self, *arguments)
        if len(calls) == after // 2:
            raise Killed

    monkeypatch.setattr(output.Unfinished, "save", interrupted)


@pytest.mark.parametrize("whole", [False, True])
def test_an_interrupted_job_goes_on(whole, model, tmp_path, monkeypatch):
    """At whatever place: the file is the one of an undisturbed job, byte by byte."""
    path = write(tmp_path, text([20, 3, 40, 600, 0, 7, 33, 150, 150, 1, 9]))
    options = {"whole": whole, "batch_tokens": BATCH}
    totals = scoring.score(model, path, tmp_path / "undisturbed.csv", **options)
    kills = 0
    for after in range(2, 100):
        with monkeypatch.context() as patch:
            interrupt(patch, after)
            table = tmp_path / f"{after}.csv"
            try:
                scoring.score(model, path, table, **options)
                break
            except Killed:
                kills += 1
            assert not table.exists()
        assert scoring.score(model, path, table, **options) == totals
        assert table.read_bytes() == (tmp_path / "undisturbed.csv").read_bytes()
    assert kills > 6


@pytest.fixture
def interrupted(model, tmp_path, monkeypatch):
    """(path, output, function that goes on) of a job that ended after 300 characters or so."""
    path, table = write(tmp_path, text([40] * 20)), tmp_path / "scores.csv"
    with monkeypatch.context() as patch:
        interrupt(patch, 4)
        with pytest.raises(Killed):
            scoring.score(model, path, table, batch_tokens=BATCH)

    def go_on(model=model, **options):
        return scoring.score(model, path, table, **{"batch_tokens": BATCH, **options})

    return path, table, go_on


def test_another_model_or_other_settings_are_refused(interrupted, model):
    _, table, go_on = interrupted
    with pytest.raises(ValueError, match="another whole False there, True here"):
        go_on(whole=True)
    other = language_model(LINES)
    other.head.bias.assign(other.head.bias + 1)
    with pytest.raises(ValueError, match="interrupted job with another model. To begin anew"):
        go_on(other)
    with pytest.raises(ValueError, match="interrupted job with another model"):
        go_on(language_model(LINES, dtype="mixed_bfloat16"))
    assert go_on(language_model(LINES))["lines"] == 20
    with pytest.raises(ValueError, match=f"{table} exists already"):
        go_on()


def test_a_table_that_another_process_has_finished_meanwhile(interrupted, monkeypatch):
    """Between the look at it and the claim on its folder."""
    _, table, go_on = interrupted
    locked = output.folder_lock

    def late(folder):
        table.write_text("whole")
        return locked(folder)

    monkeypatch.setattr(output, "folder_lock", late)
    with pytest.raises(ValueError, match=f"{table} exists already"):
        go_on()
    assert table.read_text() == "whole"


def test_a_changed_text(interrupted):
    """What has been scored must be the same; what comes later may be put right."""
    path, table, go_on = interrupted
    content = path.read_text()
    write(path.parent, content[:-20] + "?" * 20)
    with pytest.raises(ValueError, match=r"text.txt, line 20: .* unknown .*: '\?'"):
        go_on()
    write(path.parent, "?" + content[1:])
    with pytest.raises(ValueError, match="has changed in the part .* To begin anew, remove"):
        go_on()
    write(path.parent, content[:100])
    with pytest.raises(ValueError, match="has changed in the part"):
        go_on()
    write(path.parent, content)
    assert go_on()["lines"] == 20


def test_damaged_states(interrupted):
    _, table, go_on = interrupted
    folder = table.with_name("scores.csv.unfinished")
    rows, state = (folder / "rows").read_bytes(), (folder / "state.npz").read_bytes()
    (folder / "rows").write_bytes(rows[:10])
    with pytest.raises(ValueError, match="damaged: .* bytes have become fewer.* To begin anew"):
        go_on()
    (folder / "rows").write_bytes(rows)
    for wrong in (b"", state[:200], b"no state"):
        (folder / "state.npz").write_bytes(wrong)
        with pytest.raises(ValueError, match="scores.csv.unfinished is damaged"):
            go_on()
    for name in np.load(io.BytesIO(state)):
        left_out = {k: v for k, v in np.load(io.BytesIO(state)).items() if k != name}
        np.savez(folder / "state.npz", **left_out)
        with pytest.raises(ValueError, match="scores.csv.unfinished is damaged"):
            go_on()
    (folder / "state.npz").unlink()
    assert go_on()["lines"] == 20


def test_one_process_at_a_time(model, tmp_path):
    path, table = write(tmp_path, "ab"), tmp_path / "scores.csv"
    with output.Unfinished(table).alone():
        with pytest.raises(ValueError, match="another process"):
            scoring.score(model, path, table)
    assert scoring.score(model, path, table)["lines"] == 1


# Errors


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"ab\nb\xff\n", {}, "line 2 is not UTF-8 text: the byte 0xff at offset 4 of the file"),
        (b"ab\n" + b"a" * 80 + b"\xc3", {}, "line 2 is not UTF-8 text: the byte 0xc3 at offset 83"),
        (b"ab\nb?", {}, r"line 2: .*symbols unknown .*: '\?'"),
        (b'{"text": "a"}\n{"t', {"field": "text"}, "line 2 is not JSON"),
        (b'{"text": "a"}\n[1]', {"field": "text"}, "line 2 is no JSON object with a text named"),
        (b'{"text": 1}\n', {"field": "text"}, "line 1 is no JSON object with a text named 'text'"),
        (b"[" * 100_000, {"field": "text"}, "line 1 is not JSON"),
        (b"a", {"field": "text", "whole": True}, "exclude each other. Received: field='text'"),
        (b"a", {"start": "z"}, "must be a token of the vocabulary, or None. Received: start='z'"),
        (b"a", {"metric": "bits"}, "`metric` must be one of .* Received: 'bits'"),
        (b"a", {"batch_tokens": 48}, "must be a power of two from 16 on. Received: 48"),
        (b"a", {"batch_tokens": 8}, "must be a power of two from 16 on. Received: 8"),
    ],
)
def test_wrong_files_and_arguments(model, tmp_path, content, options, message):
    with pytest.raises(ValueError, match=message):
        scoring.score(model, write(tmp_path, content), tmp_path / "scores.csv", **options)
    assert not (tmp_path / "scores.csv").exists()


def test_no_text_of_words(tmp_path):
    path = write(tmp_path, "a" * 65)
    with pytest.raises(ValueError, match="line 1 has no blank in 64 bytes"):
        scoring.score(language_model(WORDS), path, tmp_path / "scores.csv")


def test_wrong_models_and_paths(model, tmp_path):
    path, table = write(tmp_path, "ab"), tmp_path / "scores.csv"
    with pytest.raises(ValueError, match="is for a LanguageModel. Received: Sequential"):
        scoring.score(keras.Sequential(), path, table)
    with pytest.raises(ValueError, match="needs a model with a vocabulary"):
        scoring.score(LanguageModel(5, 4, BACKBONES["lru"]()), path, table)
    with pytest.raises(ValueError, match="There is no file"):
        scoring.score(model, tmp_path / "missing.txt", table)
    with pytest.raises(ValueError, match="must be a .csv or a .jsonl file. Received: .*scores.txt"):
        scoring.score(model, path, tmp_path / "scores.txt")
    with pytest.raises(OSError, match="missing"):
        scoring.score(model, path, tmp_path / "missing" / "scores.csv")


# Progress, the command line


def test_progress(model, tmp_path, capsys):
    path = write(tmp_path, text([40] * 100))
    options = {"batch_tokens": BATCH}
    scoring.score(model, path, tmp_path / "1.csv", verbose=1, **options)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("\r0.0 of 0.0 MB, ")
    assert shown.err.split("\r")[-1].rstrip().endswith("MB/s, 0:00:00 left")
    assert shown.err.endswith("\n") and shown.err.count("\n") == 1
    scoring.score(model, path, tmp_path / "2.csv", verbose=2, **options)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 10
    assert shown.err.splitlines()[-1].startswith("0.0 of 0.0 MB, ")


def test_the_command(tmp_path, monkeypatch, capsys):
    run = tiny_run(tmp_path, epochs=1)
    path, table = write(tmp_path, "ab de\n\nabc\n"), tmp_path / "scores.csv"

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["trellis-keras", "score", *map(str, words)])
        try:
            cli.main()
        except SystemExit as end:
            assert end.code in (0, 2)
        return capsys.readouterr()

    capsys.readouterr()
    totals = json.loads(command(run, path, "--output", table).out)
    expected = {"lines": 3, "num_tokens": 6, "run": str(run), "output": str(table)}
    assert expected.items() <= totals.items()
    check_lines_of_run(runs.load_best(run), table)
    assert "exists already" in command(run, path, "--output", table).err
    wrong = command(run, path, "--output", tmp_path / "other.csv", "--start", "<eos>").err
    assert "must be a token of the vocabulary" in wrong


def check_lines_of_run(model, table):
    sums, counts, rows = read(table)
    assert counts.tolist() == [4, 0, 2]
    log_p = [forward(model, model.vocabulary.encode(line)) for line in ("ab de", "", "abc")]
    np.testing.assert_allclose(sums, [each.sum() for each in log_p], rtol=1e-5)
    assert float(rows[0]["bpc"]) == pytest.approx(METRICS["bpc"](-log_p[0].mean()), rel=1e-4)
