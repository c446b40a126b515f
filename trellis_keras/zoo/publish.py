"""What a finished run leaves in the zoo: card, results, history, learning curve, small weights."""

import contextlib
import datetime
import json
import math
import os
import pathlib
import shutil
import tempfile

from trellis_keras.files import atomic_write, folder_lock
from trellis_keras.training.records import read_history
from trellis_keras.zoo import cards, pretrained, registry, runs
from trellis_keras.zoo.assets import RESULTS, WEIGHTS
from trellis_keras.zoo.card_sections import title
from trellis_keras.zoo.failures import resuming

# Larger weights are no part of the repository.
_LARGEST_WEIGHTS = 5_000_000  # bytes

# Settings that say what a model was trained on.
_DATA = {"data", "data_options"}
# What a run knows of its data and of the literature; no settings of anybody's choice.
_FOUND = {
    "data_dir",
    "data_checksum",
    "vocabulary_size",
    "published",
    "published_epochs",
    "source",
}


def publish(run, folder, data_dir=None, note="", other_seeds=(), wall_time_s=None):
    """Evaluates the best model of a run on the test split and writes what the zoo keeps of it.

    Writes `results.json`, `history.csv`, `curve.png`, `card.md` and, for a model that solves the
    benchmark of its name, the weights where they are below 5 MB. A vocabulary of characters or
    bytes goes with them; one of words does not, as it would be a part of the text.

    Args:
        run: The run's folder.
        folder: Where to write, for instance `zoo/tcn_jsb`.
        data_dir: Folder of local copies of the data, if they are not where the run found them.
        note: What a reader of the card should know: runs that are not shown, limits, what the
            gap to the published result is due to.
        other_seeds: Folders of runs by the same recipe with other seeds. Their test results are
            told beside that of `run`, which must have the lowest validation loss of all.
        wall_time_s: Seconds of training. Default: by TensorBoard's records, if there are any.

    Returns:
        The results, a dict.

    Raises:
        ValueError: As `runs.evaluate`; or a run in `other_seeds` has another recipe, no other seed
            or a lower validation loss; or a run was killed between an epoch's row in its history
            and its checkpoint, or another process trains in it; or `folder` has the name of
            another model, or of this one with another benchmark (such as another T, or a text of
            one's own).
        FileNotFoundError: As `runs.evaluate`.
    """
    run, folder, *other_seeds = [
        pathlib.Path(path).expanduser() for path in (run, folder, *other_seeds)
    ]
    for each in (run, *other_seeds):
        runs.read_recipe(each)  # there is a run
    with contextlib.ExitStack() as claims:
        for each in sorted({each.resolve() for each in (run, *other_seeds)}):
            if os.access(each, os.W_OK):  # else nobody trains there
                claims.enter_context(folder_lock(each))
        return _publish(run, folder, data_dir, note, other_seeds, wall_time_s)


def _publish(run, folder, data_dir, note, other_seeds, wall_time_s):
    recipe = runs.read_recipe(run)
    _check_name(folder.name, recipe)
    # Without the optimizer, whose variables would be in the weights file too.
    model = runs.load_best(run, compile=False)
    for each in (run, *other_seeds):
        _check_whole(each)
    _check_seeds(run, recipe, other_seeds)
    results = _results(run, recipe, model, runs.evaluate(run, "test", data_dir=data_dir))
    results["other_seeds"] = [_other_seed(other, data_dir) for other in other_seeds]
    results["wall_time_s"] = _wall_time(run) if wall_time_s is None else wall_time_s
    results["note"] = note
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as aside:
        weights = _weights(model, recipe, pathlib.Path(aside) / WEIGHTS)
        if weights is not None:
            results["weights_sha256"] = pretrained.checksum(weights)
            if registry.reads_text(recipe.model):
                results["vocabulary"] = model.vocabulary.get_config()
        text = json.dumps(results, indent=2, allow_nan=False) + "\n"
        # Weights of an earlier run must not stay beside other results.
        (folder / WEIGHTS).unlink(missing_ok=True)
        if weights is not None:
            weights.replace(folder / WEIGHTS)
    results = json.loads(text)  # as all who read the file will see them
    _write(folder / RESULTS, text)
    shutil.copyfile(run / "history.csv", folder / "history.csv")
    with atomic_write(folder / "curve.png") as temporary:
        _draw(_history(run), results, temporary)
    _write(folder / cards.CARD, cards.trained(results, folder.name))
    return results


def _weights(model, recipe, path):
    """Saves a model's weights; None where they are not to be published."""
    if not is_the_zoos(recipe, getattr(model, "vocabulary", None)):
        return None
    model.save_weights(path)
    return path if path.stat().st_size < _LARGEST_WEIGHTS else None


def is_the_zoos(recipe, vocabulary):
    """Whether a run's weights may be called the zoo's: they solve the benchmark of its name.

    Weights of a language model are of no use without its vocabulary.
    """
    of_words = vocabulary is not None and vocabulary.unit == "word"
    return not of_words and not _DATA & set(_changed(recipe))


def _check_name(name, recipe):
    """Keeps a model's own folder for the benchmark that is published of it."""
    if name not in registry.list_models():
        return
    if name != recipe.name:
        raise ValueError(f"{name} is another model's folder than {recipe.name}'s.")
    changed = _changed(recipe)
    # Models of which nothing is published have a benchmark too: their data.
    if _DATA & set(changed) or _figure(recipe) != _figure(registry.recipe(name)):
        raise ValueError(
            f"The folder {name} is kept for the benchmark of {name}, and this run is of other "
            f"settings: {changed}. Name it {name}_..."
        )


