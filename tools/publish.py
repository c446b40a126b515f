"""Publishes finished runs: card, results, history, learning curve, small weights.

    python -m tools.publish runs/tcn_jsb --note "One more setting was tried."
    python -m tools.publish runs/seed_1 runs/seed_2 zoo/tcn_jsb/fast

evaluates the best model of each run on the test split and writes to zoo/MODEL, or to
zoo/MODEL/VARIANT if the run changed the model's default arguments or has the setting "fast".
`python -m tools.pages` then updates the tables.
"""

import contextlib
import dataclasses
import datetime
import json
import math
import pathlib
import shutil
import statistics
import sys
import tempfile
from typing import Annotated

import h5py
import typer
from matplotlib.figure import Figure

from keras_streams.files import atomic_write
from tools import cards
from tools.description import Description
from trellis_keras.files import file_checksum
from trellis_keras.jobs import check_no_links, different_settings, folder_lock
from trellis_keras.zoo import environment, pretrained, read_recipe
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.evaluation import evaluate, evaluate_cache, evaluate_dynamic
from trellis_keras.zoo.registry import recipe_from_dict
from trellis_keras.zoo.results import RESULTS, WEIGHTS, assets_folder, read_run

GENERATED = ("adding", "copy_memory")  # data sets whose test split is only a sample
TEST_SETS = range(1, 11)  # their seeds of other test splits
_OF_A_SEED = "test validation_loss epoch epochs wall_time_s test_sets backend".split()


def publish(
    seeds: Annotated[
        list[pathlib.Path],
        typer.Argument(help="Runs, or zoo runs, that differ only in their seeds."),
    ],
    folder: Annotated[
        pathlib.Path | None, typer.Option(help="Output. Default: the zoo run's, or the model's.")
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of local copies of the data.")
    ] = None,
    note: Annotated[
        str | None, typer.Option(help="Runs not shown, limits. Default: the published note.")
    ] = None,
    test_runs: Annotated[
        int | None,
        typer.Option(min=1, help="Evaluations of the test split. Default: the known ones."),
    ] = None,
    test_time: Annotated[
        bool, typer.Option("--test-time", help="Also adapt a language model at test time.")
    ] = False,
):
    """Evaluate runs on the test split, and write their card and results.

    Of several seeds, that with the median validation loss (the lower of two medians; the next one,
    if its weights are not there) is stored with its history and weights, of the others the test
    results. Weights are stored if the data are the zoo's own, no vocabulary of words would have
    to accompany them, and they take less than 5 MB: in half precision if the test result keeps its
    printed digits, otherwise in single precision.
    """
    paths = [pathlib.Path(path).expanduser() for path in seeds]
    recipes = [
        recipe_from_dict(_read(path)["recipe"]) if is_zoo_run(path) else read_recipe(path)
        for path in paths
    ]
    _check_same(paths, recipes)
    fresh = [path for path in paths if not is_zoo_run(path)]
    if folder is None:
        folder = next(filter(is_zoo_run, paths), None) or zoo_folder(recipes[0])
    folder = pathlib.Path(folder).expanduser()
    with contextlib.ExitStack() as locks:
        for path in fresh:
            locks.enter_context(folder_lock(path))
            check_no_links(path)
            _check_whole(path)
        found = [(p, _evaluated(p, data_dir) if p in fresh else _read(p)) for p in paths]
        earlier = [results for path, results in found if path not in fresh]
        without_weights = [other for results in earlier for other in results["other_seeds"]]
        source, results = _median(found, without_weights)
        others = [_of_a_seed(each) for _, each in found if each is not results] + without_weights
        replaced = []
        if is_zoo_run(folder) and folder.resolve() not in [path.resolve() for path in paths]:
            earlier.append(_read(folder))
            if earlier[-1]["test"] not in [each["test"] for each in (results, *others)]:
                replaced = [earlier[-1]["test"]]
        counts = [each.get("test_runs") for each in earlier]  # None if it was not recorded
        notes = [note] if note is not None else [each["note"] for each in earlier if each["note"]]
        results |= {
            "other_seeds": others,
            "note": next(iter(notes), ""),
            "test_runs": test_runs or (None if None in counts else len(fresh) + sum(counts)),
            "replaced": [test for each in earlier for test in each.get("replaced", [])] + replaced,
        }
        if test_time:
            recipe = recipe_from_dict(results["recipe"])
            recipe = recipe.replace(data_dir=data_dir) if data_dir else recipe
            loaded = recipe.load_data()
            if is_zoo_run(source):
                model = recipe.build(weights="pretrained", vocabulary=loaded.vocabulary)
            else:
                model = runs.load_best(source)
            results["test_time"] = {
                "dynamic": evaluate_dynamic(recipe, model, loaded, show=typer.echo),
                "cache": evaluate_cache(recipe, model, loaded, show=typer.echo),
            }
        results = _write(folder, source, results, data_dir)
    typer.echo(json.dumps({"model": results["recipe"]["name"], "test": results["test"]}))
    return results


