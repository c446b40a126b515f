"""What a language model writes after each epoch."""

import math
import textwrap

import keras
import numpy as np

from trellis_keras.training.summaries import Summaries

_WRAPPER = textwrap.TextWrapper(
    80, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False
)


class TextSamples(keras.callbacks.Callback):
    """Lets a language model go on from a prompt after every epoch, for TensorBoard's texts.

    The prompt and the sampler's seed are the same each time, so that one sees what the weights have
    learnt meanwhile. The training is not touched: its random numbers, metrics and carried states
    are as without this callback. An epoch that ends with a loss that is no number has no sample.

    It costs the compilation of the model's step once, and then `length` steps of one row.

    Args:
        prompt: The text to go on from: a string of the vocabulary's tokens, or token ids.
        directory: Where to write TensorBoard's logs.
        length: Number of tokens to add.
        seed: Integer seed of the sampler.
        temperature: Of the sampler; lower is safer. All tokens stay possible: with the likeliest
            ones alone (top-p, top-k) a weak model does not leave a run of spaces any more.

    Raises:
        ValueError: When constructed, if TensorFlow is not installed, or for arguments out of
            range; when training begins, if the model has no vocabulary, does not stream, or the
            prompt is none.
        ImportError: When constructed, if Keras-NLP is not installed.

    Example:

    >>> callbacks = [TextSamples("the ", "run/tensorboard", length=100)]
    """

    def __init__(self, prompt, directory, *, length=200, seed=0, temperature=0.8):
        super().__init__()
        if length < 1 or temperature <= 0:
            raise ValueError(
                "`length` must be 1 or more and `temperature` positive. "
                f"Received: length={length}, temperature={temperature}"
            )
        self.prompt = prompt
        self.length = length
        self.seed = seed
        self._sampler = _sampler(temperature)
        self._summaries = Summaries(directory)
        self._description = f"Random sampling, temperature {temperature:g}, seed {seed}."

    def on_train_begin(self, logs=None):
        vocabulary = getattr(self.model, "vocabulary", None)
        if vocabulary is None:
            raise ValueError(
                "TextSamples needs a language model with a vocabulary. "
                f"Received: {type(self.model).__name__} without one"
            )
        self.model.initial_cache(1)  # raises if the model does not stream
        ids = self.prompt
        if isinstance(ids, str):
            ids = vocabulary.encode(ids, final_eos=False)
        if not len(ids):
            raise ValueError(f"The prompt must have a token. Received: prompt={self.prompt!r}")
        self._ids = np.asarray(ids, "int32")[None]

    def on_epoch_end(self, epoch, logs=None):
        if not math.isfinite((logs or {}).get("loss", 0.0)):
            return
        self._summaries.text(epoch, "sample", self._markdown(), self._description)
        self._summaries.flush()

    def _markdown(self):
        """The prompt and what the model adds, as blocks in which every character is itself."""
        prompt_length = self._ids.shape[1]
        (ids,) = self.model.generate(
            self._ids, prompt_length + self.length, sampler=self._sampler, seed=self.seed
        )
        decode = self.model.vocabulary.decode
        prompt, added = decode(ids[:prompt_length]), decode(ids[prompt_length:])
        return f"After the prompt\n\n{_block(prompt)}\n\nthe model writes\n\n{_block(added)}"


def _sampler(temperature):
    try:
        from keras_nlp import samplers
    except ImportError as error:
        raise ImportError(
            "Text samples take their sampler from Keras-NLP. "
            "Install it with `pip install keras-nlp`, or do without them."
        ) from error
    return samplers.RandomSampler(temperature=temperature)


def _block(text):
    lines = [part for line in text.splitlines() for part in _WRAPPER.wrap(line) or [""]]
    return textwrap.indent("\n".join(lines), "    ", lambda line: True)
