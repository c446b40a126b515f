"""The command line; `trellis-keras --help` lists its commands.

Importing `trellis_keras` imports Keras, which takes seconds. Help, `--version` and mistyped
commands do not need it: this module lies beside the package, and its commands import it.
"""

import functools
import importlib.metadata
import json
import os
import pathlib
import re
import sys
import traceback
import warnings
from typing import Annotated

import typer
import typer.core


class _Command(typer.core.TyperCommand):
    """A command whose usage and errors name its options as they are typed."""

    def collect_usage_pieces(self, ctx):
        words = [p.metavar for p in self.params if isinstance(p, typer.core.TyperArgument)]
        return ["[OPTIONS]", *words]

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except (ValueError, FileNotFoundError) as error:
            if getattr(error, "filename", None) is not None:  # from the operating system
                raise
            given = _parse(ctx.params.get("words"))[1]
            own = (p.name for p in self.params if not isinstance(p, typer.core.TyperArgument))
            names = {*own, *given, *_NAMED}
            kind = ValueError if isinstance(error, ValueError) else FileNotFoundError
            raise kind(re.sub(r"`(\w+)`", lambda m: _option(m, names), str(error))) from error


# Options of recipes that errors name even if they are not given.
_NAMED = ("batch_size", "context_length", "data_dir", "epochs", "sequence_length")


def _option(match, names):
    return f"--{match[1].replace('_', '-')}" if match[1] in names else match[0]


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # errors in one line, like the commands' own
    help="Causal sequence models: train, evaluate, generate, export.",
)
command = functools.partial(app.command, cls=_Command)


with_words = functools.partial(command, context_settings={"ignore_unknown_options": True})


def _argument(metavar, **more):
    return typer.Argument(metavar=metavar, hidden=True, **more)


def _described(metavar, help, **more):
    return typer.Option(metavar=metavar, help=help, **more)


def _flag(name, help):
    return typer.Option(name, help=help)


def _show_version(value: bool):
    if value:
        typer.echo(f"trellis-keras {importlib.metadata.version('trellis-keras')}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
):
    pass


def _check_runs(runs: list[str] | str):
    """Raises FileNotFoundError for missing runs, before the package is imported."""
    for folder in [runs] if isinstance(runs, str) else runs:
        path = pathlib.Path(folder).expanduser()
        if not (path / "recipe.json").is_file():
            within = sorted(path.glob("*/recipe.json"))
            hint = f" There is one in {within[0].parent}." if within else ""
            raise FileNotFoundError(f"{folder} holds no run: recipe.json is missing.{hint}")
    return runs


Words = Annotated[list[str] | None, _argument("[MODEL [--depth 8 ...]]")]
Run = Annotated[str, _argument("RUN", callback=_check_runs)]
DataDir = Annotated[
    str | None, _described("FOLDER", "Folder of local copies of the data (or TRELLIS_KERAS_DATA).")
]
Overwrite = Annotated[bool, _flag("--overwrite", "Replace the output, if there is one.")]


@command("list")
def list_command(
    pattern: Annotated[str, _argument("[PATTERN]")] = "*",
    pretrained: Annotated[
        bool, _flag("--pretrained", "Only models with pretrained weights.")
    ] = False,
):
    """List the zoo's models, with published results and ours.

    A PATTERN such as 'trellisnet_*' selects models by name.
    """
    from trellis_keras import zoo
    from trellis_keras.zoo import registry, results
    from trellis_keras.zoo.datasets.registry import suggestion

    rows = []
    trained = {(run.model, run.variant): run for run in results.all_runs()}
    costs = results.read_costs()["models"]
    for name in zoo.list_models(pattern):
        variants = [variant for model, variant in trained if model == name]
        for variant in dict.fromkeys(["", *variants]):
            own = trained.get((name, variant))
            has_weights = own is not None and own.has_weights
            if pretrained and not has_weights:
                continue
            shown = registry.recipe_from_dict(own.recipe) if own else zoo.recipe(name)
            size = own.results["parameters"] if own else costs.get(name, {}).get("parameters")
            value = registry.published_value(shown)
            rows.append(
                [
                    f"{name} {variant}".strip(),
                    shown.data,
                    "-" if size is None else f"{size:,}",
                    shown.metric,
                    "-" if value is None else f"{value.value:.4g}",
                    f"{own.mean:.4g}" if own else "-",
                    "yes" if has_weights else "-",
                ]
            )
    if not rows:
        kind = "model with pretrained weights" if pretrained else "model"
        hint = suggestion(pattern, zoo.list_models())
        raise ValueError(f"No {kind} matches {pattern!r}.{hint} `trellis-keras list` shows all.")
    header = ["model", "data", "parameters", "metric", "published", "ours", "weights"]
    _echo_table([header, *rows], numbers={2, 4, 5})


