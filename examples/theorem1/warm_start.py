"""Converts a trained LSTM to a TrellisNet (Theorem 1) and continues training with dense kernels.

    python examples/theorem1/warm_start.py --quick

1. A 2-layer LSTM trains on characters.
2. `theorem1.to_trellis` converts it to a TrellisNet that equals the LSTM truncated to M = 32 steps.
   On held-out text it has the same bits per character as the truncated LSTM, which runs separately
   for each character, over the last 32.
3. `theorem1.to_dense` makes its kernels dense, and training continues from there. For comparison,
   the LSTM is also trained further, with the same optimizer on the same batches.

Writes bits.csv, curve.csv, curve.png and run.json to `--output`.
"""

import csv
import dataclasses
import json
import pathlib
import sys
import time
from typing import Annotated

import numpy as np
import typer


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the example.

    Attributes:
        data: Name of the text, for `zoo.datasets.load`.
        units: Units of each of the two LSTM layers.
        embedding_dim: Width of the embedding.
        truncation: M, in characters.
        batch_size: Rows of a batch. Each has 2 M - 1 characters, of which the last M count.
        lstm_steps: Training steps of the LSTM.
        further_steps: Training steps of both nets after the conversion.
        every: Further steps between two evaluations on the held-out text; 8 times as many for the
            LSTM before the conversion.
        learning_rate: Learning rate of the LSTM.
        further_learning_rate: Learning rate after the conversion.
        characters: Length of the held-out text, the start of the validation split.
        seed: Seed of the initial weights.
    """

    data: str = "char_ptb"
    units: int = 128
    embedding_dim: int = 64
    truncation: int = 32
    batch_size: int = 32
    lstm_steps: int = 800
    further_steps: int = 40
    every: int = 10
    learning_rate: float = 1e-2
    further_learning_rate: float = 1e-3
    characters: int = 8_000
    seed: int = 0


QUICK = Settings(
    units=16, embedding_dim=8, truncation=8, batch_size=8, lstm_steps=48, further_steps=6, every=3,
    characters=400,
)  # fmt: skip


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny: shows that it works, not the result.")
    ] = False,
    output: Annotated[
        str | None, typer.Option(help="Folder of CSV and PNG. Default: runs/theorem1.")
    ] = None,
    data: Annotated[
        str, typer.Option(help="char_ptb, pydoc (which is on every machine), text8, ...")
    ] = Settings.data,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of local copies (or TRELLIS_KERAS_DATA).")
    ] = None,
    lstm_steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps of the LSTM.")
    ] = None,
    further_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps after the conversion.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the initial weights.")] = 0,
):
    """Trains a 2-layer LSTM on characters, converts it, and trains the TrellisNet on."""
    given = {"lstm_steps": lstm_steps, "further_steps": further_steps}
    settings = dataclasses.replace(
        QUICK if quick else Settings(),
        data=data,
        seed=seed,
        **{name: value for name, value in given.items() if value is not None},
    )
    try:
        run(settings, output or f"runs/theorem1{'-quick' if quick else ''}", data_dir)
    except (ValueError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)


def run(settings, folder, data_dir=None):
    """The example.

    Returns:
        {net: bits of each held-out character}, and {net: list of (step, their mean)}.
    """
    from trellis_keras import theorem1
    from trellis_keras.zoo import datasets

    started = time.perf_counter()
    corpus = datasets.load(settings.data, data_dir=data_dir)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    held_out = corpus.valid[: settings.characters + 1]

    lstm = make_lstm(settings, len(corpus.vocabulary))
    compile_model(lstm, settings.learning_rate, jit_compile=False)
    curves = {"LSTM": train(lstm, corpus, settings, settings.lstm_steps, 8 * settings.every)}

    trellis = theorem1.to_trellis(lstm, settings.truncation)
    truncated = f"LSTM truncated to {settings.truncation}"
    found = {
        "LSTM": bits(lstm, held_out),
        truncated: bits_of_windows(lstm, held_out, settings.truncation),
        "TrellisNet": bits(trellis, held_out),
    }
    report(found, reference=truncated)

    dense = theorem1.to_dense(trellis)
    for name, model in {"LSTM, trained on": lstm, "TrellisNet, dense": dense}.items():
        compile_model(model, settings.further_learning_rate, jit_compile=model is dense)
        curves[name] = train(
            model, corpus, settings, settings.further_steps, settings.every, settings.lstm_steps
        )
        typer.echo(f"{name}: {curves[name][0][1]:.4f} -> {curves[name][-1][1]:.4f}")

    write(folder, settings, corpus, found, curves, time.perf_counter() - started)
    plot(folder, settings, found, curves)
    return found, curves


# The nets


def make_lstm(settings, vocabulary_size):
    """A language model of two LSTM layers."""
    import keras

    from trellis_keras.layers import StackedRNN
    from trellis_keras.models import LanguageModel

    keras.utils.set_random_seed(settings.seed)
    options = {"return_sequences": True, "return_state": True}
    backbone = StackedRNN([keras.layers.LSTM(settings.units, **options) for _ in range(2)])
    model = LanguageModel(
        vocabulary_size,
        settings.embedding_dim,
        backbone,
        tie_embeddings=False,
        # Livelier than the default, so that it gets somewhere in a few hundred steps.
        embeddings_initializer=keras.initializers.RandomNormal(stddev=0.5),
    )
    model.build((None, None))
    return model


def compile_model(model, learning_rate, jit_compile):
    import keras

    optimizer = keras.optimizers.Adam(learning_rate, global_clipnorm=1.0)
    model.compile(optimizer, jit_compile=jit_compile)


def train(model, corpus, settings, steps, every, first_step=0):
    """Trains for a number of steps; returns [(step, held-out bits)], with a first evaluation."""
    import keras

    from trellis_keras.data import TokenStream

    context = settings.truncation - 1
    stream = TokenStream(corpus.train, settings.batch_size, context + settings.truncation, context)
    held_out = corpus.valid[: settings.characters + 1]
    curve = [(first_step, mean(bits(model, held_out)))]
    progress = keras.utils.Progbar(steps, stateful_metrics=["held_out"])
    for step in range(1, steps + 1):
        model.train_on_batch(*stream[(first_step + step - 1) % len(stream)])
        if step % every == 0 or step == steps:
            curve.append((first_step + step, mean(bits(model, held_out))))
        progress.update(step, [("held_out", curve[-1][1])])
    return curve


# Bits per character


def bits(model, tokens):
    """Bits of each character but the first, from one pass over the text."""
    return bits_of(model.predict(tokens[None, :-1], verbose=0)[0], tokens[1:])


def bits_of_windows(model, tokens, truncation):
    """The same for the truncated net, run on the last `truncation` characters before each."""
    windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], truncation)
    outputs = model.predict(windows, batch_size=256, verbose=0)
    # There is nothing before the first character: the first windows are shorter.
    return bits_of(np.concatenate([outputs[0], outputs[1:, -1]]), tokens[1:])


def bits_of(log_probabilities, targets):
    chosen = log_probabilities[np.arange(len(targets)), targets]
    return -chosen.astype("float64") / np.log(2)


def mean(values):
    return float(np.mean(values))


# What is left behind


def rows(found, reference):
    """A row per net: bits per character, and its differences from the reference net."""
    for name, values in found.items():
        apart = np.abs(values - found[reference])
        yield {
            "net": name,
            "bits_per_character": f"{mean(values):.6f}",
            "difference": f"{mean(values) - mean(found[reference]):.1e}",
            "largest_difference_of_a_character": f"{apart.max():.1e}",
        }


def report(found, reference):
    for row in rows(found, reference):
        typer.echo(
            f"{row['net']}: {row['bits_per_character']} bits per character, "
            f"{row['difference']} from the truncated LSTM "
            f"(a single character: at most {row['largest_difference_of_a_character']})"
        )


def write(folder, settings, corpus, found, curves, seconds):
    from trellis_keras.zoo.environment import environment

    _, reference, _ = found
    write_csv(folder / "bits.csv", list(rows(found, reference)))
    points = [
        {"net": name, "step": step, "bits_per_character": f"{value:.6f}"}
        for name, curve in curves.items()
        for step, value in curve
    ]
    write_csv(folder / "curve.csv", points)
    about = {
        "settings": dataclasses.asdict(settings),
        "data_sha256": corpus.checksum,
        "seconds": round(seconds),
        **environment(),
    }
    (folder / "run.json").write_text(json.dumps(about, indent=2) + "\n")


def write_csv(path, table):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, table[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def plot(folder, settings, found, curves):
    """Held-out bits per character: the LSTM's training, and what follows the conversion."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 3.8), layout="constrained")
    whole, further = figure.subplots(1, 2)
    # Okabe and Ito's palette, safe for the color-blind.
    colors = dict(zip(curves, ("black", "#D55E00", "#0072B2"), strict=True))
    for name, curve in curves.items():
        style = {"color": colors[name], "marker": "o", "markersize": 4, "label": name}
        whole.plot(*zip(*curve, strict=True), **style)
        if name != "LSTM":
            further.plot(*zip(*curve, strict=True), **style)
    converted = mean(found["TrellisNet"])
    label = f"TrellisNet as converted, M = {settings.truncation}"
    further.axhline(converted, color="gray", linestyle=":", label=label)
    whole.set_title("2-layer LSTM, then both")
    further.set_title("After the conversion")
    for axes in (whole, further):
        axes.set(xlabel="training step", ylabel="bits per character, held-out text")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    whole.legend(frameon=False)
    further.legend(frameon=False, loc="lower left")
    figure.savefig(folder / "curve.png", dpi=120)


if __name__ == "__main__":
    app()
