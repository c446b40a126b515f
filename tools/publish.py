"""Publishes a finished run: card, results, history, learning curve, small weights.

    python -m tools.publish runs/tcn_jsb --note "One seed."

evaluates the best model of the run on the test split and writes to zoo/MODEL, or to
zoo/MODEL/SETTING if the run changed the model's default arguments or has the setting "fast".
"""

import contextlib
import datetime
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile
from typing import Annotated

import h5py
import typer
from matplotlib.figure import Figure

from keras_streams.files import atomic_write
from tools import cards
from trellis_keras.files import check_no_links, folder_lock
from trellis_keras.training.monitors import read_history
from trellis_keras.zoo import environment, pretrained, read_recipe
from trellis_keras.zoo import run as runs
from trellis_keras.zoo.results import RESULTS, WEIGHTS, Run, assets_folder


def main(
    run: Annotated[str, typer.Argument(help="Folder of the run.")],
    folder: Annotated[
        str | None, typer.Option(help="Output folder. Default: the model's folder in the zoo.")
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of local copies of the data.")
    ] = None,
    note: Annotated[
        str, typer.Option(help="Note for readers of the card: runs not shown, limits.")
    ] = "",
    other_seed: Annotated[
        list[str] | None,
        typer.Option(help="Run of the same recipe with another seed; can be repeated."),
    ] = None,
    test_runs: Annotated[
        int | None,
        typer.Option(min=1, help="Evaluations of the test split so far, including this one."),
    ] = None,
):
    """Evaluate a run on the test split and write its card and results."""
    results = publish(run, folder, data_dir, note, other_seed or (), test_runs=test_runs)
    typer.echo(json.dumps({"model": results["recipe"]["name"], "test": results["test"]}))


def publish(
    run, folder=None, data_dir=None, note="", other_seeds=(), wall_time_s=None, test_runs=None
):
    """Evaluates the best model of a run on the test split and publishes it in the zoo.

    Writes `results.json`, `history.csv`, `curve.png`, `card.md` and, for a model trained on the
    zoo's own data, the weights if they are smaller than 5 MB: in half precision if the test result
    keeps its printed digits, otherwise in single precision. A vocabulary of characters or bytes is
    saved with them; a vocabulary of words is not, because it would contain parts of the text.

    Args:
        run: The run's folder.
        folder: Output folder. Defaults to `zoo_folder` of the run's recipe.
        data_dir: Folder of local copies of the data, if they are not where the run found them.
        note: Note for readers of the card: runs not shown, limits, reasons for a gap to the
            published result.
        other_seeds: Folders of runs of the same recipe with other seeds. Their test results are
            published too; `run` must have the lowest validation loss of all.
        wall_time_s: Seconds of training. Defaults to the time in TensorBoard's logs, if any.
        test_runs: Number of evaluations of the test split in all experiments, including those of
            this call. Defaults to the number of seeds.

    Returns:
        The results, a dict.

    Raises:
        ValueError: A run in `other_seeds` has another recipe, the same seed or a lower validation
            loss; a run was killed between writing an epoch's history and its checkpoint; another
            process is training the run; or a run on the user's own data has no `folder`.
        FileNotFoundError: There is no run, or it has not finished an epoch.
    """
    run, *other_seeds = [pathlib.Path(path).expanduser() for path in (run, *other_seeds)]
    recipe = read_recipe(run)
    folder = zoo_folder(recipe) if folder is None else pathlib.Path(folder).expanduser()
    for other in other_seeds:
        read_recipe(other)  # raises if there is no run
    with contextlib.ExitStack() as locks:
        for each in sorted({each.resolve() for each in (run, *other_seeds)}):
            if os.access(each, os.W_OK):  # otherwise no process can be training there
                locks.enter_context(folder_lock(each))
            check_no_links(each)
        facts = {
            "wall_time_s": _wall_time(run) if wall_time_s is None else wall_time_s,
            "note": note,
            "test_runs": 1 + len(other_seeds) if test_runs is None else test_runs,
        }
        return _publish(run, recipe, folder, data_dir, other_seeds, facts)


