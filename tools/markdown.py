"""Tables in Markdown."""


def table(header, rows):
    """Returns a Markdown table; `header` and `rows` hold the texts of the cells."""
    first, *others = (f"| {' | '.join(cells)} |\n" for cells in (header, *rows))
    return "".join([first, "|---" * len(header), "|\n", *others])
