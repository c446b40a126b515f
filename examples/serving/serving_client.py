"""Code shared by clients of a served model, over any transport.

A transport (`rest_client.RestTransport`, `grpc_client.GrpcTransport`) has three methods:

    newest_version()                         the newest version that the server serves
    endpoints(version=None)                  the names of a version's endpoints
    predict(endpoint, inputs, version=None)  the outputs; inputs and outputs are dicts from names
                                             to NumPy arrays, texts are arrays of str

The version defaults to the newest one. Nothing here needs TensorFlow or trellis_keras.
"""

import itertools
import json

import numpy as np

EOS = "<eos>"


class ServerError(Exception):
    """The server rejected a request, or did not respond."""


def as_text(array):
    """Returns an array of bytes as strings, and other arrays unchanged."""
    if array.dtype != object:
        return array
    texts = [text.decode("utf-8", "replace") for text in array.ravel()]
    return np.array(texts, dtype=object).reshape(array.shape)


class Session:
    """One stream of a language model, or several in parallel. The server keeps nothing of it.

    The cache travels with every step: the server returns it, and the session sends it back. A cache
    belongs to the weights that made it, so a session stays with the version it started with.

    Args:
        transport: See above.
        batch_size: Number of streams. Defaults to 1.
    """

    inputs, dtype = "tokens", "int32"  # what `step` reads of each stream
    hint = "(Of numbers: use SensorSession, the command `watch`, or load.py with --channels.)"

    def __init__(self, transport, batch_size=1):
        self.transport = transport
        self.batch_size = batch_size
        self.version = transport.newest_version()
        self.cache = None
        if "step" not in transport.endpoints(self.version):
            raise ValueError("The model has no endpoint `step`: it reads whole sequences only.")

    def step(self, values):
        """Reads one step of each stream.

        Args:
            values: Token ids (batch,).

        Returns:
            Log-probabilities (batch, vocabulary) of the next tokens.
        """
        if self.cache is None:
            self.cache = self._predict("initial_cache", batch_size=np.int32(self.batch_size))
        return self._advance("step", values, self.cache)

    def read(self, values):
        """Reads several steps (batch, time, ...), and returns the result of the last one.

        The start of a stream of tokens is a single request.
        """
        values = np.asarray(values, self.dtype)
        if self.cache is None and "prefill" in self.transport.endpoints(self.version):
            return self._advance("prefill", values, {})
        for time in range(values.shape[1]):
            outputs = self.step(values[:, time])
        return outputs

    def _advance(self, endpoint, values, cache):
        values = {self.inputs: np.asarray(values, self.dtype)}
        try:
            self.cache = self._predict(endpoint, **values, **cache)
        except ServerError as error:
            # Not before: a server may offer a part of the endpoints.
            if ("prefill" in self.transport.endpoints(self.version)) == (self.inputs == "tokens"):
                raise
            raise ServerError(f"{error} {self.hint}") from error
        (name,) = (name for name in self.cache if not name.startswith("cache_"))
        return self.cache.pop(name)

    def _predict(self, endpoint, **inputs):
        return self.transport.predict(endpoint, inputs, self.version)


class SensorSession(Session):
    """One stream of a model of numbers (classifier, regressor, music), or several in parallel.

    `step` reads numbers (batch, channels) and returns the outputs (batch, units) as if the sequence
    ended there: `predictions` of a regressor, `probabilities` of the others.
    """

    inputs, dtype = "inputs", "float32"
    hint = "(Of tokens: use Session, the command `stream`, or load.py without --channels.)"


def sample(log_probabilities, temperature, rng):
    """Samples one token per row of (batch, vocabulary); 0 chooses the most probable one."""
    if temperature == 0:
        return log_probabilities.argmax(axis=-1)
    noise = rng.gumbel(size=log_probabilities.shape)
    return (log_probabilities / temperature + noise).argmax(axis=-1)


def continue_stream(session, log_probabilities, length, temperature, rng):
    """Yields `length` sampled tokens (batch,), each after the session has read it."""
    for _ in range(length):
        tokens = sample(log_probabilities, temperature, rng)
        log_probabilities = session.step(tokens)
        yield tokens


def generate_texts(transport, texts, max_new_tokens, temperature, seed):
    """Continues texts on the server, in one request. Returns a list of complete texts."""
    inputs = {
        "text": np.array(texts, dtype=object),
        "max_new_tokens": np.int32(max_new_tokens),
        "temperature": np.float32(temperature),
        "seed": np.int32(seed),
    }
    return transport.predict("generate_text", inputs)["text"].tolist()


def score_texts(transport, texts):
    """Returns each text's log-probability after its first token, and the number of tokens."""
    outputs = transport.predict("score_text", {"text": np.array(texts, dtype=object)})
    return outputs["log_probability"], outputs["num_tokens"]


def score_tokens(transport, rows):
    """As `score_texts` for rows of token ids, where a model has no `score_text`.

    Rows of different lengths share a request: padding behind a row changes nothing before it.
    """
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), max(lengths.max(), 1)), "int32")
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    scores = transport.predict("serving_default", {"tokens": tokens})["log_probabilities"]
    of_targets = np.take_along_axis(scores[:, :-1], tokens[:, 1:, None], axis=2)[..., 0]
    counted = np.arange(1, tokens.shape[1]) < lengths[:, None]
    return np.where(counted, of_targets, 0).sum(axis=1), counted.sum(axis=1)


def batches(items, size):
    """Yields lists of `size` items; the last one may be shorter."""
    items = iter(items)
    while batch := list(itertools.islice(items, size)):
        yield batch


class Vocabulary:
    """The token ids of a model, from the vocabulary file in its SavedModel.

    What a client needs of `trellis_keras.data.Vocabulary`, without Keras.

    Args:
        path: The JSON file.
    """

    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        self.tokens, self.unit = config["tokens"], config["unit"]
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        self._unknown = self._ids.get(config["unknown"])

    def encode(self, text):
        """Returns the ids of a text whose last line continues."""
        if self.unit == "word":
            symbols = text.replace("\n", f" {EOS} ").split()
        elif self.unit == "byte":
            symbols = text.encode("utf-8").decode("latin-1")
        else:
            symbols = text
        ids = [self._ids.get(symbol, self._unknown) for symbol in symbols]
        if None in ids:
            raise ValueError(f"The model does not know {symbols[ids.index(None)]!r}.")
        return np.array(ids, "int32")

    def decode(self, ids):
        """Returns the text of ids, with spaces between words."""
        tokens = [self.tokens[i] for i in ids]
        if self.unit == "word":
            return " ".join("\n" if token == EOS else token for token in tokens)
        text = "".join(tokens)
        return text.encode("latin-1").decode("utf-8", "replace") if self.unit == "byte" else text
