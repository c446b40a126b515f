"""Scores of files: equal to one forward pass, in order, and the same after an interruption."""

import csv
import errno
import io
import json
import math
import os

import keras
import numpy as np
import pytest
from keras import ops

from keras_streams import StreamingMixin
from tests.support.disks import NO_SPACE
from tests.support.parameters import slow_but
from trellis_keras import layers, scoring
from trellis_keras.data import Vocabulary
from trellis_keras.data import lines as text_lines
from trellis_keras.models import LanguageModel, NeuralCache

CHARACTERS = Vocabulary("abcé ", unit="character")
LINES = Vocabulary("\nabcé ", unit="character")
WORDS = Vocabulary(["<eos>", "<unk>", "a", "b", "cat"], unknown="<unk>")
BATCH = 32  # one row of 32 steps, or two of 16


class RunningSum(StreamingMixin, keras.layers.Layer):
    def call(self, x):
        return ops.cumsum(x, axis=1) / 10

    def initial_cache(self, batch_size):
        return ops.zeros((batch_size, 4))

    def step(self, x, cache):
        return (cache + x) / 10, cache + x

    def compute_output_shape(self, shape):
        return shape


BACKBONES = {
    "trellis": lambda: layers.TrellisLayer(
        units=6, depth=3, output_units=4, dilation_rate=[1, 2], aux_every=2, return_aux=True, seed=1
    ),
    # A dilation above the 16 steps of short lines, and states that scores must not carry.
    "dilated": lambda: layers.TrellisLayer(
        units=6, depth=2, output_units=4, dilation_rate=[1, 20], stateful=True, seed=1
    ),
    "tcn": lambda: layers.TCN(4, kernel_size=3, depth=3, seed=1),
    "lru": lambda: layers.LRU(4, depth=2, return_sequences=True, seed=1),
    "sum": RunningSum,  # its cache is one tensor
}
# Whether the layers stream on JAX, their own tests say.
TRELLIS = pytest.param("trellis", marks=pytest.mark.both_backends)


def language_model(vocabulary, backbone="trellis", dtype="float32"):
    model = LanguageModel(
        len(vocabulary),
        4,
        BACKBONES[backbone](),
        # Far from uniform probabilities, which would hide mistakes.
        embeddings_initializer=keras.initializers.RandomUniform(-1.5, 1.5, seed=2),
        vocabulary=vocabulary,
        seed=0,
        dtype=dtype,
    )
    model.build((None, None))
    return model


@pytest.fixture(scope="module")
def model():
    return language_model(LINES)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """A text of some hundred characters exceeds every size."""
    monkeypatch.setattr(text_lines, "_PIECE", 64)
    monkeypatch.setattr(scoring, "_WINDOW_BATCHES", 4)


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
    """Each line's score is that of the forward pass over its ids."""
    sums, counts, rows = read(path)
    expected = [forward(model, np.concatenate([start, ids]).astype("int32")) for ids in lines]
    assert counts.tolist() == [len(log_p) for log_p in expected]
    np.testing.assert_allclose(sums, [log_p.sum() for log_p in expected], rtol=1e-5, atol=1e-5)
    for total, count, row in zip(sums, counts, rows, strict=True):
        value = float(row["perplexity"]) if count else row["perplexity"]
        assert value == (pytest.approx(math.exp(-total / count), rel=1e-4) if count else "")


# Equal to one forward pass


@pytest.mark.both_backends(slow=True)
@pytest.mark.parametrize("backbone", slow_but(BACKBONES, "trellis", "dilated"))
def test_lines_are_documents(backbone, tmp_path):
    """Some fit into a row, some need several batches, and some are read in pieces."""
    model = language_model(CHARACTERS, backbone)
    content = text([0, 1, 2, 17, 45, 3, 0, 200, 20, 33, 34, 16, 63, 64, 65, 5])
    path, table = write(tmp_path, content), tmp_path / "scores.csv"
    totals = scoring.score(model, path, table, batch_tokens=BATCH)
    check_lines(model, [CHARACTERS.encode(line) for line in content.split("\n")], table)
    sums, counts, _ = read(table)
    assert (totals["lines"], totals["num_tokens"]) == (len(sums), counts.sum())
    assert totals["log_probability"] == pytest.approx(sums.sum(), abs=1e-4)
    assert totals["perplexity"] == pytest.approx(math.exp(-sums.sum() / counts.sum()), rel=1e-5)
    assert sorted(tmp_path.iterdir()) == [table, path]
    ours = scoring.score_documents(model, content.split("\n"), batch_tokens=BATCH)
    np.testing.assert_allclose(ours, [sums, counts], rtol=1e-5, atol=1e-5)


def test_documents_in_memory():
    model = language_model(CHARACTERS)
    one, several = (scoring.score_documents(model, given) for given in ("ab", ["ab"]))
    np.testing.assert_array_equal(one, several)
    with pytest.raises(ValueError, match="`documents` must be strings. Received: 3"):
        scoring.score_documents(model, ["ab", 3])
    with pytest.raises(ValueError, match="`batch_tokens` must be a power of two"):
        scoring.score_documents(model, "ab", batch_tokens=32.0)