def _figure(recipe):
    return recipe.training.published, recipe.training.source


def _check_whole(run):
    """Refuses a run that was killed at an epoch's end: its best model may be an older one's."""
    rows, epochs = len(_history(run)), runs.epochs_done(run)
    if rows != epochs:
        raise ValueError(
            f"{run} has {rows} epochs in its history and {epochs} in its last checkpoint, as runs "
            f"have that were killed at the end of an epoch. Go on with it first: {resuming(run)}"
        )


def _check_seeds(run, recipe, other_seeds):
    """Refuses other runs that are not of the same recipe, or the one of which should be shown."""
    seeds, best = {recipe.model.seed}, _best(run)["val_loss"]
    for other in other_seeds:
        theirs = runs.read_recipe(other)
        if _identity(theirs) != _identity(recipe):
            raise ValueError(f"{other} was trained by another recipe than {run}.")
        if theirs.model.seed in seeds:
            raise ValueError(f"{other} has the seed {theirs.model.seed}, which is there already.")
        if _best(other)["val_loss"] < best:
            raise ValueError(f"{other} has a lower validation loss than {run}: publish that one.")
        seeds.add(theirs.model.seed)


def _identity(recipe):
    """What two runs must have in common to differ by their seeds alone."""
    chosen = {k: v for k, v in _chosen(recipe).items() if k not in ("seed", "jit_compile")}
    return recipe.name, recipe.training.data_checksum, chosen


def _other_seed(run, data_dir):
    recipe, test, best = runs.read_recipe(run), runs.evaluate(run, data_dir=data_dir), _best(run)
    return {
        "seed": recipe.model.seed,
        "test": test[recipe.model.metric],
        "validation_loss": best["val_loss"],
        "epoch": int(best["epoch"]),
        "epochs": len(_history(run)),
        "wall_time_s": _wall_time(run),
    }


def _best(run):
    """The row of the history with the lowest validation loss."""
    if not _history(run):
        raise ValueError(f"{run} has not finished an epoch yet.")
    return min(_history(run), key=lambda row: (math.isnan(row["val_loss"]), row["val_loss"]))


def _results(run, recipe, model, test):
    history, best = _history(run), _best(run)
    return {
        "model": recipe.name,
        "settings": _changed(recipe),
        "metric": recipe.model.metric,
        "test": test[recipe.model.metric],
        "test_metrics": test,
        "published": recipe.training.published,
        "source": recipe.training.source,
        "protocol": "the epoch of the lowest validation loss; the test split has no part in that",
        "validation_loss": best["val_loss"],
        "epoch": int(best["epoch"]),
        "epochs": len(history),
        "recipe_epochs": recipe.training.epochs,
        "finished": runs.is_finished(run),
        "seed": recipe.model.seed,
        "parameters": model.count_params(),
        **json.loads((run / runs.ENVIRONMENT).read_text(encoding="utf-8")),
        "data": recipe.training.data,
        "data_checksum": recipe.training.data_checksum,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _changed(recipe):
    """The fewest fields that make the zoo's recipe this one, paths without their folders."""
    zoos = registry.recipe(recipe.name)
    wanted = _chosen(recipe)
    changed = {k: v for k, v in wanted.items() if v != zoos.fields()[k]}
    for name in list(changed):
        others = {k: v for k, v in changed.items() if k != name}
        if _makes(zoos, others, wanted):  # it follows from them
            changed = others
    options = changed.get("data_options", {})
    if "path" in options:
        changed["data_options"] = options | {"path": pathlib.Path(options["path"]).name}
    return changed


def _makes(recipe, changed, wanted):
    try:
        return _chosen(recipe.replace(**changed)) == wanted
    except ValueError:  # fields that do not fit each other
        return False


def _chosen(recipe):
    return {k: v for k, v in recipe.fields().items() if k not in _FOUND}


def _write(path, text):
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _history(run):
    """The rows of a run's history, with NaN where an epoch has no such value."""
    rows = read_history(run / "history.csv")
    return [{k: float(v or "nan") for k, v in row.items()} for row in rows]


def _wall_time(run):
    """Seconds of training by TensorBoard's records, pauses left out; None without such."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return None
    stamps = []
    for path in sorted((run / "tensorboard" / "train").glob("events.out.tfevents.*")):
        events = EventAccumulator(str(path)).Reload()
        tags = events.Tags()
        tensors = [e.wall_time for t in tags["tensors"] for e in events.Tensors(t)]
        scalars = [e.wall_time for t in tags["scalars"] for e in events.Scalars(t)]
        if tensors or scalars:
            stamps.append(max(tensors + scalars) - events.FirstEventTimestamp())
    return round(sum(stamps), 1) if stamps else None


def _draw(history, results, path):
    """The losses of training and validation by epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    epochs = [row["epoch"] for row in history]
    for name, label in (("loss", "training"), ("val_loss", "validation")):
        axes.plot(epochs, [row[name] for row in history], label=label)
    axes.axvline(results["epoch"], color="0.7", lw=1, zorder=0, label="reported epoch")
    values = [row[name] for row in history for name in ("loss", "val_loss")]
    values = [value for value in values if not math.isnan(value)]
    if min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("loss")
    axes.set_title(title(results))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, format="png")
