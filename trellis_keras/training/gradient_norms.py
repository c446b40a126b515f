"""How long the gradients of a model's layers or levels are, epoch by epoch."""

import itertools
import math
import re

import keras
import numpy as np
from keras import ops

from trellis_keras.training.gradients import LossGradient
from trellis_keras.training.heatmap import draw_heatmap
from trellis_keras.training.level_gradients import LevelGradient
from trellis_keras.training.records import HistoryCSV, read_history
from trellis_keras.training.summaries import Summaries

GLOBAL = "gradient_norm"


class GradientNorms(keras.callbacks.Callback):
    """Measures the gradient's norm in each layer, or level, at the end of every epoch.

    Figure 7 of the LRU paper (Ahuja & Morency, 2018): whether gradients reach the lower layers of
    a deep stack. Measured is the gradient of the training loss, averaged over the given batches,
    at the weights that the epoch ended with: before the optimizer's clipping and weight decay, with
    dropout, and with the states of stateful layers empty. (The paper's program sums the gradients
    of all batches of an epoch while its weights move.) The training itself is not touched: its
    random numbers, metrics and carried states are as without this callback.

    The levels of a TrellisNet share their weights. With `by_level` there is a row for each of
    them: the norm of that same loss' gradient with respect to all pre-activations of the level in
    these batches, of which its share in the weights' gradient is made (`training.level_gradients`).

    It costs a forward and a backward pass for each batch, and once their compilation (with
    `by_level` that of every level by itself).

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
        by_level: whether the rows are the levels of `model.backbone`, a `TrellisLayer`.
        directory: where to write TensorBoard's logs: a curve for each row, and a heatmap of the
            epochs until now as an image. `None`: none are written.
        table: path of a CSV file with a row for each epoch (`training.records.HistoryCSV`), from
            which a restarted run takes up the norms of its earlier epochs, instead of from
            `set_state`. Epochs that it lacks are NaN. `None`: there is none.
        in_logs: whether the norms go into the epoch's logs, and so to all who print or store them.

    Attributes:
        norms: {row: list of its norms after each epoch}, with the row `gradient_norm` first.

    Raises:
        ValueError: when constructed, if TensorBoard's logs are wanted where TensorFlow is not
            installed, or both `groups` and `by_level`; when training begins, if there are no
            levels, `groups` gives no rows or a variable that is not trained, or the rows are not
            those of the state that was restored; after the first epoch without batches.

    Example:

    >>> norms = trellis_keras.training.GradientNorms(train, steps=10)
    >>> history = model.fit(train, epochs=2, callbacks=[norms])
    >>> norms.heatmap().shape  # of a model of one layer
    (1, 2)
    """

    def __init__(
        self,
        batches,
        *,
        steps=None,
        groups=None,
        by_level=False,
        directory=None,
        table=None,
        in_logs=True,
    ):
        super().__init__()
        if steps is not None and steps < 1:
            raise ValueError(f"`steps` must be 1 or more, or None for all. Received: steps={steps}")
        if by_level and groups is not None:
            raise ValueError(
                "`groups` are rows of weights, which levels share: leave it or `by_level` out."
            )
        self.batches = batches
        self.steps = steps
        self.groups = layers_with_weights if groups is None else groups
        self.by_level = by_level
        self.in_logs = in_logs
        self.norms = {}
        self._summaries = None if directory is None else Summaries(directory)
        self._table = None if table is None else HistoryCSV(table)
        self._restored = False
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
        if self.by_level:
            self._gradient = LevelGradient(self.model)
            self._rows = _numbered("level", self.model.backbone.depth)
        else:
            self._gradient = LossGradient(self.model)
            self._rows = _checked_rows(self.groups(self.model), self.model)
        self._restored = False
        if self._table is not None:
            self._table.on_train_begin()
        # What it may lack, such as memory, it shall lack before an epoch's work can be lost.
        for batch in itertools.islice(_each(self.batches), 1):
            self._gradient(batch)

    def on_epoch_begin(self, epoch, logs=None):
        names = [GLOBAL, *(f"{GLOBAL}/{row}" for row in self._rows)]
        if self._table is not None and not self._restored:
            self._table.on_epoch_begin(epoch)
            self.norms = _read_norms(self._table.path, names, epoch)
        self._restored = True
        if not self.norms:
            self.norms = {name: [] for name in names}
        if list(self.norms) != names:
            raise ValueError(
                "GradientNorms goes on with the norms of other rows. "
                f"There were {list(self.norms)}, there are {names}."
            )

    def on_epoch_end(self, epoch, logs=None):
        measured = dict(zip(self.norms, self._measure(), strict=True))
        for name, norm in measured.items():
            self.norms[name].append(norm)
        if logs is not None and self.in_logs:
            logs.update(measured)
        if self._table is not None:
            self._table.on_epoch_end(epoch, measured)
        if self._summaries is not None:
            self._summaries.scalars(epoch, measured)
            self._summaries.image(epoch, "gradient_norms", self._picture())
            self._summaries.flush()

    def _measure(self):
        """The norm of the mean gradient, and those of the rows."""
        total, count = self._sum_of_gradients()
        if self.by_level:
            *total, squares = total
            # Of one loss, the mean over the batches, as a function of all their pre-activations.
            rows = np.sqrt(ops.convert_to_numpy(squares))
        else:
            rows = [_norm([total[i] for i in indices]) for indices in self._rows.values()]
        return [float(norm) / count for norm in (_norm(total), *rows)]

    def _sum_of_gradients(self):
        total, count = None, 0
        for batch in itertools.islice(_each(self.batches), self.steps):
            gradient = self._gradient(batch)
            total = gradient if total is None else list(map(ops.add, total, gradient))
            count += 1
        if total is None:
            raise ValueError("GradientNorms found no batches. Give it a list or a PyDataset.")
        return total, count

    def _picture(self):
        title = f"Gradient norm by {'level' if self.by_level else 'layer'} and epoch"
        return draw_heatmap(self.heatmap(), list(self._rows), title)


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
            rows.append((_kind(layer), own))
    numbers = _numbered("", len(rows))
    return {f"{i}_{name}": own for i, (name, own) in zip(numbers, rows, strict=True)}


