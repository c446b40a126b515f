"""Writes tests/golden/keras_tcn.npz: weights and outputs of keras-tcn 3.5.7, which it needs.

python -m tests.support.make_keras_tcn_fixture
"""

import json
import pathlib

import keras
import numpy as np

CASES = {
    "plain": {"nb_filters": 5, "kernel_size": 3, "dilations": [1, 2, 4]},
    "no skip connections": {
        "nb_filters": [4, 6],
        "kernel_size": 2,
        "dilations": [1, 3],
        "use_skip_connections": False,
        "return_sequences": True,
    },
    "two stacks": {
        "nb_filters": 3,
        "kernel_size": 4,
        "nb_stacks": 2,
        "dilations": [1, 2],
        "dropout_rate": 0.2,
        "go_backwards": True,
    },
    "layer normalization": {
        "nb_filters": 6,
        "kernel_size": 2,
        "dilations": [2, 1],
        "use_layer_norm": True,
        "return_sequences": True,
    },
    "batch normalization": {
        "nb_filters": 4,
        "kernel_size": 3,
        "nb_stacks": 2,
        "dilations": [1, 2],
        "use_batch_norm": True,
        "use_skip_connections": False,
    },
    "centered": {
        "nb_filters": 4,
        "kernel_size": 4,
        "dilations": [1, 2, 4],
        "padding": "same",
        "return_sequences": True,
        "activation": "linear",
    },
}
SHAPE = (2, 11, 3)


def keras_tcn_layer(options, seed):
    """A keras-tcn layer with random weights, and its input and output."""
    import tcn

    random = np.random.default_rng(seed)
    layer = tcn.TCN(**options)
    x = random.normal(size=SHAPE).astype("float32")
    layer(x)
    # Variances are positive.
    layer.set_weights(
        [
            np.abs(w) if "variance" in weight.path else w
            for weight in layer.weights
            for w in [random.normal(0.1, 0.5, weight.shape).astype("float32")]
        ]
    )
    return layer, x, keras.ops.convert_to_numpy(layer(x))


if __name__ == "__main__":
    arrays = {"meta": json.dumps({"keras-tcn": "3.5.7", "cases": CASES})}
    for seed, (name, options) in enumerate(CASES.items()):
        layer, x, y = keras_tcn_layer(options, seed)
        arrays |= {f"{name}.x": x, f"{name}.y": y}
        arrays |= {f"{name}.w{i:02}": w for i, w in enumerate(layer.get_weights())}
    np.savez_compressed(pathlib.Path(__file__).parents[1] / "golden" / "keras_tcn.npz", **arrays)
