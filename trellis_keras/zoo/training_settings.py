"""How a model is trained: optimizer, learning-rate schedule, stopping rule, batches.

The parts are objects of Keras and of `trellis_keras.training`, which check their own arguments.
"""

import dataclasses
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from trellis_keras import training
from trellis_keras.layers.checks import check_integer, check_positive, is_number

# The classes of each part by the names that options take. An untrusted recipe can create objects of
# these classes only.
PARTS: dict[str, dict[str, type]] = {
    "optimizer": {
        "sgd": training.SGD,
        "asgd": training.ASGD,
        "adam": training.Adam,
        "rmsprop": training.RMSprop,
        "adamw": keras.optimizers.AdamW,
        "lion": keras.optimizers.Lion,
        "nadam": keras.optimizers.Nadam,
        "keras_sgd": keras.optimizers.SGD,
        "keras_adam": keras.optimizers.Adam,
        "keras_rmsprop": keras.optimizers.RMSprop,
    },
    "schedule": {
        "PlateauDecay": training.PlateauDecay,
        "StepDecay": training.StepDecay,
        "ExponentialDecay": training.ExponentialDecay,
        "ASGDSwitch": training.ASGDSwitch,
    },
    "stopping": {"EarlyStopping": training.EarlyStopping},
    "growth": {"GrowingDepth": training.GrowingDepth},
}
_SGD = keras.optimizers.SGD
_COSINE = {"CosineDecay": keras.optimizers.schedules.CosineDecay}
_NAMES = {"global_clipnorm": "clip_norm"}  # arguments of Keras by the names of our optimizers
_NO_KERNEL = "^(?!.*kernel)"  # matches names without "kernel"


