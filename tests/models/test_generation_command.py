"""The command `generate`: what a terminal shows, and when."""

import functools

import pytest

from trellis_keras.data.vocabulary import Vocabulary

samplers = pytest.importorskip("keras_nlp").samplers


class Speaker:
    """Stands for a run's model: notes what it is asked for, and says what it is told to."""

    vocabulary = Vocabulary.from_text("ab .", unit="character")
    vocabulary_size = 4

    def __init__(self):
        self.asked = []
        self.pieces = ["a", "b", "."]

    def generate_stream(self, prompt, max_length, sampler, **options):
        self.asked.append({"prompt": prompt, "max_length": max_length, **options})
        self.sampler = sampler
        return iter(self.pieces)


@pytest.fixture
def speaker(monkeypatch):
    speaker = Speaker()
    monkeypatch.setattr("trellis_keras.zoo.run.load_best", lambda run, kind: speaker)
    return speaker


@pytest.fixture
def generate(command, tmp_path):
    """`generate("--seed", 1)`: exit status, standard output and errors."""
    (tmp_path / "recipe.json").touch()
    return functools.partial(command, "generate", tmp_path)


def test_what_the_model_is_asked_for(generate, speaker):
    status, out, err = generate(
        "--prompt", "a", "--prompt", "bab", "--length", 5, "--stop", ".", "--stop", "a", "--seed", 3
    )  # fmt: skip
    assert (status, out, err) == (0, "ab.\n\nab.\n", "")
    options = {"seed": 3, "stop_tokens": [".", "a"]}
    assert speaker.asked == [
        {"prompt": "a", "max_length": 6, **options},
        {"prompt": "bab", "max_length": 8, **options},
    ]


def test_a_terminal_executes_nothing(generate, speaker):
    """A foreign vocabulary may have control characters."""
    speaker.pieces = ["a\tb\n", "\x1b]0;title\x07", "\x9b2J\x7f\r", "\u202e\u00e9"]
    out = generate("--prompt", "a")[1]
    assert out == "a\tb\n\\x1b]0;title\\x07\\x9b2J\\x7f\\r\\u202e\u00e9\n"


def test_an_interruption_ends_the_line_and_nothing_else_is_said(generate, speaker):
    def pieces():
        yield "ab"
        raise KeyboardInterrupt

    speaker.pieces = pieces()
    assert generate("--prompt", "a") == (130, "ab\n", "")


@pytest.mark.parametrize(
    ("options", "kind", "settings"),
    [
        ([], "TopPSampler", {"p": 0.9, "temperature": 0.8}),
        (["--top-p", 0.5, "--temperature", 0], "TopPSampler", {"p": 0.5, "temperature": 0.0}),
        (["--sampler", "top_k", "--top-k", 3], "TopKSampler", {"k": 3, "temperature": 0.8}),
        (["--sampler", "random"], "RandomSampler", {"temperature": 0.8}),
        (["--sampler", "greedy"], "GreedySampler", {}),
        (["--sampler", "beam", "--beams", 2], "BeamSampler", {"num_beams": 2}),
        (["--sampler", "contrastive"], "ContrastiveSampler", {"k": 4}),
    ],
)
def test_samplers(generate, speaker, options, kind, settings):
    status, _, err = generate("--prompt", "a", *options)
    assert status == 0, err
    assert type(speaker.sampler) is getattr(samplers, kind)
    config = speaker.sampler.get_config()
    assert {name: config[name] for name in settings} == settings
    whole = kind in ("BeamSampler", "ContrastiveSampler")
    assert ("appear at the end" in err) == whole
