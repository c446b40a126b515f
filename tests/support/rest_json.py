"""The JSON of TensorFlow Serving's REST API, to arrays and back, for `rest_double.py`."""

import base64
import binascii
import json
import math

import numpy as np

MAX_BYTES = 8 * 2**20
MAX_QUOTED = 100

# Codes of errors, as in tf.errors.
INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED, INTERNAL = 3, 5, 8, 13


class Refused(Exception):
    """An error to tell the client, with its code."""

    def __init__(self, message, code=INVALID_ARGUMENT):
        super().__init__(message)
        self.code = code


def quoted(value):
    """The beginning of a value, for a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "..."


# Requests


def parsed(body):
    """Returns the JSON object in a body."""
    if len(body) > MAX_BYTES:
        raise Refused(f"The body has more than {MAX_BYTES} bytes.")
    try:
        request = json.loads(body.decode("utf-8", "surrogateescape"), parse_float=_finite)
    except RecursionError:
        raise Refused("JSON Parse error: nested too deep") from None
    except ValueError as error:
        raise Refused(f"JSON Parse error: {quoted(str(error))}") from None
    if not isinstance(request, dict):
        raise Refused(f"JSON Value: {quoted(request)} Is not object")
    return request


def _finite(text):
    if math.isinf(number := float(text)):
        raise ValueError(f"Number too big to be stored in double: {text}")
    return number


def named_columns(value, specs):
    """Returns the values by name of a request in columnar form."""
    if not isinstance(value, dict) or is_base64(value):
        if len(specs) > 1:
            raise Refused(
                "inputs is a plain value/list, but expecting an object as multiple input "
                "tensors required as per tensorinfo_map"
            )
        return dict.fromkeys(specs, value)
    for name in specs:
        if name not in value:
            raise Refused(f"Missing named input: {name} in 'inputs' object.")
    return value


def rows_to_columns(rows, specs):
    """Returns the values by name of a request in row form."""
    if not isinstance(rows, list):
        raise Refused("Expecting 'instances' to be an list/array")
    if not rows:
        raise Refused("No values in 'instances' array")
    objects = [isinstance(row, dict) and not is_base64(row) for row in rows]
    if not any(objects):
        if len(specs) > 1:
            raise Refused(
                "instances is a plain list, but expecting list of objects as multiple input "
                "tensors required as per tensorinfo_map"
            )
        return dict.fromkeys(specs, rows)
    if not all(objects):
        raise Refused("'instances' is a mix of objects and of values or lists")
    for index, row in enumerate(rows):
        if row.keys() != specs.keys():
            raise Refused(
                f"Failed to process element: {index} of 'instances' list. JSON object: "
                f"{quoted(row)} keys must be equal to: {','.join(sorted(specs))}"
            )
    return {name: [row[name] for row in rows] for name in specs}


def to_array(value, name, spec):
    """Turns nested lists into an array of the dtype of an input."""
    shape = []
    first = value
    while isinstance(first, list):
        shape.append(len(first))
        first = first[0] if first else None
    if len(shape) != len(spec.shape):
        raise Refused(
            f"Input {name} has {len(spec.shape)} axes. Received: a value with {len(shape)}"
        )
    values = [value]
    for level, size in enumerate(shape):
        for item in values:
            if not isinstance(item, list):
                raise Refused(
                    f"JSON Value: {quoted(item)} found at incorrect level: {level + 1} in the "
                    f"JSON DOM. Expected at level: {len(shape)}"
                )
            if len(item) != size:
                raise Refused(
                    f"Encountered list at unexpected size: {len(item)} at level: {level} "
                    f"expected size: {size}"
                )
        values = [element for item in values for element in item]
    convert = _CONVERTERS[spec.dtype.name](spec.dtype)
    values = [convert(item) for item in values]
    return np.array(values, spec.dtype.as_numpy_dtype).reshape(shape)


def is_base64(value):
    return isinstance(value, dict) and value.keys() == {"b64"} and isinstance(value["b64"], str)


def _integers(dtype):
    low, high = dtype.min, dtype.max

    def convert(value):
        # JSON's true is an int in Python, and no number here.
        if type(value) is not int or not low <= value <= high:
            raise _of_wrong_type(value, dtype)
        return value

    return convert


def _floats(dtype):
    # The floats skip over larger integers.
    exact, largest = 2 ** (np.finfo(dtype.as_numpy_dtype).nmant + 1), float(dtype.max)

    def convert(value):
        if type(value) is float:
            fits = not math.isfinite(value) or abs(value) <= largest
        elif type(value) is int:
            fits = abs(value) < exact
        else:
            raise _of_wrong_type(value, dtype)
        if not fits:
            raise Refused(
                f"Cannot convert JSON value: {quoted(value)} to {dtype.name} without loss of "
                "precision."
            )
        return value

    return convert


def _strings(dtype):
    def convert(value):
        if is_base64(value):
            try:
                return base64.b64decode(value["b64"], validate=True)
            except (binascii.Error, ValueError):
                raise Refused("Unable to base64 decode") from None
        if not isinstance(value, str):
            raise _of_wrong_type(value, dtype)
        try:
            return value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            message = "JSON Parse error: The surrogate pair in string is invalid."
            raise Refused(message) from None

    return convert


def _of_wrong_type(value, dtype):
    kind = type(value).__name__
    return Refused(
        f"JSON Value: {quoted(value)} Type: {kind} is not of expected type: {dtype.name}"
    )


# Functions of a dtype that return one which checks a value of JSON.
_CONVERTERS = {"int32": _integers, "int64": _integers, "string": _strings}
_CONVERTERS |= {"float32": _floats, "float64": _floats}


# Answers


def as_columns(outputs):
    """The outputs in columnar form. The name of an only one is left out."""
    values = {name: to_json(array, name) for name, array in outputs.items()}
    return next(iter(values.values())) if len(values) == 1 else values


def as_rows(outputs):
    """The outputs in row form."""
    for name, array in outputs.items():
        if not array.ndim:
            raise Refused(f"Tensor name: {name} has no shape information")
    sizes = {name: len(array) for name, array in outputs.items()}
    if len(set(sizes.values())) > 1:
        raise Refused(f"Tensors have inconsistent batch sizes: {sizes}")
    columns = [to_json(array, name) for name, array in outputs.items()]
    if len(columns) == 1:
        return columns[0]
    return [dict(zip(outputs, row, strict=True)) for row in zip(*columns, strict=True)]


def to_json(array, name):
    if array.dtype != object:
        return array.tolist()
    encode = _base64 if name.endswith("_bytes") else _text
    encoded = [encode(value) for value in array.ravel()]
    return np.array(encoded, object).reshape(array.shape).tolist()


def _text(value):
    return value.decode("utf-8", "surrogateescape")


def _base64(value):
    return {"b64": base64.b64encode(value).decode()}
