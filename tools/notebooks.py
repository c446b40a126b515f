"""Makes notebooks of the examples for time series.

    pip install jupytext nbclient ipykernel
    python -m tools.notebooks runs/notebooks --execute

The docstring becomes the first text; each paragraph becomes a cell, and a comment that it begins
with becomes text before it.
"""

import ast
import os
import pathlib
import re
from typing import Annotated

import jupytext
import typer

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ("forecasting", "sensor_classification", "anomaly_detection", "streaming_forecast")


def main(
    folder: Annotated[pathlib.Path, typer.Argument(help="Where the notebooks go.")],
    execute: Annotated[
        bool, typer.Option("--execute", help="Run them, and keep their outputs.")
    ] = False,
):
    """Makes a notebook of each example."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in EXAMPLES:
        notebook = convert(ROOT / "examples" / f"{name}.py", folder)
        if execute:
            run(notebook, folder)
        path = folder / f"{name}.ipynb"
        jupytext.write(notebook, path)
        print(path)


def convert(path, folder):
    """The notebook of a script, which is to lie in a folder."""
    source = path.read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(source))
    title, text = doc.split("\n", 1)
    # The command to run it is of no use in a notebook.
    text = re.sub(r"\n    python .*\n", "\n", text)
    cells = [("markdown", f"# {title}\n{text}")]
    code = source.split('"""', 2)[2].strip()
    # A notebook knows no file of its own, and shows its pictures.
    here = pathlib.Path(os.path.relpath(path.parent, folder)).as_posix()
    code = code.replace("pathlib.Path(__file__).resolve().parent", f'pathlib.Path("{here}")')
    code = re.sub(r"\nfigure\.savefig\(.*\)", "", code)
    for paragraph in re.split(r"\n\n+", code):
        lines = paragraph.split("\n")
        comment = [line[2:] for line in lines if line.startswith("# ")]
        if lines[: len(comment)] == [f"# {line}" for line in comment] and comment:
            cells.append(("markdown", " ".join(comment)))
            lines = lines[len(comment) :]
        cells.append(("code", "\n".join(lines)))
    text = "\n\n".join(
        "# %%\n" + body if kind == "code" else "# %% [markdown]\n" + _commented(body)
        for kind, body in cells
    )
    return jupytext.reads(text, fmt="py:percent")


def _commented(text):
    return "\n".join(f"# {line}".rstrip() for line in text.strip().split("\n"))


def run(notebook, folder):
    """Executes a notebook; its cells get their outputs."""
    from nbclient import NotebookClient

    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata["kernelspec"] = kernel
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()


if __name__ == "__main__":
    typer.run(main)
