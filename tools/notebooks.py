"""Converts the time series examples to notebooks.

    pip install '.[notebooks]'
    python -m tools.notebooks runs/notebooks
    jupytext --execute runs/notebooks/*.ipynb

The docstring becomes the first Markdown cell, and each paragraph a code cell. A comment at the
start of a paragraph becomes a Markdown cell before it.
"""

import ast
import os
import pathlib
import re
from typing import Annotated

import typer

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ("forecasting", "sensor_classification", "streaming_forecast")


def main(folder: Annotated[pathlib.Path, typer.Argument(help="Output folder.")]):
    """Convert each example to a notebook."""
    import jupytext

    folder.mkdir(parents=True, exist_ok=True)
    for name in EXAMPLES:
        path = folder / f"{name}.ipynb"
        jupytext.write(convert(ROOT / "examples" / f"{name}.py", folder), path)
        print(path)


def convert(path, folder):
    """Returns a script as a notebook to be saved in `folder`."""
    import jupytext

    # Notebooks have no `__file__`, and display their figures.
    here = pathlib.Path(os.path.relpath(path.parent, folder)).as_posix()
    source = path.read_text(encoding="utf-8")
    source = source.replace("pathlib.Path(__file__).resolve().parent", f'pathlib.Path("{here}")')
    source = re.sub(r"\nfigure\.savefig\(.*\)", "", source)
    text = "\n\n".join(
        "# %%\n" + body if kind == "code" else "# %% [markdown]\n" + _commented(body)
        # Drops the command that runs the script.
        for kind, body in cells(re.sub(r"\n    python .*\n", "\n", source))
    )
    return jupytext.reads(text, fmt="py:percent")


def cells(source):
    """Yields a script's docstring and paragraphs as ("markdown" or "code", text)."""
    title, text = ast.get_docstring(ast.parse(source)).split("\n", 1)
    yield "markdown", f"# {title}\n{text}"
    for paragraph in re.split(r"\n\n+", source.split('"""', 2)[2].strip()):
        lines = paragraph.split("\n")
        comment = [line[2:] for line in lines if line.startswith("# ")]
        if lines[: len(comment)] == [f"# {line}" for line in comment] and comment:
            yield "markdown", " ".join(comment)
            lines = lines[len(comment) :]
        if lines:
            yield "code", "\n".join(lines)


def _commented(text):
    return "\n".join(f"# {line}".rstrip() for line in text.strip().split("\n"))


if __name__ == "__main__":
    typer.run(main)