def one_cycle(
    peak: float, *, warmup_steps: int | None = None, decay_steps: int
) -> keras.optimizers.schedules.CosineDecay:
    """Returns a learning rate that falls from `peak` to 0 by a cosine.

    In `warmup_steps` before it, the learning rate rises linearly from 0.
    """
    cosine = keras.optimizers.schedules.CosineDecay
    if not warmup_steps:
        return cosine(peak, decay_steps)
    return cosine(0.0, decay_steps, warmup_target=peak, warmup_steps=warmup_steps)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Training:
    """How a model is trained.

    The objects are templates: each model gets copies of them. All their arguments are options of
    `zoo.recipe` and of `trellis-keras train`: those of the optimizer by their names (`clip_norm`
    also sets `global_clipnorm` of Keras' optimizers; `decay_steps` and `warmup_steps` are those of
    a cosine), those of the other objects after the name of the field, such as `schedule_factor`.

    Args:
        optimizer: An optimizer of `trellis_keras.training` or `keras.optimizers`, with a constant
            `learning_rate` or a `keras.optimizers.schedules.CosineDecay`. The `weight_decay` of
            Keras' optimizers applies to kernels only, not to biases and gains.
        schedule: `training.PlateauDecay`, `StepDecay`, `ExponentialDecay` or `ASGDSwitch`.
            Defaults to `None`: the learning rate is the optimizer's.
        stopping: `training.EarlyStopping`. Defaults to `None`, no early stopping.
        growth: `training.GrowingDepth`, for language models of TrellisNets. Defaults to `None`.
        batch_size: Positive integer, number of rows per batch.
        epochs: Positive integer, maximum number of epochs.
        stream: Dict of the other arguments of the batches. Language models: `sequence_length`, the
            number of tokens per row, and `context_length`, how many of them are read but not
            scored. Music: `transpose`, the probability of transposing a piece by -6 to 5
            semitones, and `note_dropout`, the fraction of notes dropped from the input but still
            predicted. Images: `shift`, the maximum shift in pixels, and for CIFAR-10 `flip`, the
            probability of mirroring an image.

    Example:

    >>> adam = keras.optimizers.Adam(2e-3, global_clipnorm=0.4)
    >>> Training(optimizer=adam, batch_size=32, epochs=10)
    Training(batch_size=32, epochs=10, optimizer='keras_adam', learning_rate=0.002, clip_norm=0.4)
    """

    optimizer: keras.optimizers.Optimizer
    schedule: keras.callbacks.Callback | None = None
    stopping: training.EarlyStopping | None = None
    growth: training.GrowingDepth | None = None
    batch_size: int
    epochs: int
    stream: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in PARTS:
            part = getattr(self, name)
            if part is not None or name == "optimizer":
                _check_class(name, part)
                _check_types(name, part)
        check_positive(batch_size=self.batch_size, epochs=self.epochs)
        own = _arguments(self.optimizer)
        rate = own["learning_rate"]
        if type(rate) not in (int, float) or not 0 < rate < math.inf:
            raise ValueError(f"`learning_rate` must be positive. Received: {rate!r}")
        # Keras' optimizers take any number, and do not clip with a norm of 0 or less.
        limited = {name: own.get(name) for name in ("clip_norm", "weight_decay", "warmup_steps")}
        given = {name: value for name, value in limited.items() if value is not None}
        for name, value in (given | dict(self.stream)).items():
            if not is_number(value) or not value >= 0 or (name == "clip_norm" and value == 0):
                wanted = "positive" if name == "clip_norm" else "0 or more"
                raise ValueError(f"`{name}` must be a number, {wanted}. Received: {value!r}")
        if own.get("use_ema") and not own["ema_overwrite_frequency"]:
            raise ValueError(
                "`use_ema` needs `ema_overwrite_frequency`: without it the averages reach the "
                "weights only after training, when the best model has been saved."
            )
        if self.schedule is not None and own["decay_steps"]:
            raise ValueError(
                "A `schedule` changes a constant learning rate. Set it to None, or omit "
                "`decay_steps`. "
                f"Received: {type(self.schedule).__name__}, decay_steps={own['decay_steps']}"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Training) and self.get_config() == other.get_config()

    def __repr__(self) -> str:
        return f"Training({', '.join(f'{k}={v!r}' for k, v in self.options().items())})"

    def make_optimizer(self) -> keras.optimizers.Optimizer:
        """Returns a new optimizer."""
        optimizer = _copy(self.optimizer)
        if optimizer.weight_decay:  # of Keras' optimizers; ours have `l2`
            optimizer.exclude_from_weight_decay(var_names=[_NO_KERNEL])
        return optimizer

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """Returns new callbacks for `fit`: the growing depth, the schedule, the stopping rule."""
        return [_copy(part) for part in (self.growth, self.schedule, self.stopping) if part]

    def get_config(self) -> dict[str, Any]:
        """Returns JSON values; objects are as `keras.saving.serialize_keras_object` writes them."""
        written: dict[str, Any] = {}
        for name in PARTS:
            if (part := getattr(self, name)) is not None:
                config = keras.saving.serialize_keras_object(part)
                written[name] = config | {"config": _config(part)}
        rest = {"batch_size": self.batch_size, "epochs": self.epochs, "stream": dict(self.stream)}
        return json.loads(json.dumps({**written, **rest}))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Training":
        """Rebuilds the settings from the result of `get_config`, which may be untrusted.

        A class that is not one of `PARTS`, or a wrong argument, raises ValueError, KeyError or
        TypeError.
        """
        written = {name: config[name] for name in PARTS if config.get(name) is not None}
        return cls(**{**config, **{k: _read(part, PARTS[k]) for k, part in written.items()}})

    def options(self) -> dict[str, Any]:
        """Returns {option: value}, without arguments of objects that have their default values."""
        found = self._plain()
        for name in PARTS:
            if (part := getattr(self, name)) is not None:
                found[name] = _name_of(name, part)
                found |= {_prefix(name) + k: v for k, v in _chosen(part).items()}
        return found

    def option_names(self, given: Mapping[str, Any]) -> list[str]:
        """Returns the options that `replace` takes, with the objects that are among `given`."""
        names = ["batch_size", "epochs", *PARTS]
        for name in PARTS:
            kind = self._class_of(name, given)
            names += [_prefix(name) + argument for argument in _defaults(kind)] if kind else []
        return names

    def replace(self, **given: Any) -> "Training":
        """Returns a copy with some options replaced.

        An object of another class keeps those arguments of the one that it replaces that differ
        from their defaults, if it has them. None removes an object.
        """
        names = ("batch_size", "epochs", "stream")
        fields: dict[str, Any] = {name: given[name] for name in names if name in given}
        for name in PARTS:
            kind, part = self._class_of(name, given), given.get(name, getattr(self, name))
            if kind is not None:
                known = _defaults(kind)
                part = getattr(self, name) if isinstance(part, str) else part
                new = {k: given[_prefix(name) + k] for k in known if _prefix(name) + k in given}
                if new or type(part) is not kind:
                    part = _make(name, kind, _inherited(kind, part) | new)
            fields[name] = part
        return dataclasses.replace(self, **fields)

    def changes(self, base: "Training") -> dict[str, Any]:
        """Returns the options with which `base.replace` returns these settings."""
        own, theirs = self._plain(), base._plain()
        found = {k: own.get(k) for k in {**theirs, **own} if own.get(k) != theirs.get(k)}
        for name in PARTS:
            part, before = getattr(self, name), getattr(base, name)
            if type(part) is not type(before):
                found[name] = None if part is None else _name_of(name, part)
            if part is not None:
                start = _defaults(type(part)) | _inherited(type(part), before)
                own = {k: _arguments(part)[k] for k in _defaults(type(part))}
                found |= {_prefix(name) + k: v for k, v in own.items() if v != start.get(k)}
        return found

    def _plain(self):
        return {"batch_size": self.batch_size, "epochs": self.epochs, **self.stream}

    def _class_of(self, name, given):
        """Returns the class of a part after `replace`, or None."""
        classes, part = PARTS[name], given.get(name, getattr(self, name))
        if isinstance(part, str):
            part = {name.lower(): kind for name, kind in classes.items()}.get(part.lower(), part)
            if isinstance(part, type):
                return part
        if part is None and name not in given and len(classes) == 1:
            (kind,) = classes.values()
            return kind if any(option.startswith(_prefix(name)) for option in given) else None
        if part is None:
            return None
        _check_class(name, part)
        return type(part)


