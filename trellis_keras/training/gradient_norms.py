"""Norms of the gradient in each layer."""

import re
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from keras_streams.protocol import at_least_float32, without_carried_states
from keras_streams.xla import compile_xla
from trellis_keras._keras_internals import direct_layers, own_trainable_variables
from trellis_keras.layers.checks import check_positive
from trellis_keras.models.base import BackboneModel
from trellis_keras.models.gradients import with_gradient
from trellis_keras.types import Logs, Tensor


class GradientNorms(keras.callbacks.Callback):
    """Logs the norm of the gradient in each layer after every epoch.

    As in Figure 7 of the LRU paper (Ahuja & Morency 2018), this shows whether gradients reach the
    lower layers of a deep stack. It is the gradient of the training loss, averaged over the given
    batches, at the end of the epoch: before clipping and L2, with dropout, and with zero initial
    states in stateful layers. (The paper's code sums the gradients of all batches of an epoch,
    while the weights change.) Training is not affected: its random numbers, metrics and carried
    states are the same as without this callback.

    It adds `gradient_norm`, over all trainable variables, and `gradient_norm/<group>` to the logs,
    for the groups of `layer_groups`. Place callbacks that write logs after this one.

    Args:
        batches: A `keras.utils.PyDataset`, or a list of (x, y) or (x, y, sample_weight), not
            empty.
        steps: Positive integer, number of batches to use. Defaults to `None`, all of them.

    Example:

    >>> norms = trellis_keras.training.GradientNorms([(x, y)])
    >>> history = model.fit(x, y, epochs=2, callbacks=[norms])
    >>> len(history.history["gradient_norm"])
    2
    """

    def __init__(self, batches: Any, *, steps: int | None = None) -> None:
        super().__init__()
        if steps is not None:
            check_positive(steps=steps)
        self.batches = batches
        self.steps = steps

    def on_train_begin(self, logs: Logs = None) -> None:
        if not len(self.batches):
            raise ValueError("`batches` must contain at least one batch. Received: none")
        self._compile()
        index = {id(v): i for i, v in enumerate(self.model.trainable_variables)}
        self._indices = {
            name: [index[id(v)] for v in variables]
            for name, variables in layer_groups(self.model).items()
        }
        # Runs out of memory now, if at all, before an epoch's work can be lost.
        self._gradient(self.batches[0])

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if _depth(self.model) != self._depth:  # `GrowingDepth` has changed it
            self._compile()
        count = min(len(self.batches), self.steps or len(self.batches))
        total = self._gradient(self.batches[0])
        for index in range(1, count):
            total = list(map(ops.add, total, self._gradient(self.batches[index])))
        logs["gradient_norm"] = _norm(total) / count
        for name, indices in self._indices.items():
            logs[f"gradient_norm/{name}"] = _norm([total[i] for i in indices]) / count

    def _compile(self):
        self._gradient, self._depth = LossGradient(self.model), _depth(self.model)


def _depth(model):
    return getattr(getattr(model, "backbone", None), "depth", None)


def layer_groups(model: keras.Model) -> dict[str, list]:
    """Returns the trainable variables of a model by block, layer or cell.

    These are the blocks of a TCN, the layers of a stack, or the cells of a deep cell: the parts of
    the first layer that has more than one, searching inwards from the backbone (or the model).

    Example:

    >>> backbone = trellis_keras.layers.TCN(4, kernel_size=2, depth=3)
    >>> model = trellis_keras.models.LanguageModel(7, 4, backbone)
    >>> model.build((None, None))
    >>> list(layer_groups(model))
    ['1_block', '2_block', '3_block']
    """
    parts = _parts(getattr(model, "backbone", model))
    width = len(str(len(parts)))
    return {
        # Without the number that Keras appends to a layer's name, which differs after a restart.
        f"{i:0{width}}_{re.sub(r'_[0-9]+$', '', part.name)}": part.trainable_variables
        for i, part in enumerate(parts, start=1)
    }


def _parts(layer):
    while not own_trainable_variables(layer):
        parts = [part for part in direct_layers(layer) if part.trainable_variables]
        if len(parts) != 1:
            return parts
        (layer,) = parts
    return [layer]


class LossGradient:
    """The gradient of the loss that `fit` minimizes, computed without side effects.

    Weights, random generators, metrics and carried states are unchanged; stateful layers start
    from zero states. The optimizer's clipping, L2 and loss scale are not included. On
    JAX it can be called between epochs, but not within one.

    Args:
        model: A built and compiled model.

    Returns:
        When called with a batch, a list of tensors, one per trainable variable, at least float32.

    Example:

    >>> gradients = LossGradient(model)((x, y))
    """

    def __init__(self, model: keras.Model) -> None:
        if not (model.built and model.compiled):
            raise ValueError("The gradient of the loss requires a built and compiled model.")
        self.model = model
        gradient = with_gradient(lambda *arguments: (self._loss(*arguments), ()))
        if not model.run_eagerly:
            gradient = compile_xla(gradient, [], jit_compile=model.jit_compile)
        self._gradient = gradient

    def __call__(self, batch: Sequence) -> list[Tensor]:
        batch = keras.tree.map_structure(_to_tensor, keras.utils.unpack_x_y_sample_weight(batch))
        others = [_to_tensor(v.value) for v in self._other_variables()]
        # Small gradients would be 0 in float16 without the optimizer's loss scale.
        scale = ops.convert_to_tensor(self.model.optimizer.scale_loss(ops.ones(())))
        with without_carried_states(self.model):
            _, gradients = self._gradient(self._weights(), others, batch, scale)
        return self._unscale(gradients, scale)

    def _weights(self):
        return [_to_tensor(v.value) for v in self.model.trainable_variables]

    def _unscale(self, gradients, scale):
        dtypes = [at_least_float32(keras.backend.standardize_dtype(g.dtype)) for g in gradients]
        pairs = zip(gradients, dtypes, strict=True)
        return [ops.cast(g, dtype) / ops.cast(scale, dtype) for g, dtype in pairs]

    def _other_variables(self):
        return [*self.model.non_trainable_variables, *self.model.metrics_variables]

    def _loss(self, weights, others, batch, scale):
        variables = [*self.model.trainable_variables, *self._other_variables()]
        mapping = list(zip(variables, [*weights, *others], strict=True))
        # Assignments to variables stay in the scope.
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            x, y, sample_weight = batch
            has_backbone = isinstance(self.model, BackboneModel)
            inputs = self.model.loss_inputs(*batch) if has_backbone else x
            y_pred = self.model(inputs, training=True)
            loss = self.model.compute_loss(x, y, y_pred, sample_weight, training=True)
            return loss * ops.cast(scale, loss.dtype)


def _norm(gradients):
    squares = [ops.sum(ops.square(gradient)) for gradient in gradients]
    return float(ops.convert_to_numpy(ops.sqrt(sum(squares))))


def _to_tensor(leaf):
    return None if leaf is None else ops.convert_to_tensor(leaf)
