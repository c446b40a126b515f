"""What a language model needs to stream and to generate."""

import keras

from trellis_keras.generation import loops, reading, text
from trellis_keras.generation.samplers import get_sampler, one_at_a_time


class Generation:
    """What `LanguageModel` adds to stream and to generate.

    The model has `embedding`, `backbone`, `head` and `vocabulary`; the backbone follows the
    protocol of `layers.streaming`.
    """

    def initial_cache(self, batch_size):
        """Returns the backbone's cache before the first token, see `layers.streaming`.

        Raises:
            ValueError: The backbone does not stream, or the model is not built.
        """
        reading.check_streams(self)
        return self.backbone.initial_cache(batch_size)

    def step(self, tokens, cache):
        """Reads one token per row; its work does not depend on how many came before.

        Not compiled by itself: `layers.streaming.compiled_step(model)` is.

        Args:
            tokens: Integer tensor (batch,).
            cache: What `initial_cache`, `step` or `prefill` returned.

        Returns:
            Log-probabilities (batch, V) of the next token, and the new cache.

        Raises:
            ValueError: The backbone does not stream, the model is not built, or tokens and cache
                do not fit.

        Example:

        >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
        >>> model.build((None, None))
        >>> log_probs, cache = model.step(np.array([1, 5]), model.initial_cache(2))
        >>> tuple(log_probs.shape)
        (2, 7)
        """
        hidden, cache = reading.step(self, tokens, cache)
        return self.head(hidden), cache

    def prefill(self, tokens, cache=None):
        """Reads a whole prompt by one forward pass.

        Args:
            tokens: Integer tensor (batch, time).
            cache: The cache to go on from. Default: the initial one.

        Returns:
            Log-probabilities (batch, V) of the token after the last, and the cache.

        Raises:
            ValueError: As `step`, or no tokens.
        """
        hidden, cache = reading.prefill(self, tokens, cache)
        return self.head(hidden[:, -1]), cache

    def generate(self, prompts, max_length, sampler="top_p", *, seed=None, stop_tokens=None):
        """Goes on from prompts, token by token.

        The prompts may differ in length: of each, as many tokens as the shortest has are read in
        one forward pass, the rest of the longer ones while the others are written. With a sampler
        that draws no random numbers each row is what it would be alone (but for rounding, where
        two tokens are equally good); the other samplers draw for all rows at once.

        Compiled, in seconds, and kept with the model are the forward pass, for each new batch size
        or length of the shortest prompt, and the loop, for each new batch size, `max_length`, set
        of stop tokens, and kind or settings of the sampler (one of a class of your own is known
        as an object: make a new one for other settings). Other prompts, seeds and weights compile
        nothing. What was used longest ago goes when there are more than 16.

        Args:
            prompts: A string or a list of strings (for a model with a vocabulary), or rows of
                token ids, such as integers (batch, time). Each has at least one token.
            max_length: Length in tokens of each row of the result. It counts the row's prompt,
                so it is greater than the length of the longest one.
            sampler: `"greedy"`, `"random"`, `"top_k"`, `"top_p"`, `"beam"` or `"contrastive"`,
                with Keras-NLP's defaults, or a `keras_nlp.samplers.Sampler`, for instance
                `TopPSampler(p=0.9, temperature=0.8)`. Beam search ranks texts by the sum of
                their tokens' log-probabilities up to the first stop token.
            seed: Integer; the same one gives the same text. Default: a string's sampler starts
                at random, a sampler object goes on from where it is.
            stop_tokens: Token or list of tokens (ids, or strings of one token each) after which
                a row ends. Default: none.

        Returns:
            Strings if the prompts were strings, else ids (batch, length), the prompt included.
            A row ends with its first stop token after the prompt; ids of shorter rows are filled
            up with it.

        Raises:
            ValueError: No or empty prompts, unknown tokens, `max_length` not greater than the
                longest prompt, a sampler that does not exist or needs what the model lacks (the
                speculative one: a draft model, and a cache that goes back to an earlier token),
                or a backbone that does not stream.

        Example:

        >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
        >>> model.build((None, None))
        >>> model.generate([[1, 2], [3, 4, 5]], max_length=10, sampler="greedy").shape
        (2, 10)
        """
        reading.check_streams(self)
        rows, is_text = text.encode_prompts(self, prompts)
        given = text.pad(rows, max_length)
        stop = text.stop_ids(self, stop_tokens)
        sampler = get_sampler(sampler, self.vocabulary_size)
        _set_seed(sampler, seed)
        generated = loops.sample(self, given, sampler, stop)
        lengths = text.lengths(generated, given, stop)
        if not is_text:
            return text.fill_up(generated, lengths)
        ended = zip(generated, lengths, strict=True)
        texts = [self.vocabulary.decode(row[:length]) for row, length in ended]
        return texts[0] if isinstance(prompts, str) else texts

    def generate_stream(self, prompt, max_length, sampler="top_p", *, seed=None, stop_tokens=None):
        """Goes on from one prompt and hands out the result while it grows.

        Joined, the pieces are what `generate` returns for the same arguments; the first of them
        are the prompt's. Samplers that choose token by token (greedy, random, top_k, top_p, and
        your own with a `get_next_token`) yield each token as soon as it is chosen; beam and
        contrastive search, which weigh continuations against each other, yield everything after
        the prompt at the end. For the former one step is compiled, whatever `max_length` is; for
        the rest see `generate`.

        Args:
            prompt: A string, or token ids (time,).
            max_length, sampler, seed, stop_tokens: As in `generate`.

        Returns:
            An iterator over pieces of text, none empty (a character in several bytes comes
            whole), or for token ids over integers. It may be left at any point.

        Raises:
            ValueError: As `generate`, before the first piece.

        Example:

        >>> model = LanguageModel(7, 4, TrellisLayer(units=6, depth=3, output_units=4))
        >>> model.build((None, None))
        >>> len(list(model.generate_stream([1, 2], max_length=5)))
        5
        """
        reading.check_streams(self)
        (row,), is_text = text.encode_prompts(self, [prompt])
        given = text.pad([row], max_length)
        stop = text.stop_ids(self, stop_tokens)
        sampler = get_sampler(sampler, self.vocabulary_size)
        tokens = _tokens(self, row, given, sampler, seed, stop)
        return text.pieces(self.vocabulary, tokens) if is_text else tokens


def _set_seed(sampler, seed):
    if seed is not None:
        for state in sampler.variables:
            state.assign(keras.random.SeedGenerator(seed).state)


def _tokens(model, prompt, given, sampler, seed, stop):
    """Yields the ids of a prompt, and then those that follow."""
    # Not before the first is asked for: two iterators may share a sampler.
    _set_seed(sampler, seed)
    yield from prompt.tolist()
    if one_at_a_time(sampler):
        yield from loops.stream(model, prompt, given.shape[1], sampler, stop)
        return
    ids = loops.sample(model, given, sampler, stop)
    (length,) = text.lengths(ids, given, stop)
    yield from ids[0, len(prompt) : length].tolist()