def adamw_cycle(
    peak: float,
    *,
    weight_decay: float,
    clip_norm: float,
    warmup_steps: int,
    decay_steps: int,
    batch_size: int,
    epochs: int,
    growth: training.GrowingDepth | None = None,
    **stream: Any,
) -> Training:
    """Returns the settings of most fast recipes: AdamW with `one_cycle`."""
    rate = one_cycle(peak, warmup_steps=warmup_steps, decay_steps=decay_steps)
    adamw = keras.optimizers.AdamW(rate, weight_decay=weight_decay, global_clipnorm=clip_norm)
    return Training(
        optimizer=adamw, growth=growth, batch_size=batch_size, epochs=epochs, stream=stream
    )


def _prefix(name):
    return "" if name == "optimizer" else f"{name}_"


def _check_class(name, part):
    if type(part) not in PARTS[name].values():
        raise ValueError(f"`{name}` must be one of {', '.join(PARTS[name])}. Received: {part!r}")


def _check_types(name, part):
    """Raises ValueError for a word in place of a number or a truth value, which Keras would take.

    It annotates no arguments; the type of a default tells as much.
    """
    hints, defaults = typing.get_type_hints(type(part).__init__), _defaults(type(part))
    for argument, value in _arguments(part).items():
        hint = hints.get(argument, type(defaults.get(argument)))
        kinds = {*(typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint])}
        for wanted, of, is_right in (
            ("true or false", {bool}, isinstance(value, bool)),
            ("a number", {int, float}, is_number(value) and not math.isnan(value)),
            ("text", {str}, isinstance(value, str)),
        ):
            if value is not None and kinds & of and not is_right:
                option = _prefix(name) + argument
                raise ValueError(f"`{option}` must be {wanted}. Received: {value!r}")


def _name_of(name, part):
    return next(word for word, kind in PARTS[name].items() if kind is type(part))


# From an object to its options


def _chosen(part):
    """Returns {argument: value} of a part, without the default values of its class."""
    arguments, defaults = _arguments(part), _defaults(type(part))
    return {k: arguments[k] for k, default in defaults.items() if arguments[k] != default}


def _arguments(part):
    """Returns {argument: value} of a part, as options have them."""
    if part is None:
        return {}
    found = {_NAMES.get(name, name): value for name, value in _config(part).items()}
    if not isinstance(part, keras.optimizers.Optimizer):
        return found
    rate = found["learning_rate"]
    cycle = rate["config"] if isinstance(rate, dict) else {}
    found |= {name: cycle.get(name) for name in ("decay_steps", "warmup_steps")}
    if cycle:
        found["learning_rate"] = cycle.get("warmup_target") or cycle.get("initial_learning_rate")
        again = keras.saving.serialize_keras_object(_cycle(found))
        if again != rate:
            raise ValueError(
                "`learning_rate` must be a number, or a CosineDecay to 0 whose warm-up, if any, "
                f"starts from 0. Received: {rate}"
            )
    return found


