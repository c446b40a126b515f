"""Streaming and generation of language models: every sampler, prompts of any lengths, text."""

import concurrent.futures
import itertools

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import ops

from keras_streams import StreamingMixin
from tests.support.generation import SIZE, make, rerun_greedily, without_x64
from tests.support.layer_checks import assert_close, at_once, compiled
from tests.support.parameters import slow_but
from trellis_keras.data import Vocabulary
from trellis_keras.layers import TrellisLayer
from trellis_keras.models import LanguageModel, generation
from trellis_keras.models.samplers import get_sampler

samplers = pytest.importorskip("keras_nlp").samplers
both_backends = pytest.mark.both_backends

PROMPTS = [[1, 5, 3], [10, 0, 7, 2, 9], [4]]
SAME_LENGTH = np.array([[1, 5, 3], [10, 0, 7]])
TOP_P = samplers.TopPSampler(p=0.9, temperature=2.0)


@keras.saving.register_keras_serializable("test_generation")
class Toy(StreamingMixin, keras.layers.Layer):
    """A backbone with only what the protocol asks for, which compiles quickly."""

    def call(self, x):
        y, _ = self.prefill(x)
        return y

    def initial_cache(self, batch_size):
        return {"sum": ops.zeros((batch_size, 8), self.compute_dtype)}

    def step(self, x, cache):
        y = ops.tanh(ops.roll(x + cache["sum"], 1, axis=-1))
        return y, {"sum": y}

    def compute_output_shape(self, input_shape):
        return input_shape


@pytest.fixture(autouse=True)
def _without_x64():
    with without_x64():
        yield


def make_toy(vocabulary=None, size=SIZE):
    """A model whose samples differ from each other."""
    model = make(vocabulary, Toy(), size)
    model.head.kernel.assign(0.3 * model.head.kernel.value)
    return model


@pytest.fixture(scope="module")
def model():
    return make_toy()


@pytest.fixture(scope="module")
def speller():
    return make_toy(Vocabulary.from_text("abcdefgh \n", unit="character"))


# Streaming


@both_backends
@pytest.mark.float64
def test_prefill_and_steps_equal_the_forward_pass():
    model = make()
    tokens = np.random.default_rng(0).integers(0, SIZE, (2, 9))
    forward = at_once(model)(tokens)
    step = at_once(model.step)
    log_probs, cache = at_once(model.prefill)(tokens[:, :4])
    assert_close(log_probs, forward[:, 3])
    for t in range(4, 6):
        log_probs, cache = step(tokens[:, t], cache)
        assert_close(log_probs, forward[:, t])
    log_probs, _ = at_once(model.prefill)(tokens[:, 6:], cache)
    assert_close(log_probs, forward[:, -1])
    log_probs, _ = step(tokens[:, 0], model.initial_cache(2))
    assert_close(log_probs, forward[:, 0])


