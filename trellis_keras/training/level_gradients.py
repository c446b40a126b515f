"""How long the gradient is at each level of a TrellisNet, whose levels share their weights.

With a^i (batch, time, preactivations) the pre-activations of level i (Bai et al. 2019, Eq. 1), the
gradient of every shared weight is a sum over the levels, and all that a level adds to it comes from
the gradient of its pre-activations: for the bias and, with S the sum over rows and steps, for tap j

    dL/db = sum_i S dL/da^i_t,        dL/dWh_j = sum_i S (m * h^{i-1}_{t-jd})^T dL/da^i_t.

So |dL/da^i| says how much of the gradient arrives at a level. It is exact, and free beside the
gradient itself: level i's pre-activations pass the identity together with a number s_i, whose
"gradient" is made to be the sum of squares of theirs on the way back.
"""

import contextlib

from keras import ops

from trellis_keras.layers import TrellisLayer
from trellis_keras.training.gradients import LossGradient


class LevelGradient(LossGradient):
    """A `LossGradient` that also tells how long the gradient is at each level of a TrellisNet.

    It runs the levels one by one, without the loop that compiles them once: the time until the
    first batch is measured grows with their number.

    Args:
        model: A compiled `keras.Model`, built, whose `backbone` is a `TrellisLayer`.

    Returns:
        A list of tensors, one for each of `model.trainable_variables`, and one (depth,) more: the
        sums of squares of dL/da^i.

    Raises:
        ValueError: The model is not built and compiled, or its backbone is another layer.

    Example:

    >>> from trellis_keras.models import LanguageModel
    >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
    >>> model.build((None, None))
    >>> model.compile("sgd")
    >>> tokens = np.zeros((2, 6), "int32")
    >>> *gradients, squares = LevelGradient(model)((tokens[:, :-1], tokens[:, 1:]))
    >>> len(squares)
    3
    """

    def __init__(self, model):
        super().__init__(model)
        self._layer = getattr(model, "backbone", None)
        if not isinstance(self._layer, TrellisLayer):
            raise ValueError(
                "Levels are those of a model whose `backbone` is a TrellisLayer. "
                f"Received: {model} with the backbone {self._layer}"
            )

    def _weights(self):
        return [*super()._weights(), ops.zeros(self._layer.depth, self._layer.state_dtype)]

    def _loss(self, weights, *rest):
        *weights, numbers = weights
        with _level_by_level(self._layer, _Probed(self._layer.cell, ops.unstack(numbers))):
            return super()._loss(weights, *rest)

    def _unscaled(self, gradient, scale):
        *gradients, squares = super()._unscaled(gradient, scale)
        return [*gradients, squares / ops.cast(scale, squares.dtype)]


class _Probed:
    """A gated activation that meets the next of some numbers whenever it is called."""

    def __init__(self, cell, numbers):
        self._cell, self._numbers = cell, iter(numbers)

    def __getattr__(self, name):
        return getattr(self._cell, name)

    def __call__(self, a, states):
        return self._cell(_probe(a, next(self._numbers)), states)


@ops.custom_gradient
def _probe(a, number):
    """Returns a; `number` gets the sum of squares of a's gradient as its own."""

    def gradient(upstream):
        return upstream, ops.sum(ops.square(ops.cast(upstream, number.dtype)))

    return a, gradient


@contextlib.contextmanager
def _level_by_level(layer, cell):
    """While it is open, the layer calls `cell` once for each level, from level 1 up."""
    # Past Keras' tracking, for which another cell would be a change of a layer that is built.
    attributes, new = vars(layer), {"unroll": True, "cell": cell}
    before = {name: attributes[name] for name in new}
    attributes.update(new)
    try:
        yield
    finally:
        attributes.update(before)
