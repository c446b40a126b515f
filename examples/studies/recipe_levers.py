"""Ablation of a fast recipe: validation loss without each of its components.

    python examples/studies/recipe_levers.py --quick

The recipe is that of `trellis-keras train tcn_jsb --setting fast`. Each variant removes one
component and changes nothing else. Results are lowest validation losses; the test split is unused.
"""

import study

from trellis_keras import zoo
from trellis_keras.zoo import run

COLUMNS = ["lever", "seed", "epochs", "best_epoch", "valid"]
MODEL = "tcn_jsb"
# Changes that remove a lever from the recipe.
WITHOUT = {
    "nothing": {},
    "transposition": {"transpose": None},
    "dropped notes": {"note_dropout": 0.0},
    "weight decay": {"weight_decay": 0.0},
    "the cosine": {"decay_steps": None, "warmup_steps": None},
    "dropout": {"dropout": 0.0},
}


def main(
    quick: study.Quick = False,
    output: study.Output = None,
    seed: study.Seeds = (),
    epochs: study.Epochs = None,
    data_dir: study.DataDir = None,
):
    """The fast recipe of tcn_jsb without each of its levers."""
    settings = {"quick": quick, "epochs": epochs or (1 if quick else None)}
    cells = study.Study("recipe_levers", output, settings, COLUMNS)
    for one in seed or ((0,) if quick else (0, 1)):
        for lever in list(WITHOUT)[: 2 if quick else None]:
            cells.measure(
                lambda work, **cell: train(settings["epochs"], data_dir, work, **cell),
                lever=lever,
                seed=one,
            )
    plot(cells)


def train(epochs, data_dir, work, lever, seed):
    """Trains one variant and returns its row."""
    options = WITHOUT[lever] | ({"epochs": epochs} if epochs else {})
    recipe = zoo.recipe(MODEL, setting="fast", seed=seed, data_dir=data_dir, **options)
    zoo.train(recipe, work, verbose=2)
    history = run.history(work)
    best = run.best_epoch(history)
    return [{"epochs": len(history), "best_epoch": int(best["epoch"]), "valid": best["val_loss"]}]


def plot(cells):
    """Draws the validation losses of the variants, a dot per seed."""
    rows = cells.rows()
    levers = list(dict.fromkeys(row["lever"] for row in rows))
    figure, (axis,) = study.panels(1)
    axis.plot([row["valid"] for row in rows], [levers.index(row["lever"]) for row in rows], "o")
    axis.set(yticks=range(len(levers)), yticklabels=levers, xlabel="Frame NLL (validation)")
    axis.set(title=f"{MODEL} without ...", ylim=(len(levers) - 0.5, -0.5))
    cells.save(figure)


if __name__ == "__main__":
    study.run(main)
