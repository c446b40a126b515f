"""A classifier for whole series, fitted in closed form."""

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from trellis_keras.layers.checks import check_integer, check_positive
from trellis_keras.models import SequenceClassifier
from trellis_keras.models.normalization import Standardization

_TAPS = 9
# All kernels of nine taps with weights 2 for three of them and -1 for the others.
_KERNELS = np.array(
    [
        [2.0 if tap in twos else -1.0 for tap in range(_TAPS)]
        for twos in itertools.combinations(range(_TAPS), 3)
    ],
    "float32",
)
FEATURES = 40 * len(_KERNELS)
_MOST_DILATIONS = 8
_SHARPNESS = 30.0  # of thresholds: an output's slope at its threshold is a sixth of this
_LEAST_DEVIATION = 0.01  # lower bound of the deviation by which a feature is divided
_PENALTIES = 10.0 ** np.arange(-3, 3.5, 0.5)
_SCALES = 10.0 ** np.arange(-1, 1.6, 0.1)  # candidates for the scale of the logits
_SERIES_AT_ONCE = 16


@keras.saving.register_keras_serializable("trellis_keras")
class RocketClassifier(SequenceClassifier):
    """Classifies whole series by MiniRocket's features and ridge regression, without training.

    The features are the fractions of time during which the outputs of fixed dilated convolutions
    exceed thresholds:

        f_j = mean_t clip(5 (c_{j,t} - b_j) + 1/2, 0, 1),    c_j = w_j * z,

    where z is the standardized series. The kernels w_j are all 84 kernels of nine taps of which
    three are 2 and six are -1, with dilations from 1 up to the longest that fits `window`
    (MiniRocket, Dempster, Schmidt and Webb 2021). A kernel reads a random subset of the channels.
    `adapt` sets each threshold b_j to a quantile of c_j on a random training series, and the head
    to the ridge regression on the classes with the lowest leave-one-out error, scaled to logits
    with the lowest leave-one-out cross-entropy. `fit` is optional: it trains the head further.

    Unlike MiniRocket's, the convolutions are causal, with zeros before the first step, and the
    thresholds are slightly smooth, so a stream gives the classes of the steps so far.

    Args:
        window: Positive integer, number of steps of the longest series.
        channels: Positive integer, number of channels.
        num_classes: Integer of at least 2, number of classes.
        features: Positive integer, number of features, rounded down to a multiple of 84 for each
            dilation. Defaults to `3360`.
        activation, class_names: As in `SequenceClassifier`.
        seed: Integer seed of the channels and thresholds. Defaults to `None`.
        name, trainable, dtype: As in `keras.Model`.

    Call arguments:
        inputs: Tensor (batch, time, channels). Shorter series are padded with NaN.

    Returns:
        Logits (batch, num_classes), or probabilities with activation="softmax".

    Example:

    >>> model = RocketClassifier(window=30, channels=1, num_classes=2, seed=0)
    >>> slow, fast = (np.sin(rate * np.arange(30)[None, :, None]) for rate in (0.2, 0.6))
    >>> y = np.array([0, 1] * 6)
    >>> x = np.where(y[:, None, None] == 0, slow, fast) + 0.1 * np.random.normal(size=(12, 30, 1))
    >>> model.adapt(x, y)
    >>> model.predict_proba(x, verbose=0).argmax(axis=-1)
    array([0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1])
    """

    def __init__(
        self,
        window: int,
        channels: int,
        num_classes: int,
        *,
        features: int = FEATURES,
        activation: str | None = None,
        class_names: Sequence[str] | None = None,
        seed: int | None = None,
        name: str | None = None,
        trainable: bool = True,
        dtype: Any = None,
    ) -> None:
        window, channels = check_positive(window=window, channels=channels)
        features = check_integer("features", features, minimum=len(_KERNELS))
        longest = max((window - 1) // (_TAPS - 1), 1)
        most = min(_MOST_DILATIONS, longest, features // len(_KERNELS))
        self._dilations = np.unique(np.geomspace(1, longest, most).astype(int)).tolist()
        thresholds = features // len(_KERNELS) // len(self._dilations)
        super().__init__(
            _features(self._dilations, thresholds, channels),
            num_classes,
            activation=activation,
            class_names=class_names,
            nan_padding=True,
            normalize=True,
            kernel_initializer="zeros",
            seed=seed,
            name=name,
            trainable=trainable,
            dtype=dtype,
        )
        self.window = window
        self.channels = channels
        self.features = features

    def adapt(self, inputs: Any, labels: Any = None) -> None:
        """Fits the model: statistics of the channels, thresholds, and the ridge regression.

        Args:
            inputs: Array (series, steps, channels) in which NaN follows shorter series, or a
                sequence of arrays (steps, channels).
            labels: Array (series,), the classes, or their names. Required.
        """
        given = [np.asarray(each, "float64") for each in inputs]
        shapes = sorted({each.shape for each in given})
        if any(shape[1:] != (self.channels,) for shape in shapes):
            raise ValueError(
                f"`inputs` must be series (steps, {self.channels}), such as x[..., None] for one "
                f"channel. Received: series of shapes {shapes[:5]}"
            )
        series = [_without_padding(each) for each in given]
        empty = [n for n, each in enumerate(series) if not len(each)]
        if empty:
            raise ValueError(
                "Each series in `inputs` must have at least one value. Received: only NaN in "
                f"series {empty[:5]}"
            )
        labels = np.asarray(self._encode_targets(np.asarray(labels)))
        if labels.shape != (len(series),):
            raise ValueError(
                f"`labels` must have the shape ({len(series)},). Received: shape {labels.shape}"
            )
        self._check_targets(labels)
        if len(np.unique(labels)) < 2:
            raise ValueError(
                f"`labels` must have at least two classes. Received: only class {labels[0]}"
            )
        super().adapt(series)
        self._set_thresholds(series)
        normalization = self.backbone.get_layer("normalization")
        normalization.mean.assign(np.zeros(normalization.mean.shape))
        normalization.scale.assign(np.ones(normalization.scale.shape))
        parts = []
        for i in range(0, len(series), _SERIES_AT_ONCE):
            x = keras.utils.pad_sequences(
                series[i : i + _SERIES_AT_ONCE], dtype="float32", padding="post", value=np.nan
            )
            hidden = self._hidden(ops.convert_to_tensor(x), training=False, mask=None)
            parts.append(ops.convert_to_numpy(hidden))
        features = np.concatenate(parts).astype("float64")
        mean, scale = features.mean(axis=0), np.maximum(features.std(axis=0), _LEAST_DEVIATION)
        normalization.mean.assign(mean)
        normalization.scale.assign(scale)
        kernel, bias = ridge_head((features - mean) / scale, labels.astype(int), self.num_classes)
        self.head.kernel.assign(kernel)
        self.head.bias.assign(bias)

    def _set_thresholds(self, series):
        generator = np.random.default_rng(self.seed)
        golden = (np.sqrt(5) - 1) / 2  # its multiples modulo 1 are spread evenly
        count = 0
        for dilation in self._dilations:
            layer = self.backbone.get_layer(f"dilation_{dilation}")
            thresholds = layer.filters // len(_KERNELS)
            kernel = np.zeros((_TAPS, self.channels, len(_KERNELS), thresholds), "float32")
            bias = np.zeros(kernel.shape[2:], "float32")
            for i, weights in enumerate(_KERNELS):
                chosen = _chosen_channels(generator, self.channels)
                one = series[generator.integers(len(series))]
                z = ops.convert_to_numpy(self.input_normalization(one))[:, chosen].sum(axis=-1)
                z = np.pad(z, ((_TAPS - 1) * dilation, 0))
                taps = [z[tap * dilation :][: len(one)] for tap in range(_TAPS)]
                quantiles = (golden * (count + np.arange(1, thresholds + 1))) % 1
                count += thresholds
                kernel[:, chosen, i] = weights[:, None, None]
                bias[i] = np.quantile(weights @ np.stack(taps), quantiles)
            layer.kernel.assign(_SHARPNESS * kernel.reshape(layer.kernel.shape))
            layer.bias.assign(-_SHARPNESS * bias.reshape(-1))

    def get_config(self) -> dict:
        config = super().get_config()
        kept = ("name", "trainable", "dtype", "num_classes", "activation", "class_names", "seed")
        own = {name: getattr(self, name) for name in ("window", "channels", "features")}
        return {**{name: config[name] for name in kept if name in config}, **own}

    @classmethod
    def from_config(cls, config: dict) -> "RocketClassifier":
        return cls(**config)


def _features(dilations, thresholds, channels):
    x = keras.Input((None, channels))
    means = []
    for dilation in dilations:
        convolution = keras.layers.Conv1D(
            thresholds * len(_KERNELS),
            _TAPS,
            dilation_rate=dilation,
            padding="causal",
            activation="hard_sigmoid",
            trainable=False,
            name=f"dilation_{dilation}",
        )
        convolution.supports_masking = True  # the mean over steps needs the mask
        means.append(keras.layers.GlobalAveragePooling1D()(convolution(x)))
    y = means[0] if len(means) == 1 else keras.layers.Concatenate()(means)
    y = Standardization(name="normalization", trainable=False)(y)
    return keras.Model(x, y, name="rocket_features")


def _chosen_channels(generator, channels):
    """Returns a random subset of at most nine channels, of log-uniform size."""
    count = int(2 ** generator.uniform(0, np.log2(min(channels, 9) + 1)))
    return np.sort(generator.choice(channels, count, replace=False))


def _without_padding(series):
    """Returns a series without missing steps at its end."""
    has_value = ~np.isnan(series).all(axis=-1)
    return series[: np.flatnonzero(has_value).max(initial=-1) + 1]


def ridge_head(x: np.ndarray, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns kernel and bias of a ridge regression on classes, as logits.

    The penalty minimizes the leave-one-out squared error, with -1 and 1 as targets, and the scale
    of the logits the leave-one-out cross-entropy.

    Args:
        x: Array (rows, features), with a mean of 0.
        labels: Integer array (rows,), the classes.
        classes: Positive integer, number of classes.
    """
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    known = s > 1e-9 * max(s[0], 1.0)
    u, s, vt = u[:, known], s[known], vt[known]
    targets = 2.0 * (np.arange(classes) == labels[:, None]) - 1
    center = targets.mean(axis=0)
    projected = u.T @ (targets - center)

    def left_out(penalty):
        """Returns the leave-one-out residuals of the targets."""
        kept = s**2 / (s**2 + penalty)
        leverage = 1 / len(x) + u**2 @ kept
        return (targets - center - u @ (kept[:, None] * projected)) / (1 - leverage)[:, None]

    def cross_entropy(scale):
        logits = scale * scores
        return np.mean(np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(x)), labels])

    penalty = min(_PENALTIES, key=lambda penalty: np.mean(left_out(penalty) ** 2))
    scores = targets - left_out(penalty)
    scale = min(_SCALES, key=cross_entropy)
    return scale * vt.T @ ((s / (s**2 + penalty))[:, None] * projected), scale * center
