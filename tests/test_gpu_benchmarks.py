"""The resumable scripts for a GPU with a time limit: what a call begins, what the next does.

On tiny models, and on the processor: a GPU is not tested here.
"""

import json
import subprocess
import sys
import types

import keras
import pytest

from benchmarks.gpu import cell as one_cell
from benchmarks.gpu import pace, steps, train
from benchmarks.gpu.work import operations
from tests.support.processes import ROOT, child_environment
from tests.support.small_runs import TINY, write_text
from trellis_keras import zoo


class Clock:
    """A clock that only the test moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def script(name, *arguments):
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=child_environment("jax"), capture_output=True, text=True
    )


# steps.py: which cells a call measures


CELLS = steps.all_cells()
FIGURES = {
    "device": "none",
    "step_s": 0.5,
    "first_call_s": 9.0,
    "peak_gib": 1.0,
    "operations_full": 4e12,
    "operations_done": 2e12,
    "product": [2, 2, 2],
    "product_rate": 16e12,
}


def call(folder, cells, seconds, clock, takes):
    """A call of so many seconds, in which each cell takes its time; returns those begun."""
    begun = []

    def run(cell, left):
        begun.append(cell)
        taken = takes[cells.index(cell)]
        clock.now += min(taken, left)
        if taken > left:
            return None
        return {"error": "out of memory"} if taken == 1 else dict(FIGURES)

    steps.measure(folder, cells, clock.now + seconds, run, clock)
    return begun


def test_cells_are_measured_once_and_a_failure_is_a_result(tmp_path):
    clock, cells = Clock(), CELLS[:4]
    takes = [100, 1, 100, 100]
    # A further one is expected to need 1.3 times as long as the longest.
    assert call(tmp_path, cells, 230, clock, takes) == cells[:2]
    assert call(tmp_path, cells, 229, clock, takes) == cells[2:3]
    assert call(tmp_path, cells, 229, clock, takes) == cells[3:]
    assert call(tmp_path, cells, 229, clock, takes) == []
    found = steps.finished(tmp_path)
    assert [cell.get("error") for cell in found] == [None, "out of memory", None, None]
    assert found[0]["wall_s"] == 100


def test_a_cell_that_does_not_end_in_time(tmp_path):
    clock, cells = Clock(), CELLS[:3]
    assert call(tmp_path, cells, 500, clock, [10, 600, 10]) == cells[:2]
    assert [cell["policy"] for cell in steps.finished(tmp_path)] == [cells[0].policy]
    # With all of a call to itself it fails, and the rest continues.
    assert call(tmp_path, cells[:2], 500, clock, [10, 600]) == cells[1:2]
    (_, failed) = steps.finished(tmp_path)
    assert failed["error"] == "did not end within 500 s"
    assert call(tmp_path, cells, 500, clock, [10, 600, 10]) == cells[2:]
    conclusion = steps.conclusion(tmp_path, cells)
    assert conclusion.startswith(f"All is done, but these failed: {cells[1].name}.")
    assert call(tmp_path, cells, 700, clock, [10, 600, 10]) == cells[1:2]
    assert steps.conclusion(tmp_path, cells) == "All is done."


def test_operations_are_those_of_the_equations():
    settings = {"depth": 6, "hidden_units": 5, "embedding_dim": 3, "vocabulary_size": 7}
    settings |= {"batch_size": 2, "sequence_length": 12, "context_length": 6}
    settings |= {"aux_every": 4, "aux_weight": 0.1}
    recipe = zoo.recipe("trellisnet_char", **settings)
    model = recipe.build()
    batch = one_cell.random_batch(recipe, quick=True)
    assert [part.shape for part in batch] == [(2, 12), (2, 6), (2, 6)]
    # Two taps, four blocks of gates; level 1 has no hidden part; a head for level 6 and for 4.
    full = 2 * 12 * 2 * 4 * 8 * (5 * 8 + 3) + 2 * 6 * 2 * 3 * 7
    assert operations(model, batch, cone=False) == 6 * full
    # From the last 6 positions of level 6 down: 6, 7, ... of 12.
    assert 0.6 < operations(model, batch) / (6 * full) < 0.9


@pytest.mark.slow
def test_steps_are_measured_on_jax_and_never_again(tmp_path):
    arguments = ["--quick", "--steps", 5, "--only", "ptb-float32", "--output", tmp_path]
    done = script("steps", *arguments, "--peak-float32", 1)
    assert done.returncode == 0 and done.stdout.endswith("All is done.\n"), done.stderr
    results = json.loads((tmp_path / "steps-quick.json").read_text())
    cone, everything, characters = results["cells"]
    assert (cone["model"], characters["model"]) == ("trellisnet_ptb", "trellisnet_char_ptb")
    assert cone["first_loss"] == pytest.approx(everything["first_loss"], rel=1e-5)
    assert cone["operations_done"] < everything["operations_done"] == cone["operations_full"]
    assert cone["first_call_s"] > cone["step_s"] > 0 and len(cone["steps_s"]) == 5
    done = script("steps", *arguments)
    assert done.stdout.count("measured before") == 3
    assert json.loads((tmp_path / "steps-quick.json").read_text())["cells"] == results["cells"]


# train.py: which runs a call resumes


class FakeQueue(train.Queue):
    """A queue whose epochs take the seconds given: {name: [seconds, ...]}.

    A run has as many epochs as there are numbers; instead of one there may be an error.
    """

    def __init__(self, folder, seconds, clock, runs):
        super().__init__(folder, clock.now + seconds, seconds, {}, clock)
        self.runs = runs
        self.trained = []

    def _is_finished(self, name):
        return not self.runs[name]

    def _train(self, name):
        while self.runs[name]:
            seconds = self.runs[name][0]
            if isinstance(seconds, Exception):
                self.clock.now += 1
                raise seconds
            if self.trained and self.trained[-1] == name and self.clock() + seconds > self.end:
                return
            self.clock.now += seconds
            self.trained.append(name)
            del self.runs[name][0]

    def _publish(self, name):
        folder = self.folder / "zoo" / name
        folder.mkdir(parents=True)
        (folder / "card.md").touch()


@pytest.mark.slow
def test_the_queue_goes_on(tmp_path):
    clock, runs = Clock(), {"a": [30] * 4, "b": [30, 30], "c": [20]}

    def trained():
        queue = FakeQueue(tmp_path, 100, clock, runs)
        queue.work(list(runs))
        return queue.trained

    assert trained() == ["a"] * 3
    # There is room for all of b and, with 10 seconds left, for no part of c.
    assert trained() == ["a", "b", "b"]
    assert trained() == ["c"]
    assert trained() == []
    assert all(FakeQueue(tmp_path, 100, clock, runs).published(name) for name in runs)


@pytest.mark.slow
def test_an_epoch_that_fails_or_fits_no_call(tmp_path):
    failing = RuntimeError("RESOURCE_EXHAUSTED:\n out of memory")
    queue = FakeQueue(tmp_path / "failing", 100, Clock(), {"a": [failing], "b": [30]})
    queue.work(["a", "b"])
    assert queue.trained == ["b"]
    assert queue.standing("a") == "skipped: RESOURCE_EXHAUSTED: out of memory"
    runs = {"a": [30], "b": [pace.NoRoom(150)], "c": [30]}
    queue = FakeQueue(tmp_path, 100, Clock(), runs)
    queue.work(["a", "b", "c"])
    assert queue.trained == ["a"] and not queue.problems  # another call may have room for b
    queue = FakeQueue(tmp_path, 100, Clock(), runs)
    queue.work(["a", "b", "c"])
    assert queue.trained == ["c"]
    assert "an epoch takes at least 2.5 minutes here" in queue.standing("b")
    assert "raise --minutes" in queue.standing("b")


def fit(callback, clock, epochs, batch_s, policy="float32"):
    """A training without a model."""
    callback.set_params({"steps": 100})
    callback.set_model(types.SimpleNamespace(dtype_policy=keras.DTypePolicy(policy)))
    clock.now += 7  # of data and building
    callback.on_train_begin()
    for epoch in epochs:
        callback.on_epoch_begin(epoch)
        for batch in range(100):
            clock.now += batch_s + 40 * (batch == 0 and epoch == epochs[0])  # compiling
            callback.on_train_batch_end(batch)
        clock.now += 5  # validation
        callback.on_epoch_end(epoch)


@pytest.mark.parametrize(("end", "room"), [(146, False), (148, True)])
def test_an_epoch_without_room_is_foretold(tmp_path, end, room):
    path, clock = tmp_path / "times.json", Clock()
    if room:
        fit(pace.Pace(path, end, clock), clock, range(1), batch_s=1)
    else:
        with pytest.raises(pace.NoRoom):
            fit(pace.Pace(path, end, clock), clock, range(1), batch_s=1)
        assert clock.now == 7 + 40 + pace.SAMPLE
        assert pace.epoch_s(pace.read(path)) == 100


class Killed(pace.Pace):
    """Of a process that is killed in the validation: nothing learns of the epoch's end."""

    def on_epoch_end(self, epoch, logs=None):
        pass