@with_words("recipe")
def recipe_command(words: Words = None):
    """Show a model's recipe, whose values are options of `train`.

    For example: recipe tcn_jsb --depth 8 --epochs 3 --learning-rate 1e-3

    The arguments of the optimizer are options by their names; those of the schedule, stopping and
    growth have these names before them, such as --schedule-factor 0.5 --stopping-patience 3.
    """
    names, options = _parse(words)
    if len(names) != 1:
        raise ValueError("Pass the name of a model. `trellis-keras list` shows them.")
    from trellis_keras import zoo

    typer.echo(zoo.recipe(names[0], **options).to_json(), nl=False)


@with_words()
def train(
    output: Annotated[str, _described("FOLDER", "Folder of the run; an existing run is resumed.")],
    words: Words = None,
    repeat: Annotated[
        bool,
        typer.Option(
            "--repeat", "--as-published", help="Repeat the zoo's own run of MODEL [VARIANT]."
        ),
    ] = False,
    text: Annotated[str | None, _described("FILE", "Train on your own text file.")] = None,
    precision: Annotated[
        str | None, _described("NAME", "float32, bfloat16, or auto (bfloat16 where it is faster).")
    ] = None,
    gradient_norms: Annotated[
        int | None,
        _described("N", "Batches for gradient norms (default: 2; with --coordinator: 0).", min=0),
    ] = None,
    sample_length: Annotated[
        int | None,
        _described("N", "Tokens of a text sample (default: 200; with --coordinator: 0).", min=0),
    ] = None,
    profile: Annotated[
        str | None, _described("FIRST:LAST", "Profile these batches, counted from 1.")
    ] = None,
    max_minutes: Annotated[
        float | None,
        _described("MINUTES", "Time limit, even within an epoch; the same command resumes."),
    ] = None,
    save_minutes: Annotated[
        float, _described("MINUTES", "Minutes between checkpoints within an epoch.")
    ] = 10,
    devices: Annotated[
        int | None, _described("N", "Number of devices on this machine to train on.", min=1)
    ] = None,
    coordinator: Annotated[
        str | None,
        _described("HOST:PORT", "Address of process 0 (JAX), or auto (Slurm, Kubernetes, clouds)."),
    ] = None,
    processes: Annotated[int | None, _described("N", "Number of processes.")] = None,
    process: Annotated[int | None, _described("N", "Index of this process, from 0.")] = None,
):
    """Train a model with its recipe, or resume an interrupted run.

    Every value of the recipe is an option, for example --depth 8 --epochs 3 --data-dir FOLDER; see
    the command `recipe`. The recipe is the paper's; --setting fast uses this zoo's fast recipe for
    the same network, if there is one. Without a model, the run in the output folder is resumed.

    To monitor training: tensorboard --logdir OUTPUT/tensorboard
    """
    names, options = _parse(words)
    if "vocabulary_size" in options:
        raise ValueError("The tokens are those of the data. Leave out --vocabulary-size.")
    alone = coordinator is None
    _join(coordinator, processes, process)
    recipe = _chosen_recipe(names, options, text, precision, output, repeat, alone)
    from trellis_keras import zoo
    from trellis_keras.zoo import run

    try:
        zoo.train(
            recipe,
            output,
            gradient_norms=(2 if alone else 0) if gradient_norms is None else gradient_norms,
            sample_length=(200 if alone else 0) if sample_length is None else sample_length,
            graph=alone,
            profile=_range(profile),
            max_minutes=max_minutes,
            save_minutes=save_minutes,
            devices=devices,
        )
    except KeyboardInterrupt:
        saved = run.saved_state(output) is not None
        then = f"To resume: {run.resuming(output)}" if saved else "Nothing was saved yet."
        _echo(f"\nInterrupted. {then}", err=True)
        raise


def _echo(text, *, newline=True, err=False):
    typer.echo(_printable(text), nl=newline, err=err)


def _printable(text, lines=True):
    """Returns a text, which may contain names from files, without control characters."""
    if (text.replace("\n", "") if lines else text).isprintable():
        return text
    from trellis_keras.terminal import printable

    return printable(text, lines)


