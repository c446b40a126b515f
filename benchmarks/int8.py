"""Compares 8-bit weights with float32 for a character model: bits per character, size, step time.

    trellis-keras train trellisnet_char --epochs 3 --output runs/char
    python -m benchmarks.int8 runs/char

A run's best model is exported to LiteRT, with and without `quantization="int8"`. Both files score
the start of the run's test split, character by character, from empty states.
"""

import pathlib
import statistics
import tempfile
import time
from typing import Annotated

import numpy as np
import typer

from benchmarks.edge import litert_step
from benchmarks.results import heading, machine, write, write_figures
from tools.markdown import table
from trellis_keras.export import export
from trellis_keras.zoo import read_recipe
from trellis_keras.zoo.run import load_best

CHARACTERS = 5000  # to score
FILES = {"LiteRT, float32": None, "LiteRT, int8": "int8"}


def main(
    run: Annotated[str, typer.Argument(help="Folder of a run of `trellis-keras train`.")],
    output: Annotated[str, typer.Option(help="Folder of the results.")] = "runs/benchmarks",
):
    """Compare a run's best model in float32 and int8."""
    recipe, model = read_recipe(run), load_best(run)
    text = recipe.load_data().test[: CHARACTERS + 1]
    results = {
        "model": recipe.name,
        "parameters": model.count_params(),
        "data": recipe.data,
        "epochs": recipe.training.epochs,
        "characters": len(text) - 1,
        "machine": machine(),
        "rows": compare(model, text),
    }
    table = markdown(results)
    typer.echo(table)
    stem = pathlib.Path(output) / "int8-tensorflow"
    write_figures(stem.with_suffix(".json"), results)
    write(stem.with_suffix(".md"), table)


def compare(model, text):
    """Returns {name: figures} of both files, on a text's characters after the first."""
    rows = {"Keras": {"bpc": bits(model.predict(text[None, :-1], verbose=0)[0], text)}}
    scores = {name: [] for name in FILES}
    seconds = {name: [] for name in FILES}
    with tempfile.TemporaryDirectory() as folder:
        steps = {}
        for name, quantization in FILES.items():
            path = pathlib.Path(folder, f"{quantization}.tflite")
            export(model, path, format="litert", quantization=quantization)
            rows[name] = {"bytes": path.stat().st_size}
            steps[name] = litert_step(path, "tokens")
        # Alternates, so that other load on the machine affects both equally.
        for token in text[:-1].astype("int32"):
            for name, step in steps.items():
                started = time.perf_counter()
                scores[name].append(step(token)[0])
                seconds[name].append(time.perf_counter() - started)
    for name in FILES:
        rows[name]["bpc"] = bits(np.stack(scores[name]), text)
        rows[name]["step_s"] = statistics.median(seconds[name])
    return rows


def bits(scores, text):
    """Returns bits per character, from scores (characters, vocabulary) of the next one in nats."""
    return float(-np.mean(scores[np.arange(len(text) - 1), text[1:]]) / np.log(2))


def markdown(results):
    """Returns the results as Markdown."""
    title = (
        f"int8: {results['model']} ({results['parameters']:,} parameters, {results['data']}, "
        f"{results['epochs']} epochs), {results['characters']:,} characters of the test split"
    )
    rows = []
    for name, row in results["rows"].items():
        size = f"{row['bytes'] / 1024:.0f}" if "bytes" in row else ""
        step = f"{1000 * row['step_s']:.3f}" if "step_s" in row else ""
        rows.append([name, f"{row['bpc']:.4f}", size, step])
    header = ["", "bits per character", "file, KiB", "step, ms (median)"]
    return heading(title, results["machine"]) + table(header, rows)


if __name__ == "__main__":
    typer.run(main)