def test_streaming_errors():
    model = make()
    cache = model.initial_cache(2)
    new = LanguageModel(SIZE, 8, TrellisLayer(8, 2))
    for call, message in (
        (lambda: model.step(np.array([1, 2]), model.initial_cache(3)), "does not fit"),
        (lambda: model.step(np.array([[1], [2]]), cache), "tokens"),
        (lambda: model.step(np.array([1.0, 2.0]), cache), "integers"),
        (lambda: model.prefill(np.zeros((2, 0), "int32"), cache), "at least one token"),
        (lambda: new.generate(SAME_LENGTH, 5), "not built"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


# Rows of ids


def cut(row, start, stop):
    """A row up to its first stop token at or after `start`."""
    ends = np.flatnonzero(np.isin(row[start:], stop))
    return row[: start + ends[0] + 1] if len(ends) else row


@both_backends(slow=True)
def test_greedy_equals_rerunning_the_window():
    """Each row is what it would be alone, up to its stop token."""
    model = make()
    free = rerun_greedily(model, PROMPTS, 12)
    np.testing.assert_array_equal(model.generate(PROMPTS, 12, sampler="greedy"), free)
    # It ends the first row; within the second one's prompt it ends nothing.
    stop = int(free[0, 6])
    prompts = [PROMPTS[0], [10, 0, 7, stop, 9], PROMPTS[2]]
    alone = rerun_greedily(model, prompts, 12)
    ids = model.generate(prompts, 12, sampler="greedy", stop_tokens=stop)
    assert ids.dtype == "int32"
    for row, prompt, whole in zip(ids, prompts, alone, strict=True):
        expected = cut(whole, len(prompt), stop)
        np.testing.assert_array_equal(row[: len(expected)], expected)
        assert (row[len(expected) :] == stop).all()


@pytest.mark.parametrize(
    "sampler",
    [
        samplers.BeamSampler(num_beams=1),
        samplers.TopPSampler(p=0.0),
        samplers.TopKSampler(temperature=0),
        samplers.RandomSampler(temperature=1e-40),
    ],
)
def test_samplers_that_come_down_to_greedy(model, sampler):
    ids = model.generate(SAME_LENGTH, 12, sampler=sampler)
    np.testing.assert_array_equal(ids, rerun_greedily(model, SAME_LENGTH, 12))


@both_backends(slow=True)
@pytest.mark.parametrize(
    "sampler",
    [
        samplers.RandomSampler(temperature=2.0),
        samplers.TopPSampler(p=0.6, temperature=2.0),
        samplers.TopPSampler(p=0.99, k=3, temperature=2.0),
    ],
    ids=["random", "top_p", "top_p of k"],
)
def test_samples_follow_the_distribution(model, sampler):
    prompt = np.tile(SAME_LENGTH[:1], (4000, 1))
    drawn = model.generate(prompt, 4, sampler=sampler, seed=0)
    frequency = np.bincount(drawn[:, -1], minlength=SIZE) / len(prompt)
    probability = np.exp(np.asarray(model(SAME_LENGTH[:1])[0, -1], "float64") / 2)
    probability /= probability.sum()
    if isinstance(sampler, samplers.TopPSampler):
        order = np.argsort(-probability)
        before = np.cumsum(probability[order]) - probability[order]
        probability[order[(before > sampler.p) | (np.arange(SIZE) >= (sampler.k or SIZE))]] = 0
        assert 2 <= np.count_nonzero(probability) < SIZE
    probability /= probability.sum()
    np.testing.assert_allclose(frequency, probability, atol=0.04)
    assert not frequency[probability == 0].any()


def sums_of_all_texts(model, prompt, length, stop):
    """All continuations, and the sum of each one's log-probabilities up to its stop token."""
    tails = np.array(list(itertools.product(range(3), repeat=length - len(prompt))), "int32")
    ids = np.concatenate([np.tile(prompt, (len(tails), 1)).astype("int32"), tails], axis=1)
    log_probs = np.asarray(model(ids))[:, len(prompt) - 1 : -1]
    log_probs = np.take_along_axis(log_probs, tails[:, :, None], axis=-1)[:, :, 0]
    ended = np.cumsum(tails == stop, axis=1) - (tails == stop) > 0
    return ids, np.where(ended, 0.0, log_probs).sum(axis=1)


@pytest.mark.slow
@both_backends(slow=True)
@pytest.mark.parametrize("stop", [pytest.param(None, marks=pytest.mark.slow_elsewhere), 2])
def test_beam_search_with_all_beams_is_exhaustive(stop):
    model = make(size=3)
    model.head.kernel.assign(0.3 * model.head.kernel.value)
    prompts = [[0, 1, 1, 2], [2], [1, 2]]
    sampler = samplers.BeamSampler(num_beams=3**4)
    ids = model.generate(prompts, 6, sampler=sampler, stop_tokens=stop)
    greedy = rerun_greedily(model, prompts, 6)
    found = []
    for row, prompt, simple in zip(ids, prompts, greedy, strict=True):
        all_ids, sums = sums_of_all_texts(model, prompt, 6, stop)
        best = cut(all_ids[sums.argmax()], len(prompt), stop)
        np.testing.assert_array_equal(cut(row, len(prompt), stop), best)
        of_row = sums[(all_ids[:, : len(best)] == best).all(axis=1)]
        np.testing.assert_allclose(of_row, sums.max(), rtol=1e-5)
        found.append(len(best) < 6 or (best != simple).any())
    assert any(found), "the toy is too easy: the greedy choice is the best one"


def contrastive(model, prompt, max_length, k, alpha):
    """Su et al. (2022), eq. (5), one row, the whole model run again for each token."""

    @compiled
    def forward(ids):
        hidden = model.encode(ids)["hidden"]
        return model.head(hidden), hidden

    ids = np.zeros((k, max_length), "int32")
    ids[:, : len(prompt)] = prompt
    for t in range(len(prompt), max_length):
        log_probs, _ = forward(ops.convert_to_tensor(ids))
        probabilities = np.exp(np.asarray(log_probs)[0, t - 1])
        ids[:, t] = np.argsort(-probabilities)[:k]
        hidden = np.asarray(forward(ops.convert_to_tensor(ids))[1])
        unit = hidden / np.linalg.norm(hidden, axis=-1, keepdims=True)
        likeness = np.einsum("ktc,kc->kt", unit[:, :t], unit[:, t]).max(axis=1)
        score = (1 - alpha) * probabilities[ids[:, t]] - alpha * likeness
        ids[:, t] = ids[score.argmax(), t]
    return ids[0]


@both_backends
def test_contrastive_search(model):
    sampler = samplers.ContrastiveSampler(k=4, alpha=0.5)
    ids = model.generate(PROMPTS, 12, sampler=sampler)
    for row, prompt in zip(ids, PROMPTS, strict=True):
        np.testing.assert_array_equal(row, contrastive(model, prompt, 12, k=4, alpha=0.5))
    assert (ids != rerun_greedily(model, PROMPTS, 12)).any()
    assert isinstance(get_sampler("contrastive", 11), samplers.ContrastiveSampler)


def test_a_new_backbone_new_weights_and_a_file(tmp_path):
    """A model that generated uses its current weights without compiling again, and can be saved."""
    model = make_toy()
    before = model.generate(SAME_LENGTH, 8, sampler="greedy")
    np.testing.assert_array_equal(before, rerun_greedily(model, SAME_LENGTH, 8))
    model.head.kernel.assign(-model.head.kernel.value)
    after = model.generate(SAME_LENGTH, 8, sampler="greedy")
    assert (before != after).any()
    np.testing.assert_array_equal(after, rerun_greedily(model, SAME_LENGTH, 8))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.generate(SAME_LENGTH, 8, sampler="greedy"), after)


# Samplers and what is compiled


def test_seeds(speller):
    prompts = ["abc", "h g"]
    for sampler in ("random", TOP_P):
        first = speller.generate(prompts, 40, sampler=sampler, seed=1)
        assert first == speller.generate(prompts, 40, sampler=sampler, seed=np.int64(1 - 2**32))
        assert first != speller.generate(prompts, 40, sampler=sampler, seed=2)
    # Without a seed, a second text is another one, unless the samplers have the same.
    assert len({speller.generate("a", 40, sampler="random") for _ in range(2)}) == 2
    texts = [speller.generate("a", 40, samplers.RandomSampler(seed=seed)) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


@both_backends
def test_one_compilation_serves_equal_samplers():
    model = make_toy()
    for seed in (1, 2, 3):
        model.generate(SAME_LENGTH, 6, sampler=samplers.TopPSampler(p=0.5, seed=seed))
    functions = model._generation_functions
    assert len(functions) == 1
    if keras.backend.backend() == "tensorflow":
        (loop, *_), *_ = functions.values()
        assert loop.experimental_get_tracing_count() == 1
    model.generate(SAME_LENGTH, 6, sampler=samplers.TopPSampler(p=0.6))
    assert len(functions) == 2


@both_backends
def test_threads_generate_what_one_does(speller):
    def generate(seed):
        with without_x64():
            return speller.generate("ab", 40, sampler="random", seed=seed)

    alone = [generate(seed) for seed in range(16)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(generate, range(16))) == alone


def test_lengths_share_compiled_functions():
    model = make_toy()
    prompt = np.random.default_rng(0).integers(0, SIZE, (1, 110))
    longest = model.generate(prompt[:, :3], 150, sampler="greedy")
    for length in range(4, 150, 29):
        ids = model.generate(prompt[:, :3], length, sampler="greedy")
        np.testing.assert_array_equal(ids, longest[:, :length])
    for length in range(1, 110, 27):
        model.generate(prompt[:, :length], 111, sampler="greedy")
    kinds = [key[0] for key, _ in model._generation_functions]
    assert sorted(kinds) == ["_loop"] * 3 + ["read"] * 2  # for 64, 128 and 256; 32 and 64
    for function in model._generation_functions.values():
        function = function[0] if isinstance(function, tuple) else function
        assert function.experimental_get_tracing_count() == 1


@both_backends(slow=True)
@pytest.mark.parametrize("sampler", slow_but(["greedy", "random", "contrastive"], "greedy"))
def test_long_prompts_are_read_in_segments(sampler):
    model = make()
    prompts = np.random.default_rng(0).integers(0, SIZE, (2, 109))
    ids = model.generate(prompts, 113, sampler=sampler, seed=1)
    np.testing.assert_array_equal(ids[:, :109], prompts)
    if sampler == "greedy":
        np.testing.assert_array_equal(ids, rerun_greedily(model, prompts, 113))
    (streamed,) = [list(model.generate_stream(prompts[0], 113, sampler=sampler, seed=1))]
    alone = model.generate(prompts[:1], 113, sampler=sampler, seed=1)
    np.testing.assert_array_equal(streamed, alone[0])
    if sampler == "contrastive":  # of hidden states that were all read in one forward pass
        short = make()
        short.set_weights(model.get_weights())
        np.testing.assert_array_equal(alone[0], contrastive(short, prompts[0], 113, 5, 0.6))


def test_a_users_sampler(model):
    class Never(samplers.Sampler):
        def __init__(self, token):
            super().__init__()
            self.token = token

        def get_next_token(self, probabilities):
            allowed = ops.arange(SIZE) != self.token
            return ops.argmax(ops.where(allowed, probabilities, 0.0), axis=-1)

    favorite = rerun_greedily(model, SAME_LENGTH, 4)[0, 3]
    for token in (int(favorite), (int(favorite) + 1) % SIZE):
        ids = model.generate(SAME_LENGTH[:1], 12, sampler=Never(token))
        assert token not in ids[0, 3:]


def test_a_changed_temperature_of_a_users_sampler(model):
    class Mine(samplers.RandomSampler):
        pass

    sampler = Mine(temperature=100.0)
    model.generate(SAME_LENGTH[:1], 12, sampler=sampler)
    sampler.temperature = 1e-5
    expected = model.generate(SAME_LENGTH[:1], 12, sampler="greedy")
    found = model.generate(SAME_LENGTH[:1], 12, sampler=sampler)
    np.testing.assert_array_equal(found, expected)


# Text


def test_text_in_text_out(speller):
    one = speller.generate("ab", 8, sampler="greedy")
    assert isinstance(one, str) and one.startswith("ab") and len(one) == 8
    encoded = [speller.vocabulary.encode(text) for text in ("h gab", "ab")]
    expected = [speller.vocabulary.decode(row) for row in rerun_greedily(speller, encoded, 9)]
    assert speller.generate(["h gab", "ab"], 9, sampler="greedy") == expected
    assert one == expected[1][:8]
    words = Vocabulary.from_text("the cat sat on the mat\n", unit="word")
    text = make_toy(words).generate("the cat", 7, sampler="greedy")
    assert text.startswith("the cat")
    assert len(words.encode(text, final_eos=False)) == 7


@both_backends
@pytest.mark.parametrize(
    "sampler", ["random", pytest.param(TOP_P, marks=pytest.mark.slow_elsewhere)]
)
def test_streamed_pieces_are_the_generated_text(speller, sampler):
    """Also of two streams at once, and up to a stop token."""
    whole = [speller.generate("ab", 24, sampler=sampler, seed=seed) for seed in (1, 2)]
    streams = [speller.generate_stream("ab", 24, sampler=sampler, seed=seed) for seed in (1, 2)]
    pairs = list(zip(*streams, strict=True))
    if sampler == "random":  # an object that two streams share would be advanced by both
        assert ["".join(pieces) for pieces in zip(*pairs, strict=True)] == whole
    assert len(pairs) == 24
    stop = whole[0][7]
    expected = whole[0][: whole[0].index(stop, 2) + 1]
    options = {"sampler": sampler, "seed": 1, "stop_tokens": stop}
    assert speller.generate("ab", 24, **options) == expected
    assert "".join(speller.generate_stream("ab", 24, **options)) == expected


VOCABULARIES = {
    "word": Vocabulary.from_text("the cat\n sat on\n\nthe mat\n", unit="word"),
    "character": Vocabulary.from_text("aé\n 語🙂", unit="character"),
    "byte": Vocabulary.from_text("aé\n 語🙂", unit="byte"),
}


@pytest.mark.parametrize("unit", VOCABULARIES)
@given(data=st.data())
def test_pieces_of_any_tokens(unit, data):
    vocabulary = VOCABULARIES[unit]
    tokens = data.draw(st.lists(st.integers(0, len(vocabulary) - 1)))
    pieces = list(generation.text_pieces(vocabulary, tokens))
    assert "".join(pieces) == vocabulary.decode(tokens)
    assert all(pieces)


# Errors, before anything is compiled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1, 2], []]}, r"Received: \[\[1, 2\], \[\]\]"),
        ({"prompts": np.array([1, 2])}, "prompts"),
        ({"prompts": [[1, 2], ["a"]]}, "integers"),
        ({"prompts": [[1, SIZE]]}, "11"),
        ({"prompts": "abc"}, "vocabulary"),
        ({"max_length": 3}, "max_length"),
        ({"sampler": "speculative"}, "speculative"),
        ({"sampler": "nucleus"}, "sampler"),
        ({"sampler": samplers.TopKSampler(k=12)}, "`k`"),
        ({"sampler": samplers.TopPSampler(k=0)}, "`k`"),
        ({"sampler": samplers.ContrastiveSampler(k=2.0)}, "`k`"),
        ({"sampler": samplers.ContrastiveSampler(alpha=1.5)}, "`alpha`"),
        ({"sampler": samplers.ContrastiveSampler(temperature=0)}, "temperature"),
        ({"sampler": samplers.BeamSampler(num_beams=0)}, "`num_beams`"),
        ({"sampler": samplers.TopPSampler(p=np.nan)}, "`p`"),
        ({"sampler": samplers.GreedySampler(temperature=-1.0)}, "`temperature`"),
        ({"sampler": samplers.RandomSampler(temperature="1")}, "`temperature`"),
        ({"seed": 1.5}, "`seed`"),
        ({"prompts": 5}, "`prompts`.*must be non-empty strings or rows.*Received: .5."),
        ({"max_length": 6.5}, "`max_length`"),
        ({"sampler": samplers.BeamSampler(return_all_beams=True)}, "return_all_beams"),
        ({"stop_tokens": SIZE}, "11"),
        ({"stop_tokens": "a"}, "vocabulary"),
    ],
)
def test_errors(model, arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        model.generate(**({"prompts": SAME_LENGTH, "max_length": 6} | arguments))


def test_text_and_stream_errors(speller):
    for arguments, message in [
        ({"prompt": "aX"}, "vocabulary"),
        ({"prompt": ""}, "empty"),
        ({"max_length": 2}, "2 tokens"),
        ({"sampler": "best"}, "`sampler`"),
        ({"stop_tokens": ["a", "ab"]}, "single tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            speller.generate_stream(**({"prompt": "ab", "max_length": 6} | arguments))
