"""Equal groups of statements become a function."""

import numpy as np

from keras_streams.statements import Function, Statement, grouped

NONE = frozenset[int]()
FIRST = Statement("copy(x);", "net", NONE)
NAMES = {f"level_{level}_kernel": "const float *" for level in range(6)}
NAMES |= {f"ring_{level}": "int " for level in range(6)}


def levels(count):
    """The statements of some levels."""
    for level in range(count):
        work, ring = f"s->work + {8 * (level % 2)}", f"s->states + ring_{level} + s->heads[{level}]"
        for text in (
            f"product_4({work}, NULL, {ring}, level_{level}_kernel, 4);",
            f"each_tanh_4({work}, {work});",
            f"memcpy({ring}, {work}, 4 * sizeof(float));",
        ):
            yield Statement(text, f"net/level_{level}", NONE)


def test_groups_that_differ_in_numbers_and_names_are_a_function():
    start, function, end = grouped([FIRST, *levels(6), FIRST], NAMES)
    assert (start, end) == (FIRST, FIRST)
    assert isinstance(function, Function)
    kinds = {"work": "int ", "ring": "int ", "head": "int ", "kernel": "const float *"}
    assert function.parameters == kinds
    assert function.calls[3] == ("8", "ring_3", "3", "level_3_kernel")
    assert [s.text for s in function.body] == [
        "product_4(s->work + work, NULL, s->states + ring + s->heads[head], kernel, 4);",
        "each_tanh_4(s->work + work, s->work + work);",
        "memcpy(s->states + ring + s->heads[head], s->work + work, 4 * sizeof(float));",
    ]
    assert function.body[0].scope == "net/level_0 to net/level_5"


def test_inputs_and_outputs_are_arguments_of_a_function():
    names = {"x": "const float *", "y": "float *"}
    texts = [f"copy_{name}(y + {i}, x);" for i in range(3) for name in "abcd"]
    (function,) = grouped([Statement(text, "net", NONE) for text in texts], names)
    assert function.parameters == {"y": "float *", "y_2": "int ", "x": "const float *"}
    assert function.calls[2] == ("y", "2", "x")


def test_a_parameter_has_another_name_than_a_table_that_all_groups_read():
    texts = [f"copy_{name}(kernel + {i});" for i in range(3) for name in "abcd"]
    statements = [Statement(text, "net", NONE) for text in texts]
    (function,) = grouped(statements, {"kernel": "const float *"})
    assert function.body[0].text == "copy_a(kernel + kernel_2);"


def test_a_function_begins_with_a_layer():
    *_, function = grouped([*levels(6)][1:], NAMES)
    assert function.body[0].text.startswith("product") and len(function.calls) == 5


def test_few_or_different_statements_stay():
    kinds = [Statement(f"f_{n}();", "net", NONE) for n in np.random.default_rng(0).permutation(20)]
    for statements in ([*levels(2)], kinds):
        assert grouped(statements, NAMES) == statements
