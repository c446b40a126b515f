"""Trains the models of a queue, in calls of a few minutes each.

    python -m benchmarks.gpu.train --minutes 9

resumes where the last call stopped, epoch by epoch. A finished run is evaluated and published to
the folder `zoo/` of the output, and the next one starts. Every call ends by printing what is done
and what is left.
"""

import json
import pathlib
import time
import traceback
from typing import Annotated

import typer

from benchmarks.gpu import pace
from benchmarks.gpu.options import Minutes, Output, end_of_call
from trellis_keras.files import folder_lock

# In order of training.
QUEUE = (
    "trellisnet_permuted_mnist",
    "trellisnet_seq_mnist",
    "trellisnet_seq_cifar10",
    "tcn_char_ptb",
    "tcn_ptb",
    "lru_char_ptb",
    "gru_char_ptb_lru_paper",
    "lstm_char_ptb_lru_paper",
    "trellisnet_char_ptb",
    "trellisnet_ptb",
)
# A run without known times starts only if this fraction of the call is left.
_ENOUGH = 1 / 3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    output: Output = "runs/gpu",
    minutes: Minutes = 9.0,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this model of the queue; can be repeated.")
    ] = None,
    dtype_policy: Annotated[
        str | None,
        typer.Option(help="float32 or mixed_bfloat16. Default: that of the run, or float32."),
    ] = None,
    settings: Annotated[
        str, typer.Option(help="Changes to the recipes, as JSON: '{\"hidden_units\": 990}'.")
    ] = "{}",
    data_dir: Annotated[
        str | None, typer.Option(help="Folder of local copies of the data (or TRELLIS_KERAS_DATA).")
    ] = None,
):
    """Train all unfinished runs in the order of the queue."""
    end = end_of_call(minutes)
    if not set(only or ()) <= set(QUEUE):
        unknown = sorted(set(only) - set(QUEUE))
        raise typer.BadParameter(f"Unknown models {unknown}. Available: {QUEUE}")
    folder = pathlib.Path(output).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    overrides = json.loads(settings)
    overrides |= {"data_dir": data_dir} if data_dir is not None else {}
    overrides |= {"dtype_policy": dtype_policy} if dtype_policy is not None else {}
    names = [name for name in QUEUE if name in (only or QUEUE)]
    with folder_lock(folder):
        queue = Queue(folder, end, 60 * minutes, overrides)
        for name in names:
            if different := queue.other_settings(name):
                raise typer.BadParameter(
                    f"{name} is finished in {output}, with {different}. Choose another --output"
                )
        queue.work(names)
    for name in names:
        typer.echo(f"{name}: {queue.standing(name)}")
    if queue.problems:
        raise typer.Exit(1)


