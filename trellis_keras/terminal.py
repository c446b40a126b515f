"""Text for a terminal, which would execute control characters in names from files."""

import re

# Controls but tab and line feed, what changes the direction of text, and surrogates, which no
# encoding has.
_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_CONTROLS}]")
_IN_LINES = re.compile(f"[{_CONTROLS}\t\n\u2028\u2029]")


def printable(text: str, lines: bool = True) -> str:
    r"""Returns a text with its control characters escaped.

    Args:
        text: String, such as a message or the name of a column.
        lines: Boolean, whether the text may have several lines and tabs. Defaults to `True`.

    Example:

    >>> printable("load\x1b[31m\n", lines=False)
    'load\\x1b[31m\\n'
    """
    return (_IN_TEXT if lines else _IN_LINES).sub(lambda found: ascii(found[0])[1:-1], text)
