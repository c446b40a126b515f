"""Samples of text and graphs for TensorBoard."""

import math
import textwrap
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_streams.protocol import without_carried_states
from trellis_keras.layers.checks import check_integer
from trellis_keras.models import samplers
from trellis_keras.types import Logs

# Draws from all tokens: with top-k or top-p a weak model does not leave a run of spaces.
_TEMPERATURE = 0.8
_SEED = 0


class TextSamples(keras.callbacks.Callback):
    """Writes a text sample of a language model to TensorBoard after every epoch.

    Prompt and seed are the same every time, so the samples show what the weights have learned.
    Training is not affected: its random numbers, metrics and carried states are the same as without
    this callback. An epoch with a NaN loss has no sample.

    It costs one compilation of the model's step, and `length` steps of one row per epoch.

    Args:
        prompt: String, or integers, the token ids of the prompt.
        directory: Folder for TensorBoard's logs.
        length: Positive integer, number of tokens to generate. Defaults to `200`.

    Example:

    >>> callbacks = [TextSamples("the ", "run/tensorboard", length=100)]
    """

    def __init__(
        self, prompt: str | Sequence[int], directory: str | PathLike, *, length: int = 200
    ) -> None:
        super().__init__()
        self.length = check_integer("length", length, 1)
        self.prompt = prompt
        self._sampler = samplers.library().RandomSampler(temperature=_TEMPERATURE)
        self._directory = directory
        self._writer: Any = None
        _summary()

    def on_train_begin(self, logs: Logs = None) -> None:
        vocabulary = getattr(self.model, "vocabulary", None)
        if vocabulary is None:
            raise ValueError(
                "TextSamples requires a language model with a vocabulary. "
                f"Received: {type(self.model).__name__} without one"
            )
        self.model.initial_cache(1)  # raises if the model does not stream
        ids = self.prompt
        if isinstance(ids, str):
            ids = vocabulary.encode(ids, final_eos=False)
        if not len(ids):
            raise ValueError(f"`prompt` must not be empty. Received: prompt={self.prompt!r}")
        self._ids = np.asarray(ids, "int32")[None]

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if not math.isfinite((logs or {}).get("loss", 0.0)):
            return
        if self._writer is None:
            self._writer = summary_writer(self._directory)
        with self._writer.as_default(step=epoch):
            description = f"Random sampling, temperature {_TEMPERATURE:g}, seed {_SEED}."
            _summary().text("sample", self._markdown(), description=description)
        self._writer.flush()

    def on_train_end(self, logs: Logs = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _markdown(self):
        prompt_length = self._ids.shape[1]
        (ids,) = self.model.generate(
            self._ids, prompt_length + self.length, sampler=self._sampler, seed=_SEED
        )
        decode = self.model.vocabulary.decode
        prompt, added = decode(ids[:prompt_length]), decode(ids[prompt_length:])
        return f"After the prompt\n\n{_code(prompt)}\n\nthe model writes\n\n{_code(added)}"


def _code(text):
    """Returns text as an indented Markdown block, displayed verbatim."""
    return textwrap.indent(text, "    ", lambda line: True)


def write_graph(model: keras.Model, batch: Sequence, directory: str | PathLike) -> None:
    """Writes the TensorFlow graph of a built model's forward pass for TensorBoard.

    `keras.callbacks.TensorBoard(write_graph=True)` does not support subclassed models.

    Args:
        model: A built model.
        batch: A batch (x, ...) of its data.
        directory: Folder for TensorBoard's logs.

    Example:

    >>> write_graph(model, train[0], "run/tensorboard")
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise ValueError(f"Graphs require the TensorFlow backend. Received: backend={backend!r}")
    import tensorflow as tf

    x = keras.utils.unpack_x_y_sample_weight(batch)[0]
    spec = keras.tree.map_structure(lambda x: tf.TensorSpec((None, *x.shape[1:]), x.dtype), x)
    with without_carried_states(model):
        # `__call__` would put everything in one node.
        function = tf.function(lambda inputs: model.call(inputs, training=False), autograph=False)
        graph = function.get_concrete_function(spec).graph
    writer = summary_writer(directory)
    with writer.as_default(step=0):
        tf.summary.graph(graph)
    writer.close()


def _summary():
    try:
        import tensorflow as tf
    except ImportError as error:
        message = "TensorBoard logs require TensorFlow, which is not installed."
        raise ImportError(message) from error
    return tf.summary


def summary_writer(directory: str | PathLike) -> Any:
    """Returns TensorFlow's writer of logs in a folder."""
    return _summary().create_file_writer(str(Path(directory).expanduser()))
