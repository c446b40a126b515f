"""Checks of arguments that several modules share."""

import operator


def checked_int(name, value, minimum):
    """`value` as an integer of at least `minimum`, else a `ValueError` that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < minimum:
        raise ValueError(f"`{name}` must be an integer >= {minimum}. Received: {name}={value!r}")
    return number