def _echo_table(rows, numbers):
    """Prints rows of text in columns, with numbers right-aligned."""
    rows = [[_printable(cell, False) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [cell.rjust(w) if i in numbers else cell.ljust(w) for i, (cell, w) in pairs]
        typer.echo("  ".join(cells).rstrip())


@command()
def evaluate(
    run: Run,
    split: Annotated[str, _described("NAME", "train, valid or test.")] = "test",
    target_counting: Annotated[
        str, _described("NAME", "For text: all (each target once) or original (the authors' code).")
    ] = "all",
    dynamic: Annotated[
        bool, _flag("--dynamic", "For text: also evaluate with dynamic evaluation.")
    ] = False,
    cache: Annotated[
        bool, _flag("--cache", "For text: also evaluate with a neural cache.")
    ] = False,
    data_dir: DataDir = None,
):
    """Evaluate the best model of a run on a whole split.

    RUN is a folder of `train`.

    --dynamic and --cache tune their hyper-parameters on the start of the validation split, which
    takes as long as several evaluations of it, and then score the split once.
    """
    from trellis_keras.layers.checks import check_choice
    from trellis_keras.zoo import evaluation
    from trellis_keras.zoo.datasets.registry import SPLITS
    from trellis_keras.zoo.run import load_best

    check_choice("split", split, SPLITS)  # before loading the data, which takes time
    recipe = _recipe_of(run, data_dir)
    kinds = {"dynamic": evaluation.evaluate_dynamic, "cache": evaluation.evaluate_cache}
    asked_for = [name for name, wanted in (("dynamic", dynamic), ("cache", cache)) if wanted]
    if asked_for and not recipe.reads_text:
        raise ValueError(
            f"--dynamic and --cache are for language models. {run} is a run of {recipe.name}."
        )
    if asked_for and target_counting != "all":
        raise ValueError("--dynamic and --cache count each target once: omit --target-counting.")
    model, loaded = load_best(run), recipe.load_data()
    found: dict[str, object] = {
        **evaluation.evaluate(recipe, model, split, target_counting=target_counting, loaded=loaded)
    }
    for name in asked_for:
        typer.echo(f"{name}: tuning on the validation split", err=True)
        show = functools.partial(_echo, err=True)
        found[name] = kinds[name](recipe, model, loaded, split, show)
    asked = {"run": run, "split": split, "target_counting": target_counting}
    typer.echo(json.dumps({**asked, **found}))


def _recipe_of(run, data_dir):
    """Returns the recipe of the run in a folder, with another folder of its data."""
    from trellis_keras import zoo

    recipe = zoo.read_recipe(run)
    return recipe if data_dir is None else recipe.replace(data_dir=data_dir)


@command()
def compare(
    runs: Annotated[list[str], _argument("RUN ...", callback=_check_runs)],
    output: Annotated[
        str | None, _described("FILE", "PNG file for a plot of the validation losses.")
    ] = None,
    overwrite: Overwrite = False,
):
    """Compare runs by their lowest validation loss.

    Each RUN is a folder of `train`. The metrics are those of the epoch with that loss.
    """
    from trellis_keras.zoo import comparison

    rows = comparison.table(runs)
    if output is not None:
        comparison.draw(runs, output, overwrite)
    _echo_table(rows, numbers=set(range(2, len(rows[0]))))
    if output is not None:
        _echo(f"Written: {output}")


@command()
def generate(
    run: Run,
    prompt: Annotated[
        list[str] | None,
        _described("TEXT", "Text to continue (default: the first token); repeat for several."),
    ] = None,
    length: Annotated[int, _described("N", "Number of tokens to add.", min=1)] = 300,
    sampler: Annotated[
        str, _described("NAME", "greedy, random, top_k, top_p, beam or contrastive.")
    ] = "top_p",
    temperature: Annotated[
        float | None,
        _described("X", "Temperature of random, top_k and top_p (default: 0.8); 0 is greedy."),
    ] = None,
    top_k: Annotated[
        int | None,
        _described("N", "Number of candidates for top_k (default: 20), contrastive (5).", min=1),
    ] = None,
    top_p: Annotated[
        float | None, _described("P", "Probability mass of top_p (default: 0.9).", min=0, max=1)
    ] = None,
    beams: Annotated[int | None, _described("N", "Number of beams (default: 5).", min=1)] = None,
    stop_tokens: Annotated[
        list[str] | None,
        _described("TOKEN", "Token that ends a text, such as `<eos>`; repeat for several."),
    ] = None,
    seed: Annotated[int, _described("N", "Seed of the sampler.")] = 0,
):
    """Continue texts with the best model of a run.

    RUN is a folder of `train`. Tokens appear as they are drawn.
    """
    from trellis_keras.models import LanguageModel
    from trellis_keras.models.generation import text_pieces
    from trellis_keras.zoo.run import load_best

    model = load_best(run, LanguageModel)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "beams": beams}
    chosen = _sampler(sampler, model.vocabulary_size, options)
    settings = {"sampler": chosen, "seed": seed, "stop_tokens": stop_tokens}
    texts = []
    for start in prompt or []:
        tokens = len(model.vocabulary.encode(start, final_eos=False)) + length
        texts.append(model.generate_stream(start, tokens, **settings))
    if not prompt:  # as an id: the first token may be only part of a character
        ids = model.generate_stream([0], 1 + length, **settings)
        texts.append(text_pieces(model.vocabulary, ids))
    if sampler in ("beam", "contrastive"):
        typer.echo(f"{sampler} compares whole texts, which appear at the end.", err=True)
    try:
        for number, pieces in enumerate(texts):
            typer.echo("\n" * (number > 0), nl=False)
            for piece in pieces:
                _echo(piece, newline=False)
            typer.echo()
    except KeyboardInterrupt:
        typer.echo()
        raise typer.Exit(130) from None  # as shells report an interrupt


@command()
def export(
    run: Run,
    path: Annotated[str, _argument("PATH")],
    version: Annotated[
        int | None, _described("N", "Version number (default: the next).", min=1)
    ] = None,
    format: Annotated[
        str | None, _described("NAME", "saved_model, litert, onnx, c or wasm (default: by PATH).")
    ] = None,
    quantization: Annotated[
        str | None,
        _described("NAME", "litert: int8; c: int8 or int8_rings, ranges from the training data."),
    ] = None,
    quantization_tolerance: Annotated[
        float,
        _described(
            "X",
            "With --quantization: largest difference from Keras, relative to the output.",
        ),
    ] = 0.05,
    data_dir: DataDir = None,
    warmup: Annotated[
        bool, _flag("--warmup", "Add warmup requests for TensorFlow Serving.")
    ] = False,
    overwrite: Overwrite = False,
):
    """Export the best model of a run for serving or another runtime.

    RUN is a folder of `train`. PATH is the folder of all versions of a SavedModel, or a file, whose
    suffix .tflite, .onnx, .c or .wasm chooses the format.
    """
    from trellis_keras.export import export as export_model
    from trellis_keras.export import format_of
    from trellis_keras.layers.checks import check_choice
    from trellis_keras.zoo.evaluation import representative_data
    from trellis_keras.zoo.run import check_no_file_of_a_run, load_best

    format = format or format_of(path)
    check_no_file_of_a_run(path)
    examples = None
    if format == "c" and quantization is not None:
        check_choice("quantization", quantization, ("int8", "int8_rings"))  # loading takes time
        examples = representative_data(_recipe_of(run, data_dir))
    written = export_model(
        load_best(run),
        path,
        version,
        format=format,
        quantization=quantization,
        warmup=warmup,
        overwrite=overwrite,
        representative_data=examples,
        quantization_tolerance=quantization_tolerance,
    )
    _echo(f"Written: {written}")


@command()
def score(
    run: Run,
    file: Annotated[str, _argument("FILE")],
    output: Annotated[
        str,
        _described("FILE", "The .csv or .jsonl file to write. An interrupted job is resumed."),
    ],
    whole: Annotated[
        bool, _flag("--whole", "Treat the file as one text, continued across lines.")
    ] = False,
    field: Annotated[
        str | None, _described("KEY", "For JSON lines: the key of the document.")
    ] = None,
    start: Annotated[
        str | None,
        _described("TOKEN", "Token before each document, such as `<eos>`: scores its first token."),
    ] = None,
    batch_tokens: Annotated[
        int | None, _described("N", "Tokens per batch, a power of two; more take more memory.")
    ] = None,
    overwrite: Overwrite = False,
):
    """Write the log-probability of each line of a text.

    The probabilities are those of the best model of RUN, a folder of `train`. FILE is a text of any
    size, one document per line.
    """
    from trellis_keras import scoring, zoo
    from trellis_keras.models import LanguageModel
    from trellis_keras.zoo.run import check_output, load_best

    check_output(output, [file], overwrite)
    try:
        totals = scoring.score(
            load_best(run, LanguageModel),
            file,
            output,
            whole=whole,
            field=field,
            start=start,
            metric=zoo.read_recipe(run).metric,
            batch_tokens=batch_tokens,
            overwrite=overwrite,
            verbose=1,
        )
    except KeyboardInterrupt:
        typer.echo("\nInterrupted. To resume, give the same command again.", err=True)
        raise
    typer.echo(json.dumps({"run": run, "file": file, "output": output, **totals}))


def _sampler(name, vocabulary_size, options):
    """Returns a Keras-NLP sampler, with defaults for small models (Keras-NLP's are near greedy)."""
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
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if option not in settings:
            raise ValueError(f"The sampler {name} does not take --{option.replace('_', '-')}.")
    names = {"top_k": "k", "top_p": "p", "beams": "num_beams"}
    return kind(**{names.get(option, option): v for option, v in (settings | given).items()})


def _join(coordinator, processes, process):
    """Joins the other processes of a run, if there are any."""
    if coordinator is not None:
        from trellis_keras.training import devices

        devices.join(coordinator, processes, process)
    elif (processes, process) != (None, None):
        raise ValueError("--processes and --process need --coordinator HOST:PORT.")


def _chosen_recipe(names, options, text, precision, output, repeat, alone):
    """Returns the recipe for the words MODEL [VARIANT], or of the run in a folder."""
    if text is not None:
        if "data" in options or "path" in options:
            raise ValueError("--text FILE takes no --data and no --path.")
        options |= {"data": "text", "path": text}
    if precision is not None:
        if "dtype_policy" in options:
            raise ValueError("--precision and --dtype-policy are mutually exclusive.")
        options["dtype_policy"] = _policy(precision)
    fewest, most = (1, 2) if repeat else (0, 1)
    if not fewest <= len(names) <= most:
        words = "MODEL [VARIANT] with --repeat" if repeat else "one model at most"
        raise ValueError(f"Expected {words}. Received: {', '.join(names) or 'no model'}")
    if not names:
        return _recipe_to_resume(output, alone).replace(**options)
    from trellis_keras import zoo

    make = zoo.run_recipe if repeat else zoo.recipe
    return make(*names, **options)


def _policy(precision):
    """Returns the dtype policy for the option --precision."""
    if precision not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"--precision must be auto, float32 or bfloat16. Received: {precision}")
    from trellis_keras.zoo.environment import has_bfloat16_units

    is_half = has_bfloat16_units() if precision == "auto" else precision == "bfloat16"
    return "mixed_bfloat16" if is_half else "float32"


