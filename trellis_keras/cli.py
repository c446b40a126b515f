"""The command line: list, recipe, train, evaluate, generate, export, publish."""

import json
import sys
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Causal sequence models: train, evaluate, generate, export.",
)

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL|--FIELD VALUE", help="A model of the zoo, and settings."),
]
Run = Annotated[str, typer.Argument(help="Folder of a run that `train` has made.")]
DataDir = Annotated[
    str | None, typer.Option(help="Folder of local copies of the data (or TRELLIS_KERAS_DATA).")
]
_ANY_OPTION = {"ignore_unknown_options": True}


@app.command("list")
def list_command(
    pattern: Annotated[str, typer.Argument(help="Pattern such as 'trellisnet_*'.")] = "*",
):
    """List the zoo's models with their data and published results."""
    from trellis_keras import zoo

    for name in zoo.list_models(pattern):
        recipe = zoo.recipe(name)
        published = recipe.training.published
        result = f"published: {recipe.model.metric} {published}" if published else ""
        typer.echo(f"{name:24} {recipe.training.data:12} {result}".rstrip())


@app.command("recipe", context_settings=_ANY_OPTION)
def recipe_command(settings: Settings = None):
    """Show a model's recipe. Every field is also an option of `train`: --depth 8, --epochs 3."""
    from trellis_keras import zoo

    model, overrides = _parse(settings)
    if model is None:
        raise ValueError(f"Name a model: {', '.join(zoo.list_models())}")
    typer.echo(zoo.recipe(model, **overrides).to_json(), nl=False)


@app.command(context_settings=_ANY_OPTION)
def train(
    output: Annotated[str, typer.Option(help="Folder of the run; an existing one is resumed.")],
    settings: Settings = None,
    text: Annotated[str | None, typer.Option(help="Train on this text file of yours.")] = None,
    data_dir: DataDir = None,
):
    """Train a model by its recipe, or go on with an interrupted run.

    Every field of the recipe is an option, for example --depth 8 --epochs 3; see the command
    `recipe`. Without a model, the run in the output folder goes on.
    """
    from trellis_keras import zoo
    from trellis_keras.zoo import runs

    model, overrides = _parse(settings)
    if data_dir is not None:
        overrides["data_dir"] = data_dir
    if text is not None:
        overrides["data"] = "text"
        options = overrides.setdefault("data_options", {})
        if isinstance(options, dict):  # anything else the recipe will refuse
            options["path"] = text
    if model is None:
        recipe = runs.read_recipe(output).replace(**overrides)
    else:
        recipe = zoo.recipe(model, **overrides)
    try:
        # A progress bar on a terminal; in a file, a line per epoch.
        runs.train(recipe, output, verbose=1 if sys.stdout.isatty() else 2)
    except KeyboardInterrupt:
        typer.echo(f"\nInterrupted. To go on: trellis-keras train --output {output}", err=True)
        raise


@app.command()
def evaluate(
    run: Run,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    protocol: Annotated[
        str,
        typer.Option(help="Of a text: exact (each target once) or authors (as the authors count)."),
    ] = "exact",
    data_dir: DataDir = None,
    breakdown: Annotated[
        str | None,
        typer.Option(help="Folder for tables and plots by word frequency and by position."),
    ] = None,
):
    """Evaluate the best model of a run on a whole split."""
    from trellis_keras.zoo import runs

    results = runs.evaluate(run, split, protocol, data_dir, breakdown=breakdown)
    typer.echo(json.dumps({"run": run, "split": split, "protocol": protocol, **results}))


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "the ",
    length: Annotated[int, typer.Option(min=1, help="Number of tokens to add.")] = 300,
    sampler: Annotated[str, typer.Option(help="greedy, top_k, top_p, random or beam.")] = "top_p",
    temperature: Annotated[
        float, typer.Option(help="Of top_k, top_p and random; lower is safer.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the sampler.")] = 0,
):
    """Continue a text with the best model of a run."""
    model = _language_model(run, "generate")
    prompt_length = len(model.vocabulary.encode(prompt, final_eos=False))
    sampler = _sampler(sampler, temperature)
    typer.echo(model.generate(prompt, prompt_length + length, sampler=sampler, seed=seed))


@app.command()
def export(run: Run, path: Annotated[str, typer.Argument(help="Folder of the SavedModel.")]):
    """Write the best model of a run as a SavedModel for TensorFlow Serving."""
    from trellis_keras import serving

    typer.echo(f"Written: {serving.export(_language_model(run, 'export'), path)}")


def _language_model(run, command):
    """Loads a run's best model, or refuses one that has nothing to do with texts."""
    from trellis_keras.zoo import registry, runs

    recipe = runs.read_recipe(run)
    if not registry.reads_text(recipe.model):
        raise ValueError(f"`{command}` is for language models. {run} is a run of {recipe.name}.")
    return runs.load_best(run)


@app.command()
def publish(
    run: Run,
    folder: Annotated[str, typer.Argument(help="Where to write, such as zoo/tcn_jsb.")],
    data_dir: DataDir = None,
    note: Annotated[
        str, typer.Option(help="What a reader of the card should know: runs not shown, limits.")
    ] = "",
):
    """Evaluate the best model of a run on the test split and write its card and results."""
    from trellis_keras.zoo.publish import publish

    results = publish(run, folder, data_dir, note)
    typer.echo(json.dumps({name: results[name] for name in ("model", "metric", "test")}))


def _sampler(name, temperature):
    """Keras-NLP's samplers, with settings for small models where its own are close to greedy."""
    from keras_nlp import samplers

    if temperature <= 0:
        raise ValueError(f"--temperature must be positive. Received: {temperature}")
    if name == "top_p":
        return samplers.TopPSampler(p=0.9, temperature=temperature)
    if name == "top_k":
        return samplers.TopKSampler(k=20, temperature=temperature)
    return samplers.RandomSampler(temperature=temperature) if name == "random" else name


def _parse(settings):
    """Turns ['name', '--depth', '8', '--data=pydoc'] into 'name', {'depth': 8, 'data': 'pydoc'}."""
    names, overrides, rest = [], {}, list(settings or [])
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if not option.startswith("-"):
            names.append(option + equals + value)
            continue
        if not equals:
            # A negative number begins with one dash.
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"{option} needs a value.")
            value = rest.pop(0)
        if not option.startswith("--"):
            raise ValueError(f"Expected an option such as --epochs 3. Received: {option!r}")
        overrides[option[2:].replace("-", "_")] = _value(value)
    if len(names) > 1:
        raise ValueError(f"Expected one model at most. Received: {', '.join(names)}")
    return names[0] if names else None, overrides


_WORDS = {"none": None, "None": None, "True": True, "False": False}


def _value(text):
    """Reads numbers, true, false, none, lists and mappings as such, everything else as text."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def main():
    """Runs the command line; what the user did wrong is one line, not a traceback."""
    try:
        app()
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
