"""What 8-bit weights cost a character model: bits per character, size and time of a step.

    trellis-keras train trellisnet_char --epochs 3 --output runs/char
    python -m benchmarks.int8 runs/char

A run's best model is written for LiteRT, once as it is and once with `quantization="int8"`. Both
files score the beginning of the run's test split, character by character, from an empty history.
"""

import json
import pathlib
import statistics
import tempfile
import time
import warnings
from typing import Annotated

import numpy as np
import typer

from benchmarks.__main__ import machine, write

# Keras and the package are imported by the functions, so that --help is quick.

FILES = {"LiteRT, float32": None, "LiteRT, int8": "int8"}


def main(
    run: Annotated[str, typer.Argument(help="Folder of a run of `trellis-keras train`.")],
    characters: Annotated[int, typer.Option(help="How many are scored.")] = 5000,
    output: Annotated[str, typer.Option(help="Folder of the results.")] = "runs/benchmarks",
):
    """Compare a run's best model in float32 and int8."""
    from trellis_keras.zoo import read_recipe
    from trellis_keras.zoo.run import load_best

    recipe, model = read_recipe(run), load_best(run)
    text = recipe.load_data().test[: characters + 1]
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
    stem.parent.mkdir(parents=True, exist_ok=True)
    write(stem.with_suffix(".json"), json.dumps(results, indent=2) + "\n")
    write(stem.with_suffix(".md"), table)


def compare(model, text):
    """Returns {what computes: its figures} on the characters of a text after the first."""
    from trellis_keras.export import export

    rows = {"Keras": {"bpc": bits(model.predict(text[None, :-1], verbose=0)[0], text)}}
    with tempfile.TemporaryDirectory() as folder:
        streams = {}
        for number, (name, quantization) in enumerate(FILES.items()):
            path = pathlib.Path(folder) / f"{number}.tflite"
            export(model, path, format="litert", quantization=quantization)
            rows[name] = {"bytes": path.stat().st_size}
            streams[name] = Stream(path)
        # In turn: whatever else the machine does disturbs both alike.
        for token in text[:-1]:
            for stream in streams.values():
                stream.read(token)
    for name, stream in streams.items():
        rows[name]["bpc"] = bits(np.stack(stream.scores), text)
        rows[name]["step_s"] = statistics.median(stream.seconds)
    return rows


class Stream:
    """A text that a LiteRT file reads: the scores of each next token, and the seconds taken."""

    def __init__(self, path):
        import tensorflow as tf

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this interpreter will move to another package
            self._interpreter = tf.lite.Interpreter(str(path))
        self._step = self._interpreter.get_signature_runner("step")
        tensors = self._step.get_input_details().items()
        self._cache = {name: np.zeros(t["shape"], t["dtype"]) for name, t in tensors}
        del self._cache["tokens"]
        self.scores, self.seconds = [], []

    def read(self, token):
        start = time.perf_counter()
        answer = self._step(tokens=np.array([token], "int32"), **self._cache)
        self.seconds.append(time.perf_counter() - start)
        self.scores.append(answer.pop("log_probabilities")[0])
        self._cache = answer


def bits(scores, text):
    """Bits per character: scores (characters, vocabulary), in nats, are of what follows each."""
    return float(-np.mean(scores[np.arange(len(text) - 1), text[1:]]) / np.log(2))


def markdown(results):
    """Returns the results as Markdown."""
    machine_line = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    lines = [
        f"### int8: {results['model']} ({results['parameters']:,} parameters, {results['data']}, "
        f"{results['epochs']} epochs), {results['characters']:,} characters of the test split",
        "",
        machine_line,
        "",
        "| | bits per character | file, KiB | step, ms (median) |",
        "|---|---|---|---|",
    ]
    for name, row in results["rows"].items():
        size = f"{row['bytes'] / 1024:.0f}" if "bytes" in row else ""
        step = f"{1000 * row['step_s']:.3f}" if "step_s" in row else ""
        lines.append(f"| {name} | {row['bpc']:.4f} | {size} | {step} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