def zoo_folder(recipe, zoo=None):
    """Returns the folder of a recipe's run in the zoo: MODEL or MODEL/SETTING.

    Raises:
        ValueError: The recipe's data are not those of the zoo's model.
    """
    if not has_own_data(recipe):
        raise ValueError(
            f"The zoo's folders are for its own data, {recipe.entry.data!r} with "
            f"{recipe.entry.data_options}. Pass another `folder`. Received: {recipe.data!r} with "
            f"{recipe.data_options}"
        )
    folder = (assets_folder() if zoo is None else zoo) / recipe.name
    setting = setting_of(recipe)
    return folder / setting if setting else folder


def setting_of(recipe):
    """Returns a recipe's changes to the model's default net, data and setting, as text."""
    known = {*recipe.entry.data_options, *recipe.arguments}
    setting = {
        name: value
        for name, value in recipe.changes().items()
        if name in known and not pretrained.is_of_the_training(name)
    }
    words = [f"{name}={value}" for name, value in setting.items()]
    return ",".join([*words, *filter(None, [recipe.setting])])


def has_own_data(recipe):
    """Returns whether a recipe has the data of the zoo's model, with any `T`."""
    own = recipe.entry
    return (recipe.data, recipe.data_options.keys()) == (own.data, own.data_options.keys())


def keeps_weights(recipe, vocabulary):
    """Returns whether a run's weights may be published: with the zoo's data, without words."""
    of_words = vocabulary is not None and vocabulary.unit == "word"
    return has_own_data(recipe) and not of_words


def _publish(run, recipe, folder, data_dir, other_seeds, facts):
    # Without the optimizer, whose variables would be saved too.
    model = runs.load_best(run)
    for each in (run, *other_seeds):
        _check_whole(each)
    _check_seeds(run, recipe, other_seeds)
    if data_dir:
        recipe = recipe.replace(data_dir=data_dir)
    results = _results(run, recipe, model, runs.evaluate(recipe, run))
    results["other_seeds"] = [_other_seed(other, data_dir) for other in other_seeds]
    results |= facts
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as aside:
        weights, dtype = _save_weights(model, recipe, results["test"], pathlib.Path(aside))
        if weights is not None:
            results |= {"weights_sha256": pretrained.checksum(weights), "weights_dtype": dtype}
            if recipe.reads_text:
                results["vocabulary"] = model.vocabulary.get_config()
        text = json.dumps(results, indent=2, allow_nan=False) + "\n"
        # Removes weights of an earlier run.
        (folder / WEIGHTS).unlink(missing_ok=True)
        if weights is not None:
            weights.replace(folder / WEIGHTS)
    results = json.loads(text)  # exactly as readers of the file see them
    with atomic_write(folder / RESULTS) as temporary:
        temporary.write_text(text, encoding="utf-8")
    shutil.copyfile(run / "history.csv", folder / "history.csv")
    published = Run(folder, setting_of(recipe), results)
    with atomic_write(folder / "curve.png") as temporary:
        _draw(_history(run), published, temporary)
    with atomic_write(folder / cards.CARD) as temporary:
        temporary.write_text(cards.card(published), encoding="utf-8")
    return results


def _save_weights(model, recipe, test, folder):
    """Saves a model's weights, and returns their path and dtype, or None and None if not kept."""
    if not keeps_weights(recipe, getattr(model, "vocabulary", None)):
        return None, None
    path, half = folder / WEIGHTS, folder / f"half.{WEIGHTS}"
    model.save_weights(path)
    halve(path, half)
    found = runs.evaluate_model(recipe, pretrained.load_weights(model, recipe.name, half))
    digits = [f"{value:.4g}" for value in (found[recipe.metric], test)]
    same = digits[0] == digits[1]
    if not same:
        typer.echo(
            f"The weights stay in single precision: in half precision, {recipe.metric} is "
            f"{digits[0]}, not {digits[1]}."
        )
    path, dtype = (half, "float16") if same else (path, "float32")
    return (path, dtype) if path.stat().st_size < cards.LARGEST_WEIGHTS else (None, None)


def halve(path, output):
    """Copies a weights file with its single-precision arrays in half precision."""
    with h5py.File(path) as old, h5py.File(output, "w") as new:

        def copy(name, item):
            if isinstance(item, h5py.Group):
                copied = new.create_group(name)
            else:
                values = item[()]
                copied = new.create_dataset(
                    name, data=values.astype("float16") if values.dtype == "float32" else values
                )
            copied.attrs.update(item.attrs)

        old.visititems(copy)


