"""What training each model of the zoo would cost: time of a step, memory, steps of an epoch.

    python -m benchmarks.zoo_costs

measures a training step of every model at its full size, in a process of its own on one core, and
writes `zoo/costs.json`, from which the cards of the models that were not trained are made. Models
that are there already are left as they are: an interrupted measurement goes on.

The time is the processor's, not the clock's, so that other work on the machine matters little. Of
the large texts only the sizes are needed: their batches are random. All other data are loaded as
for a training.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Annotated

import numpy as np
import typer

from benchmarks.process import begin_epoch, peak_memory, words
from trellis_keras.files import atomic_write
from trellis_keras.zoo.assets import COSTS, assets_folder

BATCHES = 5
ENOUGH = 10  # seconds of one core, after which no further step is measured

# Models that are too large for an ordinary machine are measured with so many levels: what a level
# takes is the same at all of them. Segments are as long, and auxiliary losses as many, as at full
# depth.
LEVELS = {"trellisnet_wt103": (6, 12)}

# Tokens of the training part of the large texts. (LAMBADA's: "more than 200M", TCN, section 5.)
TRAINING_TOKENS = {
    "wt103": 103_227_021,
    "text8": 90_000_000,
    "enwik8": 90_000_000,
    "lambada": 200_000_000,
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Models; none: all.")] = None,
    output: Annotated[str | None, typer.Option(help="The file. Default: the zoo's.")] = None,
    core: Annotated[int, typer.Option(help="The core to measure on.")] = 0,
):
    """Measures what is not in the file yet."""
    from trellis_keras import zoo
    from trellis_keras.zoo.environment import environment

    known = set(zoo.list_models())
    if not set(names or ()) <= known:
        raise typer.BadParameter(f"the zoo has no {sorted(set(names) - known)}")
    path = assets_folder() / COSTS if output is None else pathlib.Path(output)
    costs = {"machine": environment(), "models": {}}
    if path.exists():
        costs = _continued(json.loads(path.read_text(encoding="utf-8")), costs["machine"], path)
    for name in names or zoo.list_models():
        if name in costs["models"]:
            continue
        costs["models"][name] = _figures(name, core)
        typer.echo(f"{name}: {costs['models'][name]}")
        costs["models"] = dict(sorted(costs["models"].items()))
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(costs, indent=2) + "\n", encoding="utf-8")


def _continued(costs, machine, path):
    for name in ("hardware", "backend"):
        if costs["machine"][name] != machine[name]:
            raise SystemExit(
                f"{path} was measured on {costs['machine'][name]}, and this is {machine[name]}. "
                "Choose another --output, or remove the file to measure all models here."
            )
    return costs


def _figures(name, core):
    if name not in LEVELS:
        return _in_own_process(name, core)
    few, more = LEVELS[name]
    small, large = (_in_own_process(name, core, **_shallow(name, depth)) for depth in LEVELS[name])
    return large | _at_full_depth(name, few, more, small, large)


def _shallow(name, depth):
    """Settings that make the model shallower, and change nothing else that takes time."""
    from trellis_keras import zoo

    recipe = zoo.recipe(name)
    losses = recipe.model.depth // recipe.model.aux_every
    return {"depth": depth, "segment": recipe.segment, "aux_every": depth // losses}


def _at_full_depth(name, few, more, small, large):
    """Time and memory on the line through two measurements with fewer levels."""
    from trellis_keras import zoo

    recipe = zoo.recipe(name)
    beyond = (recipe.model.depth - more) / (more - few)
    line = {k: large[k] + beyond * (large[k] - small[k]) for k in ("step_core_s", "memory_gib")}
    return {
        "step_core_s": float(f"{line['step_core_s']:.3g}"),
        "memory_gib": round(line["memory_gib"], 1),
        "levels_measured": [few, more],
    }


def _in_own_process(name, core, **fields):
    code = f"from benchmarks.zoo_costs import measure; measure({name!r}, {core}, **{fields!r})"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{name} could not be measured: exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(name, core, **fields):
    """Prints the figures of one model as JSON."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})  # before the backend counts the cores
    from trellis_keras import zoo

    recipe, batches, steps = _batches(zoo.recipe(name, **fields))
    model = zoo.get_model(name, **vars(recipe.model) | {"jit_compile": False})
    figures = {
        "step_core_s": float(f"{_step_time(model, batches):.3g}"),
        "steps_per_epoch": steps,
        "memory_gib": round(peak_memory() / 2**30, 2),
        "parameters": model.count_params(),
    }
    print(json.dumps(figures))


def _step_time(model, batches):
    """Seconds of the processor for a training step."""
    begin_epoch(model, len(batches[0][0]))
    # Where lengths differ, the second one makes TensorFlow compile for all.
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
    """The recipe with its data, some batches of these, and the number of batches of an epoch."""
    if recipe.training.data in TRAINING_TOKENS:
        return recipe, *_random_batches(recipe)
    loaded = recipe.load_data()
    recipe = recipe.with_data(loaded)
    stream = recipe.stream(loaded.train)
    steps = len(stream)
    return recipe, [stream[i * steps // BATCHES] for i in range(BATCHES)], steps


def _random_batches(recipe):
    # Nothing is kept of so long a text, whose tokens are all the same: it says how many batches.
    text = np.broadcast_to(np.int32(0), TRAINING_TOKENS[recipe.training.data])
    stream = recipe.training.stream(recipe.model, text, "all", False)
    rng = np.random.default_rng(0)
    x, y, weight = stream[len(stream) // 2]
    size = recipe.model.vocabulary_size
    random = [[words(rng, size, part.shape) for part in (x, y)] for _ in range(BATCHES)]
    return [(*tokens, weight) for tokens in random], len(stream)


if __name__ == "__main__":
    typer.run(main)
