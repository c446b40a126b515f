"""TensorBoard's logs, written by TensorFlow on whatever backend trains."""

import pathlib


class Summaries:
    """Writes scalars, images, texts and graphs for TensorBoard.

    The file is made when something is written for the first time.

    Args:
        directory: The folder for it.

    Raises:
        ValueError: TensorFlow is not installed.
    """

    def __init__(self, directory):
        try:
            import tensorflow as tf
        except ImportError as error:
            raise ValueError(
                "TensorBoard's logs are written with TensorFlow, which is not installed. "
                f"Received: directory={str(directory)!r}"
            ) from error
        self.directory = pathlib.Path(directory).expanduser()
        self._summary = tf.summary
        self._writer = None

    def scalars(self, step, values):
        """Writes {tag: number}."""
        with self._open(step):
            for tag, value in values.items():
                self._summary.scalar(tag, value)

    def image(self, step, tag, pixels):
        """Writes an array (height, width, colours) of 8-bit numbers."""
        with self._open(step):
            self._summary.image(tag, pixels[None])

    def text(self, step, tag, markdown, description=None):
        with self._open(step):
            self._summary.text(tag, markdown, description=description)

    def graph(self, graph):
        """Writes a `tf.Graph`."""
        with self._open(0):
            self._summary.graph(graph)

    def _open(self, step):
        if self._writer is None:
            self._writer = self._summary.create_file_writer(str(self.directory))
        return self._writer.as_default(step=step)

    def flush(self):
        """Writes what is left in memory, for a TensorBoard that is open meanwhile."""
        if self._writer is not None:
            self._writer.flush()
