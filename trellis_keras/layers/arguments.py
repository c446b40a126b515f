"""Checks of constructor arguments, and what follows from them."""

import numbers

import keras
import numpy as np
from keras.src.backend import get_keras_mask  # on JAX it is no attribute of a traced array


def check_positive(**arguments):
    for name, value in arguments.items():
        if not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"`{name}` must be a positive integer. Received: {name}={value!r}")


def mask_of(inputs, mask):
    """The mask of a call: where states are passed too, Keras does not look for that of `inputs`."""
    return get_keras_mask(inputs) if mask is None else mask


def sequence_spec(layer, input_shape):
    """The `keras.layers.InputSpec` of a layer that is built for sequences.

    Raises:
        ValueError: The inputs are none. (Keras looks at a layer's spec once it is built.)
    """
    if len(input_shape) != 3:
        raise ValueError(
            f"{type(layer).__name__} needs inputs (batch, time, channels). "
            f"Received: input_shape={tuple(input_shape)}"
        )
    return keras.layers.InputSpec(ndim=3, axes={-1: input_shape[-1]})


def dilation_cycle(dilation_rate):
    single = isinstance(dilation_rate, numbers.Integral)
    cycle = [dilation_rate] if single else list(dilation_rate)
    if not cycle:
        raise ValueError("`dilation_rate` must not be empty.")
    for d in cycle:
        check_positive(dilation_rate=d)
    return [int(d) for d in cycle]


def aux_levels(depth, aux_every, aux_from):
    if aux_from not in ("bottom", "top"):
        raise ValueError(f'`aux_from` must be "bottom" or "top". Received: {aux_from!r}')
    if aux_every is None:
        return []
    check_positive(aux_every=aux_every)
    if aux_from == "bottom":
        levels = list(range(aux_every, depth + 1, aux_every))
    else:
        levels = sorted(range(depth - aux_every, 0, -aux_every))
    if not levels:
        raise ValueError(
            "`aux_every` leaves no auxiliary output: it must be at most the depth (less than it "
            f'with aux_from="top"). Received: aux_every={aux_every}, depth={depth}'
        )
    return levels


def initializer(identifier, seed, offset):
    """The authors' N(0, 0.01), with a seed of its own per weight, unless another is given."""
    if identifier is not None:
        return keras.initializers.get(identifier)
    seed = None if seed is None else seed + offset
    return keras.initializers.RandomNormal(stddev=0.01, seed=seed)


def sub_seed(seed, *path):
    """A seed for a part of a layer, unrelated to those of other parts and of other seeds."""
    if seed is None:
        return None
    return int(np.random.SeedSequence([seed % 2**32, *path]).generate_state(1)[0] >> 1)


def seeded(initializer, seed, *path):
    """An initializer with a seed of its own: one with a seed draws equal numbers each time.

    Args:
        initializer: Keras initializer. A seed that it has counts more than `seed`.
        seed: Integer or None.
        *path: Integers that tell the part from the others.
    """
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    own = config.get("seed", False)
    if own is not None and (isinstance(own, bool) or not isinstance(own, int)):
        return initializer  # it draws nothing, or other numbers each time
    base = seed if own is None else own
    if base is None:
        return initializer.clone()
    return type(initializer).from_config({**config, "seed": sub_seed(base, *path)})


def compatible(shape, wanted):
    """Whether two static shapes can be the same, None standing for any size."""
    return len(shape) == len(wanted) and all(
        a == b or a is None or b is None for a, b in zip(shape, wanted, strict=True)
    )


def check_length(time, longest_dilation, kept):
    """Refuses sequences that are too short for a dilation or for the outputs wanted of them."""
    if time is None:
        return
    if time < longest_dilation:
        raise ValueError(
            f"The input has {time} steps, fewer than the dilation {longest_dilation}: such a level "
            "would see nothing but padding. Use longer sequences or smaller dilations."
        )
    if kept is not None and kept > time:
        raise ValueError(
            f"`output_length` must be at most the length of the input. "
            f"Received: output_length={kept}, input length {time}"
        )
