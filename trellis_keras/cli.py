"""The command line: list, recipe, train, evaluate, generate, export, score, publish."""

import json
import re
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
    gradient_norms: Annotated[
        int,
        typer.Option(min=0, help="Measure gradients on so many batches after each epoch; 0: none."),
    ] = 2,
    sample_length: Annotated[
        int,
        typer.Option(min=0, help="Let a language model write so many tokens then; 0: none."),
    ] = 200,
    profile: Annotated[
        str | None,
        typer.Option(metavar="FIRST:LAST", help="Profile these batches, counted from 1."),
    ] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option(help="End after the last epoch that fits; the same run goes on another time."),
    ] = None,
):
    """Train a model by its recipe, or go on with an interrupted run.

    Every field of the recipe is an option, for example --depth 8 --epochs 3; see the command
    `recipe`. Without a model, the run in the output folder goes on.

    To watch it: tensorboard --logdir OUTPUT/tensorboard
    """
    from trellis_keras import zoo
    from trellis_keras.zoo import runs
    from trellis_keras.zoo.failures import resuming
    from trellis_keras.zoo.observation import Observation

    model, overrides = _parse(settings)
    if data_dir is not None:
        overrides["data_dir"] = data_dir
    base = runs.read_recipe(output) if model is None else zoo.recipe(model)
    if text is not None:
        _add_text(overrides, text, base.training)
    recipe = base.replace(**overrides)
    observation = Observation(gradient_norms, sample_length, graph=True, profile=_range(profile))
    try:
        # A progress bar on a terminal; in a file, a line per epoch.
        verbose = 1 if sys.stdout.isatty() else 2
        runs.train(
            recipe, output, verbose=verbose, observation=observation, max_minutes=max_minutes
        )
    except KeyboardInterrupt:
        typer.echo(f"\nInterrupted. To go on: {resuming(output)}", err=True)
        raise


@app.command()
def evaluate(
    run: Run,
    split: Annotated[str, typer.Option(help="train, valid or test.")] = "test",
    target_counting: Annotated[
        str,
        typer.Option(help="Of a text: all (each target once) or original (the authors' code)."),
    ] = "all",
    data_dir: DataDir = None,
    breakdown: Annotated[
        str | None,
        typer.Option(help="Folder for tables and plots by word frequency and by position."),
    ] = None,
):
    """Evaluate the best model of a run on a whole split."""
    from trellis_keras.zoo import runs

    results = runs.evaluate(run, split, target_counting, data_dir, breakdown=breakdown)
    typer.echo(
        json.dumps({"run": run, "split": split, "target_counting": target_counting, **results})
    )


@app.command()
def generate(
    run: Run,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to go on from (default: 'the '); repeat it for several texts."),
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="Number of tokens to add.")] = 300,
    sampler: Annotated[
        str, typer.Option(help="greedy, random, top_k, top_p, beam or contrastive.")
    ] = "top_p",
    temperature: Annotated[
        float | None,
        typer.Option(help="Of random, top_k and top_p (default: 0.8); lower is safer."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that top_k (default: 20) or contrastive (5) choose from."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Probability that top_p chooses from (default: 0.9)."),
    ] = None,
    beams: Annotated[
        int | None, typer.Option(min=1, help="Texts that beam keeps (default: 5).")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Token that ends a text, such as '<eos>'; repeat it for several."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampler.")] = 0,
):
    """Continue texts with the best model of a run; they appear as they are generated."""
    model = _language_model(run, "generate")
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "beams": beams}
    chosen = _sampler(sampler, model.vocabulary_size, options)
    texts = []
    for start in prompt or ["the "]:
        tokens = len(model.vocabulary.encode(start, final_eos=False)) + length
        texts.append(model.generate_stream(start, tokens, chosen, seed=seed, stop_tokens=stop))
    if sampler in ("beam", "contrastive"):
        typer.echo(f"{sampler} weighs whole continuations: they appear at their end.", err=True)
    try:
        for number, pieces in enumerate(texts):
            typer.echo("\n" * (number > 0), nl=False)
            for piece in pieces:
                typer.echo(piece, nl=False)
            typer.echo()
    except KeyboardInterrupt:
        typer.echo()
        raise typer.Exit(130) from None  # as the shell says it


