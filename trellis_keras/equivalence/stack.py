"""Which recurrent layers Theorem 1 covers: the checks of a stack, and its cells."""

import dataclasses

import keras

from trellis_keras.layers import StackedRNN, gates
from trellis_keras.layers.rnn import DROPOUTS


@dataclasses.dataclass(frozen=True)
class Kind:
    """A recurrent network whose step has the form of Eq. (4).

    Attributes:
        cell: Name of the TrellisLayer's gated activation.
        gates: Its class.
        layer: Keras' layer.
        keras_cell: That layer's cell.
        blocks: Gate blocks of its kernels.
    """

    cell: str
    gates: type
    layer: type
    keras_cell: type
    blocks: int


KINDS = (
    Kind("rnn", gates.RNNGates, keras.layers.SimpleRNN, keras.layers.SimpleRNNCell, 1),
    Kind("lstm", gates.LSTMGates, keras.layers.LSTM, keras.layers.LSTMCell, 4),
    Kind("gru", gates.GRUGates, keras.layers.GRU, keras.layers.GRUCell, 3),
)
_LAYERS = (keras.layers.RNN, *(kind.layer for kind in KINDS))
_FIXED = {"activation": keras.activations.tanh, "recurrent_activation": keras.activations.sigmoid}


def is_recurrent(layer):
    """Whether a layer is, or holds, recurrent layers of Keras."""
    wrapped = [getattr(layer, name, None) for name in ("layer", "forward_layer")]
    kinds = (keras.layers.RNN, StackedRNN)
    return any(isinstance(part, kinds) for part in (layer, *wrapped))


@dataclasses.dataclass(frozen=True)
class Stack:
    """Recurrent layers, one above the other, that are known to convert.

    Attributes:
        kind: Their `Kind`.
        cells: Their cells, the bottom one first.
        return_sequences, return_state: Of the top layer.
    """

    kind: Kind
    cells: list
    return_sequences: bool
    return_state: bool


def read(layers):
    """Checks a list of layers, the bottom one first, and returns their `Stack`.

    Raises:
        ValueError: Something in it is no part of an RNN of the form of Eq. (4).
    """
    layers = [layer for layer in layers if not is_idle(layer)]
    if not layers:
        raise ValueError("There is no recurrent layer to convert. Received: an empty stack.")
    for layer in layers:
        _check_layer(layer, is_top=layer is layers[-1])
    cells = [cell for layer in layers for cell in _cells(layer.cell)]
    kinds = [_kind(cell) for cell in cells]
    if len(set(kinds)) > 1:
        names = [type(cell).__name__ for cell in cells]
        raise ValueError(
            "All recurrent layers must be of one kind: the levels of a TrellisNet share one gated "
            f"activation f (Eq. 3). Received: {names}"
        )
    for cell in cells:
        _check_cell(cell)
    _check_fit(cells)
    return Stack(kinds[0], cells, layers[-1].return_sequences, layers[-1].return_state)


def is_idle(layer):
    """Whether a layer is a dropout that drops nothing."""
    return isinstance(layer, DROPOUTS) and layer.rate == 0


def _check_layer(layer, is_top):
    reason = _why_not(layer, is_top)
    if reason:
        name = getattr(layer, "name", layer)
        raise ValueError(f"{reason} Received: {name} ({type(layer).__name__})")


def _why_not(layer, is_top):
    """Why a layer cannot be converted, or None."""
    if isinstance(layer, DROPOUTS):
        return _no_dropout(f"rate={layer.rate}")
    if isinstance(layer, keras.layers.Bidirectional):
        return (
            "A Bidirectional layer reads the future: its outputs depend on all later inputs, those "
            "of a TrellisNet on earlier ones only."
        )
    if type(layer) not in _LAYERS:
        return (
            "Only keras.layers.SimpleRNN, LSTM and GRU, and keras.layers.RNN of their cells, one "
            "straight above the other, are known to be of the form of Eq. (4)."
        )
    if not layer.built:
        return "The layer is not built, so it has no weights to convert: build it or call it first."
    if layer.go_backwards:
        return (
            "A layer with go_backwards=True reads the future: its outputs depend on later inputs, "
            "those of a TrellisNet on earlier ones only."
        )
    if layer.stateful:
        return (
            "Keras' stateful=True has one state for training and validation, which a TrellisLayer "
            "keeps apart. Put stateless layers into layers.StackedRNN(..., stateful=True), which "
            "does so too."
        )
    if not layer.return_sequences and not is_top:
        return (
            "A layer with return_sequences=False below another one hands on its last step only, "
            "but every layer of Eq. (4) reads all steps of the one below. Set "
            "return_sequences=True on it."
        )
    return None


def _no_dropout(received):
    return (
        "Dropout within a stack cannot be kept: a TrellisNet has one mask for all its levels, an "
        "RNN one for each of its steps or sequences (appendix B.1). Set the rates to 0 first: in "
        f"inference this changes nothing. Here: {received}."
    )


def _cells(cell):
    """The cells of a layer's cell, which may be several, the bottom one first."""
    if type(cell) is keras.layers.StackedRNNCells:
        return [part for inner in cell.cells for part in _cells(inner)]
    return [cell]


def _kind(cell):
    for kind in KINDS:
        if type(cell) is kind.keras_cell:
            return kind
    raise ValueError(
        "Only SimpleRNNCell, LSTMCell and GRUCell are known to be of the form of Eq. (4), in which "
        f"states enter through one matrix product. Received: {cell.name} ({type(cell).__name__})"
    )


def _check_cell(cell):
    rates = {name: getattr(cell, name) for name in ("dropout", "recurrent_dropout")}
    if any(rates.values()):
        raise ValueError(f"{_no_dropout(rates)} Received: {cell.name} ({type(cell).__name__})")
    for name, wanted in _FIXED.items():
        found = getattr(cell, name, wanted)
        if found is not wanted:
            raise ValueError(
                "The gated activations of a TrellisLayer have tanh and sigmoid, so the cells must "
                f'have activation="tanh" and recurrent_activation="sigmoid". Received: {name}='
                f"{keras.activations.serialize(found)!r} in {cell.name} ({type(cell).__name__})"
            )
    if not getattr(cell, "reset_after", True):
        raise ValueError(
            "A GRU with reset_after=False is not of the form of Eq. (4): it multiplies the state "
            "by the reset gate before its matrix product U(r * h), so that a product stands inside "
            "the gated activation. Train it with reset_after=True (Keras' default). Received: "
            f"{cell.name} ({type(cell).__name__})"
        )


def _check_fit(cells):
    policies = [cell.dtype_policy.name for cell in cells]
    if len(set(policies)) > 1:
        raise ValueError(
            f"The layers of a stack must have the same dtype policy. Received: {policies}"
        )
    for lower, upper in zip(cells, cells[1:], strict=False):
        if upper.kernel.shape[0] != lower.units:
            raise ValueError(
                "The layers must be given from the input upwards, each reading the one before. "
                f"Received: {upper.name}, which reads {upper.kernel.shape[0]} channels, above "
                f"{lower.name} with {lower.units} units"
            )
