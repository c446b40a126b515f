"""A run: a folder with a recipe, and what training by that recipe leaves in it.

recipe.json    all settings; what the other commands start from
environment.json   hardware, versions, commit and precision of the processes that trained
history.csv    a row per epoch
gradient_norms.csv   likewise, where gradients were measured
best.keras     the model of the best validation loss, with its vocabulary
checkpoints/   where an interrupted run goes on
tensorboard/   logs for TensorBoard
"""

import json
import pathlib
import tempfile

import keras

from trellis_keras.breakdown import measure
from trellis_keras.data.registry import SPLITS
from trellis_keras.data.streams import TARGET_COUNTING, EpochOrder
from trellis_keras.files import atomic_write, folder_lock, remove_unfinished
from trellis_keras.models.saved_files import load_model
from trellis_keras.training import Checkpoint, StopOnNaN, TimeLimit, checkpoint_state, latest
from trellis_keras.training.records import BestModel, HistoryCSV
from trellis_keras.zoo import environment, registry
from trellis_keras.zoo.failures import explained, resuming
from trellis_keras.zoo.observation import Observation

RECIPE = "recipe.json"
ENVIRONMENT = "environment.json"
BEST = "best.keras"


def train(recipe, folder, verbose="auto", callbacks=(), observation=None, max_minutes=None):
    """Trains a model by its recipe, or goes on with a run that was interrupted.

    Args:
        recipe: A `Recipe`. If `folder` holds a run, it must be that run's, though it may have
            another number of epochs.
        folder: The run's folder, made if need be. While a process trains in it, others are refused.
        verbose: As in `keras.Model.fit`.
        callbacks: More callbacks than the recipe's. What those with `get_state` and `set_state`
            remember is kept with the run.
        observation: An `Observation`, what TensorBoard shows beside metrics and learning rate.
            It changes nothing of the training, and may be another when a run goes on. Default:
            nothing.
        max_minutes: Training ends after an epoch if another one would end later than so many
            minutes from now, see `training.TimeLimit`; the run goes on when it is called again.
            Default: no limit.

    Returns:
        The trained model.

    Raises:
        ValueError: The folder cannot be written to, or holds a run of another recipe, or another
            process trains in it, or the data are not what they should be, or `max_minutes` is not
            positive.
        FileNotFoundError: The data are missing.
        FloatingPointError: The loss is not finite any more. Nothing of that epoch was saved.
        OSError: Something could not be written, or the data not be read. What was saved before is
            whole, and the run goes on from there.

    Example:

    >>> recipe = zoo.recipe("trellisnet_char", epochs=3)
    >>> model = train(recipe, "runs/first")
    """
    folder = pathlib.Path(folder).expanduser()
    limits = _limits(max_minutes, folder)  # before the data, whose loading takes time too
    folder = _writable(folder)
    with folder_lock(folder):
        remove_unfinished(folder)
        recipe = _continued(recipe, folder)
        loaded = recipe.load_data()
        recipe = recipe.with_data(loaded)
        observation = observation or Observation()
        with explained(folder):
            return _fit(recipe, loaded, folder, verbose, callbacks, observation, limits)


def _limits(max_minutes, folder):
    if max_minutes is None:
        return []
    if not max_minutes > 0:
        raise ValueError(f"`max_minutes` must be positive. Received: {max_minutes}")
    return [TimeLimit(60 * max_minutes, command=resuming(folder))]


