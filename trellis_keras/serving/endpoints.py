"""Which endpoints a model has."""

from trellis_keras.models import LanguageModel
from trellis_keras.models.sequence_model import SequenceModel
from trellis_keras.serving import language, sequences


def endpoints_of(model):
    """Returns a model's endpoints, a dict from name to `Endpoint`.

    Args:
        model: A built model of this package, without a carried history (`without_history`).

    Raises:
        ValueError: It is another model, or not built.

    Example:

    >>> model = zoo.tcn_adding(depth=2, filters=3)
    >>> sorted(endpoints_of(model))
    ['initial_state', 'serving_default', 'step']
    """
    check(model)
    make = language.endpoints if isinstance(model, LanguageModel) else sequences.endpoints
    return {endpoint.name: endpoint for endpoint in make(model)}


def check(model):
    """Refuses what has no endpoints.

    Raises:
        ValueError: The model is of another kind, or not built.
    """
    if not isinstance(model, (LanguageModel, SequenceModel)):
        raise ValueError(
            "Exported are a LanguageModel, SequenceClassifier, SequenceRegressor or "
            f"PolyphonicModel. Received: {model!r}"
        )
    if not model.built:
        shape = "None, None" + ", channels" * isinstance(model, SequenceModel)
        raise ValueError(f"Build the model before exporting it: model.build(({shape})).")
