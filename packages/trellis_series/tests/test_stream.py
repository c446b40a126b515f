"""Streams of forecasts: the numbers of `update` and `predict`, one value at a time."""

import keras
import numpy as np
import pandas as pd
import pytest

from keras_streams import compiled_step
from keras_streams.c_export import native
from trellis_series import Forecasts

pytestmark = pytest.mark.both_backends

N = 260
RNG = np.random.default_rng(0)
SERIES = {
    "day": 100 + 10 * np.sin(np.arange(N) * np.pi / 12) + RNG.normal(size=N),
    "walk": RNG.normal(size=N).cumsum(),
    "meter": 1e9 + (10 + RNG.normal(size=N)).cumsum(),
    "counts": RNG.poisson(0.5, N).astype(float),
}
SLOW_ON_JAX = pytest.mark.both_backends(slow=True)
IN_DOUBLE = pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="JAX computes in float32 unless it is told otherwise"
)


def numbered(y):
    return pd.DataFrame({"ds": np.arange(len(y)), "y": y})


def streamed(forecasts, y, dtype, rows=1):
    stream = forecasts.stream(dtype=dtype)
    cache = stream.initial_cache(rows)
    for value in y:
        found, cache = stream.step(np.full((rows, 1), value), cache)
    return keras.ops.convert_to_numpy(found)


@IN_DOUBLE
@pytest.mark.parametrize("name", SERIES)
def test_a_stream_equals_updates(name):
    y = SERIES[name].copy()
    y[220] = np.nan
    forecasts = Forecasts(6, season=24, levels=(80, 95)).fit(numbered(y[:200]))
    found = streamed(forecasts, y[200:], "float64", rows=2)
    expected = forecasts.update(numbered(y)).predict().drop(columns=["unique_id", "ds"])
    assert found.shape == (2, 6, 5)
    np.testing.assert_allclose(found[1], expected.to_numpy(), rtol=1e-10)


@pytest.mark.parametrize("name", ["day", pytest.param("counts", marks=SLOW_ON_JAX)])
def test_a_stream_in_single_precision_is_close(name):
    forecasts = Forecasts(6, season=24).fit(numbered(SERIES[name][:200]))
    found = streamed(forecasts, SERIES[name][200:], "float32")[0]
    expected = forecasts.update(numbered(SERIES[name])).predict()
    scale = np.abs(np.diff(SERIES[name])).mean()
    ends = expected[["ours", "ours-lo-80", "ours-hi-80"]].to_numpy()
    np.testing.assert_allclose(found, ends, atol=1e-3 * scale)


def test_a_stream_may_run_forever():
    """Sums and counts stop growing, so single precision still follows after a change."""
    y = 10.0 * (np.arange(1_800) % 4 == 0) + np.random.default_rng(0).normal(size=1_800)
    y[1_500:] += 50
    stream = Forecasts(4, season=4).fit(numbered(y[:100])).stream(dtype="float32")
    step, cache = compiled_step(stream), stream.initial_cache(1)
    for value in y[100:]:
        found, cache = step(np.array([[value]], "float32"), cache)
    cache = cache.unpack()
    np.testing.assert_allclose(np.asarray(found)[0, :, 0], [60, 50, 50, 50], atol=2)
    *_, seen, steps = cache["filters"][0]
    assert np.max(seen) <= 1_000 and np.max(steps) <= 1_000


def test_a_constant_stream_keeps_its_filters():
    """The errors that weight them decay, but not to zero, whose logarithm is infinite."""
    stream = Forecasts(4).fit(pd.Series(np.full(60, 5.0))).stream(dtype="float32")
    cache = stream.initial_cache(1)
    cache["filters"] = [
        [0 * part if n == 3 else part for n, part in enumerate(state)] for state in cache["filters"]
    ]
    for _ in range(2):
        found, cache = stream.step(np.array([[5.0]]), cache)
    np.testing.assert_allclose(found, 5.0, atol=1e-3)


def test_streams_that_cannot_start_are_refused():
    table = numbered(SERIES["day"][:50]).assign(x=SERIES["walk"][:50])
    panel = pd.concat([table.assign(unique_id=name) for name in ("day", "walk")])
    forecasts = Forecasts(6).fit(panel)
    with pytest.raises(ValueError, match="unique_id"):
        forecasts.stream()
    with pytest.raises(ValueError, match="'night'"):
        forecasts.stream("night")
    with pytest.raises(ValueError, match="'x'"):
        Forecasts(6, past=["x"]).fit(table).stream()
    stream = Forecasts(6, season=24).fit(table[["ds", "y"]]).stream()
    for shape, rows in (((1, 2), 1), ((1,), 1), ((1, 1), 3)):
        with pytest.raises(ValueError, match=rf"`x` must have shape \({rows}, 1\)"):
            stream.step(np.zeros(shape), stream.initial_cache(rows))


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="Other backends have float64")
def test_double_precision_on_jax_needs_its_option(tmp_path):
    import jax

    forecasts = Forecasts(6).fit(numbered(SERIES["day"][:50]))
    for start in (forecasts.stream, lambda: forecasts.export(tmp_path / "a.c", dtype="float64")):
        with jax.enable_x64(False), pytest.raises(ValueError, match="JAX_ENABLE_X64=1.*'float32'"):
            start()


def test_exports_equal_the_stream(tmp_path):
    forecasts = Forecasts(6, season=24).fit(numbered(SERIES["day"][:200]))
    new = (SERIES["day"][200:] - 150 * (np.arange(60) > 12)).astype("float32")  # below the floor
    expected = streamed(forecasts, new, "float32")[0]
    assert np.min(expected) < 0
    forecasts.export(tmp_path / "load.c")  # compares 200 steps with Keras
    assert "the forecast, the lower end of the 80 % band" in (tmp_path / "load.h").read_text()
    found = native(forecasts.stream(dtype="float32"))
    for value in new:
        y = found.step([value])
    np.testing.assert_allclose(np.reshape(y, (6, 3)), expected, rtol=1e-4)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        forecasts.export(tmp_path / "served")
        serve = tf.saved_model.load(str(tmp_path / "served")).signatures["serving_default"]
        served = serve(values=tf.constant(new[None, :, None]))["forecast"]
        np.testing.assert_allclose(served[0], expected, rtol=1e-4)
        with pytest.raises(ValueError, match="exists"):
            forecasts.export(tmp_path / "served")
        forecasts.export(tmp_path / "served", overwrite=True)
        (tmp_path / "served" / "notes.txt").write_text("mine")
        with pytest.raises(ValueError, match="notes.txt"):
            forecasts.export(tmp_path / "served", overwrite=True)
