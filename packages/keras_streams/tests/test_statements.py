"""Equal groups of statements become a function."""

import numpy as np

from keras_streams.statements import Code, Function, Number, Place, Statement, grouped

NONE = frozenset[int]()


def group(level):
    """The statements of a level."""
    work = Place("s->work", "", 8 * (level % 2), "float")
    kernel = Place("", f"level_{level}_kernel", 0, "float")
    ring = Code("%s + s->heads[%s] * 4", (Place("s->states", f"ring_{level}", 0, "float"),
                                          Number(level, "head")))  # fmt: skip
    for text, values in (
        ("product_4(%s, NULL, %s, %s, 4);", (work, ring, kernel)),
        ("each_tanh_4(%s, %s);", (work, work)),
        ("memcpy(%s, %s, 4 * sizeof(float));", (ring, work)),
    ):
        yield Statement(Code(text, values), f"net/level_{level}", NONE)


def test_groups_that_differ_in_places_are_a_function():
    first = Statement(Code("copy(%s);", (Place("x", "", 0, "float"),)), "net", NONE)
    statements = [first, *(s for level in range(6) for s in group(level)), first]
    start, function, end = grouped(statements)
    assert (start, end) == (first, first)
    assert isinstance(function, Function)
    assert function.parameters == {
        "kernel": "const float *",
        "work": "int ",
        "ring": "int ",
        "head": "int ",
    }
    assert function.calls[3] == ("level_3_kernel", "8", "ring_3", "3")
    assert [str(s.code) for s in function.body] == [
        "product_4(s->work + work, NULL, s->states + ring + s->heads[head] * 4, kernel, 4);",
        "each_tanh_4(s->work + work, s->work + work);",
        "memcpy(s->states + ring + s->heads[head] * 4, s->work + work, 4 * sizeof(float));",
    ]
    assert function.body[0].scope == "net/level_0 to net/level_5"


def test_a_function_begins_with_a_layer():
    statements = [s for level in range(6) for s in group(level)][1:]
    *_, function = grouped(statements)
    assert function.body[0].code.text.startswith("product") and len(function.calls) == 5


def test_few_or_different_statements_stay():
    statements = [s for level in range(2) for s in group(level)]
    assert grouped(statements) == statements
    rng = np.random.default_rng(0)
    kinds = [Statement(Code(f"f{n}();"), "net", NONE) for n in rng.permutation(20)]
    assert grouped(kinds) == kinds
