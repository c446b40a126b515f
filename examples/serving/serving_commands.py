"""The commands of the clients: stream, score and generate, over any transport."""

import csv
import sys
from typing import Annotated

import numpy as np
import typer
from serving_client import (
    ServerError,
    Session,
    Vocabulary,
    batches,
    continue_stream,
    generate_texts,
    score_texts,
    score_tokens,
)

Seed = Annotated[int, typer.Option(help="The same one draws the same text.")]
Temperature = Annotated[float, typer.Option(min=0, help="0: always the most probable token.")]


def make_app(connect, default_address):
    """Returns the command line of a transport, made by `connect(address, model, timeout)`."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def main(
        context: typer.Context,
        address: Annotated[str, typer.Option(help="Of the server.")] = default_address,
        model: Annotated[str, typer.Option(help="Its name there.")] = "trellisnet_char",
        timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 30.0,
    ):
        """A client of a served language model."""
        context.obj = connect(address, model, timeout)
        context.call_on_close(context.obj.close)

    app.command()(stream)
    app.command()(score)
    app.command()(generate)

    def run():
        try:
            app()
        except (ServerError, ValueError, OSError) as error:
            sys.exit(f"Error: {error}")

    return run


def stream(
    context: typer.Context,
    vocabulary: Annotated[str, typer.Argument(help="The vocabulary file of the SavedModel.")],
    top: Annotated[int, typer.Option(min=1, help="How many next tokens to show.")] = 5,
    sample: Annotated[int, typer.Option(min=0, help="How many tokens to add to a line.")] = 0,
    temperature: Temperature = 0.8,
    seed: Seed = 0,
):
    """Read text line by line, as it is typed; show what comes next.

    Each line goes on where the last one, and what was sampled after it, ended.
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
    file: Annotated[str, typer.Argument(help="A text file; each line is scored by itself.")],
    vocabulary: Annotated[
        str | None, typer.Option(help="Send token ids, for models that take no text.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Lines a request.")] = 32,
):
    """Score the lines of a text file: CSV of log-probability (natural) and number of tokens.

    The first token of a line is given, not scored. The total goes to standard error.
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
    prompts: Annotated[list[str], typer.Argument(help="Texts to go on from.")],
    length: Annotated[int, typer.Option(min=1, help="Number of tokens to add.")] = 200,
    temperature: Temperature = 0.8,
    seed: Seed = 0,
):
    """Continue texts; the server draws the tokens, in one request."""
    for text in generate_texts(context.obj, prompts, length, temperature, seed):
        typer.echo(text)
