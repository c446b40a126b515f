"""The samplers of Keras-NLP: which there are, and what they need."""

import json


def library():
    """Returns the module `keras_nlp.samplers`."""
    try:
        import keras_nlp
    except ImportError as error:
        raise ImportError(
            "`generate` takes its samplers from Keras-NLP. Install it with `pip install keras-nlp`."
        ) from error
    return keras_nlp.samplers


def get_sampler(sampler, vocabulary_size):
    """Returns a Keras-NLP sampler that the model can feed.

    Raises:
        ValueError: It does not exist, or needs what the model lacks.
    """
    samplers = library()
    by_name = {
        "beam": samplers.BeamSampler,
        "contrastive": samplers.ContrastiveSampler,
        "greedy": samplers.GreedySampler,
        "random": samplers.RandomSampler,
        "top_k": samplers.TopKSampler,
        "top_p": samplers.TopPSampler,
    }
    # Not in every version of the library.
    speculative = getattr(samplers, "SpeculativeSampler", ())
    if sampler == "speculative" or isinstance(sampler, speculative):
        raise ValueError(
            "The speculative sampler needs a second, smaller model, and caches that go back to an "
            "earlier token where its guesses are refused. A streaming cache only goes forward."
        )
    if isinstance(sampler, str) and sampler in by_name:
        sampler = by_name[sampler]()
    if not isinstance(sampler, samplers.Sampler):
        raise ValueError(
            f"`sampler` must be one of {sorted(by_name)} or a `keras_nlp.samplers.Sampler`. "
            f"Received: sampler={sampler!r}"
        )
    if getattr(sampler, "return_all_beams", False):
        raise ValueError("`generate` returns the best beam: `return_all_beams` must be False.")
    k = getattr(sampler, "k", None)
    if k is not None and k > vocabulary_size:
        raise ValueError(
            f"The sampler chooses among k={k} tokens, but the vocabulary has {vocabulary_size}."
        )
    return sampler


def one_at_a_time(sampler):
    """Whether the sampler only says how a token is chosen, and leaves the loop to its base."""
    return type(sampler).__call__ is library().Sampler.__call__


def compares_hidden_states(sampler):
    """Whether the sampler reads the hidden states of all past tokens."""
    return isinstance(sampler, library().ContrastiveSampler)


def key(sampler):
    """Samplers of the library with the same key sample alike, but for their seed."""
    kind = type(sampler)
    if not from_library(sampler):
        # A user's sampler need not describe itself by its config.
        return kind, id(sampler)
    config = {k: v for k, v in sampler.get_config().items() if k != "seed"}
    # NumPy's numbers are as good as Python's.
    return kind, json.dumps(config, sort_keys=True, default=lambda number: number.item())


def from_library(sampler):
    """Whether the sampler is one of Keras-NLP's own."""
    return type(sampler) in vars(library()).values()