def _fit(recipe, loaded, folder, verbose, callbacks, observation, limits):
    model = _build(recipe, loaded)
    train_stream = recipe.stream(loaded.train, shuffle=True)
    observers = observation.callbacks(
        folder,
        model,
        recipe.stream(loaded.train),
        loaded,
        batches=len(train_stream) * (recipe.training.epochs - epochs_done(folder)),
    )
    valid_stream = recipe.stream(loaded.valid)
    if verbose:
        print(describe(recipe, model, loaded), flush=True)
    model.fit(
        train_stream,
        validation_data=valid_stream,
        epochs=recipe.training.epochs,
        callbacks=[
            *_callbacks(recipe, folder, train_stream, callbacks, observers),
            # Behind the checkpoint, which refuses a model that is not the run's.
            keras.callbacks.LambdaCallback(on_train_begin=lambda logs: _record(recipe, folder)),
            *limits,  # there too: what they end is not over
        ],
        shuffle=False,  # the stream's business: Keras would do it from no seed
        verbose=verbose,
    )
    return model


def _record(recipe, folder):
    """Writes by which recipe the run goes on, and what computes it."""
    with atomic_write(folder / RECIPE) as temporary:
        temporary.write_text(recipe.to_json(), encoding="utf-8")
    if not is_finished(folder):
        environment.record(folder / ENVIRONMENT, recipe, epochs_done(folder) + 1)


def epochs_done(folder):
    """Returns after how many epochs the run in `folder` would go on."""
    checkpoint = latest(pathlib.Path(folder) / "checkpoints")
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("epoch-"))


def is_finished(folder):
    """Whether the run in `folder` has had its last epoch, or a rule of its recipe has ended it.

    Raises:
        FileNotFoundError: There is no run.
        ValueError: Its recipe or its checkpoint cannot be read.
    """
    epochs = read_recipe(folder).training.epochs
    checkpoint = latest(pathlib.Path(folder) / "checkpoints")
    if checkpoint is None:
        return False
    state, _ = checkpoint_state.read(checkpoint)
    return state["epoch"] >= epochs or state["stopped"] and epochs <= state["epochs"]


def read_recipe(folder):
    """Returns the recipe of the run in `folder`.

    Raises:
        FileNotFoundError: There is no run.
        ValueError: Its recipe cannot be read.
    """
    path = pathlib.Path(folder).expanduser() / RECIPE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run: {RECIPE} is missing.")
    try:
        text = path.read_text(encoding="utf-8")
        return registry.recipe(json.loads(text)["name"]).from_json(text)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not a recipe of this version: {error}") from error


def load_best(folder, compile=True):
    """Returns the best model of the run in `folder`.

    Args:
        folder: The run's folder.
        compile: Whether it can be trained on; without, it has no optimizer.

    Raises:
        FileNotFoundError: There is no run, or it has not finished an epoch.
        ValueError: The model's file is damaged.
    """
    read_recipe(folder)
    path = pathlib.Path(folder).expanduser() / BEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {BEST}: the run has not finished an epoch yet.")
    try:
        return load_model(path, compile=compile)
    except ValueError as error:
        raise ValueError(f"{error} Put a copy of it back, or train in another folder.") from error


def evaluate(folder, split="test", target_counting="all", data_dir=None, verbose=0, breakdown=None):
    """Evaluates the best model of a run.

    Args:
        folder: The run's folder.
        split: `"train"`, `"valid"` or `"test"`.
        target_counting: Of a text: `"all"` counts each target once, `"original"` follows the
            authors' code, see `data.TokenStream`.
        data_dir: Folder of local copies of the data, if they are not where the run found them.
        verbose: As in `keras.Model.evaluate`.
        breakdown: Folder where a language model's figures by word frequency and by position go,
            see `breakdown.Breakdown.write`. None: they are not worked out.

    Returns:
        A dict of the metrics, the published one among them, and of the number of what they are
        means of: `targets` of a text, `frames` of music, else `sequences`.

    Raises:
        ValueError: An unknown split or target counting, data that are not the run's, a damaged
            file, or a `breakdown` that cannot be written to or of a model that reads no text.
        FileNotFoundError: There is no run, or it has not finished an epoch, or has lost its data.
    """
    choices = {"split": (split, SPLITS), "target_counting": (target_counting, TARGET_COUNTING)}
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"`{name}` must be one of {', '.join(allowed)}. Received: {value!r}")
    recipe, model = read_recipe(folder), load_best(folder)
    if data_dir is not None:
        recipe = recipe.replace(data_dir=data_dir)
    loaded = recipe.load_data()
    part = getattr(loaded, split)
    stream = recipe.stream(part, target_counting)
    if breakdown is not None:
        breakdown = _writable(breakdown)
        measure(model, stream, loaded.train, recipe.model.metric, verbose).write(breakdown)
    results = model.evaluate(stream, return_dict=True, verbose=verbose)
    # Some published figures are the loss, under another name.
    results.setdefault(recipe.model.metric, results["loss"])
    return {**results, **recipe.training.counted(part, stream)}


