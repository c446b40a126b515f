"""The commands of the clients: stream, score, generate and watch, over any transport."""

import csv
import sys
from typing import Annotated

import numpy as np
import typer
from serving_client import (
    SensorSession,
    ServerError,
    Session,
    Vocabulary,
    batches,
    continue_stream,
    generate_texts,
    score_texts,
    score_tokens,
)

Seed = Annotated[int, typer.Option(help="The same seed draws the same text.")]
Temperature = Annotated[float, typer.Option(min=0, help="0 chooses the most probable token.")]


def make_app(connect, default_address):
    """Returns the command line of a transport, made by `connect(address, model, timeout)`."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def main(
        context: typer.Context,
        address: Annotated[str, typer.Option(help="Address of the server.")] = default_address,
        model: Annotated[str, typer.Option(help="Name of the model.")] = "trellisnet_char",
        timeout: Annotated[float, typer.Option(help="Timeout in seconds.")] = 30.0,
    ):
        """A client of a served model: of language, or with `watch` of numbers."""
        context.obj = connect(address, model, timeout)
        context.call_on_close(context.obj.close)

    app.command()(stream)
    app.command()(score)
    app.command()(generate)
    app.command()(watch)

    def run():
        try:
            app()
        except (ServerError, ValueError, OSError) as error:
            sys.exit(f"Error: {error}")

    return run


def stream(
    context: typer.Context,
    vocabulary: Annotated[
        str, typer.Argument(help="assets.extra/vocabulary.json of the SavedModel.")
    ],
    top: Annotated[int, typer.Option(min=1, help="Number of next tokens to show.")] = 5,
    sample: Annotated[
        int, typer.Option(min=0, help="Number of tokens to sample after a line.")
    ] = 0,
    temperature: Temperature = 0.8,
    seed: Seed = 0,
):
    """Read lines as they are typed and show the most probable next tokens.

    A line continues the one before it and what was sampled after that.
    """
    vocabulary = Vocabulary(vocabulary)
    session = Session(context.obj)
    rng = np.random.default_rng(seed)
    for line in sys.stdin:
        try:
            tokens = vocabulary.encode(line.rstrip("\n"))
        except ValueError as error:
            typer.echo(f"{error} The line was not read.", err=True)
            continue
        if not tokens.size:
            continue
        log_probabilities = session.read(tokens[None])
        typer.echo(_most_probable(vocabulary, log_probabilities[0], top))
        if sample:
            drawn = continue_stream(session, log_probabilities, sample, temperature, rng)
            typer.echo(vocabulary.decode([*tokens, *(int(t[0]) for t in drawn)]))


def _most_probable(vocabulary, log_probabilities, top):
    best = np.argsort(-log_probabilities, kind="stable")[:top]
    return "  ".join(f"{vocabulary.tokens[i]!r} {np.exp(log_probabilities[i]):.3f}" for i in best)


def score(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="Text file with a document per line.")],
    vocabulary: Annotated[
        str | None, typer.Option(help="Send token ids, for models without text endpoints.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Lines per request.")] = 32,
):
    """Score the lines of a text file as CSV: log-probability in nats and number of tokens.

    The first token of a line is not scored. The total goes to the standard error stream.
    """
    encode = Vocabulary(vocabulary).encode if vocabulary else None
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["line", "log_probability", "num_tokens"])
    number, total, count = 0, 0.0, 0
    with open(file, encoding="utf-8") as lines:
        for texts in batches((line.rstrip("\n") for line in lines), batch):
            if encode is None:
                sums, counts = score_texts(context.obj, texts)
            else:
                sums, counts = score_tokens(context.obj, [encode(text) for text in texts])
            for log_probability, tokens in zip(sums, counts, strict=True):
                number += 1
                writer.writerow([number, f"{log_probability:.6f}", tokens])
            total, count = total + float(sums.sum()), count + int(counts.sum())
    bits = f", {-total / count / np.log(2):.4f} bits each" if count else ""
    typer.echo(f"{number} lines, {count} tokens{bits}", err=True)


def generate(
    context: typer.Context,
    prompts: Annotated[list[str], typer.Argument(help="Texts to continue.")],
    length: Annotated[int, typer.Option(min=1, help="Number of tokens to add.")] = 200,
    temperature: Temperature = 0.8,
    seed: Seed = 0,
):
    """Continue texts by tokens that the server samples, in one request."""
    for text in generate_texts(context.obj, prompts, length, temperature, seed):
        typer.echo(text)


def watch(context: typer.Context):
    """Read measurements as they arrive, and show the model's output after each.

    A line is one step: a number per channel, with commas between them.
    """
    session, channels = SensorSession(context.obj), None
    for line in sys.stdin:
        try:
            values = [float(number) for number in line.split(",")]
            if channels not in (None, len(values)):
                raise ValueError(f"expected {channels} numbers, received {len(values)}")
        except ValueError as error:
            typer.echo(f"{error}. The line was not read.", err=True)
            continue
        channels = len(values)
        outputs = session.step([values])[0].ravel()  # of a forecaster (horizon, targets, quantiles)
        typer.echo(",".join(f"{number:.6g}" for number in outputs))
