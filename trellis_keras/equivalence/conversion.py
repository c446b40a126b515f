"""From an RNN to the TrellisNet that computes the same function."""

import keras

from trellis_keras.equivalence import kernels, models, stack
from trellis_keras.equivalence.truncated_rnn import TruncatedRNN
from trellis_keras.layers import StackedRNN, base


def to_trellis(model_or_layers, horizon):
    """Turns an RNN into a TrellisNet (Bai et al. 2019, Theorem 1).

    Output t of the result is that of the RNN begun with zero states at step max(1, t - M + 1),
    M = `horizon`: at every step, by construction. (The zero inputs that definition 1 has before the
    first step would be the same only without biases.) With L layers the TrellisNet has M + L - 1
    levels, and its kernels have the sparsity of Eq. (5): per block of gates, group i (the states
    of layer i) is fed by its own past and by the present of group i - 1, or of x. So if level j
    holds states that began at t - j + i (Eq. 6), level j + 1 holds

        h^{(i)}_{t,s} = g(U_i h^{(i)}_{t-1,s} + K_i h^{(i-1)}_{t,s} + b_i),  s = t - j - 1 + i

    with h^{(0)} = x: a step of layer i (Eqs. 4, 7 to 10). For LSTMs g is the gated activation of
    Eq. (12), and the groups of c run along with those of h (Eq. 14).

    The proof needs h^{(i)}_{t,t'} = 0 for t' > t, and has it because g(0) = 0. With biases that
    fails: below level i, where its RNN has not begun, group i would hold states g(b_i), and all
    that follows would be wrong. So it is held at zero there (`TrellisLayer(group_starts=...)`).

    The result computes what the RNN computes, with weights of its own. What the RNN has for
    training only (initializers, regularizers, constraints, trainable=False) stays behind; a model
    is compiled as it was, with a new optimizer. A layer without bias becomes a group with a bias of
    zeros, which can be trained. To train all of the kernels go on with `to_dense`.

    Args:
        model_or_layers: Built layers, the bottom one first, as one of

            - a list of `keras.layers.SimpleRNN`, `LSTM` or `GRU` (reset_after=True), or of
              `keras.layers.RNN` of their cells, all of one kind, or one such layer alone;
            - a `layers.StackedRNN` of such, which may be stateful: then the result is, too, and
              refuses segments of more than M steps (appendix B.1, see `TruncatedRNN`);
            - a `keras.Sequential` or functional model with one such stack in it, or a model of
              `trellis_keras.models` around one.

        horizon: M, at least 1.

    Returns:
        A built `TruncatedRNN`, which is a `TrellisLayer`. It returns all steps or the last one, and
        its states or none, as the top layer does; these are the states of all layers, side by side.
        Of a model: a model of its kind with copies of its other layers.

    Raises:
        ValueError: A horizon below 1; layers that are not built; or something that is not an RNN of
            the form of Eq. (4), or that a TrellisNet cannot reproduce, which the message names:
            Bidirectional, go_backwards, return_sequences=False below another layer, other layers
            within the stack, masks, dropout within the stack, other activations, a GRU with
            reset_after=False, layers of several kinds, and Keras' stateful=True.

    Example:

    >>> lower = keras.layers.LSTM(8, return_sequences=True)
    >>> rnn = keras.Sequential([keras.Input((None, 3)), lower, keras.layers.LSTM(5)])
    >>> trellis = to_trellis(rnn, horizon=12)
    >>> x = np.random.normal(size=(2, 12, 3)).astype("float32")
    >>> np.allclose(trellis(x), rnn(x), atol=1e-6)
    True
    >>> trellis.layers[0].depth
    13
    """
    base.check_positive(horizon=horizon)
    if isinstance(model_or_layers, keras.Model):
        return models.convert(model_or_layers, lambda part: to_trellis(part, horizon))
    single = not isinstance(model_or_layers, (list, tuple))
    layers = [model_or_layers] if single else list(model_or_layers)
    if len(layers) == 1 and isinstance(layers[0], StackedRNN):
        (outer,) = layers
        names = ("return_sequences", "return_state", "stateful")
        layer = _convert(outer.layers, horizon, **{name: getattr(outer, name) for name in names})
        if outer.stateful:
            layer.state_cache.allocate_like(outer.state_cache)
        return layer
    return _convert(layers, horizon)


def _convert(layers, horizon, **options):
    rnn = stack.read(layers)
    widths = [cell.units for cell in rnn.cells]
    options = {"return_sequences": rnn.return_sequences, "return_state": rnn.return_state} | options
    layer = TruncatedRNN(
        sum(widths),
        int(horizon) + len(widths) - 1,
        output_units=widths[-1],
        cell=rnn.kind.cell,
        kernel_structure="mixed_group",
        groups=widths,
        group_starts=list(range(1, len(widths) + 1)),
        dtype=rnn.cells[0].dtype_policy,
        **options,
    )
    weights = [kernels.of_cell(cell, rnn.kind.blocks) for cell in rnn.cells]
    layer.build((None, None, weights[0].kernel.shape[0]))
    kernels.set_trellis(layer, kernels.join(weights))
    return layer
