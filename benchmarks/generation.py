"""The cost of a streamed or generated token: with a cache, or recomputing the window."""

from benchmarks.case import Case

# Keras and the package are imported by the functions: each variant runs in its own process.

VOCABULARY, WINDOW = 10_000, 110


def _model():
    from trellis_keras.zoo import trellisnet_ptb

    return trellisnet_ptb(aux_weight=0.0)


def _tokens(batch, time):
    import numpy as np

    return np.random.default_rng(0).integers(0, VOCABULARY, (batch, time)).astype("int32")


def loop(batch, prompt=16, new=48):
    """`generate`, prompt included in the time; only new tokens count."""

    def build():
        model, tokens = _model(), _tokens(batch, prompt)

        def step():
            model.generate(tokens, prompt + new, sampler="greedy")
            return new

        return step

    return build


def one_by_one(prompt=16, new=48):
    """`generate_stream`, which calls a compiled step for each token."""

    def build():
        model, tokens = _model(), _tokens(1, prompt)

        def step():
            list(model.generate_stream(tokens[0], prompt + new, sampler="greedy"))
            return new

        return step

    return build


def _last(model, tokens, cone=True):
    """Returns log-probabilities after a window; `cone` computes only what they depend on."""
    length = {"output_length": 1} if cone else {}
    hidden = model.backbone(model.embedding(tokens), training=False, **length)
    return model.head(hidden[:, -1])


def streamed(batch):
    """Cached steps in a compiled loop."""

    def build():
        from benchmarks.compiled import compiled_steps

        return compiled_steps(_model(), _tokens(batch, 16), VOCABULARY)

    return build


def all_outputs(batch):
    """Every output of a window."""

    def build():
        from benchmarks.compiled import compiled_window

        return compiled_window(_model(), _tokens(batch, WINDOW))

    return build


def last_output(batch):
    """The last output of a window, computing only what it depends on."""

    def build():
        from benchmarks.compiled import compiled_call

        model = _model()
        tokens = _tokens(batch, WINDOW)
        return compiled_call(lambda x, training: _last(model, x), model.variables, tokens)

    return build


def window(batch, cone=False):
    """A greedy token from a window; `cone` computes only what the last output depends on."""

    def build():
        import numpy as np
        from keras import ops

        from keras_streams.xla import compile_xla

        model = _model()

        def choose(tokens):
            return ops.argmax(_last(model, tokens, cone), axis=-1)

        choose = compile_xla(choose, model.variables)
        tokens = ops.convert_to_tensor(_tokens(batch, WINDOW))

        def step():
            np.asarray(choose(tokens))
            return 1

        return step

    return build


def _case(batch, variants):
    return Case(
        f"a generated token of trellisnet_ptb's shape, batch {batch}",
        {f"window of {WINDOW}": window(batch), **variants, "generate": loop(batch)},
        baseline=f"window of {WINDOW}",
    )


def _streaming_case(batch):
    return Case(
        f"a token of trellisnet_ptb's shape, batch {batch}",
        {
            f"window of {WINDOW}": all_outputs(batch),
            f"window of {WINDOW}, last output only": last_output(batch),
            "cached": streamed(batch),
        },
        baseline=f"window of {WINDOW}",
    )


CASES = {
    "streaming_1": _streaming_case(1),
    "streaming_8": _streaming_case(8),
    "generate_1": _case(
        1,
        {f"window of {WINDOW}, last output only": window(1, True), "generate_stream": one_by_one()},
    ),
    "generate_8": _case(8, {f"window of {WINDOW}, last output only": window(8, True)}),
}
