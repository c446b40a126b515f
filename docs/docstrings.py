"""Rewrites docstrings for the site: sections that Griffe does not know, as Markdown."""

import re

from griffe import Extension, Object


class Docstrings(Extension):
    """Examples become code blocks, and "Call arguments" a list."""

    def on_object(self, *, obj: Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Returns a docstring with blocks that begin with ">>>" as code, and call arguments as a list.

    >>> print(as_markdown("Call arguments:\\n    x: Tensor\\n        (batch, time)."))
    **Call arguments:**
    <BLANKLINE>
    - `x`: Tensor
      (batch, time).
    """
    text = re.sub(r"^(>>> (?:.+\n?)+)", _as_code, text, flags=re.MULTILINE)
    return re.sub(r"^Call arguments:\n((?:    .*\n?)+)", _as_list, text, flags=re.MULTILINE)


def _as_code(block):
    return f"```pycon\n{block[1].rstrip()}\n```\n"


def _as_list(block):
    items = re.sub(r"^ {4}(\w[^:]*):", r"- `\1`:", block[1], flags=re.MULTILINE)
    return "**Call arguments:**\n\n" + re.sub(r"^ {8}", "  ", items, flags=re.MULTILINE)
