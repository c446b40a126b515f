"""The network: one more expert, where it makes forecasts better."""

import keras
import numpy as np
import pandas as pd
import pytest

from trellis_keras.layers import TCN
from trellis_series import Forecaster, Forecasts

HORIZON = 4


def table(n=1_000):
    """A series that a linear map cannot forecast: it moves away from 0 and is thrown back."""
    rng = np.random.default_rng(0)
    y = np.zeros(n)
    for t in range(1, n):
        new = 1 - 1.4 * y[t - 1] ** 2 + 0.3 * y[t - 2] + 0.001 * rng.normal()  # y[-1] is 0
        y[t] = np.clip(new, -1.5, 1.5)
    return pd.DataFrame({"ds": np.arange(n), "y": 50 + y})


def fitted(data, **options):
    backbone = TCN(16, 2, depth=2, return_sequences=False, seed=0)
    return Forecasts(HORIZON, season=1, network=backbone, **options).fit(data)


@pytest.fixture(scope="module")
def chaos():
    return fitted(table()[:-100])


def test_a_network_is_kept_where_it_helps(chaos):
    assert chaos.trained_network is not None
    with_net = chaos.predict()
    without = Forecasts(HORIZON, season=1, network=None).fit(table()[:-100]).predict()
    actual = table()["y"][900:904].to_numpy()
    errors = [np.abs(each["ours"][:2] - actual[:2]).mean() for each in (with_net, without)]
    assert errors[0] < errors[1]
    half = [(each["ours-hi-80"] - each["ours"]).mean() for each in (with_net, without)]
    assert half[0] < half[1]


def test_a_trained_network_is_not_trained_again(chaos):
    again = Forecasts(HORIZON, season=1, network=chaos.trained_network).fit(table()[:-100])
    assert again.trained_network is chaos.trained_network
    pd.testing.assert_frame_equal(again.predict(), chaos.predict())
    expected = again.predict()
    again.network = None
    again.cross_validation(table(), 2)
    assert again.backtest_network is None
    pd.testing.assert_frame_equal(again.predict(), expected)
    plain = Forecaster(TCN(4, depth=1, return_sequences=False), HORIZON)
    quantiles = Forecaster.from_config(
        chaos.trained_network.get_config() | {"quantiles": (0.1, 0.5, 0.9)}
    )
    quantiles.build((None, quantiles.linear_window, 1))
    wrong = ((HORIZON, plain), (HORIZON + 1, chaos.trained_network), (HORIZON, quantiles))
    for horizon, network in wrong:
        with pytest.raises(ValueError, match="network"):
            Forecasts(horizon, season=1, network=network)


def test_bands_of_a_network_hold_in_windows_after_its_data(chaos):
    forecasts = Forecasts(HORIZON, season=1, network=chaos.trained_network)
    found = pd.concat(forecasts.cross_validation(table(n), 200) for n in (2_200, 3_200, 4_200))
    assert forecasts.backtest_network is chaos.trained_network
    assert 0.74 < found["y"].between(found["ours-lo-80"], found["ours-hi-80"]).mean() < 0.9


def test_a_network_is_left_out_where_it_does_not_help(chaos):
    noise = pd.Series(np.random.default_rng(0).normal(size=1_000))
    forecasts = Forecasts(HORIZON, season=1, network=chaos.trained_network).fit(noise)
    assert forecasts.trained_network is None


def test_files_and_streams_keep_the_network(chaos, tmp_path):
    chaos.save(tmp_path / "kept")
    loaded = Forecasts.load(tmp_path / "kept")
    pd.testing.assert_frame_equal(loaded.predict(), chaos.predict())
    more = table()[-100:-90]
    stream = chaos.stream(dtype="float32")
    cache = stream.initial_cache(1)
    for value in more["y"]:
        found, cache = stream.step(np.array([[value]]), cache)
    expected = loaded.update(more).predict()
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(found)[0], expected.iloc[:, 2:], atol=1e-3
    )
    (tmp_path / "kept" / "network.keras").unlink()
    with pytest.raises((ValueError, OSError), match="kept"):
        Forecasts.load(tmp_path / "kept")


def test_covariates_reach_the_network():
    rng = np.random.default_rng(0)
    x, z = rng.choice([-1.0, 1.0], (2, 1_000))
    y = x * z + 0.1 * rng.normal(size=1_000)  # no linear map of either finds it
    data = pd.DataFrame({"ds": np.arange(1_000), "y": y, "x": x, "z": z})
    found = fitted(data[:-HORIZON], future=["x", "z"]).predict(X_df=data[-HORIZON:])
    assert np.abs(found["ours"].to_numpy() - y[-HORIZON:]).mean() < 0.8