@pytest.mark.parametrize("backbone", [TRELLIS, "dilated"])
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
    """The first token of each document, or of the whole text, counts too."""
    content = text([0, 4, 90, 20])
    path, table = write(tmp_path, content), tmp_path / "scores.csv"
    scoring.score(model, path, table, start="\n", batch_tokens=BATCH)
    check_lines(model, [LINES.encode(line) for line in content.split("\n")], table, start=[0])
    options = {"whole": True, "start": "\n", "batch_tokens": BATCH}
    whole = scoring.score(model, path, tmp_path / "whole.csv", **options)
    assert whole["num_tokens"] == len(content)
    log_p = forward(model, LINES.encode("\n" + content))
    assert whole["log_probability"] == pytest.approx(log_p.sum(), rel=1e-5)


def test_words(tmp_path):
    """Every line ends with <eos>, the last one too, and no word is cut."""
    model = language_model(WORDS)
    lines = ["a cat", "", "dog\tcat b", " a" * 70, "a  " * 50, "b cat"]
    path, table = write(tmp_path, "\n".join(lines)), tmp_path / "scores.csv"
    scoring.score(model, path, table, batch_tokens=BATCH)
    check_lines(model, [WORDS.encode(line + "\n") for line in lines], table)


def test_json_lines(model, tmp_path):
    texts = ["ab\ncé", "", "a" * 100, "b"]
    lines = [json.dumps({"id": i, "text": each}) + "\n" for i, each in enumerate(texts)]
    path, table = write(tmp_path, "".join(lines)), tmp_path / "scores.jsonl"
    scoring.score(model, path, table, field="text", metric="bpc", batch_tokens=BATCH)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3, 4]
    for each, row in zip(texts, rows, strict=True):
        log_p = forward(model, LINES.encode(each))
        assert row["num_tokens"] == len(log_p)
        assert row["log_probability"] == pytest.approx(log_p.sum(), rel=1e-5, abs=1e-5)
        bpc = -log_p.mean() / math.log(2) if len(log_p) else None
        assert row["bpc"] == (bpc and pytest.approx(bpc, rel=1e-4))


def test_json_has_no_infinities():
    rows = [(1, -math.inf, 2), (2, math.nan, 3)]
    written = scoring._format(rows, ["line", "log_probability", "num_tokens"], ".jsonl")
    assert [json.loads(line)["log_probability"] for line in written.splitlines()] == [None, None]


def test_a_cache_of_one_tensor_and_settings_of_numpy(tmp_path):
    """A tensor of several numbers is neither true nor false."""
    model, content = language_model(LINES, "sum"), text([300])
    path, table = write(tmp_path, content), tmp_path / "scores.csv"
    scoring.score(model, path, table, whole=True, batch_tokens=np.int64(BATCH))
    check_lines(model, [LINES.encode(content)], table)
    neural = NeuralCache(model, 8, np.float32(0.3), np.float32(0.1))
    totals = scoring.score(neural, path, tmp_path / "cache.csv", batch_tokens=BATCH)
    assert totals["num_tokens"] == 299


def test_an_empty_file(model, tmp_path):
    totals = scoring.score(model, write(tmp_path, ""), tmp_path / "scores.csv")
    assert totals == {"lines": 0, "num_tokens": 0, "log_probability": 0.0, "perplexity": None}
    header = "line,log_probability,num_tokens,perplexity\n"
    assert (tmp_path / "scores.csv").read_text() == header


# Interruptions


class Killed(Exception):
    pass


def interrupt(monkeypatch, after):
    """Ends a job at its `after // 2`-th save: before it if `after` is odd, else behind it."""
    save, calls = scoring._Progress.save, []

    def interrupted(job, written):
        calls.append(None)
        if len(calls) == after // 2 and after % 2:
            raise Killed  # with rows on the disk that the state does not count
        save(job, written)
        if len(calls) == after // 2:
            raise Killed

    monkeypatch.setattr(scoring._Progress, "save", interrupted)


@pytest.mark.parametrize("whole", [False, True])
def test_an_interrupted_job_resumes(whole, model, tmp_path, monkeypatch):
    """Wherever it ends, before and after a save, the output is that of an undisturbed job."""
    path = write(tmp_path, text([20, 3, 40, 600, 0, 7, 33, 150, 150, 1, 9]))
    options = {"whole": whole, "batch_tokens": BATCH}
    totals = scoring.score(model, path, tmp_path / "undisturbed.csv", **options)
    kills = 0
    for after in range(2, 100, 3):
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
    assert kills > 3


@pytest.fixture
def interrupted(model, tmp_path, monkeypatch):
    """(path, output, function that resumes) of a job that ended after about 300 characters."""
    path, table = write(tmp_path, text([40] * 20)), tmp_path / "scores.csv"
    with monkeypatch.context() as patch:
        interrupt(patch, 4)
        with pytest.raises(Killed):
            scoring.score(model, path, table, batch_tokens=BATCH)

    def resume(model=model, **options):
        return scoring.score(model, path, table, **{"batch_tokens": BATCH, **options})

    return path, table, resume


