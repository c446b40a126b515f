"""A recipe: a model's configuration and how to train it, as published or as overridden."""

import dataclasses
import json
import numbers
import os
import typing

import trellis_keras
from trellis_keras.zoo.training import PUBLISHED, Training


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A zoo model's configuration (`model`) and its training (`training`).

    Recipes do not change: `replace` returns a new one. They are written as JSON into a run's
    folder, from where the run can be repeated.

    Attributes:
        name: Name of the zoo's model.
        model: Its configuration.
        training: Its training.
        origin: The zoo's own recipe, from which `replace` has made this one. None: it is this one.
    """

    name: str
    model: typing.Any
    training: Training
    origin: typing.Any = dataclasses.field(default=None, compare=False, repr=False)

    def replace(self, **overrides):
        """Returns a recipe with other fields, of the model's or of the training's.

        Raises:
            ValueError: An unknown field, or a value of the wrong type, or fields that do not
                fit each other.
        """
        parts = {"model": {}, "training": {}}
        for field, value in overrides.items():
            part = next((p for p in parts if field in vars(getattr(self, p))), None)
            if part is None:
                raise ValueError(
                    f"{self.name}: unknown field {field!r}. It has: {', '.join(self.fields())}"
                )
            parts[part][field] = value
        model = self.model_with(**parts["model"])
        given = _absolute(self._checked("training", parts["training"]))
        training = self.training.replace(**given)
        new = Recipe(self.name, model, training, self.origin or self)
        if not new._same_benchmark(self):
            training = dataclasses.replace(training, **{**new._published(), **given})
            new = dataclasses.replace(new, training=training)
        new.training.check(new.model)
        return new

    def _same_benchmark(self, other):
        """Whether what is published of the other one is published of this one."""
        same_data = _data(self) == _data(other)
        return same_data and self.model.has_result_of(other.model)

    def _published(self):
        """The fields of the training that say what is published."""
        if self._same_benchmark(self.origin):
            return {name: getattr(self.origin.training, name) for name in PUBLISHED}
        return self.model.published_on(*_data(self))

    def model_with(self, **fields):
        """Returns the model's configuration with other fields, whatever it is trained with.

        Raises:
            ValueError: A value of the wrong type, or fields that do not fit each other.
        """
        return self.model.replace(**self._checked("model", fields))

    def _checked(self, part, fields):
        return {
            field: _checked(self.name, getattr(self, part), field, value)
            for field, value in fields.items()
        }

    def fields(self):
        """Returns {field: value} of the model's configuration and of the training."""
        return {**vars(self.model), **vars(self.training)}

    @property
    def segment(self):
        """Tokens of a text that one row of a batch reads."""
        return self.training.segment_of(self.model)

    @property
    def horizon(self):
        """How many of them are read but not counted."""
        return self.training.horizon_of(self.model)

    def load_data(self):
        """Loads the data set: a `data.Dataset`.

        Raises:
            ValueError: It is not what it should be, or not the one of `data_checksum`.
            FileNotFoundError: A file is missing.
        """
        return self.training.load(self.model)

    def with_data(self, loaded):
        """Returns the recipe bound to what `load_data` returned: its checksum, its vocabulary."""
        fields = self.training.model_fields(loaded)
        return self.replace(data_checksum=loaded.checksum, **fields)

    def stream(self, part, target_counting="all", shuffle=False):
        """Returns a part of the data as batches for `fit` or `evaluate`.

        The tokens of a text are those of the data's vocabulary, which the model must be built
        with: the recipe's `vocabulary_size` may be another as long as no run has set it.

        Args:
            part: `train`, `valid` or `test` of what `load_data` returned.
            target_counting: Of a text, see `data.TokenStream`.
            shuffle: Whether separate sequences come in a new order in each epoch, which needs
                `data.EpochOrder` among the callbacks. A text is always read in its order.
        """
        return self.training.stream(self.model, part, target_counting, shuffle)

    def callbacks(self):
        """Returns the published rules of learning rate and stopping as callbacks for `fit`."""
        return self.training.callbacks()

    def to_json(self):
        """Returns the recipe as JSON text.

        `derived` is for the reader: what follows from fields that are None.
        """
        fields = {
            "name": self.name,
            "trellis_keras": trellis_keras.__version__,
            "model": vars(self.model),
            "training": vars(self.training),
            "derived": {**self.model.derived(), **self.training.derived(self.model)},
        }
        return json.dumps(fields, indent=2) + "\n"

    def from_json(self, text):
        """Returns this recipe with the fields that `to_json` wrote."""
        fields = json.loads(text)
        return self.replace(**fields["model"], **fields["training"])


def _data(recipe):
    return recipe.training.data, recipe.training.data_options


_KINDS = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
    str: (str, "text"),
    dict: (dict, 'a mapping such as {"path": "my.txt"}'),
    type(None): (type(None), "none"),
}


def _checked(name, part, field, value):
    """Returns the value in the field's type, or raises."""
    wanted = typing.get_type_hints(type(part))[field]
    if typing.get_origin(wanted) is tuple:
        kind = typing.get_args(wanted)[0]
        if isinstance(value, (list, tuple)) and all(_is_a(kind, item) for item in value):
            return tuple(kind(item) for item in value)
        raise ValueError(f"{name}: `{field}` must be a list such as [2, 3]. Received: {value!r}")
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, dict):  # as they come back from a run's folder
        value = {k: list(v) if isinstance(v, tuple) else v for k, v in value.items()}
    kinds = typing.get_args(wanted) or (wanted,)
    for kind in kinds:
        if _is_a(kind, value):
            return value if value is None else kind(value)
    wording = " or ".join(_KINDS[kind][1] for kind in kinds)
    raise ValueError(f"{name}: `{field}` must be {wording}. Received: {value!r}")


def _is_a(kind, value):
    # True and False are integers in Python, but never meant as such.
    return isinstance(value, _KINDS[kind][0]) and (kind is bool or not isinstance(value, bool))


def _absolute(fields):
    """Makes paths independent of the working directory: a run is evaluated from other ones."""
    fields = dict(fields)
    if fields.get("data_dir") is not None:
        fields["data_dir"] = _absolute_path(fields["data_dir"])
    options = fields.get("data_options", {})
    if isinstance(options.get("path"), (str, os.PathLike)):
        fields["data_options"] = options | {"path": _absolute_path(options["path"])}
    return fields


def _absolute_path(path):
    return os.path.abspath(os.path.expanduser(path))