def _evaluate(run, data_dir):
    recipe = read_recipe(run)
    return runs.evaluate(recipe.replace(data_dir=data_dir) if data_dir else recipe, run)


def _check_whole(run):
    """Raises for a run killed at the end of an epoch, whose best model may be outdated."""
    rows, epochs = len(_history(run)), runs.epochs_done(run)
    if rows != epochs:
        raise ValueError(
            f"{run} has {rows} epochs in its history but {epochs} in its last checkpoint, because "
            f"it was killed at the end of an epoch. Resume it first: {runs.resuming(run)}"
        )


def _check_seeds(run, recipe, other_seeds):
    """Raises unless all runs share a recipe, have different seeds, and `run` is the best."""
    seeds, best = {recipe.seed}, _best(run)["val_loss"]
    for other in other_seeds:
        theirs = read_recipe(other)
        ours, its = _identity(recipe), _identity(theirs)
        differing = [
            f"{name} is {its.get(name)!r}, not {ours.get(name)!r}"
            for name in {**ours, **its}
            if ours.get(name) != its.get(name)
        ]
        if differing:
            raise ValueError(f"{other} and {run} have different recipes: {'; '.join(differing)}.")
        if theirs.seed in seeds:
            raise ValueError(f"{other} repeats the seed {theirs.seed}.")
        if _best(other)["val_loss"] < best:
            raise ValueError(f"Publish {other} instead: its validation loss is lower than {run}'s.")
        seeds.add(theirs.seed)


def _identity(recipe):
    """Returns the parts of a recipe that are equal for runs that differ only in their seeds."""
    written = recipe.to_dict()
    flat = {**written, **written["arguments"], **written["training"]}
    own = ("seed", "jit_compile", "data_dir", "arguments", "training")
    return {name: value for name, value in flat.items() if name not in own}


def _other_seed(run, data_dir):
    recipe, test, best = read_recipe(run), _evaluate(run, data_dir), _best(run)
    return {
        "seed": recipe.seed,
        "test": test[recipe.metric],
        "validation_loss": best["val_loss"],
        "epoch": int(best["epoch"]),
        "epochs": len(_history(run)),
        "wall_time_s": _wall_time(run),
    }


def _best(run):
    """Returns the row of the history with the lowest validation loss."""
    if not _history(run):
        raise ValueError(f"{run} has not finished an epoch yet.")
    return min(_history(run), key=lambda row: (math.isnan(row["val_loss"]), row["val_loss"]))


def _results(run, recipe, model, test):
    history, best = _history(run), _best(run)
    written, _ = runs.without_paths(recipe.to_dict())
    return {
        **environment.read(run / runs.ENVIRONMENT),
        "recipe": written,
        "test": test[recipe.metric],
        "test_metrics": test,
        "protocol": "the epoch of the lowest validation loss; the test split has no part in that",
        "validation_loss": best["val_loss"],
        "epoch": int(best["epoch"]),
        "epochs": len(history),
        "finished": runs.is_finished(run),
        "parameters": model.count_params(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _history(run):
    """Returns the rows of a run's history, with NaN for missing values."""
    rows = read_history(run / "history.csv")
    return [{k: float(v or "nan") for k, v in row.items()} for row in rows]


def _wall_time(run):
    """Returns the seconds of training in TensorBoard's logs, without pauses, or None."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return None
    seconds = []
    for path in sorted((run / "tensorboard" / "train").glob("events.out.tfevents.*")):
        events = EventAccumulator(str(path)).Reload()
        tags = events.Tags()
        tensors = [e.wall_time for t in tags["tensors"] for e in events.Tensors(t)]
        scalars = [e.wall_time for t in tags["scalars"] for e in events.Scalars(t)]
        if tensors or scalars:
            seconds.append(max(tensors + scalars) - events.FirstEventTimestamp())
    return round(sum(seconds), 1) if seconds else None


def _draw(history, published, path):
    """Plots the training and validation loss by epoch."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    epochs = [row["epoch"] for row in history]
    for name, label in (("loss", "training"), ("val_loss", "validation")):
        axes.plot(epochs, [row[name] for row in history], label=label)
    axes.axvline(published.results["epoch"], color="0.7", lw=1, zorder=0, label="reported epoch")
    values = [row[name] for row in history for name in ("loss", "val_loss")]
    values = [value for value in values if not math.isnan(value)]
    if min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("loss")
    axes.set_title(published.title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, format="png")


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")
