"""Plot gradient norms by layer (or by level of a TrellisNet) and epoch as a heatmap.

    python examples/gradient_heatmap.py trellisnet_char FILE.png [--epochs 5] [--batches 2]

Trains a zoo model with its optimizer and batches, at a constant learning rate, and measures with
`GradientNorms` after every epoch (Ahuja & Morency 2018, Figure 7). The levels of a TrellisNet share
their weights: with a^i the pre-activations of level i (Bai et al. 2019, Eq. 1), the gradient of a
shared weight is a sum over the levels, and the contribution of level i is computed from dL/da^i,
whose norm is plotted. The norm is exact and adds no cost to the gradient itself: level i passes a^i
through the identity together with a number, whose "gradient" is defined as the sum of squares of
dL/da^i.
"""

import argparse
import contextlib

import keras
import numpy as np
from keras import ops

from trellis_keras import kernels
from trellis_keras.layers import TrellisLayer
from trellis_keras.training import GradientNorms
from trellis_keras.training.gradient_norms import LossGradient


class LevelNorms(keras.callbacks.Callback):
    """Logs `gradient_norm/<level>` of a model whose `backbone` is a `TrellisLayer`.

    This is the norm of the gradient of the loss, averaged over the batches, with respect to all
    pre-activations of a level in these batches. All levels are unrolled, which takes longer to
    compile than training does.

    Args:
        batches: `PyDataset` whose first `steps` batches are measured.
        steps: Positive integer.
    """

    def __init__(self, batches, steps):
        super().__init__()
        self.batches = [batches[i] for i in range(min(steps, len(batches)))]

    def on_train_begin(self, logs=None):
        self.gradient = LevelGradient(self.model)

    def on_epoch_end(self, epoch, logs=None):
        squares = sum(ops.convert_to_numpy(self.gradient(b)[-1]) for b in self.batches)
        norms = np.sqrt(squares) / len(self.batches)
        width = len(str(len(norms)))
        logs |= {f"gradient_norm/{i:0{width}}": float(n) for i, n in enumerate(norms, start=1)}


class LevelGradient(LossGradient):
    """A `LossGradient` with an additional tensor (depth,): the sums of squares of dL/da^i."""

    def _weights(self):
        layer = self.model.backbone
        return [*super()._weights(), ops.zeros(layer.depth, layer.state_dtype)]

    def _loss(self, weights, *rest):
        *weights, numbers = weights
        layer = self.model.backbone
        with kernels.disabled(), replaced_cell(layer, Probe(layer.cell, ops.unstack(numbers))):
            return super()._loss(weights, *rest)

    def _unscale(self, gradients, scale):
        *gradients, squares = super()._unscale(gradients, scale)
        return [*gradients, squares / ops.cast(scale, squares.dtype)]  # squared: twice


class Probe:
    """A gated activation that uses the next of the given numbers in each call."""

    def __init__(self, cell, numbers):
        self._cell, self._numbers = cell, iter(numbers)

    def __getattr__(self, name):
        return getattr(self._cell, name)

    def __call__(self, a, states):
        return self._cell(probe(a, next(self._numbers)), states)


@ops.custom_gradient
def probe(a, number):
    """Returns a. The gradient of `number` is the sum of squares of a's gradient."""

    def gradient(upstream):
        return upstream, ops.sum(ops.square(ops.cast(upstream, number.dtype)))

    return a, gradient


@contextlib.contextmanager
def replaced_cell(layer, cell):
    """Context that replaces the cell of a built layer, bypassing Keras' tracking."""
    original, vars(layer)["cell"] = layer.cell, cell
    try:
        yield
    finally:
        vars(layer)["cell"] = original


def draw(norms, rows, path):
    """Draws a heatmap of rows (the first at the bottom) and epochs, on a logarithmic scale."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.add_subplot()
    extent = (0.5, norms.shape[1] + 0.5, -0.5, len(rows) - 0.5)
    image = axes.imshow(
        norms, norm=LogNorm(), origin="lower", aspect="auto", interpolation="nearest", extent=extent
    )
    step = -(-len(rows) // 16)
    axes.set_yticks(range(0, len(rows), step), rows[::step])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="epoch", title="Gradient norm")
    figure.colorbar(image)
    figure.savefig(path, dpi=120)


def train(model, stream, epochs, batches):
    """Returns (rows, norms of shape (rows, epochs))."""
    levels = isinstance(getattr(model, "backbone", None), TrellisLayer)
    callback = LevelNorms(stream, batches) if levels else GradientNorms(stream, steps=batches)
    history = model.fit(stream, epochs=epochs, shuffle=False, verbose=2, callbacks=[callback])
    rows = [name for name in history.history if name.startswith("gradient_norm/")]
    norms = np.array([history.history[name] for name in rows])
    return [row.removeprefix("gradient_norm/") for row in rows], norms


def main(arguments=None):
    from trellis_keras import zoo

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="a model of the zoo")
    parser.add_argument("path", help="the .png file")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2, help="number of batches to measure on")
    options = parser.parse_args(arguments)
    recipe = zoo.recipe(options.name)
    splits = recipe.load_data()
    model = recipe.build(vocabulary=splits.vocabulary if recipe.reads_text else None)
    rows, norms = train(model, recipe.batches(splits.train), options.epochs, options.batches)
    draw(norms, rows, options.path)


if __name__ == "__main__":
    main()
