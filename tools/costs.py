"""Measures the cost of training each model of the zoo: step time, memory, steps per epoch.

    python -m tools.costs

measures a training step of each model at full size, in its own process on one core, and writes
`zoo/costs.json`, which the table of models uses. It skips models that are already in the file, so
an interrupted measurement resumes. To measure a model again, remove it from the file.

Times are CPU times, so other work on the machine matters little. For large texts only the size
counts, and batches are random; all other data are loaded as for training.
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

# Models too large for an ordinary machine are extrapolated from these numbers of levels, as all
# levels cost the same. Segments and auxiliary losses are those of the full depth.
LEVELS = {"trellisnet_wt103": (6, 12)}

# Tokens in the training split of large texts (for LAMBADA "more than 200M": TCN paper, section 5).
TRAINING_TOKENS = {
    "wt103": 103_227_021,
    "text8": 90_000_000,
    "enwik8": 90_000_000,
    "lambada": 200_000_000,
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Models. Default: all.")] = None,
    output: Annotated[str | None, typer.Option(help="Output file. Default: the zoo's.")] = None,
    core: Annotated[int, typer.Option(help="Core to measure on.")] = 0,
):
    """Measure the models that are not yet in the file."""
    known = [
        name
        for name in zoo.list_models()
        if not zoo.recipe(name).data.endswith("series")  # the user's own data
    ]
    if unknown := sorted(set(names or ()) - set(known)):
        raise typer.BadParameter(f"the zoo has no {unknown}")
    path = assets_folder() / COSTS if output is None else pathlib.Path(output)
    machine = environment()
    commit = machine.pop("commit")
    costs = {"machine": machine, "models": {}}
    if path.exists():
        costs = _continued(json.loads(path.read_text(encoding="utf-8")), machine, path)
    for name in names or known:
        if name in costs["models"]:
            continue
        costs["models"][name] = {**_figures(name, core), "commit": commit}
        typer.echo(f"{name}: {costs['models'][name]}")
        costs["models"] = dict(sorted(costs["models"].items()))
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(costs, indent=2) + "\n", encoding="utf-8")


def _continued(costs, machine, path):
    for name in ("hardware", "backend"):
        if costs["machine"][name] != machine[name]:
            raise SystemExit(
                f"{path} was measured on {costs['machine'][name]}, but this machine is "
                f"{machine[name]}. Use another --output, or remove the file to measure all models "
                "here."
            )
    return costs


def _figures(name, core):
    if name not in LEVELS:
        return _in_own_process(name, core)
    few, more = LEVELS[name]
    small, large = (_in_own_process(name, core, **_shallow(name, depth)) for depth in LEVELS[name])
    return large | _at_full_depth(name, few, more, small, large)


def _shallow(name, depth):
    """Returns options that reduce the depth and change no other cost."""
    recipe = zoo.recipe(name)
    losses = recipe.arguments["depth"] // recipe.arguments["aux_every"]
    length = recipe.training.sequence_length
    return {"depth": depth, "sequence_length": length, "aux_every": depth // losses}


def _at_full_depth(name, few, more, small, large):
    """Extrapolates time and memory linearly from two measurements with fewer levels."""
    recipe = zoo.recipe(name)
    beyond = (recipe.arguments["depth"] - more) / (more - few)
    line = {k: large[k] + beyond * (large[k] - small[k]) for k in ("step_core_s", "memory_gib")}
    return {
        "step_core_s": float(f"{line['step_core_s']:.3g}"),
        "memory_gib": round(line["memory_gib"], 1),
        "levels_measured": [few, more],
    }


def _in_own_process(name, core, **fields):
    # Sets the affinity before the backend counts the cores.
    code = (
        f"import os; hasattr(os, 'sched_setaffinity') and os.sched_setaffinity(0, {{{core}}}); "
        f"from tools.costs import measure; measure({name!r}, **{fields!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{name} could not be measured: exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name, **fields):
    """Prints the figures of one model as JSON."""
    recipe = zoo.recipe(name, jit_compile=False, **fields)
    recipe, batches, steps = _batches(recipe)
    model = recipe.build()
    figures = {
        "step_core_s": float(f"{_step_time(model, batches):.3g}"),
        "steps_per_epoch": steps,
        "memory_gib": round(peak_memory() / 2**30, 2),
        "parameters": model.count_params(),
    }
    print(json.dumps(figures))


def _step_time(model, batches):
    """Returns the CPU time of a training step, in seconds."""
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
    return sum(taken) / len(taken)


def _batches(recipe):
    """Returns the recipe with its data, some batches, and the number of batches per epoch."""
    if recipe.data in TRAINING_TOKENS:
        return recipe, *_random_batches(recipe)
    loaded = recipe.load_data()
    recipe = recipe.with_data(loaded)
    stream = recipe.stream(loaded.train)
    steps = len(stream)
    return recipe, [stream[i * steps // BATCHES] for i in range(BATCHES)], steps


def _random_batches(recipe):
    # A constant text, which takes no memory, to count batches.
    text = np.broadcast_to(np.int32(0), TRAINING_TOKENS[recipe.data])
    stream = recipe.stream(text)
    rng = np.random.default_rng(0)
    x, y, weight = stream[len(stream) // 2]
    size = recipe.arguments["vocabulary_size"]
    random = [[words(rng, size, part.shape) for part in (x, y)] for _ in range(BATCHES)]
    return [(*tokens, weight) for tokens in random], len(stream)


if __name__ == "__main__":
    typer.run(main)
