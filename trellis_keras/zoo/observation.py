"""What a run shows of itself in TensorBoard. Nothing of it changes the training."""

import dataclasses
import sys

import keras

from trellis_keras.layers import TrellisLayer
from trellis_keras.training import GradientNorms
from trellis_keras.training.gradient_norms import parts_with_weights
from trellis_keras.training.model_graph import write_graph
from trellis_keras.training.samples import TextSamples

_PROMPT = 64  # tokens


@dataclasses.dataclass(frozen=True)
class Observation:
    """What is observed while a run trains, beside its metrics and its learning rate.

    Attributes:
        gradient_norms: On how many batches the norms of the gradients are measured after each
            epoch, see `training.GradientNorms`: by the level of a TrellisNet, by the block of a
            TCN, by the layer of others. 0: they are not.
        sample_length: How many tokens a language model writes after each epoch, see
            `training.samples.TextSamples`; it goes on from the validation text's begin. 0: none.
        graph: Whether the model's graph is written before training begins (on TensorFlow).
        profile: (first, last) of the training batches, counted from 1 in this process, that are
            profiled. None: none are.
    """

    gradient_norms: int = 0
    sample_length: int = 0
    graph: bool = False
    profile: tuple[int, int] | None = None

    def __post_init__(self):
        for name in ("gradient_norms", "sample_length"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be 0 or more. Received: {getattr(self, name)}")
        if self.profile is not None and not 1 <= self.profile[0] <= self.profile[1]:
            raise ValueError(
                "`profile` must be the first and the last batch, counted from 1. "
                f"Received: {self.profile}"
            )

    def callbacks(self, folder, model, stream, corpus, batches):
        """Writes the graph, and returns the callbacks for `fit`.

        Args:
            folder: The run's folder.
            model: The model.
            stream: Batches of the training data, in the same order each time.
            corpus: Data with a `valid` text; used only for a model with a vocabulary.
            batches: How many batches will be trained on.

        Raises:
            ValueError: A profile without TensorFlow, or of batches that there will not be.
        """
        self._check_profile(batches)
        # A folder each: of several files in one TensorBoard may follow the newest only.
        logs = folder / "tensorboard"
        has_tensorflow = _has_tensorflow()
        if not has_tensorflow:
            print("TensorFlow is not installed: no TensorBoard logs are written.", flush=True)
        callbacks = [self._metrics(logs)] if has_tensorflow else []
        if self.gradient_norms:
            directory = logs / "gradients" if has_tensorflow else None
            callbacks += [self._gradient_norms(folder, model, stream, directory)]
        if has_tensorflow and self.sample_length:
            callbacks += self._samples(logs / "samples", model, corpus)
        if has_tensorflow and self.graph and keras.backend.backend() == "tensorflow":
            write_graph(model, stream[0], logs / "graph")
        return callbacks

    def _check_profile(self, batches):
        if self.profile is None:
            return
        if not _has_tensorflow():
            raise ValueError("A profile is written with TensorFlow, which is not installed.")
        if keras.backend.backend() == "jax" and sys.version_info < (3, 12):
            raise ValueError(
                "On JAX Keras writes a profile with Python 3.12 and newer only: leave `profile` "
                "out, or use another Python, or TensorFlow."
            )
        if self.profile[1] > batches:
            raise ValueError(
                f"The last batch to profile, {self.profile[1]}, is not among the {batches} batches "
                "that are left of this run."
            )

    def _metrics(self, logs):
        # The model's graph is another one than Keras', which has none for models like ours.
        return keras.callbacks.TensorBoard(logs, write_graph=False, profile_batch=self.profile or 0)

    def _gradient_norms(self, folder, model, stream, directory):
        by_level = isinstance(model.backbone, TrellisLayer)
        return GradientNorms(
            stream,
            steps=self.gradient_norms,
            groups=None if by_level else parts_with_weights,
            by_level=by_level,
            directory=directory,
            table=folder / "gradient_norms.csv",
            in_logs=False,
        )

    def _samples(self, directory, model, corpus):
        if getattr(model, "vocabulary", None) is None:
            return []
        try:
            return [TextSamples(corpus.valid[:_PROMPT], directory, length=self.sample_length)]
        except ImportError as error:
            print(f"No text samples are written. {error}", flush=True)
            return []


def _has_tensorflow():
    try:
        import tensorflow  # noqa: F401
    except ImportError:
        return False
    return True
