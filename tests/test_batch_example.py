"""examples/batch: two workers of Ray, one killed on the way, write what one process writes."""

import os

import numpy as np
import pytest

from tests.support.processes import ROOT, run_script
from tests.support.small_runs import tiny_run
from trellis_keras import scoring
from trellis_keras.zoo.run import load_best

pytest.importorskip("ray")
pq = pytest.importorskip("pyarrow.parquet")
import pyarrow as pa  # noqa: E402

FILES, ROWS = 6, 40
PATH = os.pathsep.join(map(str, [ROOT, *(ROOT / "packages").iterdir(), ROOT / "examples/batch"]))

SCRIPT = f"""
import os, pathlib, signal
import ray
import score, workers


class ScoreAndDie(score.Score):
    def __call__(self, batch):
        mark = pathlib.Path(os.environ["MARK"])  # the workers inherit it
        if 3 * {ROWS} in batch["row"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


ray.init(num_cpus=4, include_dashboard=False)
sys.argv += ["--workers", "2", "--rows", "{ROWS // 2}"]
workers.run(ScoreAndDie, workers.arguments(""))
"""


@pytest.mark.slow
def test_a_killed_worker(tmp_path):
    run = tiny_run(tmp_path, epochs=1)
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abc de"), rng.integers(0, 60))) for _ in range(FILES * ROWS)]
    (tmp_path / "corpus").mkdir()
    for i in range(FILES):
        rows = range(i * ROWS, (i + 1) * ROWS)
        table = pa.table({"row": list(rows), "text": [texts[row] for row in rows]})
        pq.write_table(table, tmp_path / "corpus" / f"{i}.parquet")
    words = run, tmp_path / "corpus", tmp_path / "scores"
    run_script(SCRIPT, *words, timeout=900, PYTHONPATH=PATH, MARK=tmp_path / "killed")
    assert (tmp_path / "killed").exists()
    files = sorted((tmp_path / "scores").glob("*.parquet"))
    found = pa.concat_tables(map(pq.read_table, files)).to_pydict()
    assert found["row"] == list(range(FILES * ROWS)) and found["text"] == texts
    sums, counts = scoring.score_documents(load_best(run), texts)
    assert found["num_tokens"] == counts.tolist()
    np.testing.assert_allclose(found["log_probability"], sums, rtol=1e-4, atol=1e-4)