def _recipe_to_resume(output, alone):
    """Returns the recipe of the run in a folder; all processes get that of process 0."""
    if alone:
        try:
            _check_runs(output)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error} Pass a model (`trellis-keras list` shows them) to start one. To restart "
                "a run that was killed before its first batch, repeat the full command."
            ) from error
    from trellis_keras import zoo
    from trellis_keras.training import devices

    if devices.process_index():
        return zoo.registry.recipe_from_dict(json.loads(devices.broadcast(b"")))
    recipe = zoo.read_recipe(output)
    devices.broadcast(recipe.to_json().encode())
    return recipe


def _range(text):
    """Turns '10:15' into (10, 15)."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise ValueError(f"--profile takes two batches, such as 10:15. Received: {text!r}")
    return int(first), int(last)


def _parse(words):
    """Turns `name --depth 8 --data=pydoc` into `["name"], {"depth": 8, "data": "pydoc"}`."""
    names, options, rest = [], {}, list(words or [])
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if not option.startswith("-"):
            names.append(option + equals + value)
            continue
        if not equals:
            # A negative number starts with one dash.
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"{option} needs a value.")
            value = rest.pop(0)
        if not option.startswith("--"):
            raise ValueError(f"Expected an option such as --epochs 3. Received: {option!r}")
        name = option[2:].replace("-", "_")
        options[name] = value if name in _TEXTS and value not in _WORDS else _value(value)
    return names, options


_TEXTS = ("data_dir", "path", "unknown")  # options that are text, also if it is a number
_WORDS = {"none": None, "None": None, "True": True, "False": False}


def _value(text):
    """Parses numbers, true, false, none, lists and mappings; everything else is text."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(re.sub(r"^(-?)\.", r"\g<1>0.", text))  # JSON has no .1
    except json.JSONDecodeError:
        return text


def main():
    """Runs the command line. Warnings and usage errors take one line; errors exit with status 2."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    warnings.formatwarning = lambda message, *_: f"Warning: {_printable(str(message), False)}\n"
    try:
        _run()
    except BaseException:
        if devices := sys.modules.get("trellis_keras.training.devices"):
            devices.end_at_once()
        raise


def _run():
    try:
        app()
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        typer.echo(f"Error: {_printable(str(error), False)}", err=True)
        sys.exit(2)
    except MemoryError as error:
        _echo(f"Error: There is not enough memory. {error}".rstrip(), err=True)
        sys.exit(2)
    except Exception:
        _echo(traceback.format_exc(), newline=False, err=True)
        sys.exit(1)
