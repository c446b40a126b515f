"""One measurement of `benchmarks.gpu.steps`, in its own process; prints its figures as JSON.

A step is a step of `fit` on a repeated batch, from loss to loss. So it includes all work between
the steps of a real training, and variables stay on the device. (Keras' `train_on_batch` on JAX
copies them in every step.) After the model, a large matrix product in the same precision is
measured, as the limit of the machine. Failures, such as running out of memory, are reported as
`error`.
"""

import itertools
import json
import os
import statistics
import time
import traceback
from typing import Annotated

import typer

from benchmarks.cases import gemm
from benchmarks.gpu.work import operations
from benchmarks.worker import device, timed

WARM_UP = 4  # uncounted steps, including the first, which compiles
LONGEST = 60.0  # seconds after which no further steps start, if there are ...
FEWEST = 5  # ... at least this many
PRODUCT = (16_384, 8_192, 8_192)  # 2.2 TFLOP
TINY_PRODUCT = (64, 64, 64)
# Lengths known only from the data.
PIXELS = {"seq_mnist": 784, "seq_cifar10": 1024}
TINY_PIXELS = 16

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: str,
    policy: str,
    settings: Annotated[str, typer.Option(help="Fields of the recipe, as JSON.")] = "{}",
    all_positions: Annotated[bool, typer.Option("--all-positions")] = False,
    steps: int = 30,
    quick: bool = False,
):
    """Measure training steps of a zoo model on random data."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps other output out of the figures
    try:
        figures = model_figures(model, policy, json.loads(settings), all_positions, steps, quick)
        figures |= product_figures(policy, TINY_PRODUCT if quick else PRODUCT)
    except Exception as error:
        traceback.print_exc()
        figures = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
    print(json.dumps(figures), file=out, flush=True)


def model_figures(name, policy, settings, all_positions, steps, quick):
    """Builds the model and returns its times, memory and amount of work."""
    from trellis_keras import zoo

    if all_positions:
        compute_all_positions()
    recipe = zoo.recipe(name, **settings, dtype_policy=policy)
    model = recipe.build()
    batch = random_batch(recipe, quick)
    first_s, times, loss = step_times(model, batch, steps)
    full = operations(model, batch, cone=False)
    done = full if all_positions else operations(model, batch)
    return {
        "parameters": model.count_params(),
        "batch": list(batch[0].shape),
        "first_call_s": first_s,
        "step_s": statistics.median(times),
        "steps_s": times,
        "first_loss": loss,
        "operations_full": full,
        "operations_done": done,
        **device(),  # before the product, whose memory must not count
    }


def step_times(model, batch, steps):
    """Trains on a batch and returns the seconds of the first and counted steps, and the loss."""
    import keras

    class Repeated(keras.utils.PyDataset):
        def __len__(self):
            return WARM_UP + steps

        def __getitem__(self, index):
            return batch

    class Times(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.ends, self.losses = [time.perf_counter()], []

        def on_train_batch_end(self, number, logs=None):
            # The loss is a float here, so the step has been computed, not just dispatched.
            self.losses.append(logs["loss"])
            self.ends.append(time.perf_counter())
            counted = self.ends[WARM_UP:]
            if len(counted) > FEWEST and counted[-1] - counted[0] > LONGEST:
                self.model.stop_training = True

    seen = Times()
    model.fit(Repeated(), callbacks=[seen], shuffle=False, verbose=0)
    first, *others = (end - begin for begin, end in itertools.pairwise(seen.ends))
    return first, others[WARM_UP - 1 :], seen.losses[0]


def compute_all_positions():
    """Disables the dependency cone, so that all positions of all levels are computed."""
    from trellis_keras.layers import TrellisLayer

    plan_levels = TrellisLayer.plan_levels
    TrellisLayer.plan_levels = lambda layer, time, output_length: plan_levels(layer, time, None)


def random_batch(recipe, quick):
    """Returns the first batch of the recipe's stream on random data."""
    import numpy as np

    rng, rows = np.random.default_rng(0), recipe.training.batch_size
    if recipe.data not in PIXELS:
        counted = recipe.training.sequence_length - recipe.training.context_length
        size = recipe.arguments["vocabulary_size"]
        part = rng.integers(0, size, rows * counted + 1).astype("int32")
    else:
        pixels = TINY_PIXELS if quick else PIXELS[recipe.data]
        x = rng.normal(size=(rows, pixels, recipe.entry.channels)).astype("float32")
        part = x, (np.arange(rows) % 10).astype("int32")
    return recipe.stream(part)[0]


def product_figures(policy, sizes):
    """Returns the operations per second of a matrix product in a policy's compute dtype."""
    import keras

    dtype = keras.DTypePolicy(policy).compute_dtype
    product = gemm(dtype, *sizes)()
    product()
    rates = []
    for _ in range(FEWEST):
        seconds, amount = timed(product)
        rates.append(amount / seconds)
    return {"product": list(sizes), "product_rate": statistics.median(rates)}


if __name__ == "__main__":
    app()
