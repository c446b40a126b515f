"""How long the gradients of a model's layers are, epoch by epoch."""

import itertools
import re

import keras
import numpy as np
from keras import ops

from trellis_keras.layers.precision import at_least_float32
from trellis_keras.training.gradients import LossGradient

GLOBAL = "gradient_norm"
_SQUARE = 16  # pixels


class GradientNorms(keras.callbacks.Callback):
    """Measures the gradient's norm in each layer at the end of every epoch.

    Figure 7 of the LRU paper (Ahuja & Morency, 2018): whether gradients reach the lower layers of
    a deep stack. Measured is the gradient of the training loss, averaged over the given batches,
    at the weights that the epoch ended with: before the optimizer's clipping and weight decay, with
    dropout, and with the states of stateful layers empty. (The paper's program sums the gradients
    of all batches of an epoch while its weights move.) The training itself is not touched: its
    random numbers, metrics and carried states are as without this callback.

    The logs of the epoch get `gradient_norm`, that of all trainable variables together, and
    `gradient_norm/<row>` of each row. Callbacks that write logs, such as
    `keras.callbacks.TensorBoard`, must come after this one in the list given to `fit`.

    Args:
        batches: the batches to measure on: a `keras.utils.PyDataset`, or a list of (x, y) or
            (x, y, sample_weight). Each counts as much as another.
        steps: how many of them to take, the first ones. `None`: all.
        groups: function from the model to the rows, a dict {name: list of trainable variables}.
            By default each layer that has trainable weights of its own is a row: those of
            `model.backbone`, where there is one (cells of a stack are layers), or of the model.
        directory: where to write TensorBoard's logs: a curve for each row, and a heatmap of the
            epochs until now as an image. `None`: none are written.

    Attributes:
        norms: {row: list of its norms after each epoch}, with the row `gradient_norm` first.

    Raises:
        ValueError: when constructed, if TensorBoard's logs are wanted where TensorFlow is not
            installed; when training begins, if `groups` gives no rows or a variable that is not
            trained, or the rows are not those of the state that was restored; after the first
            epoch without batches.

    Example:

    >>> norms = trellis_keras.training.GradientNorms(train, steps=10)
    >>> history = model.fit(train, epochs=2, callbacks=[norms])
    >>> norms.heatmap().shape  # of a model of one layer
    (1, 2)
    """

    def __init__(self, batches, *, steps=None, groups=None, directory=None):
        super().__init__()
        if steps is not None and steps < 1:
            raise ValueError(f"`steps` must be 1 or more, or None for all. Received: steps={steps}")
        self.batches = batches
        self.steps = steps
        self.groups = layers_with_weights if groups is None else groups
        self.norms = {}
        self._tensorboard = None if directory is None else _TensorBoard(directory)
        self._rows = None
        self._gradient = None

    def get_state(self):
        """Returns the norms until now as a JSON-able dict."""
        return {"norms": {name: list(values) for name, values in self.norms.items()}}

    def set_state(self, state):
        """Takes up the norms that `get_state` returned."""
        self.norms = {name: list(values) for name, values in state["norms"].items()}

    def heatmap(self):
        """Returns the norms as an array (rows, epochs), without the global one."""
        return np.array([values for name, values in self.norms.items() if name != GLOBAL])

    def on_train_begin(self, logs=None):
        self._rows = _checked_rows(self.groups(self.model), self.model)
        self._gradient = LossGradient(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        names = [GLOBAL, *(f"{GLOBAL}/{row}" for row in self._rows)]
        if not self.norms:
            self.norms = {name: [] for name in names}
        if list(self.norms) != names:
            raise ValueError(
                "GradientNorms goes on with the norms of other rows. "
                f"There were {list(self.norms)}, there are {names}."
            )

    def on_epoch_end(self, epoch, logs=None):
        gradient = self._mean_gradient()
        everything = range(len(gradient))
        for name, indices in zip(self.norms, [everything, *self._rows.values()], strict=True):
            norm = _norm([gradient[i] for i in indices])
            self.norms[name].append(norm)
            if logs is not None:
                logs[name] = norm
        if self._tensorboard is not None:
            self._tensorboard.write(epoch, self.norms, self.heatmap())

    def _mean_gradient(self):
        total, count = None, 0
        for batch in itertools.islice(_each(self.batches), self.steps):
            gradient = self._gradient(batch)
            total = gradient if total is None else list(map(ops.add, total, gradient))
            count += 1
        if total is None:
            raise ValueError("GradientNorms found no batches. Give it a list or a PyDataset.")
        return [ops.divide(part, count) for part in total]


def layers_with_weights(model):
    """Returns {name: trainable variables} of the layers that have such of their own.

    Args:
        model: A model. If it has a `backbone`, the layers are the backbone's.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    >>> list(layers_with_weights(model))
    ['1_dense', '2_dense']
    """
    trained = {id(variable) for variable in model.trainable_variables}
    rows = []
    for layer in _in_order(getattr(model, "backbone", model)):
        own = [v for v in layer._trainable_variables if id(v) in trained]
        if own:
            # Keras numbers the layers of a process, which a restarted run would not repeat.
            rows.append((re.sub(r"_\d+$", "", layer.name), own))
    width = len(str(len(rows)))
    return {f"{i:0{width}}_{name}": own for i, (name, own) in enumerate(rows, start=1)}


def _in_order(layer):
    """Yields a layer and all in it. Keras' own walk turns the order of the nested ones round."""
    yield layer
    for part in layer._flatten_layers(include_self=False, recursive=False):
        yield from _in_order(part)


def _checked_rows(groups, model):
    """Returns {name: indices into the model's trainable variables}."""
    index = {id(variable): i for i, variable in enumerate(model.trainable_variables)}
    if not groups:
        raise ValueError("`groups` gave no rows: no layer has trainable weights.")
    for name, variables in groups.items():
        wrong = [v.path for v in variables if id(v) not in index]
        if wrong or not variables:
            raise ValueError(
                "`groups` must give lists of the model's trainable variables. "
                f"Received: {name!r} with {wrong or 'none'}"
            )
    return {name: [index[id(v)] for v in variables] for name, variables in groups.items()}


def _each(batches):
    if isinstance(batches, keras.utils.PyDataset):
        return (batches[i] for i in range(len(batches)))
    return iter(batches)


def _norm(gradients):
    squares = [ops.sum(ops.square(_in_single_precision(gradient))) for gradient in gradients]
    return float(ops.convert_to_numpy(ops.sqrt(sum(squares))))


def _in_single_precision(x):
    return ops.cast(x, at_least_float32(keras.backend.standardize_dtype(x.dtype)))


class _TensorBoard:
    """Writes curves and heatmaps."""

    def __init__(self, directory):
        try:
            import tensorflow as tf
        except ImportError as error:
            raise ValueError(
                "GradientNorms writes TensorBoard's logs with TensorFlow, which is not installed. "
                "Leave `directory` out: the norms are in the epoch's logs too."
            ) from error
        self._summary = tf.summary
        self._writer = tf.summary.create_file_writer(str(directory))

    def write(self, epoch, norms, heatmap):
        with self._writer.as_default(step=epoch):
            for name, values in norms.items():
                self._summary.scalar(name, values[-1])
            self._summary.image("gradient_norms", _image(heatmap)[None, :, :, None])
        self._writer.flush()


def _image(heatmap):
    """Returns gray squares (pixels, pixels): the first row at the bottom, large norms dark."""
    finite = np.where(np.isfinite(heatmap), heatmap, 0.0)
    shares = finite / (finite.max() or 1.0)
    gray = np.round(255 * (1 - shares)).astype("uint8")[::-1]
    return np.kron(gray, np.ones((_SQUARE, _SQUARE), "uint8"))