def zoo_folder(recipe, zoo=None):
    """Returns the folder of a recipe's run in the zoo: MODEL or MODEL/VARIANT.

    Raises:
        ValueError: The recipe's data are not those of the zoo's model.
    """
    if not has_own_data(recipe):
        raise ValueError(
            f"The zoo's folders are for its own data, {recipe.entry.data!r} with "
            f"{recipe.entry.data_options}. Pass another `folder`. Received: {recipe.data!r} with "
            f"{recipe.data_options}"
        )
    return (assets_folder() if zoo is None else zoo) / recipe.name / variant_of(recipe)


def variant_of(recipe):
    """Returns a recipe's changes to the model's default net, data and setting, as text."""
    known = {*recipe.entry.data_options, *recipe.arguments}
    words = [
        f"{name}={value}"
        for name, value in recipe.changes().items()
        if name in known and not pretrained.is_of_the_training(name)
    ]
    return ",".join([*words, *filter(None, [recipe.setting])])


def has_own_data(recipe):
    """Returns whether a recipe has the data of the zoo's model, with any `T`."""
    own = recipe.entry
    return (recipe.data, recipe.data_options.keys()) == (own.data, own.data_options.keys())


def keeps_weights(recipe, vocabulary):
    """Returns whether a run's weights may be published: with the zoo's data, without words."""
    of_words = vocabulary is not None and vocabulary.unit == "word"
    return has_own_data(recipe) and not of_words


# Runs and zoo runs


def is_zoo_run(path):
    """Returns whether a folder holds a run of the zoo."""
    return (path / RESULTS).is_file()


def _read(folder):
    return json.loads((folder / RESULTS).read_text(encoding="utf-8"))


def _check_whole(run):
    """Raises for a run killed at the end of an epoch, whose best model may be outdated."""
    rows, epochs = len(runs.history(run)), runs.epochs_done(run)
    if rows != epochs:
        raise ValueError(
            f"{run} has {rows} epochs in its history but {epochs} in its last checkpoint, because "
            f"it was killed at the end of an epoch. Resume it first: {runs.resuming(run)}"
        )


def _check_same(paths, recipes):
    """Raises unless all recipes differ in their seeds, and only in these."""
    first, seeds = recipes[0].options(), []
    for path, recipe in zip(paths, recipes, strict=True):
        of_the_process = ("seed", "jit_compile", "data_dir")
        different = different_settings(first, recipe.options(), of_the_process)
        if different:
            raise ValueError(f"{paths[0]} (there) and {path} (here) differ: {different}.")
        others = _read(path)["other_seeds"] if is_zoo_run(path) else []
        own = [recipe.seed, *(other["seed"] for other in others)]
        if repeated := set(own).intersection(seeds):
            raise ValueError(f"{path} repeats the seed {repeated.pop()}.")
        seeds += own


