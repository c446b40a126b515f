"""examples/breakdown.py: the parts add up, and each is what it says it is."""

import numpy as np

from examples.breakdown import measure
from trellis_keras.data import TokenStream
from trellis_keras.layers import TrellisLayer
from trellis_keras.models import LanguageModel, Perplexity

SIZE = 30
RNG = np.random.default_rng(0)
# Some tokens are much more frequent than others, and the last two do not occur.
TRAIN = ((RNG.zipf(1.3, 2000) - 1) % (SIZE - 2)).astype("int32")
SPLIT = TRAIN[:211]  # 210 targets do not fill the batches


def test_a_breakdown_of_perplexity():
    backbone = TrellisLayer(units=10, depth=3, output_units=6, stateful=True)
    model = LanguageModel(SIZE, 6, backbone)
    model.build((None, None))
    for weight in model.trainable_variables:  # far from uniform
        weight.assign(np.random.default_rng(1).normal(size=weight.shape))
    model.compile("sgd", metrics=[Perplexity()], jit_compile=False)
    stream = TokenStream(SPLIT, 4, sequence_length=11)
    parts = measure(model, stream, TRAIN)
    loss = model.evaluate(stream, verbose=0, return_dict=True)["loss"]
    for rows in (parts["frequency"], [row for row in parts["position"] if row["counted"]]):
        rows = [row for row in rows if row["tokens"]]
        tokens = [row["tokens"] for row in rows]
        assert sum(tokens) == 210
        mean = np.average([row["cross_entropy"] for row in rows], weights=tokens)
        np.testing.assert_allclose(mean, loss, rtol=1e-5)
    counts = np.bincount(TRAIN, minlength=SIZE)
    targets = np.bincount(SPLIT[1:], minlength=SIZE)
    assert parts["frequency"][0]["words"] == 2 and parts["frequency"][0]["perplexity"] is None
    for row in parts["frequency"]:
        inside = (counts >= row["count_from"]) & (counts <= row["count_to"])
        assert (row["words"], row["tokens"]) == (inside.sum(), targets[inside].sum())
