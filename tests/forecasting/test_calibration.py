"""Conformal calibration: the rank of the score that bounds the next one, and its coverage."""

import numpy as np
import pytest

from trellis_keras.forecasting.calibration import conformal_scale, rescale

QUANTILES = (0.1, 0.5, 0.9)


@pytest.mark.parametrize(
    ("count", "quantile", "rank"),
    [(19, 0.9, 18), (39, 0.9, 36), (99, 0.9, 90), (199, 0.9, 180), (20, 0.9, 19), (5, 0.9, 5)]
    + [(19, 0.55, 11), (1, 0.6, 1)],
)
def test_the_rank_of_the_bound(count, quantile, rank):
    scores = np.random.default_rng(0).permutation(np.arange(1.0, count + 1))[:, None]
    outputs = np.tile([-1.0, 0.0, 1.0], (count, 1, 1))  # with gaps of 1: the scores are the targets
    quantiles = (1 - quantile, 0.5, quantile)
    np.testing.assert_array_equal(conformal_scale(outputs, scores, quantiles), [[0, 1, rank]])
    np.testing.assert_array_equal(conformal_scale(outputs, -scores, quantiles), [[rank, 1, 0]])


def test_coverage_of_the_next_value():
    """Of 19 past values and the next one, each is as likely as the others to be the 18th."""
    random = np.random.default_rng(0)
    targets = random.normal(size=(4000, 20, 1))
    wrong = np.tile([-0.5, 0.0, 0.7], (20, 1, 1))  # a band far too narrow
    bounds = [
        rescale(wrong[-1], conformal_scale(wrong[:-1], past, QUANTILES), QUANTILES)[0]
        for past in targets[:, :-1]
    ]
    low, _, high = np.transpose(bounds)
    following = targets[:, -1, 0]
    assert np.mean(following <= high) == pytest.approx(0.9, abs=0.015)
    assert np.mean(following >= low) == pytest.approx(0.9, abs=0.015)
