"""Measures the cost of training each model of the zoo: step time, memory, steps per epoch.

    python -m tools.costs

measures a training step of each model at full size, in its own process on one core, and writes
`zoo/costs.json`, which the table of models uses. It skips models that are already in the file, so
an interrupted measurement resumes. To measure a model again, remove it from the file.

Times are CPU times, so other work on the machine matters little. For large texts only the size
counts, and batches are random; all other data are loaded as for training. A model with
`levels_measured` in the file was measured with these depths, and its figures are extrapolated.
"""

import json
import pathlib
import subprocess
import sys
import time
from typing import Annotated

import numpy as np
import typer

from keras_streams.files import atomic_write
from tools.process import begin_epoch, peak_memory, words
from trellis_keras import zoo
from trellis_keras.zoo.environment import environment
from trellis_keras.zoo.results import COSTS, assets_folder

BATCHES = 5
ENOUGH = 10  # seconds of one core after which no further steps are measured

# Tokens in the training split of large texts (for LAMBADA "more than 200M": TCN paper, section 5).
TRAINING_TOKENS = {
    "wt103": 103_227_021,
    "text8": 90_000_000,
    "enwik8": 90_000_000,
    "lambada": 200_000_000,
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Models. Default: all.")] = None,
    output: Annotated[
        pathlib.Path | None, typer.Option(help="Output file. Default: the zoo's.")
    ] = None,
):
    """Measure the models that are not yet in the file."""
    path = output or assets_folder() / COSTS
    machine = environment()
    commit = machine.pop("commit")
    costs = {"machine": machine, "models": {}}
    if path.exists():
        costs = json.loads(path.read_text(encoding="utf-8"))
    for part in ("hardware", "backend"):
        if costs["machine"][part] != machine[part]:
            raise SystemExit(f"{path} was measured on {costs['machine']}: use another --output.")
    for name in names or zoo.list_models():
        if name not in costs["models"]:
            # Sets the affinity before the backend counts the cores.
            code = (
                "import os; os.sched_setaffinity(0, {0}); "
                f"from tools.costs import measure; measure({name!r})"
            )
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            figures = json.loads(done.stdout.splitlines()[-1]) | {"commit": commit}
            typer.echo(f"{name}: {figures}")
            costs["models"] = dict(sorted({**costs["models"], name: figures}.items()))
            with atomic_write(path) as temporary:
                temporary.write_text(json.dumps(costs, indent=2) + "\n", encoding="utf-8")


def measure(name):
    """Prints the figures of one model as JSON."""
    recipe, batches, steps = _batches(zoo.recipe(name, jit_compile=False))
    model = recipe.build()
    begin_epoch(model, len(batches[0][0]))
    # If lengths differ, TensorFlow compiles for any length at the second batch.
    for batch in batches[: len({batch[0].shape for batch in batches[:2]})]:
        model.train_on_batch(*batch)
    taken = []
    for batch in batches:
        begin = time.process_time()
        model.train_on_batch(*batch)
        taken.append(time.process_time() - begin)
        if sum(taken) > ENOUGH:
            break
    figures = {
        "step_core_s": float(f"{sum(taken) / len(taken):.3g}"),
        "steps_per_epoch": steps,
        "memory_gib": round(peak_memory() / 2**30, 2),
        "parameters": model.count_params(),
    }
    print(json.dumps(figures))


def _batches(recipe):
    """Returns the recipe with its data, some batches, and the number of batches per epoch."""
    if recipe.data not in TRAINING_TOKENS:
        loaded = recipe.load_data()
        recipe = recipe.with_data(loaded)
        stream = recipe.batches(loaded.train)
        steps = len(stream)
        return recipe, [stream[i * steps // BATCHES] for i in range(BATCHES)], steps
    # A constant text, which takes no memory, to count batches.
    stream = recipe.batches(np.broadcast_to(np.int32(0), TRAINING_TOKENS[recipe.data]))
    rng, size = np.random.default_rng(0), recipe.arguments["vocabulary_size"]
    x, y, weight = stream[len(stream) // 2]
    random = [[words(rng, size, part.shape) for part in (x, y)] for _ in range(BATCHES)]
    return recipe, [(*tokens, weight) for tokens in random], len(stream)


if __name__ == "__main__":
    typer.run(main)