def _config(part):
    """Returns the configuration of a part, without the name that Keras numbers.

    The learning rate has as few digits as identify it.
    """
    config = {name: value for name, value in part.get_config().items() if name != "name"}
    rate = config.get("learning_rate")
    if isinstance(rate, float) and np.float32(rate) == rate:  # as a float32 variable returns it
        config["learning_rate"] = float(str(np.float32(rate)))
    return config


# From options, or a configuration, to an object


def _defaults(kind):
    """Returns {argument: default} of a class, for the arguments that are options.

    `learning_rate` has no default.
    """
    parameters = inspect.signature(kind).parameters.values()
    named = [p for p in parameters if p.name not in ("name", "verbose", "kwargs")]
    found = {_NAMES.get(parameter.name, parameter.name): parameter.default for parameter in named}
    is_optimizer = issubclass(kind, keras.optimizers.Optimizer)
    names = ("learning_rate", "decay_steps", "warmup_steps") if is_optimizer else ()
    return found | dict.fromkeys(names)


def _inherited(kind, part):
    """Returns {argument: value} that an object of a class takes over from a part."""
    if part is None or type(part) is kind:
        return _arguments(part)
    kept = {k: v for k, v in _chosen(part).items() if k in _defaults(kind)}
    if issubclass(kind, _SGD) != isinstance(part, _SGD):
        kept.pop("learning_rate", None)  # the rate of SGD is not one of Adam
    return kept


def _make(part, kind, arguments):
    """Returns an object with the arguments of `_arguments`. Errors name them as options."""
    if issubclass(kind, keras.optimizers.Optimizer):
        rest = {k: v for k, v in arguments.items() if k not in ("decay_steps", "warmup_steps")}
        if arguments.get("learning_rate") is None:
            raise ValueError(f"`optimizer` {kind.__name__} needs its own `learning_rate`.")
        arguments = {**rest, "learning_rate": _cycle(arguments)}
        if "global_clipnorm" in inspect.signature(kind).parameters:
            arguments["global_clipnorm"] = arguments.pop("clip_norm", None)
    prefix, parameters = _prefix(part), inspect.signature(kind).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if missing := [name for name in required if name not in arguments]:
        options = " and ".join(f"`{prefix}{name}`" for name in missing)
        raise ValueError(f"`{part}` {kind.__name__} needs {options}.")
    try:
        return kind(**arguments)
    except ValueError as error:
        names = "|".join(arguments)
        raise ValueError(re.sub(rf"\b({names})(?=[`=])", rf"{prefix}\1", str(error))) from error
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def _cycle(arguments):
    """Returns the learning rate of the result of `_arguments`: a number, or a cosine."""
    rate, decay_steps = arguments["learning_rate"], arguments.get("decay_steps")
    rate = float(rate) if type(rate) is int else rate  # Keras takes no integer
    if decay_steps is None:
        if arguments.get("warmup_steps"):
            raise ValueError("`warmup_steps` needs `decay_steps`.")
        return rate
    warmup_steps = check_integer("warmup_steps", arguments.get("warmup_steps") or 0, minimum=0)
    check_positive(decay_steps=decay_steps)
    return one_cycle(rate, warmup_steps=warmup_steps, decay_steps=decay_steps)


def _copy(part):
    return type(part).from_config(_config(part))


def _read(written, classes):
    """Returns the object of a configuration, whose class must be one of `classes`."""
    known = {keras.saving.get_registered_name(kind): kind for kind in classes.values()}
    name = written["registered_name"] or written["class_name"]
    if name not in known:
        raise ValueError(f"expected {' or '.join(known) or 'no object'}. Received: {name!r}")
    within = {} if classes is _COSINE else _COSINE  # no deeper: nothing else has objects
    arguments = written["config"].items()
    config = {k: _read(v, within) if isinstance(v, dict) else v for k, v in arguments}
    return known[name].from_config(config)
