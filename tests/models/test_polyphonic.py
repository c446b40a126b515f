"""PolyphonicModel: the frame NLL of pieces that differ in length, and what it refuses."""

import keras
import numpy as np
import pytest

from tests.support.layer_checks import check_streaming
from trellis_keras.layers import TrellisLayer
from trellis_keras.models import FrameNLL, PolyphonicModel
from trellis_keras.models.losses import frame_nll

pytestmark = pytest.mark.both_backends

KEYS = 7


def small_model(backbone=None, **options):
    # A causal convolution, because it compiles fast.
    backbone = keras.layers.Conv1D(9, 3, padding="causal") if backbone is None else backbone
    model = PolyphonicModel(backbone, keys=KEYS, seed=2, **options)
    model.compile(keras.optimizers.Adam(3e-2), jit_compile=True)
    return model


def pieces(lengths=(12, 5, 9, 3, 7), seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.random((n, KEYS)) < 0.3).astype("float32") for n in lengths]


def padded(rolls):
    """Inputs, next frames and the weights of frames, padded at the end with frames of ones."""
    length = max(map(len, rolls)) - 1
    x, y = np.ones((2, len(rolls), length, KEYS), "float32")
    weight = np.zeros((len(rolls), length), "float32")
    for i, roll in enumerate(rolls):
        n = len(roll) - 1
        x[i, :n], y[i, :n], weight[i, :n] = roll[:-1], roll[1:], 1
    return x, y, weight


def nll_of(model, roll):
    """-log p of each frame of one piece, from probabilities in float64."""
    logits = np.asarray(model.predict(roll[None, :-1], verbose=0)[0], "float64")
    p = 1 / (1 + np.exp(-logits))
    return -np.sum(np.log(np.where(roll[1:] == 1, p, 1 - p)), axis=-1)


def test_padded_batches_give_the_figure_of_the_pieces_one_by_one():
    model = small_model()
    x, y, weight = padded(pieces())
    model.fit(x, y, sample_weight=weight, batch_size=2, epochs=3, verbose=0)
    results = model.evaluate(x, y, sample_weight=weight, batch_size=2, verbose=0, return_dict=True)
    frames = np.concatenate([nll_of(model, roll) for roll in pieces()])
    assert len(frames) == weight.sum()
    assert results["frame_nll"] == pytest.approx(frames.mean(), rel=1e-5)
    assert results["loss"] == pytest.approx(frames.mean(), rel=1e-5)
    # The mean of batch means is another number: the batches have 15, 10 and 6 frames.
    lengths = np.cumsum([len(roll) - 1 for roll in pieces()])[[1, 3]]
    means = np.mean([part.mean() for part in np.split(frames, lengths)])
    assert abs(means - frames.mean()) > 1e-4


def test_what_stands_in_the_padding_changes_nothing():
    model = small_model()
    x, y, weight = padded(pieces())
    expected = model.evaluate(x, y, sample_weight=weight, verbose=0)
    real = weight[..., None]
    silent = model.evaluate(x * real, y * real, sample_weight=weight, verbose=0)
    np.testing.assert_allclose(silent, expected, rtol=1e-6)


def test_a_piece_is_learned():
    model = small_model()
    roll = np.tile(np.eye(KEYS), (6, 1)).astype("uint8")
    x, y = np.stack(4 * [roll[:-1]]), np.stack(4 * [roll[1:]])
    losses = model.fit(x, y, epochs=40, verbose=0).history["frame_nll"]
    assert losses[0] > 3 and losses[-1] < 0.5 * losses[0]


def test_the_loss_stays_exact_where_a_sigmoid_is_0_or_1():
    logits = np.array([[200.0, -200.0]], keras.config.floatx())
    assert float(frame_nll(np.array([[1.0, 0.0]]), keras.ops.convert_to_tensor(logits))[0]) == 0
    wrong = frame_nll(np.array([[0.0, 1.0]]), keras.ops.convert_to_tensor(logits))
    assert float(wrong[0]) == 400


def test_the_metric_counts_frames_over_all_batches():
    metric, rng = FrameNLL(), np.random.default_rng(0)
    total, count = 0.0, 0
    for frames in (3, 50):
        y, logits = rng.integers(0, 2, (1, frames, KEYS)), rng.normal(size=(1, frames, KEYS))
        weight = rng.integers(0, 2, (1, frames)).astype("float32")
        metric.update_state(y, logits, sample_weight=weight)
        p = 1 / (1 + np.exp(-logits))
        total -= np.sum(weight[..., None] * np.log(np.where(y == 1, p, 1 - p)))
        count += weight.sum()
    assert float(metric.result()) == pytest.approx(total / count, rel=1e-5)
    clone = FrameNLL.from_config(metric.get_config())
    assert clone.name == "frame_nll" and float(clone.result()) == 0


def test_keras_file_gives_identical_outputs(tmp_path):
    model = small_model(output_dropout=0.2)
    x, y, weight = padded(pieces())
    model.fit(x, y, sample_weight=weight, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert np.array_equal(model.predict(x, verbose=0), loaded.predict(x, verbose=0))
    before, after = (
        m.evaluate(x, y, sample_weight=weight, verbose=0, return_dict=True) for m in (model, loaded)
    )
    assert before == after and set(after) == {"loss", "frame_nll"}
    assert loaded.get_config() == model.get_config() and loaded.keys == KEYS


def test_stream_equals_forward():
    model = small_model(TrellisLayer(9, 4, seed=1))
    model.build((None, None, KEYS))
    check_streaming(model, padded(pieces())[0], steps=4)


def test_bad_piano_rolls_are_named():
    model = small_model()
    x, y, weight = padded(pieces())
    with pytest.raises(ValueError, match="`x`.*0.5 in row 1, frame 2, key 3"):
        bad = x.copy()
        bad[1, 2, 3] = 0.5
        model.fit(bad, y, verbose=0)
    with pytest.raises(ValueError, match="`y`.*nan in row 0, frame 1, key 2"):
        bad = y.copy()
        bad[0, 1, 2] = np.nan
        model.fit(x, y, validation_data=(x, bad, weight), verbose=0)
    with pytest.raises(ValueError, match=f"`x` must have {KEYS} keys"):
        model.evaluate(x[..., 1:], y, verbose=0)
    with pytest.raises(ValueError, match=r"`y`.*\(batch, time, keys\)"):
        model.fit(x, y[:, -1], verbose=0)
    with pytest.raises(ValueError, match="Row 0"):
        model.fit(x, y, sample_weight=0 * weight, verbose=0)
    with pytest.raises(ValueError, match="88.*keys=88"):
        PolyphonicModel(TrellisLayer(4, 2)).build((None, None, KEYS))
    with pytest.raises(ValueError, match="return_sequences=True"):
        PolyphonicModel(keras.layers.GRU(4), keys=KEYS).build((None, None, KEYS))