def test_an_epoch_that_was_killed_twice_is_not_begun_again(tmp_path):
    path = tmp_path / "times.json"

    def call(seconds, kind=pace.Pace, **options):
        clock = Clock()
        callback = kind(path, seconds, clock)
        fit(callback, clock, range(1), batch_s=1, **options)
        if kind is not Killed:
            callback.__exit__()

    call(150, Killed)
    call(150, Killed)
    with pytest.raises(pace.NoRoom) as refused:
        call(151)
    assert refused.value.seconds == 143  # without the 7 before it
    call(170, Killed)  # more time, and this is its first try
    call(150, Killed, policy="mixed_bfloat16")
    call(170)
    assert pace.read(path)["begun"] == []


@pytest.mark.slow
def test_runs_are_trained_and_published_on_jax(tmp_path):
    """Call by call: one epoch, the rest of it and the next run, nothing."""
    text = write_text(tmp_path / "text.txt")
    # Fewer batches than foretell an epoch.
    settings = TINY | {"batch_size": 24, "jit_compile": True, "stateful": False}
    settings |= {"output_units": 4, "aux_weight": 0.0}
    settings |= {"data": "text", "data_options": {"path": str(text)}}
    arguments = ["--only", "trellisnet_ptb", "--only", "trellisnet_char_ptb"]
    arguments += ["--settings", json.dumps(settings), "--output", tmp_path / "gpu"]
    done = script("train", *arguments, "--minutes", 1e-6)
    assert done.returncode == 0, done.stderr
    assert "Stopped by the time limit after 1 of 2 epochs" in done.stdout
    said = done.stdout.splitlines()[-2:]
    assert said[0].startswith("trellisnet_char_ptb: 1 of 2 epochs, ")
    assert said[1] == "trellisnet_ptb: not started"
    done = script("train", *arguments, "--minutes", 1000, "--dtype-policy", "mixed_bfloat16")
    assert done.returncode == 0, done.stderr
    done = script("train", *arguments)
    assert done.stdout == "trellisnet_char_ptb: done\ntrellisnet_ptb: done\n"
    for name in ("trellisnet_char_ptb", "trellisnet_ptb"):
        # On the user's own text, without a published result.
        folder = tmp_path / "gpu" / "zoo" / f"{name}_custom"
        results = json.loads((folder / "results.json").read_text())
        assert results["epochs"] == 2 and results["wall_time_s"] > 0
        assert results["recipe"]["dtype_policy"] == "mixed_bfloat16"