def test_a_full_disk_keeps_the_last_progress(interrupted, monkeypatch):
    _, table, resume = interrupted
    state = table.with_name("scores.csv.unfinished") / "state.npz"
    before = state.read_bytes()

    def fill(file, **arrays):
        file.write(b"half of an archive")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", fill)
        with pytest.raises(OSError, match=f"state.npz {NO_SPACE}$"):
            resume()
    assert state.read_bytes() == before and not table.exists()
    assert resume()["lines"] == 20


def test_another_model_or_other_arguments_are_refused(interrupted):
    _, table, resume = interrupted
    with pytest.raises(ValueError, match="whole False there, True here. To start over"):
        resume(whole=True)
    other = language_model(LINES)
    other.head.bias.assign(other.head.bias + 1)
    for changed in (other, language_model(LINES, dtype="mixed_bfloat16")):
        with pytest.raises(ValueError, match="other settings: model "):
            resume(changed)
    assert resume(language_model(LINES))["lines"] == 20
    with pytest.raises(ValueError, match=f"{table} already exists"):
        resume()


def test_an_output_is_replaced_when_the_new_one_is_complete(interrupted, monkeypatch):
    path, table, resume = interrupted
    expected = resume()
    complete = table.read_text()
    table.write_text("old")
    with monkeypatch.context() as patch:
        interrupt(patch, 4)
        with pytest.raises(Killed):
            resume(overwrite=True)
    assert table.read_text() == "old"
    assert table.with_name("scores.csv.unfinished").exists()
    assert resume(overwrite=True) == expected
    assert table.read_text() == complete
    assert not table.with_name("scores.csv.unfinished").exists()


def test_a_changed_text(interrupted):
    """The scored part must be the same; what follows may be corrected."""
    path, _, resume = interrupted
    content = path.read_text()
    write(path.parent, content[:-20] + "?" * 20)
    with pytest.raises(ValueError, match=r"text.txt, line 20: .*'\?'"):
        resume()
    for changed in ("?" + content[1:], content[:100]):
        write(path.parent, changed)
        with pytest.raises(ValueError, match="has changed in its first .* To start over, remove"):
            resume()
    write(path.parent, content)
    assert resume()["lines"] == 20


def test_damaged_states(interrupted):
    _, table, resume = interrupted
    folder = table.with_name("scores.csv.unfinished")
    rows, state = (folder / "rows").read_bytes(), (folder / "state.npz").read_bytes()
    (folder / "rows").write_bytes(rows[:10])
    with pytest.raises(ValueError, match="cannot be resumed: .* has fewer than"):
        resume()
    (folder / "rows").write_bytes(rows)
    arrays = dict(np.load(io.BytesIO(state)))
    for name in arrays:
        np.savez(folder / "state.npz", **{key: arrays[key] for key in arrays if key != name})
        with pytest.raises(ValueError, match="scores.csv.unfinished cannot be resumed"):
            resume()
    (folder / "state.npz").unlink()
    assert resume()["lines"] == 20


# Errors


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"ab\nb\xff\n", {}, "line 2 is not UTF-8: .* 0xff at offset 4"),
        (b"ab\n" + b"a" * 80 + b"\xc3", {}, "line 2 is not UTF-8: .*0xc3 at offset 83"),
        (b"ab\nb?", {}, r"line 2: .*'\?'"),
        (b'{"text": "a"}\n{"t', {"field": "text"}, "line 2 is not JSON"),
        (b'{"text": "a"}\n[1]', {"field": "text"}, "line 2"),
        (b'{"text": 1}\n', {"field": "text"}, "line 1"),
        (b"a", {"field": "text", "whole": True}, "whole=True"),
        (b"a", {"start": "z"}, "`start`"),
        (b"a", {"metric": "bits"}, "`metric`"),
        (b"a", {"batch_tokens": 48}, "`batch_tokens`"),
    ],
)
def test_wrong_files_and_arguments(model, tmp_path, content, options, message):
    with pytest.raises(ValueError, match=message):
        scoring.score(model, write(tmp_path, content), tmp_path / "scores.csv", **options)
    assert not (tmp_path / "scores.csv").exists()


def test_wrong_models_and_paths(model, tmp_path):
    path, table = write(tmp_path, "a" * 65), tmp_path / "scores.csv"
    for wrong, message in (
        ((keras.Sequential(), path, table), "LanguageModel or a NeuralCache"),
        ((LanguageModel(5, 4, BACKBONES["lru"]()), path, table), "vocabulary"),
        ((model, tmp_path / "missing.txt", table), "There is no file"),
        ((model, path, tmp_path / "scores.txt"), "`output`"),
        ((language_model(WORDS), path, table), "no white space in 64 characters"),
    ):
        with pytest.raises(ValueError, match=message):
            scoring.score(*wrong)
    assert not table.with_name("scores.csv.unfinished").exists()  # nothing was scored yet
