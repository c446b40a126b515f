"""Endpoints of classifiers, regressors and models of music."""

import keras
from keras import ops

from trellis_keras.models import PolyphonicModel, SequenceClassifier
from trellis_keras.serving.endpoint import Endpoint, Field
from trellis_keras.serving.state import State, streams


def endpoints(model):
    """Returns the list of a `SequenceModel`'s endpoints."""
    channels, units = model.input_spec.axes[-1], model.head.units
    name, meaning, activation = _output(model)

    def outputs(logits):
        return {name: ops.cast(activation(logits), "float32")}

    def serving_default(inputs):
        return outputs(model(inputs, training=False))

    steps = ("batch", "time") if model.per_step else ("batch",)
    found = [
        Endpoint(
            "serving_default",
            "What the model says of whole sequences" + ", at each step." * model.per_step,
            {"inputs": Field("float32", ("batch", "time", channels), "The sequences.")},
            {name: Field("float32", (*steps, units), meaning)},
            serving_default,
        )
    ]
    if not streams(model.backbone):
        return found
    state = State(model.backbone)

    def step(inputs, **tensors):
        cache = state.cache(tensors, ops.shape(inputs)[0])
        logits, cache = model.step(inputs, cache)
        return outputs(logits) | state.flat(cache)

    step = Endpoint(
        "step",
        "Reads one step, and says what the model would if the sequence ended with it.",
        {"inputs": Field("float32", ("batch", channels), "One step of each row."), **state.fields},
        {name: Field("float32", ("batch", units), meaning), **state.fields},
        step,
    )
    return [*found, state.endpoint(), step]


def _output(model):
    """The output's name, its meaning, and the function that makes it of the head's output."""
    if isinstance(model, SequenceClassifier):
        return "probabilities", "Probabilities of the classes, which add up to 1.", ops.softmax
    if isinstance(model, PolyphonicModel):
        meaning = "Probability of each key, by itself, to sound in the next frame."
        return "probabilities", meaning, ops.sigmoid
    return "predictions", "The predicted numbers.", keras.activations.linear
