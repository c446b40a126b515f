"""Trains one flagship model in one visit of minutes to a GPU, and brings its weights home.

    python -m benchmarks.gpu.flagship measure trellisnet_ptb --plan plan.json
    python -m benchmarks.gpu.flagship train trellisnet_ptb --output out --settings "$(<plan.json)"
    python -m benchmarks.gpu.flagship unpack out --output runs/trellisnet_ptb

`measure` times the steps and writes the settings with which the epochs fit. `train` trains with the
model's fast recipe and evaluates the best epoch on the test split, once. Its output is small enough
to be copied: the recipe, the history, the figures, and the best weights in half precision, in
pieces below 16 MiB. `unpack` makes a finished run of them, for `tools.publish`.
"""

import dataclasses
import json
import math
import pathlib
import statistics
import time
from typing import Annotated

import keras
import numpy as np
import typer

from benchmarks.cases import gemm
from benchmarks.results import write_figures
from benchmarks.worker import timed
from trellis_keras import zoo
from trellis_keras.data import EpochOrder
from trellis_keras.files import atomic_folder
from trellis_keras.training import Checkpoint, HistoryCSV, TimeLimit, set_seeds
from trellis_keras.zoo import environment
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.datasets.registry import SPLITS

STEPS, REPEATS = 16, 3  # of a measurement
PRODUCT = (16_384, 8_192, 8_192)  # 2.2 TFLOP
# A rehearsal takes a tiny product, and the start of each split.
TINY_PRODUCT = (64, 64, 64)
REHEARSED_TOKENS, REHEARSED_ROWS = 20_000, 256
PIECE = 15 * 2**20  # bytes
WEIGHTS = "weights"  # a folder
FIGURES = "figures.json"  # `tools.publish` reads the seconds of training
SAVE_S = 60.0  # seconds between two copies of the best weights
# Fraction of the time for validation, copies of the weights, building and loading.
RESERVE = 0.12
SHALLOW = 0.4  # fraction of the time for the epochs of reduced depth

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Model = Annotated[str, typer.Argument(help="A TrellisNet of the zoo with a fast recipe.")]
Settings = Annotated[str, typer.Option(help="Changes to the recipe, as JSON.")]


@app.command()
def measure(
    model: Model,
    plan: Annotated[str, typer.Option(help="Output: the settings for `train`, as JSON.")],
    minutes: Annotated[float, typer.Option(help="Time limit of `train`.")] = 9.0,
    settings: Settings = "{}",
):
    """Print the seconds per step, and write the settings with which the epochs fit."""
    recipe, loaded = prepare(model, settings)
    figures = measured(recipe, loaded)
    chosen = json.loads(settings) | planned(recipe, figures, 60 * minutes)
    write_figures(pathlib.Path(plan), chosen)
    print(json.dumps(figures | chosen, indent=1), flush=True)


@app.command()
def train(
    model: Model,
    output: Annotated[str, typer.Option(help="Folder for what is to be copied.")],
    minutes: Annotated[float, typer.Option(help="Time limit of the whole call.")] = 9.0,
    settings: Settings = "{}",
    start: Annotated[
        str | None, typer.Option(help="Output of an earlier call, whose weights to continue from.")
    ] = None,
    rehearsal: Annotated[bool, typer.Option(help="Read the start of the data only.")] = False,
):
    """Train by the fast recipe, evaluate the best epoch on the test split, pack the weights."""
    limit = TimeLimit(60 * minutes)
    folder = pathlib.Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    recipe, loaded = prepare(model, settings)
    if rehearsal:
        loaded = beginning(loaded)
    write_figures(folder / "recipe.json", recipe.to_dict())
    environment.record(folder / "environment.json", recipe.dtype_policy, 1)
    print(f"{recipe.training}", flush=True)

    net = recipe.build(vocabulary=loaded.vocabulary)
    if start is not None:
        load(net, pathlib.Path(start))
    growth = recipe.training.growth
    best = Best(folder, 0 if growth is None else growth.epochs)
    stream = recipe.batches(loaded.train, shuffle=True)
    start = time.monotonic()
    net.fit(
        stream,
        validation_data=recipe.batches(loaded.valid),
        epochs=recipe.training.epochs,
        # None of them reads the loss of a step, for which the GPU would wait.
        callbacks=[
            EpochOrder(stream),
            *recipe.training.callbacks(),
            # As `Checkpoint` does.
            keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: set_seeds(net, recipe.seed, epoch)
            ),
            HistoryCSV(folder / "history.csv"),
            best,
            limit,
        ],
        shuffle=False,
        verbose=2,
    )
    seconds = time.monotonic() - start
    best.restore()
    save(best.weights, folder)
    test = net.evaluate(recipe.batches(loaded.test), return_dict=True, verbose=0)
    figures = {
        "training_s": seconds,
        "best_epoch": best.epoch,
        "test": {name: float(value) for name, value in test.items()},
        "operations_per_step": operations(net, stream[0]),
    }
    write_figures(folder / FIGURES, figures)
    sizes = TINY_PRODUCT if rehearsal else PRODUCT
    figures |= {"product": sizes, "product_rate": product_rate(net.compute_dtype, sizes)}
    write_figures(folder / FIGURES, figures)
    print(json.dumps(figures, indent=1), flush=True)