class Queue:
    """The runs in a folder: `runs/NAME`, their times in `times/NAME.json`, and `zoo/NAME`.

    Runs with settings for which there are no published results go to `zoo/NAME_custom`.

    Args:
        folder: The folder.
        end: When this call must end, by the clock.
        seconds: Time limit of the whole call.
        overrides: Changed fields of the recipes.
        clock: Function that returns seconds.
    """

    def __init__(self, folder, end, seconds, overrides, clock=time.monotonic):
        self.folder, self.end, self.seconds = folder, end, seconds
        self.overrides = overrides
        self.clock = clock
        self.fresh = True  # no time of this call has been used
        self.problems = {}  # {name: why it cannot resume}

    def work(self, names):
        """Works through the queue until time is up."""
        import keras

        for name in names:
            if self.published(name):
                continue
            fresh = self.fresh
            try:
                time_is_over = self._go_on(name)
            # A failed run must not stop the others: out of memory (JAX' RuntimeError), missing
            # data, a NaN loss.
            except (RuntimeError, ValueError, OSError, ImportError, FloatingPointError) as error:
                traceback.print_exc()
                self.problems[name] = " ".join(str(error).split())[:500]
                # It will fail in every call, so the next run never gets more time than now.
                self.fresh = fresh
                time_is_over = False
            if time_is_over:
                return
            keras.utils.clear_session()

    def _go_on(self, name):
        """Trains a run and publishes it if it is finished. Returns whether time is up."""
        if not self._is_finished(name):
            if not self._worth_it(name):
                return True
            fresh, self.fresh = self.fresh, False
            left = self.end - self.clock()
            try:
                self._train(name)
            except pace.NoRoom as error:
                if not fresh:
                    return True
                self.problems[name] = self._advice(name, error.seconds, left)
                self.fresh = True  # or the next run that is too long would end every call
                return False
            if not self._is_finished(name):
                return True
        self.fresh = False
        self._publish(name)
        return False

    def _train(self, name):
        from trellis_keras.zoo import run as runs

        with pace.Pace(self._times(name), self.end, self.clock) as times:
            runs.train(
                self._recipe(name),
                self.run(name),
                verbose=2,
                callbacks=[times],
                # At least one epoch is trained.
                max_minutes=max(self.end - self.clock(), 1e-3) / 60,
                save_minutes=None,  # `pace` counts whole epochs
            )

    def _publish(self, name):
        from tools.publish import publish

        epochs = pace.read(self._times(name))["epochs"]
        # Passed because there are no TensorBoard logs, from which it would be read.
        seconds = sum(epochs.values()) if epochs else None
        folder = self._card(name).parent
        data_dir = self.overrides.get("data_dir")
        results = publish(self.run(name), folder, data_dir, wall_time_s=seconds)
        typer.echo(f"{name}: {folder}, test {results['recipe']['metric']} {results['test']:.6g}")

    def _recipe(self, name):
        from trellis_keras import zoo

        if self._has_begun(name):
            return zoo.read_recipe(self.run(name)).replace(**self.overrides)
        return zoo.recipe(name, **{"dtype_policy": "float32"} | self.overrides)

    def _has_begun(self, name):
        return (self.run(name) / "recipe.json").exists()

    def _is_finished(self, name):
        from trellis_keras.zoo.run import is_finished

        return self._has_begun(name) and is_finished(self.run(name))

    def other_settings(self, name):
        """Returns the options of a finished run that differ from those of this call."""
        from trellis_keras import zoo

        if not self._is_finished(name):
            return {}
        there = zoo.read_recipe(self.run(name)).options()
        wanted = self._recipe(name).options()
        return {k: there[k] for k in self.overrides if k != "data_dir" and there[k] != wanted[k]}

    def _worth_it(self, name):
        """Returns whether an epoch is likely to end in this call."""
        epochs = pace.read(self._times(name))["epochs"]
        # The longest epoch includes compiling.
        needed = max(epochs.values()) if epochs else _ENOUGH * self.seconds
        return self.fresh or self.clock() + needed < self.end

    def _advice(self, name, seconds, left):
        return (
            f"an epoch takes at least {seconds / 60:.1f} minutes here, but a call only has "
            f"{left / 60:.1f}, so it would never finish. Raise --minutes if the machine allows it, "
            "or try --dtype-policy mixed_bfloat16. To try again anyway, delete "
            f"{self._times(name)}"
        )

    def run(self, name):
        return self.folder / "runs" / name

    def _times(self, name):
        return self.folder / "times" / f"{name}.json"

    def published(self, name):
        """Returns whether a run is published; `publish` writes the card last."""
        return any(card.exists() for card in self._cards(name))

    def _cards(self, name):
        return [self.folder / "zoo" / folder / "card.md" for folder in (name, f"{name}_custom")]

    def _card(self, name):
        """Returns the path of a run's card; a model's own folder is for its own benchmark."""
        from tools.publish import has_own_data, setting_of

        own, custom = self._cards(name)
        recipe = self._recipe(name)
        return own if has_own_data(recipe) and not setting_of(recipe) else custom

    def standing(self, name):
        """Returns the progress of a run as text."""
        from trellis_keras.zoo.run import epochs_done

        if self.published(name):
            return "done"
        if name in self.problems:
            return f"skipped: {self.problems[name]}"
        if not self._has_begun(name):
            return "not started"
        done = epochs_done(self.run(name))
        epochs = self._recipe(name).training.epochs
        seconds = pace.epoch_s(pace.read(self._times(name)))
        if seconds is None:
            return f"{done} of {epochs} epochs"
        left = (epochs - done) * seconds
        return (
            f"{done} of {epochs} epochs, {seconds:.0f} s each: at most {left / 3600:.1f} hours left"
        )


if __name__ == "__main__":
    app()
