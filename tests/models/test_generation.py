"""Streaming and generation of language models."""

import keras
import numpy as np
import pytest
from keras import ops

from tests.support.generation import SIZE, make, rerun_greedily
from tests.support.layer_checks import assert_close
from trellis_keras.data.vocabulary import Vocabulary
from trellis_keras.layers import TrellisLayer, streaming
from trellis_keras.models import LanguageModel

samplers = pytest.importorskip("keras_nlp").samplers
pytestmark = pytest.mark.both_backends


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module")
def speller():
    return make(Vocabulary.from_text("abcdefgh \n", unit="character"))


PROMPT = np.array([[1, 5, 3], [10, 0, 7]])


# Streaming


@pytest.mark.float64
def test_prefill_and_steps_equal_the_forward_pass(model):
    tokens = np.random.default_rng(0).integers(0, SIZE, (2, 9))
    forward = model(tokens)
    log_probs, cache = model.prefill(tokens[:, :4])
    assert_close(log_probs, forward[:, 3])
    for t in range(4, 6):
        log_probs, cache = model.step(tokens[:, t], cache)
        assert_close(log_probs, forward[:, t])
    log_probs, _ = model.prefill(tokens[:, 6:], cache)
    assert_close(log_probs, forward[:, -1])
    log_probs, _ = model.step(tokens[:, 0], model.initial_cache(2))
    assert_close(log_probs, forward[:, 0])


def test_streaming_errors(model):
    cache = model.initial_cache(2)
    with pytest.raises(ValueError, match=r"Expected.*\(2, 1, 8\).*Received.*\(3, 1, 8\)"):
        model.step(np.array([1, 2]), model.initial_cache(3))
    with pytest.raises(ValueError, match=r"tokens.*\(None,\).*\(2, 1\)"):
        model.step(np.array([[1], [2]]), cache)
    with pytest.raises(ValueError, match="integers"):
        model.step(np.array([1.0, 2.0]), cache)
    with pytest.raises(ValueError, match="at least one token"):
        model.prefill(np.zeros((2, 0), "int32"), cache)
    new = LanguageModel(SIZE, 8, TrellisLayer(8, 2))
    for call in (lambda: new.step(np.array([1, 2]), cache), lambda: new.initial_cache(2)):
        with pytest.raises(ValueError, match="not built.*build"):
            call()
    foreign = LanguageModel(SIZE, 8, keras.layers.LSTM(8, return_sequences=True))
    with pytest.raises(ValueError, match="protocol of trellis_keras.layers.streaming.*LSTM"):
        foreign.generate(PROMPT, 5)


# Generation


def test_greedy_equals_rerunning_the_window(model):
    generated = model.generate(PROMPT, 12, sampler="greedy")
    assert generated.dtype == "int32"
    np.testing.assert_array_equal(generated, rerun_greedily(model, PROMPT, 12))
    one_token = model.generate(PROMPT[:, :1], 6, sampler="greedy")
    np.testing.assert_array_equal(one_token, rerun_greedily(model, PROMPT[:, :1], 6))


@pytest.mark.parametrize("sampler", [samplers.TopKSampler(k=1), samplers.BeamSampler(num_beams=1)])
def test_samplers_that_come_down_to_greedy(model, sampler):
    generated = model.generate(PROMPT, 12, sampler=sampler)
    np.testing.assert_array_equal(generated, model.generate(PROMPT, 12, sampler="greedy"))


@pytest.mark.parametrize("sampler", ["random", "top_k", "top_p"])
def test_same_seed_same_text(speller, sampler):
    if sampler == "top_p":
        sampler = samplers.TopPSampler(p=0.9, temperature=2.0)
    prompts = ["abc", "h g"]
    first = speller.generate(prompts, 40, sampler=sampler, seed=1)
    assert first == speller.generate(prompts, 40, sampler=sampler, seed=1)
    assert first != speller.generate(prompts, 40, sampler=sampler, seed=2)
    # Without a seed, a second text is another one.
    texts = [speller.generate(prompts, 40, sampler=sampler) for _ in range(2)]
    assert texts[0] != texts[1]


