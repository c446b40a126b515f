"""The command line: list, recipe, train, evaluate, generate, export."""

import json
import sys
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trellis networks, TCNs and lattice recurrent units: train, evaluate, generate, export.",
)

Run = Annotated[str, typer.Argument(help="Folder of a run that `train` has made.")]
DataDir = Annotated[
    str | None, typer.Option(help="Folder of local copies of the data (or TRELLIS_KERAS_DATA).")
]
_FREE_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command("list")
def list_command(
    pattern: Annotated[str, typer.Argument(help="Pattern such as 'trellisnet_*'.")] = "*",
):
    """List the zoo's models with their data and published results."""
    from trellis_keras import zoo

    for name in zoo.list_models(pattern):
        training = zoo.recipe(name).training
        published = f"{training.metric} {training.published}" if training.published else "-"
        typer.echo(f"{name:32} {training.data:12} published: {published}")


@app.command("recipe", context_settings=_FREE_OPTIONS)
def recipe_command(context: typer.Context, model: str):
    """Show a model's recipe. Every field is also an option of `train`: --depth 8, --epochs 3."""
    from trellis_keras import zoo

    typer.echo(zoo.recipe(model, **_overrides(context.args)).to_json(), nl=False)


@app.command(context_settings=_FREE_OPTIONS)
def train(
    context: typer.Context,
    output: Annotated[str, typer.Option(help="Folder of the run; an existing one is resumed.")],
    model: Annotated[str | None, typer.Argument(help="A model of the zoo; none: resume.")] = None,
    text: Annotated[str | None, typer.Option(help="Train on this text file of yours.")] = None,
    data_dir: DataDir = None,
):
    """Train a model by its recipe, or go on with an interrupted run.

    Every field of the recipe (see the command `recipe`) can be given as an option, for example
    --depth 8 --epochs 3.
    """
    from trellis_keras import zoo
    from trellis_keras.zoo import runs

    overrides = _overrides(context.args)
    if text is not None:
        overrides |= {"data": "text", "data_options": {"path": text}}
    if model is None:
        chosen = runs.read_recipe(output).replace(**overrides)
    else:
        chosen = zoo.recipe(model, **overrides)
    runs.train(chosen, output, data_dir)


@app.command()
def evaluate(
    run: Run,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    protocol: Annotated[
        str, typer.Option(help="exact (each target once) or authors (as the authors count).")
    ] = "exact",
    data_dir: DataDir = None,
):
    """Evaluate the best model of a run on a whole split."""
    from trellis_keras.zoo import runs

    if split not in ("train", "valid", "test"):
        raise ValueError(f"--split must be train, valid or test. Received: {split}")
    results = runs.evaluate(run, split, protocol, data_dir)
    typer.echo(json.dumps({"run": run, "split": split, "protocol": protocol, **results}))


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "The ",
    length: Annotated[int, typer.Option(help="Number of tokens to add.")] = 300,
    sampler: Annotated[str, typer.Option(help="greedy, top_k, top_p or random.")] = "top_p",
    seed: Annotated[int, typer.Option(help="Of the sampler.")] = 0,
):
    """Continue a text with the best model of a run."""
    from trellis_keras.zoo import runs

    model = runs.load_best(run)
    prompt_length = len(model.vocabulary.encode(prompt, final_eos=False))
    text = model.generate([prompt], prompt_length + length, sampler=sampler, seed=seed)
    typer.echo(text[0])


@app.command()
def export(run: Run, path: Annotated[str, typer.Argument(help="Folder of the SavedModel.")]):
    """Write the best model of a run as a SavedModel for TensorFlow Serving."""
    from trellis_keras import serving
    from trellis_keras.zoo import runs

    typer.echo(f"Written: {serving.export(runs.load_best(run), path)}")


def _overrides(arguments):
    """Turns ['--depth', '8', '--data=pydoc'] into {'depth': 8, 'data': 'pydoc'}."""
    overrides, rest = {}, list(arguments)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if not option.startswith("--"):
            raise ValueError(f"Expected an option such as --epochs 3. Received: {option!r}")
        if not equals:
            if not rest:
                raise ValueError(f"{option} needs a value.")
            value = rest.pop(0)
        overrides[option[2:].replace("-", "_")] = _value(value)
    return overrides


def _value(text):
    """Reads numbers, true, false, none and lists as such, everything else as text."""
    try:
        return json.loads({"none": "null", "None": "null", "True": "true"}.get(text, text))
    except json.JSONDecodeError:
        return text


def main():
    """Runs the command line; what the user did wrong is one line, not a traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError, ImportError) as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
