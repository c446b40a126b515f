"""Ablation of a fast recipe: validation loss without each of its components.

    python examples/studies/recipe_levers.py --quick

The recipe is that of `trellis-keras train tcn_jsb --setting fast`. Each variant removes one
component and changes nothing else. Results are lowest validation losses; the test split is unused.
"""

from study import cli

COLUMNS = ["lever", "seed", "epochs", "best_epoch", "valid"]
MODEL = "tcn_jsb"
# Changes that remove a lever from the recipe.
WITHOUT = {
    "nothing": {},
    "transposition": {"transpose": None},
    "dropped notes": {"note_dropout": 0.0},
    "weight decay": {"weight_decay": 0.0},
    "the cosine": {"schedule": None},
    "dropout": {"dropout": 0.0},
}
# None: the recipe's.
FULL = {"epochs": None}
QUICK = {"epochs": 1}


def main(
    quick: cli.Quick = False,
    output: cli.Output = None,
    seed: cli.Seeds = (0, 1),
    epochs: cli.WholeEpochs = None,
    data_dir: cli.DataDir = None,
):
    """The fast recipe of tcn_jsb without each of its levers."""
    settings = cli.changed(quick, QUICK if quick else FULL, epochs=epochs)
    levers = list(WITHOUT)[:2] if quick else list(WITHOUT)
    seeds = seed[:1] if quick else seed
    run(cli.folder(output, "recipe_levers", quick), settings, levers, seeds, data_dir)


def run(folder, settings, levers, seeds, data_dir=None):
    """The study: every variant with every seed."""
    from study.table import Study

    study = Study("recipe_levers", folder, settings, COLUMNS)
    for seed in seeds:
        for lever in levers:
            study.run(
                {"lever": lever, "seed": seed},
                lambda work, lever=lever, seed=seed: measure(settings, work, data_dir, lever, seed),
            )
    plot(study)
    return study


def measure(settings, work, data_dir, lever, seed):
    """Trains one variant."""
    import csv

    from trellis_keras import zoo

    options = dict(WITHOUT[lever])
    if settings["epochs"] is not None:
        options["epochs"] = settings["epochs"]
    recipe = zoo.recipe(MODEL, setting="fast", seed=seed, data_dir=data_dir, **options)
    zoo.train(recipe, work / "run", verbose=2)
    with open(work / "run" / "history.csv", newline="") as file:
        epochs = list(csv.DictReader(file))
    best = min(range(len(epochs)), key=lambda n: float(epochs[n]["val_loss"]))
    valid = float(epochs[best]["val_loss"])
    return [{"epochs": len(epochs), "best_epoch": best + 1, "valid": valid}]


def plot(study):
    """Draws the validation losses of the variants, with a dot per seed."""
    from study import figures

    rows = study.rows()
    levers = list(dict.fromkeys(row["lever"] for row in rows))
    figure, (axis,) = figures.panels(1, columns=1)
    places = [levers.index(row["lever"]) for row in rows]
    axis.plot([row["valid"] for row in rows], places, "o", color=figures.COLORS["tcn"])
    axis.set(yticks=range(len(levers)), yticklabels=levers, xlabel="Frame NLL (validation)")
    axis.set(title=f"{MODEL} without ...", ylim=(len(levers) - 0.5, -0.5))
    figures.save(figure, study)


if __name__ == "__main__":
    cli.run(main)