def test_sampler_objects_start_from_their_own_seed(speller):
    texts = [speller.generate("a", 40, samplers.RandomSampler(seed=seed)) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_samples_follow_the_distribution(model):
    """`random` on log-probabilities as logits: frequencies are the model's probabilities."""
    prompt = np.tile(PROMPT[:1], (4000, 1))
    drawn = model.generate(prompt, 4, sampler=samplers.RandomSampler(temperature=2.0), seed=0)
    frequency = np.bincount(drawn[:, -1], minlength=SIZE) / len(prompt)
    probability = np.exp(np.asarray(model(PROMPT[:1])[0, -1]) / 2)
    np.testing.assert_allclose(frequency, probability / probability.sum(), atol=0.04)


def test_text_in_text_out(speller):
    one = speller.generate("ab", 8, sampler="greedy")
    assert isinstance(one, str) and one.startswith("ab") and len(one) == 8
    assert speller.generate(["ab"], 8, sampler="greedy") == [one]
    ids = speller.generate(speller.vocabulary.encode("ab")[None], 8, sampler="greedy")
    assert speller.vocabulary.decode(ids[0]) == one


def test_words(model):
    words = Vocabulary.from_text("the cat sat on the mat\n", unit="word")
    text = make(words).generate("the cat", 7, sampler="greedy")
    assert text.startswith("the cat")
    assert len(words.encode(text, final_eos=False)) == 7


def test_rows_end_with_their_first_stop_token(model):
    free = model.generate(PROMPT, 16, sampler="random", seed=3)
    stops = [int(free[0, 5]), int(free[1, 9])]
    stopped = model.generate(PROMPT, 16, sampler="random", seed=3, stop_tokens=stops)
    ends = [3 + int(np.flatnonzero(np.isin(row[3:], stops))[0]) for row in free]
    assert stopped.shape == (2, max(ends) + 1)
    for row, whole, end in zip(stopped, free, ends, strict=True):
        np.testing.assert_array_equal(row[: end + 1], whole[: end + 1])
        assert (row[end:] == whole[end]).all()


@pytest.mark.parametrize("stop", [0, 4])
def test_any_token_can_be_the_stop_token(model, stop):
    free = model.generate(PROMPT, 40, sampler="random", seed=3)
    stopped = model.generate(PROMPT, 40, sampler="random", seed=3, stop_tokens=stop)
    for row, whole in zip(stopped, free, strict=True):
        end = 3 + int(np.argmax([*(whole[3:] == stop), True]))
        np.testing.assert_array_equal(row[: end + 1], whole[: end + 1])


def test_stop_tokens_as_text(speller):
    free = speller.generate("ab", 30, sampler="random", seed=1)
    stop = free[6]
    stopped = speller.generate("ab", 30, sampler="random", seed=1, stop_tokens=stop)
    assert stopped == free[: free.index(stop, 2) + 1]


def test_one_compilation_serves_equal_samplers():
    model = make()
    for seed in (1, 2, 3):
        model.generate(PROMPT, 6, sampler=samplers.TopPSampler(p=0.5, seed=seed))
    functions = model._generation_functions
    assert len(functions) == 2  # the prompt's and the loop's
    if keras.backend.backend() == "tensorflow":
        loop = next(value for key, value in functions.items() if key != "cache")[0]
        assert loop.experimental_get_tracing_count() == 1
    model.generate(PROMPT, 6, sampler=samplers.TopPSampler(p=0.6))
    assert len(functions) == 3


def test_new_weights_are_used_without_compiling_again():
    model = make()
    before = model.generate(PROMPT, 12, sampler="greedy")
    model.head.kernel.assign(-model.head.kernel.value)
    after = model.generate(PROMPT, 12, sampler="greedy")
    assert (before != after).any()
    np.testing.assert_array_equal(after, rerun_greedily(model, PROMPT, 12))


def test_a_users_sampler(model):
    class Never(samplers.Sampler):
        def __init__(self, token):
            super().__init__()
            self.token = token

        def get_next_token(self, probabilities):
            allowed = ops.arange(SIZE) != self.token
            return ops.argmax(ops.where(allowed, probabilities, 0.0), axis=-1)

    favourite = model.generate(PROMPT, 12, sampler="greedy")[0, 3]
    for token in (int(favourite), (int(favourite) + 1) % SIZE):
        assert token not in model.generate(PROMPT[:1], 12, sampler=Never(token))[0, 3:]


def test_a_model_that_generated_can_be_saved(model, tmp_path):
    generated = model.generate(PROMPT, 12, sampler="greedy")
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.generate(PROMPT, 12, sampler="greedy"), generated)


@keras.saving.register_keras_serializable("test_generation")
class LeakySum(streaming.StreamingMixin, keras.layers.Layer):
    """A backbone with only what the protocol asks for."""

    def call(self, x):
        y, _ = self.prefill(x)
        return y

    def initial_cache(self, batch_size):
        return {"sum": ops.zeros((batch_size, 8), self.compute_dtype)}

    def step(self, x, cache):
        y = x + 0.5 * cache["sum"]
        return y, {"sum": y}

    def compute_output_shape(self, input_shape):
        return input_shape


def test_any_backbone_that_streams():
    model = make(backbone=LeakySum())
    generated = model.generate(PROMPT, 8, sampler="greedy")
    np.testing.assert_array_equal(generated, rerun_greedily(model, PROMPT, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1, 2], []]}, r"none empty.*\[2, 0\]"),
        ({"prompts": []}, "at least one"),
        ({"prompts": np.zeros((2, 0), "int32")}, r"none empty.*\[0, 0\]"),
        ({"prompts": np.array([1, 2])}, "rows of token ids"),
        ({"prompts": [[1, 2], ["a"]]}, "must be integers"),
        ({"prompts": [[1, SIZE]]}, r"\[0, 11\)"),
        ({"prompts": [[0.5]]}, "integers"),
        ({"prompts": "abc"}, "no vocabulary"),
        ({"max_length": 3}, "greater than its 3 tokens. Received: max_length=3"),
        ({"prompts": [[1], [1, 2, 3, 4, 5, 6]]}, "greater than its 6 tokens"),
        ({"sampler": "speculative"}, "second, smaller model.*only goes forward"),
        ({"sampler": "nucleus"}, r"'top_p'\].*Received: sampler='nucleus'"),
        ({"sampler": samplers.TopKSampler(k=12)}, "k=12 tokens, but the vocabulary has 11"),
        ({"sampler": samplers.BeamSampler(return_all_beams=True)}, "return_all_beams"),
        ({"stop_tokens": SIZE}, r"\[0, 11\)"),
        ({"stop_tokens": "a"}, "no vocabulary"),
    ],
)
def test_errors(model, arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        model.generate(**({"prompts": PROMPT, "max_length": 6} | arguments))


def test_text_errors(speller):
    with pytest.raises(ValueError, match="unknown to the vocabulary.*'X'"):
        speller.generate("aX", 6)
    with pytest.raises(ValueError, match="single tokens. Received: 'ab', 2 tokens"):
        speller.generate("a", 6, stop_tokens=["a", "ab"])