@app.command()
def export(
    run: Run,
    path: Annotated[
        str, typer.Argument(help="Folder of all versions of the model; of other formats the file.")
    ],
    version: Annotated[
        int | None, typer.Option(min=1, help="Number of the version (default: the next).")
    ] = None,
    format: Annotated[str, typer.Option(help="saved_model, litert or onnx.")] = "saved_model",
    quantization: Annotated[str | None, typer.Option(help="Of litert: int8.")] = None,
    warmup: Annotated[
        bool, typer.Option("--warmup", help="Add requests that TensorFlow Serving tries out.")
    ] = False,
):
    """Write the best model of a run for TensorFlow Serving, or for another runtime."""
    from trellis_keras import serving
    from trellis_keras.zoo import runs

    model = runs.load_best(run, compile=False)
    options = {"format": format, "quantization": quantization, "warmup": warmup}
    typer.echo(f"Written: {serving.export(model, path, version, **options)}")


@app.command()
def score(
    run: Run,
    file: Annotated[str, typer.Argument(help="Text, a document per line; may be of any size.")],
    output: Annotated[
        str, typer.Option(help="What to write: a .csv or .jsonl file. An interrupted job goes on.")
    ],
    whole: Annotated[
        bool, typer.Option("--whole", help="The file is one text, read on from line to line.")
    ] = False,
    field: Annotated[
        str | None, typer.Option(help="Of JSON lines: the name of the document's text.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(help="Token before each document, such as '<eos>': its first counts too."),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens in a batch, a power of two; more take more memory.")
    ] = None,
):
    """Write the log-probability of each line of a text under the best model of a run."""
    from trellis_keras import scoring
    from trellis_keras.zoo import runs

    try:
        totals = scoring.score(
            _language_model(run, "score"),
            file,
            output,
            whole=whole,
            field=field,
            start=start,
            metric=runs.read_recipe(run).model.metric,
            batch_tokens=batch_tokens,
            verbose=1,
        )
    except KeyboardInterrupt:
        typer.echo("\nInterrupted. To go on, give the same command again.", err=True)
        raise
    typer.echo(json.dumps({"run": run, "file": file, "output": output, **totals}))


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
    other_seed: Annotated[
        list[str] | None,
        typer.Option(help="A run by the same recipe with another seed; repeat it for several."),
    ] = None,
):
    """Evaluate the best model of a run on the test split and write its card and results."""
    from trellis_keras.zoo.publish import publish

    results = publish(run, folder, data_dir, note, other_seed or ())
    typer.echo(json.dumps({name: results[name] for name in ("model", "metric", "test")}))


def _sampler(name, vocabulary_size, options):
    """Keras-NLP's samplers, with settings for small models where its own are close to greedy."""
    from keras_nlp import samplers

    known = {
        "greedy": (samplers.GreedySampler, {}),
        "random": (samplers.RandomSampler, {"temperature": 0.8}),
        "top_k": (samplers.TopKSampler, {"top_k": min(20, vocabulary_size), "temperature": 0.8}),
        "top_p": (samplers.TopPSampler, {"top_p": 0.9, "temperature": 0.8}),
        "beam": (samplers.BeamSampler, {"beams": 5}),
        "contrastive": (samplers.ContrastiveSampler, {"top_k": min(5, vocabulary_size)}),
    }
    if name not in known:
        raise ValueError(f"`sampler` must be one of {', '.join(known)}. Received: {name}")
    kind, settings = known[name]
    for option, value in options.items():
        if value is None:
            continue
        if option not in settings:
            raise ValueError(f"--{option.replace('_', '-')} is not for the sampler {name}.")
        settings[option] = value
    if settings.get("temperature", 1) <= 0:
        raise ValueError(f"--temperature must be positive. Received: {settings['temperature']}")
    names = {"top_k": "k", "top_p": "p", "beams": "num_beams"}
    return kind(**{names.get(option, option): value for option, value in settings.items()})


def _add_text(overrides, text, training):
    """Adds what --text means to the settings, or refuses those that mean other data.

    A run that goes on with a text that has moved keeps its other options.
    """
    data = overrides.setdefault("data", "text")
    if data != "text":
        raise ValueError(f"--text {text} and --data {data} exclude each other.")
    kept = training.data_options if training.data == "text" else {}
    kept = {name: value for name, value in kept.items() if name != "path"}
    options = overrides.setdefault("data_options", kept)
    # Anything else the recipe will refuse.
    if isinstance(options, dict) and options.setdefault("path", text) != text:
        given = json.dumps(options)
        raise ValueError(f"--text {text} and --data-options '{given}' exclude each other.")


def _range(text):
    """Turns '10:15' into (10, 15)."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise ValueError(f"--profile takes two batches such as 10:15. Received: {text!r}")
    return int(first), int(last)


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
        return json.loads(re.sub(r"^(-?)\.", r"\g<1>0.", text))  # JSON has no .1
    except json.JSONDecodeError:
        return text


def main():
    """Runs the command line; what the user did wrong is one line, not a traceback."""
    try:
        app()
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
