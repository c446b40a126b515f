"""What a finished run leaves in the zoo: card, results, history, learning curve, small weights."""

import datetime
import json
import math
import pathlib
import shlex
import shutil
import textwrap

from trellis_keras.files import replacing
from trellis_keras.training.records import read_history
from trellis_keras.zoo import pretrained, registry, runs
from trellis_keras.zoo.assets import RESULTS, WEIGHTS

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


def publish(run, folder, data_dir=None, note=""):
    """Evaluates the best model of a run on the test split and writes what the zoo keeps of it.

    Writes `results.json`, `history.csv`, `curve.png`, `card.md` and, for a model with the zoo's
    own settings, the weights where they are below 5 MB.

    Args:
        run: The run's folder.
        folder: Where to write, for instance `zoo/tcn_jsb`.
        data_dir: Folder of local copies of the data, if they are not where the run found them.
        note: What a reader of the card should know: runs that are not shown, limits.

    Returns:
        The results, a dict.

    Raises:
        ValueError: As `runs.evaluate`.
        FileNotFoundError: As `runs.evaluate`.
    """
    run, folder = pathlib.Path(run), pathlib.Path(folder)
    # Without the optimizer, whose variables would be in the weights file too.
    recipe, model = runs.read_recipe(run), runs.load_best(run, compile=False)
    results = _results(run, recipe, model, runs.evaluate(run, "test", data_dir=data_dir))
    results["note"] = note
    folder.mkdir(parents=True, exist_ok=True)
    # Those of an earlier run must not stay beside other results.
    (folder / WEIGHTS).unlink(missing_ok=True)
    if is_the_zoos(recipe) and 4 * model.count_params() < _LARGEST_WEIGHTS:
        with replacing(folder / WEIGHTS) as temporary:
            model.save_weights(temporary)
        results["weights_sha256"] = pretrained.checksum(folder / WEIGHTS)
    shutil.copyfile(run / "history.csv", folder / "history.csv")
    _write(folder / RESULTS, json.dumps(results, indent=2, allow_nan=False) + "\n")
    with replacing(folder / "curve.png") as temporary:
        _draw(_history(run), results, temporary)
    _write(folder / "card.md", _card(recipe, results, folder))
    return results


def is_the_zoos(recipe):
    """Whether a run's weights may be called the zoo's: they solve the benchmark of its name.

    Weights of a language model are none without its vocabulary, which such a file lacks.
    """
    return not registry.reads_text(recipe.model) and not _DATA & set(_changed(recipe))


def _results(run, recipe, model, test):
    history = _history(run)
    best = min(history, key=lambda row: (math.isnan(row["val_loss"]), row["val_loss"]))
    return {
        "model": recipe.name,
        "settings": _changed(recipe),
        "metric": recipe.model.metric,
        "test": test[recipe.model.metric],
        "test_metrics": test,
        "published": recipe.training.published,
        "source": recipe.training.source,
        "protocol": "the epoch of the lowest validation loss; the test split is evaluated once",
        "validation_loss": best["val_loss"],
        "epoch": int(best["epoch"]),
        "epochs": len(history),
        "seed": recipe.model.seed,
        "parameters": model.count_params(),
        "wall_time_s": _wall_time(run),
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
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _history(run):
    return [{k: float(v) for k, v in row.items()} for row in read_history(run / "history.csv")]


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
    if min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("loss")
    axes.set_title(_title(results))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, format="png")


def _title(results):
    settings = ", ".join(f"{k}={v}" for k, v in results["settings"].items() if k == "T")
    return results["model"] + (f" ({settings})" if settings else "")


def _card(recipe, results, folder):
    options = "".join(
        f" --{name.replace('_', '-')} {shlex.quote(_word(value))}"
        for name, value in results["settings"].items()
    )
    other = {k: v for k, v in results["test_metrics"].items() if k != results["metric"]}
    minutes = "unknown" if results["wall_time_s"] is None else f"{results['wall_time_s'] / 60:.0f}"
    return f"""# {_title(results)}

{registry.describe(recipe.name)}

| | {results["metric"]} on the test split |
|---|---|
| ours | {results["test"]:.6g} |
| {_published(results)} |

Also measured: {", ".join(f"{k} {v:.6g}" for k, v in other.items())}.

Epoch {results["epoch"]} of {results["epochs"]}, chosen by the validation loss
({results["validation_loss"]:.6g}); the test split was evaluated once. Seed {results["seed"]},
{results["parameters"]:,} parameters, {minutes} minutes on {results["hardware"]}
({results["backend"]}). Data: `{results["data"]}`, see `trellis_keras.data.load`.
{_paragraph(results["note"])}
![Learning curve](curve.png)

Trained and written by

```sh
trellis-keras train {recipe.name}{options} --output runs/{folder.name}
trellis-keras publish runs/{folder.name} zoo/{folder.name}
```
{_use(recipe, results)}"""


def _word(value):
    """A setting as a word of the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _paragraph(text):
    return f"\n{textwrap.fill(text, 100)}\n" if text else ""


def _published(results):
    if results["published"] is None:
        return "published | none for these settings"
    return f"published ({results['source']}) | {results['published']:g}"


def _use(recipe, results):
    """How to get the model with its weights, where these are published too."""
    if "weights_sha256" not in results:
        return ""
    fields = set(vars(recipe.model)) - {"seed", "jit_compile", "dtype_policy"}
    arguments = [f"{k}={v!r}" for k, v in results["settings"].items() if k in fields]
    call = ", ".join([*arguments, 'weights="pretrained"'])
    return f"""
With its weights:

```python
from trellis_keras import zoo

model = zoo.{recipe.name}({call})
```
"""