def parts_with_weights(model):
    """Returns {name: trainable variables} of the parts that a model is deep by.

    They are the blocks of a TCN, the layers of a stack, the cells of a deep cell: what the first
    layer, from the backbone (or the model) inwards, is made of that has more than one part.

    Args:
        model: A model.

    Example:

    >>> backbone = trellis_keras.layers.TCN(4, kernel_size=2, depth=3)
    >>> model = trellis_keras.models.LanguageModel(7, 4, backbone)
    >>> model.build((None, None))
    >>> list(parts_with_weights(model))
    ['1_block', '2_block', '3_block']
    """
    parts = _parts(getattr(model, "backbone", model))
    numbers = _numbered("", len(parts))
    return {
        f"{i}_{_kind(part)}": part.trainable_variables
        for i, part in zip(numbers, parts, strict=True)
    }


def _parts(layer):
    while not layer._trainable_variables:
        inside = layer._flatten_layers(include_self=False, recursive=False)
        parts = [part for part in inside if part.trainable_variables]
        if len(parts) != 1:
            return parts
        (layer,) = parts
    return [layer]


def _numbered(word, count):
    """['level_01', ..., 'level_12'], or without a word ['01', ..., '12']: sorted as counted."""
    width = len(str(count))
    return [f"{word}_{i:0{width}}".lstrip("_") for i in range(1, count + 1)]


def _kind(layer):
    """A layer's name. Keras numbers the layers of a process, which a restart would not repeat."""
    return re.sub(r"_\d+$", "", layer.name)


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


def _read_norms(path, names, epochs):
    """{row: its norms after each epoch} from a table; NaN where it has none."""
    rows = {int(row["epoch"]): row for row in read_history(path)}
    of_epochs = [rows.get(epoch, {}) for epoch in range(1, epochs + 1)]
    return {name: [float(row.get(name) or math.nan) for row in of_epochs] for name in names}


def _each(batches):
    if isinstance(batches, keras.utils.PyDataset):
        return (batches[i] for i in range(len(batches)))
    return iter(batches)


def _norm(gradients):
    squares = [ops.sum(ops.square(gradient)) for gradient in gradients]
    return float(ops.convert_to_numpy(ops.sqrt(sum(squares))))
