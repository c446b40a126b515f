"""What a language model asks of its backbone."""

from trellis_keras.layers.base import StatefulMixin


def check_backbone(backbone, aux_weight):
    """Refuses a backbone without one output for each step, or whose states would be mixed up.

    Args:
        backbone: A layer, see `LanguageModel`.
        aux_weight: The weight of the auxiliary losses.

    Raises:
        ValueError: The backbone has other options.
    """
    if aux_weight and not getattr(backbone, "return_aux", False):
        raise ValueError(
            "`aux_weight` needs a backbone with auxiliary outputs (return_aux=True). "
            f"Received: aux_weight={aux_weight}, backbone={backbone}"
        )
    if getattr(backbone, "return_state", False):
        raise ValueError("The backbone of a language model must have return_state=False.")
    if not getattr(backbone, "return_sequences", True):
        raise ValueError("The backbone of a language model must have return_sequences=True.")
    if getattr(backbone, "output_length", None) is not None:
        raise ValueError(
            "The backbone of a language model must have output_length=None: the targets say which "
            f"outputs count. Received: output_length={backbone.output_length}"
        )
    if getattr(backbone, "stateful", False) and not isinstance(backbone, StatefulMixin):
        raise ValueError(
            "A stateful backbone must keep the states of training and of validation apart, as "
            "a TrellisLayer and a StackedRNN do (Keras' own recurrent layers do not: put them "
            f"into a StackedRNN(..., stateful=True)). Received: {backbone}"
        )