@app.command()
def unpack(
    folder: Annotated[str, typer.Argument(help="Output of `train`.")],
    output: Annotated[str, typer.Option(help="Folder of the run.")],
):
    """Make a finished run of the output of `train`."""
    source, run = pathlib.Path(folder), pathlib.Path(output)
    recipe = zoo.read_recipe(source)
    vocabulary = recipe.load_data().vocabulary if recipe.reads_text else None
    net = recipe.build(vocabulary=vocabulary)
    load(net, source)
    run.mkdir(parents=True, exist_ok=True)
    for name in ("recipe.json", "environment.json", "history.csv", FIGURES):
        (run / name).write_bytes((source / name).read_bytes())
    epochs = len((run / "history.csv").read_text(encoding="utf-8").splitlines()) - 1
    net.save(run / runs.BEST)
    finished = Checkpoint(run / "checkpoints", seed=recipe.seed)
    calls = keras.callbacks.CallbackList([finished], model=net, epochs=epochs, steps=1)
    calls.on_train_begin()
    calls.on_epoch_begin(epochs - 1)
    calls.on_epoch_end(epochs - 1)


def prepare(model, settings):
    """Returns the fast recipe with the precision of a GPU, and its data."""
    if not model.startswith("trellisnet_"):  # whose operations are counted
        raise ValueError(f"A flagship must be a TrellisNet. Received: {model}")
    options = {"setting": "fast", "dtype_policy": "mixed_bfloat16"} | json.loads(settings)
    recipe = zoo.recipe(model, **options)
    loaded = recipe.load_data()
    return recipe.with_data(loaded), loaded


def beginning(loaded):
    """Returns a data set of the first tokens or rows of each split."""

    def first(part):
        if isinstance(part, tuple):
            return tuple(array[:REHEARSED_ROWS] for array in part)
        return part[:REHEARSED_TOKENS]

    parts = {name: first(getattr(loaded, name)) for name in SPLITS}
    return dataclasses.replace(loaded, **parts)


def measured(recipe, loaded):
    """Returns the steps of an epoch, and the seconds of the first ones and of a later one.

    With `growth` in the recipe, for both depths.
    """
    figures = {"steps": len(recipe.batches(loaded.train))}
    depths = {"deep": {}}
    if recipe.training.growth is not None:
        depths["shallow"] = {"depth": recipe.training.growth.depth}
    for name, depth in depths.items():
        changed = recipe.replace(growth=None, epochs=1, **depth)
        net = changed.build(vocabulary=loaded.vocabulary)
        batches = Few(changed.batches(loaded.train, shuffle=True))
        clock = EpochTimes()
        net.fit(batches, epochs=1 + REPEATS, callbacks=[clock], shuffle=False, verbose=0)
        first, *others = clock.seconds
        figures[name] = {
            "first_s": first,
            "step_s": statistics.median(others) / STEPS,
            "operations": operations(net, batches[0]),
            "operations_without_cone": operations(net, batches[0], cone=False),
        }
        print(json.dumps(figures), flush=True)
        keras.utils.clear_session()
    return figures


def planned(recipe, figures, seconds):
    """Returns the options of the recipe with which the epochs fit into the seconds."""
    kinds = [name for name in ("deep", "shallow") if name in figures]
    seconds = (1 - RESERVE) * seconds - sum(figures[name]["first_s"] for name in kinds)
    epoch_s = {name: figures[name]["step_s"] * figures["steps"] for name in kinds}
    options = {}
    if recipe.training.growth is not None:
        options["growth_epochs"] = int(SHALLOW * seconds / epoch_s["shallow"])
        seconds -= options["growth_epochs"] * epoch_s["shallow"]
    deep = int(seconds / epoch_s["deep"])
    if deep < 1:
        raise ValueError(
            f"{seconds:.0f} s are too few for an epoch of {epoch_s['deep']:.0f} s. Raise "
            "--minutes, or choose a smaller model."
        )
    epochs = options.get("growth_epochs", 0) + deep
    warm_up = recipe.training.options()["warmup_steps"]
    return options | {"epochs": epochs, "decay_steps": epochs * figures["steps"] - warm_up}


