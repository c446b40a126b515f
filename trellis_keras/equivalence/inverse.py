"""From a TrellisNet with the kernels of Theorem 1 back to an RNN."""

from trellis_keras.equivalence import kernels, stack
from trellis_keras.equivalence.truncated_rnn import check_structure, refuse_others
from trellis_keras.layers import TrellisLayer


def to_rnn(trellis):
    """Turns a TrellisNet with the kernels of Eq. (5) into an RNN (Bai et al. 2019, Theorem 1).

    The inverse of `to_trellis`: over windows of M = depth - L + 1 steps, L being the number of
    groups, the layers compute what the TrellisNet does. They themselves are not truncated.

    Args:
        trellis: Built `TrellisLayer` with the structure that `to_trellis` gives: L groups that
            start at levels 1..L, and weights in no other places than those of Eq. (5), by
            `kernel_structure="mixed_group"` or, in a dense kernel, because they are zero.

    Returns:
        List of L built `keras.layers.SimpleRNN`, `LSTM` or `GRU`, the bottom one first, with
        biases. Each returns all steps; the top one as the TrellisNet does. They return their states
        if it returns or carries its own, so that `layers.StackedRNN` takes them. (A GRU has two
        biases where their sum counts: the state's is zero there.)

    Raises:
        ValueError: Another structure, which the message names.

    Example:

    >>> gru = keras.layers.GRU(4, return_sequences=True)
    >>> gru.build((None, None, 3))
    >>> (again,) = to_rnn(trellis_keras.equivalence.to_trellis(gru, horizon=20))
    >>> x = np.random.normal(size=(2, 7, 3)).astype("float32")
    >>> np.allclose(again(x), gru(x), atol=1e-6)
    True
    """
    if not isinstance(trellis, TrellisLayer):
        raise ValueError(f"`to_rnn` takes a TrellisLayer. Received: {trellis!r}")
    if not trellis.built:
        raise ValueError(f"{trellis.name} is not built, so it has no weights to convert.")
    kind = _kind(trellis)
    check_structure(trellis)
    refuse_others(
        trellis,
        dropout=(trellis.dropout, 0),
        weight_dropout=(trellis.weight_dropout, 0),
        return_aux=(trellis.return_aux, False),
        output_length=(trellis.output_length, None),
    )
    groups = trellis.groups or [trellis.units]
    weights = kernels.split(kernels.of_trellis(trellis, kind.blocks), groups)
    return [_layer(trellis, kind, w, is_top=w is weights[-1]) for w in weights]


def _layer(trellis, kind, weights, is_top):
    channels, _, units = weights.kernel.shape
    layer = kind.layer(
        units,
        return_sequences=trellis.return_sequences or not is_top,
        return_state=trellis.return_state or trellis.stateful,
        dtype=trellis.dtype_policy,
    )
    layer.build((None, None, channels))
    kernels.set_cell(layer, weights)
    return layer


def _kind(trellis):
    for kind in stack.KINDS:
        if type(trellis.cell) is kind.gates:
            return kind
    raise ValueError(
        f"Keras has no recurrent layer for this gated activation. Received: cell={trellis.cell!r}"
    )
