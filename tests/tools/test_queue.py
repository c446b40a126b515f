"""What `tools.queue` does with a list: training, resuming, publishing, failures."""

import json

import pytest
import typer

from tests.tools.test_publish import SETTINGS
from tools import publish, queue
from trellis_keras import zoo
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.results import RESULTS

LIST = """
[broken]
train = "tcn_adding --T 9"
note = "One seed."

[small]
train = "tcn_adding --T 8"
note = "One seed of two."
"""


@pytest.fixture
def processes(monkeypatch, tmp_path):
    """Runs what the queue starts in this process, on small data; returns the list of it."""
    started = []

    def run(arguments):
        started.append(arguments[0])
        value = dict(zip(arguments, arguments[1:], strict=False))
        if value.get("--T") == "9":
            return None
        if arguments[0] == "tools.publish":
            results = publish.publish(arguments[1], tmp_path / "zoo", note=value["--note"])
            return f"a line\n{json.dumps({'test': results['test']})}\n"
        limit = {"max_minutes": float(value["--max-minutes"])} if "--max-minutes" in value else {}
        runs.train(zoo.recipe("tcn_adding", **SETTINGS), value["--output"], verbose=0, **limit)
        return ""

    monkeypatch.setattr(queue, "run", run)
    return started


def read(tmp_path, text=LIST):
    path = tmp_path / "queue.toml"
    path.write_text(text)
    return path


def test_trains_and_publishes_what_is_left(processes, tmp_path, capsys):
    path, output = read(tmp_path), tmp_path / "runs"
    for _ in range(2):
        with pytest.raises(typer.Exit):
            queue.main(path, output)
        printed = capsys.readouterr().out.splitlines()
        assert "broken: training failed" in printed
    assert processes == ["trellis_keras", "trellis_keras", "tools.publish", "trellis_keras"]
    results = json.loads((tmp_path / "zoo" / RESULTS).read_text())
    assert results["note"] == "One seed of two."
    assert f"small: published, {results['test']:.4g} on the test split" in printed


def test_resumes_what_has_not_finished(processes, tmp_path):
    job = queue.read(read(tmp_path))[1]
    folder = tmp_path / "run"
    assert queue.process(job, folder, max_minutes=1e-9) == "not finished"
    assert processes == ["trellis_keras"]
    assert queue.process(job, folder).startswith("published")


@pytest.mark.parametrize(
    "text", ['train = "tcn_jsb"', '[a]\ntrain = "tcn_jsb"', '[a]\ntrain = 1\nnote = ""', "[a"]
)
def test_names_what_is_wrong_in_a_list(text, tmp_path):
    with pytest.raises(ValueError, match=r"queue\.toml(: a run must be| is not a TOML file)"):
        queue.read(read(tmp_path, text))


def test_the_list_of_this_repository():
    for job in queue.read(queue.pathlib.Path(queue.__file__).with_suffix(".toml")):
        assert job.train[0] in zoo.list_models()