def product_rate(dtype, sizes):
    """Returns the operations per second of a matrix product, as the limit of the machine."""
    product = gemm(dtype, *sizes)()
    product()
    return statistics.median(
        amount / seconds for seconds, amount in (timed(product) for _ in range(3))
    )


def operations(model, batch, cone=True):
    """Counts the operations of a step's matrix products: forward, and twice that for gradients.

    Gates, softmax, dropout, weight norm and the optimizer are not counted.

    Args:
        model: A zoo model with a `TrellisLayer`.
        batch: A batch (x, y, weight) from its recipe's stream.
        cone: Boolean, whether to count only the positions that the layer computes: those that the
            loss can see and, in loops, a few more. Otherwise counts all positions of all levels.
    """
    layer, (x, y, _) = model.backbone, batch
    rows, time = x.shape[:2]
    counted = y.shape[1] if layer.return_sequences else 1
    plan = layer.plan_levels(time, counted if cone else None)
    # Without carried states, the inputs of level 1 are zeros.
    multiplying = range(1 if layer.stateful else 2, layer.depth + 1)
    hidden = layer.units * sum(len(plan.positions[level]) for level in multiplying)
    entering = {}
    for level in filter(layer.injects_input, range(1, layer.depth + 1)):
        entering.setdefault(layer.dilation(level), []).append(plan.positions[level])
    # Levels with the same dilation share the product with x.
    injected = sum(len(np.unique(np.concatenate(levels))) for levels in entering.values())
    core = layer.kernel_size * layer.cell.kernel_units * (hidden + _channels(model) * injected)
    return 6.0 * rows * (core + _head(layer, model, counted))


def _channels(model):
    return getattr(model, "embedding_dim", None) or model.input_spec.axes[-1]


def _head(layer, model, counted):
    """Counts the products per row, for the last level and each auxiliary one."""
    outputs = getattr(model, "vocabulary_size", None) or model.head.units
    levels = 1 + layer.return_aux * len(layer.aux_levels)
    return counted * levels * layer.output_units * outputs


class Few(keras.utils.PyDataset):
    """The first batches of a stream."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        return self.stream[index % len(self.stream)]


class EpochTimes(keras.callbacks.Callback):
    """The seconds of each epoch. At its end all its steps are computed, not just dispatched."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._start)


class Best(keras.callbacks.Callback):
    """Keeps the best weights in memory, and copies them to the output once a minute.

    Args:
        folder: The output.
        first: Integer, number of epochs that do not count: those of reduced depth.

    Raises:
        FloatingPointError: After an epoch with a loss of NaN.
    """

    def __init__(self, folder, first=0):
        super().__init__()
        self.folder, self.first = folder, first
        self.best = math.inf
        self.weights, self.epoch = None, None
        self._saved, self._is_new = time.monotonic(), False

    def on_epoch_end(self, epoch, logs=None):
        if not math.isfinite(logs["loss"] + logs["val_loss"]):
            raise FloatingPointError(f"The loss after epoch {epoch + 1} is {logs}.")
        if epoch >= self.first and logs["val_loss"] < self.best:
            self.best, self.epoch, self._is_new = logs["val_loss"], epoch + 1, True
            self.weights = self.model.get_weights()
        if self._is_new and time.monotonic() - self._saved >= SAVE_S:
            save(self.weights, self.folder)
            self._saved, self._is_new = time.monotonic(), False

    def restore(self):
        """Gives the model its best weights."""
        if self.weights is None:
            raise ValueError(
                f"No epoch at full depth followed the {self.first} of reduced depth: lower "
                "growth_epochs, or raise --minutes."
            )
        self.model.set_weights(self.weights)


def save(weights, folder):
    """Writes weights in half precision, in pieces; a kill leaves the earlier ones."""
    flat = np.concatenate([np.ravel(weight).astype("float16") for weight in weights])
    if not np.isfinite(flat).all():
        raise FloatingPointError("A weight does not fit into half precision.")
    content = flat.tobytes()
    with atomic_folder(folder / WEIGHTS) as temporary:
        for number, start in enumerate(range(0, len(content), PIECE)):
            (temporary / f"{number:02d}").write_bytes(content[start : start + PIECE])


def load(model, folder):
    """Reads what `save` has written."""
    pieces = [path.read_bytes() for path in sorted((folder / WEIGHTS).iterdir())]
    flat = np.frombuffer(b"".join(pieces), "float16")
    shapes = [tuple(weight.shape) for weight in model.weights]
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    if len(flat) != ends[-1]:
        raise ValueError(f"{folder} has {len(flat)} weights, the model {ends[-1]}")
    values = np.split(flat.astype("float32"), ends[:-1])
    model.set_weights([v.reshape(shape) for v, shape in zip(values, shapes, strict=True)])


if __name__ == "__main__":
    app()
