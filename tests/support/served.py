"""Small models of every kind, what Keras makes of requests, and a process without Keras that asks.

The zoo's models keep everything but their sizes. Their weights are so large that no two answers
are alike.
"""

import pickle

import numpy as np
from keras import ops

from tests.support.processes import run_script
from trellis_keras import serving, zoo
from trellis_keras.data import Vocabulary
from trellis_keras.models import LanguageModel, PolyphonicModel, SequenceClassifier

# Where they are not left open.
SMALL = {"depth": 3, "aux_every": 1, "embedding_dim": 4, "output_units": 4, "filters": 3}
VOCABULARIES = {
    "character": Vocabulary("\n abcdefghé", "character"),
    "byte": Vocabulary("\n abcdefgh\xc3\xa9", "byte", unknown="a"),
    "word": Vocabulary(["<eos>", "the", "cat", "sat", "ö", *"abcdef", "<unk>"], unknown="<unk>"),
}
# A model for each kind of backbone, of head and of output, and one that carries a history.
KINDS = {
    "trellisnet_char": {"stateful": True, "weight_norm": True, "weight_dropout": 0.2},
    "trellisnet_ptb_mos": {"experts": 2},
    "trellisnet_wt103": {},
    "tcn_char_ptb": {"vocabulary": VOCABULARIES["byte"]},
    "lru_char_ptb": {},
    "grid_lstm_char_ptb": {},
    "rhn_char_ptb": {"vocabulary": None},
    "lstm_char_ptb": {},
    "trellisnet_seq_mnist": {"dilations": (1, 1, 2, 4)},
    "tcn_adding": {},
    "tcn_copy_memory": {},
    "gru_jsb": {},
}
LANGUAGE = [name for name in KINDS if zoo.recipe(name).reads_text]
TEXT = [name for name in LANGUAGE if KINDS[name].get("vocabulary", "") is not None]


def small_model(name, **overrides):
    """Returns a model of the zoo at a size of a few hundred weights."""
    recipe = zoo.recipe(name)
    arguments = recipe.arguments
    settings = {key: size for key, size in SMALL.items() if arguments.get(key) is not None}
    if "hidden_units" in arguments:
        settings["hidden_units"] = 4
    if arguments.get("cutoffs"):
        settings["cutoffs"] = (4, 8)
    if recipe.reads_text:
        letters = any(part in name for part in ("char", "8", "peace"))
        settings["vocabulary"] = VOCABULARIES["character" if letters else "word"]
    settings |= overrides
    if settings.get("vocabulary", "") is None:
        settings["vocabulary_size"] = 11
    model = zoo.get_model(name, **settings)
    for index, weight in enumerate(model.trainable_weights):
        weight.assign(np.random.default_rng(index).normal(size=weight.shape, scale=0.5))
    return model


def inputs(model, batch, time):
    """Returns the name of what the model reads, and an array of it."""
    rng = np.random.default_rng(time)
    if isinstance(model, LanguageModel):
        return "tokens", rng.integers(0, model.vocabulary_size, (batch, time)).astype("int32")
    return "inputs", rng.random((batch, time, model.input_spec.axes[-1])).astype("float32")


_FORWARD = {}  # compiled


def scores(model, array):
    """What Keras computes of whole rows from an empty history, named as the server names it."""
    import tensorflow as tf

    if id(model) not in _FORWARD:
        # Called with an array, the layers refuse rows that are shorter than a dilation.
        plain = serving.without_history(model)
        shape = [None, None, *model.input_spec.axes.values()] if model.input_spec else [None, None]
        spec = tf.TensorSpec(shape, inputs(model, 1, 1)[1].dtype)
        _FORWARD[id(model)] = model, tf.function(lambda x: plain(x, training=False), [spec])
    outputs = _FORWARD[id(model)][1](array)
    if isinstance(model, LanguageModel):
        return "log_probabilities", ops.convert_to_numpy(outputs)
    if isinstance(model, SequenceClassifier):
        return "probabilities", ops.convert_to_numpy(ops.softmax(outputs))
    if isinstance(model, PolyphonicModel):
        return "probabilities", ops.convert_to_numpy(ops.sigmoid(outputs))
    return "predictions", ops.convert_to_numpy(outputs)


def scores_so_far(model, array):
    """The same at each step, as if the rows ended there."""
    if scores(model, array)[1].ndim == 3:
        return scores(model, array)[1]
    times = range(1, array.shape[1] + 1)
    return np.stack([scores(model, array[:, :time])[1] for time in times], axis=1)


_CLIENT = """
import pickle
import sys
import tensorflow as tf

def call(endpoint, inputs):
    outputs = endpoint(**{name: tf.constant(value) for name, value in inputs.items()})
    return {name: value.numpy() for name, value in outputs.items()}

def stream(signatures, name, array, read=0):
    # As a client does it that keeps the state; `read` steps at once, then one by one.
    if read:
        answer = call(signatures["prefill"], {name: array[:, :read]})
    else:
        answer = call(signatures["initial_state"], {"batch_size": len(array)})
    scores = []
    for t in range(read, array.shape[1]):
        state = {key: value for key, value in answer.items() if key.startswith("state_")}
        answer = call(signatures["step"], {name: array[:, t], **state})
        scores += [value for key, value in answer.items() if not key.startswith("state_")]
    return tf.stack(scores, axis=1).numpy()

answers = []
with open(sys.argv[1], "rb") as file:
    requests = pickle.load(file)
models = {path: tf.saved_model.load(path) for path in {path for path, _, _ in requests}}
for path, name, inputs in requests:
    signatures = models[path].signatures
    if name == "stream":
        answers.append(stream(signatures, **inputs))
    else:
        answers.append(call(signatures[name], inputs))
with open(sys.argv[2], "wb") as file:
    pickle.dump(answers, file)
"""


def ask(requests, folder):
    """Asks SavedModels in a process that has TensorFlow, but neither Keras nor this package.

    Args:
        requests: List of (path, endpoint, dict of inputs). The endpoint `"stream"` stands for
            `initial_state`, or `prefill`, and many a `step`.
        folder: For the files that go there and back.

    Returns:
        The list of answers: dicts of arrays, or the scores of a stream (batch, time, ...).
    """
    requests = [(str(path), name, inputs) for path, name, inputs in requests]
    (folder / "requests").write_bytes(pickle.dumps(requests))
    files = folder / "requests", folder / "answers"
    run_script(_CLIENT, *files, block=("keras", "trellis_keras"), timeout=3600)
    return pickle.loads((folder / "answers").read_bytes())
