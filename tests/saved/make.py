"""Writes the model files of this folder, which later versions must load: python -m tests.saved.make

Only names without a file are written. A file that is there stays as it was written.
"""

import pathlib
import sys

import keras
import numpy as np

from tests.support.layer_checks import at_once
from trellis_keras import layers, models, training
from trellis_keras.data import Vocabulary
from trellis_keras.layers.recurrent_cell import GateInitializer
from trellis_keras.theorem1 import to_trellis

FOLDER = pathlib.Path(__file__).parent
BATCH, TIME, CHANNELS, TOKENS = 2, 7, 3, 6


def sequences():
    """Returns the inputs of models without an embedding."""
    return np.random.RandomState(0).normal(size=(BATCH, TIME, CHANNELS)).astype("float32")


def tokens():
    """Returns the inputs of models with an embedding."""
    return np.random.RandomState(0).randint(0, TOKENS, (BATCH, TIME))


def _sequential(*parts):
    return keras.Sequential([keras.Input((None, CHANNELS)), *parts])


def _trellis(cell, **options):
    return _sequential(layers.TrellisLayer(4, 3, cell=cell, seed=0, **options))


def _language_model(backbone, optimizer, metric, **options):
    model = models.LanguageModel(TOKENS, 4, backbone, seed=0, **options)
    model.compile(optimizer, metrics=[metric])
    return model


def _compiled(model, optimizer="sgd", **options):
    model.compile(optimizer, **options)
    return model


def _rnn(cell):
    return keras.layers.RNN(cell, return_sequences=True)


def _trellis_of_lstm():
    lstm = keras.layers.LSTM(3, return_sequences=True, seed=0)
    return to_trellis(_sequential(lstm), truncation=4)


# {name: function that returns the model}
MODELS = {
    "tcn": lambda: _sequential(layers.TCN(4, 3, 2, activation="glu", seed=0)),
    "tcn_block": lambda: _sequential(layers.TCNBlock(4, 3, dilation_rate=2, seed=0)),
    "trellis_lstm": lambda: _trellis("lstm", weight_norm=True, dilation_rate=[1, 2]),
    "trellis_gru": lambda: _trellis("gru"),
    "trellis_rnn": lambda: _trellis("rnn", kernel_structure="mixed_group", groups=[2, 2]),
    "theorem1": _trellis_of_lstm,
    "lru": lambda: _sequential(layers.LRU(CHANNELS, 2, variant="ps", seed=0)),
    "lru_cell": lambda: _sequential(_rnn(layers.LRUCell(CHANNELS, seed=0))),
    "rhn_cell": lambda: _sequential(_rnn(layers.RHNCell(4, seed=0))),
    "grid_lstm_cell": lambda: _sequential(_rnn(layers.GridLSTMCell(CHANNELS, seed=0))),
    "dropouts": lambda: _sequential(
        layers.VariationalDropout(0.1, seed=0), layers.TCN(4, 2, 2, seed=0)
    ),
    "dropout": lambda: _sequential(layers.Dropout(0.1, seed=0), layers.TCN(4, 2, 2, seed=0)),
    "stacked_rnn": lambda: _sequential(
        layers.StackedRNN(
            [
                keras.layers.LSTM(
                    4,
                    return_sequences=True,
                    return_state=True,
                    kernel_initializer=GateInitializer("glorot_uniform", 4),
                    seed=0,
                )
            ]
        )
    ),
    "language_model": lambda: _language_model(
        layers.TrellisLayer(5, 3, output_units=4, return_aux=True, aux_every=2, seed=0),
        training.SGD(0.1, clip_norm=1.0),
        models.Perplexity(),
        aux_weight=0.1,
        vocabulary=Vocabulary("abcdef", "character"),
    ),
    "mixture": lambda: _language_model(
        layers.LRU(4, seed=0),
        training.Adam(1e-3),
        models.BitsPerCharacter(),
        head=layers.MixtureOfSoftmaxes(TOKENS, 2, seed=0),
    ),
    "adaptive": lambda: _language_model(
        layers.TCN(4, 2, 2, seed=0),
        training.ASGD(0.1),
        models.CrossEntropy(),
        head=layers.AdaptiveSoftmax(TOKENS, (2, 4), seed=0),
    ),
    "dense": lambda: _language_model(
        layers.TCN(4, 2, 2, seed=0),
        training.RMSprop(1e-3),
        models.CrossEntropy(),
        head=layers.DenseHead(TOKENS),
    ),
    "classifier": lambda: _compiled(
        models.SequenceClassifier(
            layers.TCN(4, 3, 2, seed=0),
            3,
            per_step=True,
            class_names=["a", "b", "c"],
            normalize=True,
            seed=0,
        ),
        weighted_metrics=[models.DigitsRecalled(2)],
    ),
    "regressor": lambda: _compiled(
        models.SequenceRegressor(layers.TCN(4, 3, 2, return_sequences=False, seed=0), 2, seed=0)
    ),
    "polyphonic": lambda: _compiled(
        models.PolyphonicModel(layers.TCN(4, 3, 2, seed=0), CHANNELS, seed=0)
    ),
}


def inputs_of(model):
    """Returns the inputs that a model's outputs are stored for."""
    if isinstance(model, models.PolyphonicModel):
        return (sequences() > 0).astype("float32")
    return tokens() if isinstance(model, models.LanguageModel) else sequences()


def outputs_of(model):
    """Returns a model's outputs, without auxiliary ones."""
    found = at_once(model)(inputs_of(model))
    return keras.ops.convert_to_numpy(found[0] if isinstance(found, (tuple, list)) else found)


def main():
    for name, make in MODELS.items():
        path = FOLDER / f"{name}.keras"
        if path.exists():
            continue
        model = make()
        if getattr(model, "normalize", False):
            model.adapt(sequences())
        outputs = outputs_of(model)
        model.save(path)
        np.save(path.with_suffix(".npy"), outputs)
        print(f"{path.name}: {path.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