def describe(recipe, model, loaded):
    """Returns a few lines on a run: model, data, recipe."""
    config, training = recipe.model, recipe.training
    published = f"; published {config.metric} {training.published:g}" if training.published else ""
    lines = [
        f"{recipe.name}: {model.count_params():,} parameters, {config.summary()}",
        *training.describe(config, loaded),
        f"{config.optimizer} {config.learning_rate:g}, up to epoch {training.epochs}{published}",
    ]
    return "\n".join(lines)


def _build(recipe, loaded):
    vocabulary = {"vocabulary": loaded.vocabulary} if registry.reads_text(recipe.model) else {}
    return registry.get_model(recipe.name, **vocabulary, **vars(recipe.model))


def _callbacks(recipe, folder, train_stream, others, observers):
    best = BestModel(folder / BEST)
    order = [EpochOrder(train_stream)] if hasattr(train_stream, "epoch") else []
    # What they add to the logs is there for the records behind them.
    rules = [*recipe.callbacks(), *others]
    records = [HistoryCSV(folder / "history.csv"), best, *observers]
    # First, so that no other learns of the end of an epoch that was lost.
    callbacks = [StopOnNaN(), *order, *rules, *records]
    remembering = [callback for callback in (*rules, best) if hasattr(callback, "get_state")]
    # Last, so that it saves what the others remember of the epoch.
    checkpoint = Checkpoint(
        folder / "checkpoints", seed=recipe.model.seed or 0, callbacks=remembering
    )
    return [*callbacks, checkpoint]


def _writable(folder):
    folder = pathlib.Path(folder).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"The output folder {folder} cannot be written to: {error}") from error
    return folder


# A folder's run may go on with other values of these: how long, where the data are, how the
# machine computes it, and what the literature says.
_FREE = {
    "epochs",
    "data_dir",
    "data_checksum",
    "vocabulary_size",
    "jit_compile",
    "dtype_policy",
    "published",
    "published_epochs",
    "source",
}


def _settled(name, value):
    """A field's value without what may change: where a text is. The checksum tells if it is it."""
    if name == "data_options":
        return {option: value for option, value in value.items() if option != "path"}
    return value


def _continued(recipe, folder):
    """Checks that the folder belongs to no other recipe, and takes over its data's checksum."""
    if not (folder / RECIPE).exists():
        return recipe
    there = read_recipe(folder)
    if there.name == recipe.name and registry.reads_text(recipe.model):
        # The run has it from its data, and other fields, such as `cutoffs`, from it.
        recipe = recipe.replace(vocabulary_size=there.model.vocabulary_size)
    old, new = {"model": there.name, **there.fields()}, {"model": recipe.name, **recipe.fields()}
    different = [
        f"{name} {old.get(name)!r} there, {value!r} here"
        for name, value in new.items()
        if name not in _FREE and _settled(name, old.get(name)) != _settled(name, value)
    ]
    if different:
        raise ValueError(
            f"{folder} holds a run with other settings: {'; '.join(different)}. Choose another "
            f"folder, or go on with that run: {resuming(folder)}"
        )
    return recipe.replace(data_checksum=there.training.data_checksum)
