"""What a served model can be asked: endpoints with named, typed inputs and outputs.

An endpoint is a pure function of tensors. It reads the model's weights; whatever else it has to
know comes in, and whatever it has to remember goes out: a stream's state is the client's.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from trellis_keras.serving import checks


@dataclasses.dataclass(frozen=True)
class Field:
    """An input or an output.

    Attributes:
        dtype: Name of its dtype.
        shape: Tuple of sizes; a name, such as `"batch"`, stands for any size.
        meaning: One line on what it holds.
        example: Of an input: the value that fills it in a request that only tries it out.
    """

    dtype: str
    shape: tuple
    meaning: str
    example: object = 0

    def spec(self, name):
        """Returns the `tf.TensorSpec` of this name."""
        import tensorflow as tf

        sizes = [None if isinstance(size, str) else size for size in self.shape]
        return tf.TensorSpec(sizes, self.dtype, name)

    def filled(self):
        """Returns an array of the example, with 1 for each size that is not fixed."""
        sizes = [1 if isinstance(size, str) else size for size in self.shape]
        dtype = object if self.dtype == "string" else self.dtype
        return np.full(sizes, self.example, dtype)


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A function that a served model offers.

    Attributes:
        name: Its name.
        meaning: One line on what it does.
        inputs, outputs: Dicts from name to `Field`.
        function: Takes the inputs, tensors, as keyword arguments and returns a dict of the outputs.
        check: Takes the inputs likewise, and returns a list of assertions on their values.
        draws: Whether it draws random numbers, from nothing but its inputs.
        tables: The lookup tables that the function reads.
    """

    name: str
    meaning: str
    inputs: dict
    outputs: dict
    function: Callable
    check: Callable = lambda **inputs: []
    draws: bool = False
    tables: tuple = ()

    def input_specs(self):
        """Returns a dict from name to `tf.TensorSpec`."""
        return {name: field.spec(name) for name, field in self.inputs.items()}

    def checked(self, **inputs):
        """`function` of what `check` lets pass and of as many rows in all inputs.

        The outputs have the shapes that their fields say.
        """
        rows = [inputs[name] for name, field in self.inputs.items() if "batch" in field.shape]
        assertions = [checks.same_rows(rows), *self.check(**inputs)]
        inputs = {name: checks.after(assertions, value) for name, value in inputs.items()}
        outputs = self.function(**inputs)
        return {
            name: checks.shaped(outputs[name], self.outputs[name].spec(name)) for name in outputs
        }

    def example(self):
        """Returns arrays that make a small request, a dict from name to array."""
        return {name: field.filled() for name, field in self.inputs.items()}