def _median(found, without_weights):
    """Returns (folder, results) of the seed with the median validation loss.

    If its weights are not there, of the next one above.
    """
    losses = sorted(each["validation_loss"] for each in [r for _, r in found] + without_weights)
    ranked = sorted(found, key=lambda pair: pair[1]["validation_loss"])
    median = losses[(len(losses) - 1) // 2]
    return next((pair for pair in ranked if pair[1]["validation_loss"] >= median), ranked[-1])


def _of_a_seed(results):
    """Returns what is stored of the seeds whose weights are not."""
    seed = {"seed": results["recipe"]["arguments"]["seed"]}
    return seed | {name: results[name] for name in _OF_A_SEED if name in results}


# Evaluation


def _evaluated(run, data_dir):
    """Returns the results of a run: those of its best model, and how it was trained."""
    recorded, recipe = environment.read(run / runs.ENVIRONMENT), read_recipe(run)
    model, history = runs.load_best(run), runs.history(run)
    best = runs.best_epoch(history)
    found, depth = (getattr(m.backbone, "depth", None) for m in (model, recipe.build()))
    if found != depth:  # of `GrowingDepth`
        raise ValueError(
            f"{run} has its lowest validation loss in epoch {int(best['epoch'])}, with {found} of "
            f"{depth} levels. The zoo's models have all of them: train longer, or pass `depth`."
        )
    recipe = recipe.replace(data_dir=data_dir) if data_dir else recipe
    test = evaluate(recipe, model)
    results = {
        **recorded,
        "recipe": recipe.without_folders(),
        "test": test[recipe.metric],
        "test_metrics": test,
        "validation_loss": best["val_loss"],
        "epoch": int(best["epoch"]),
        "epochs": len(history),
        "finished": runs.is_finished(run),
        "parameters": model.count_params(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "wall_time_s": _wall_time(run),
    }
    if recipe.data in GENERATED and has_own_data(recipe):
        results["test_sets"] = _on_other_test_sets(recipe, model)
    return results


def _on_other_test_sets(recipe, model):
    values = []
    for seed in TEST_SETS:
        # The test split does not depend on the size of the others.
        options = {"seed": seed, "train": 1, "valid": 1}
        other = recipe.replace(data_options=options, data_checksum=None)
        values.append(evaluate(other, model)[recipe.metric])
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    return {"seeds": list(TEST_SETS), "mean": mean, "deviation": deviation}


def _wall_time(run):
    """Returns the seconds of training without pauses, or `None`.

    They are in TensorBoard's logs, or in the figures of `benchmarks.gpu.flagship`.
    """
    if (figures := run / "figures.json").is_file():
        return round(json.loads(figures.read_text(encoding="utf-8"))["training_s"], 1)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seconds = []
    for path in sorted((run / "tensorboard" / "train").glob("events.out.tfevents.*")):
        events = EventAccumulator(str(path)).Reload()
        tags = events.Tags()
        tensors = [e.wall_time for t in tags["tensors"] for e in events.Tensors(t)]
        scalars = [e.wall_time for t in tags["scalars"] for e in events.Scalars(t)]
        if tensors or scalars:
            seconds.append(max(tensors + scalars) - events.FirstEventTimestamp())
    return round(sum(seconds), 1) if seconds else None


# Files


def _write(folder, source, results, data_dir):
    """Writes a zoo run from a run, or from a zoo run with other seeds, and returns its results."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as aside:
        weights = pathlib.Path(aside) / WEIGHTS
        if not is_zoo_run(source):
            results |= _save_weights(source, results, data_dir, weights)
        elif (source / WEIGHTS).is_file():
            shutil.copyfile(source / WEIGHTS, weights)
        text = json.dumps(results, indent=2, allow_nan=False) + "\n"
        history = (source / "history.csv").read_bytes()
        # Removes weights of an earlier run.
        (folder / WEIGHTS).unlink(missing_ok=True)
        if weights.is_file():
            weights.replace(folder / WEIGHTS)
    results = json.loads(text)  # exactly as readers of the file see them
    for name, content in ((RESULTS, text.encode()), ("history.csv", history)):
        with atomic_write(folder / name) as temporary:
            temporary.write_bytes(content)
    run = read_run(folder / RESULTS)
    variant = run.variant or variant_of(recipe_from_dict(run.recipe))
    one = Description.of(dataclasses.replace(run, variant=variant))
    with atomic_write(folder / "curve.png") as temporary:
        _draw(runs.history(folder), one.run, temporary)
    with atomic_write(folder / cards.CARD) as temporary:
        temporary.write_text(cards.card(one), encoding="utf-8")
    return results


def _save_weights(run, results, data_dir, path):
    """Saves a run's weights if they are to be published, and returns what describes them."""
    recipe, model = read_recipe(run), runs.load_best(run)  # uncompiled: without an optimizer
    vocabulary = getattr(model, "vocabulary", None)
    too_large = 2 * results["parameters"] > cards.LARGEST_WEIGHTS  # even in half precision
    if too_large or not keeps_weights(recipe, vocabulary):
        return {}
    whole, half = (path.with_name(f"{dtype}.{WEIGHTS}") for dtype in ("float32", "float16"))
    model.save_weights(whole)
    _rewrite(whole, half, "float16")
    recipe = recipe.replace(data_dir=data_dir) if data_dir else recipe
    found = evaluate(recipe, pretrained.load_weights(model, recipe.name, half))
    digits = [f"{value:.4g}" for value in (found[recipe.metric], results["test"])]
    dtype = "float16" if digits[0] == digits[1] else "float32"
    _rewrite(whole, path, dtype)
    if dtype == "float32":
        typer.echo(f"Half precision would change {recipe.metric} to {digits[0]}: single is kept.")
    if path.stat().st_size > cards.LARGEST_WEIGHTS:
        path.unlink()
        return {}
    described = {"weights_sha256": file_checksum(path), "weights_dtype": dtype}
    return described | ({"vocabulary": vocabulary.get_config()} if recipe.reads_text else {})


def _rewrite(path, output, dtype):
    """Copies a weights file in HDF5's compact format, with floating-point arrays in `dtype`."""
    with h5py.File(path) as old, h5py.File(output, "w", libver="latest") as new:

        def copy(name, item):
            if isinstance(item, h5py.Group):
                copied = new.create_group(name)
            else:
                values = item[()]
                values = values.astype(dtype) if values.dtype.kind == "f" else values
                copied = new.create_dataset(name, data=values)
            copied.attrs.update(item.attrs)

        old.visititems(copy)


def _draw(history, run, path):
    """Plots the training and validation loss by epoch."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel="loss", title=run.title)
    epochs = [row["epoch"] for row in history]
    for name, label in (("loss", "training"), ("val_loss", "validation")):
        axes.plot(epochs, [row[name] for row in history], label=label)
    axes.axvline(run.results["epoch"], color="0.7", lw=1, zorder=0, label="reported epoch")
    values = [row[name] for row in history for name in ("loss", "val_loss")]
    values = [value for value in values if not math.isnan(value)]
    if min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, format="png")


if __name__ == "__main__":
    try:
        typer.run(publish)
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
