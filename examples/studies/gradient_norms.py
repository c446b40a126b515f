"""Gradient norms by layer and epoch in models with ten layers.

    python examples/studies/gradient_norms.py --quick

Fig. 7 of the LRU paper (Ahuja & Morency 2018): GRU and LRU with ten layers on Penn Treebank.
`training.GradientNorms` measures the mean gradient over the first `--batches` training batches
after every epoch. (The authors' code sums over all batches of an epoch, while the weights change.)
The paper does not state the numbers of parameters and epochs: here 10M and 10.
"""

from typing import Annotated

import typer
from study import cli

COLUMNS = [
    "net", "seed", "parameters", "epoch", "layer", "gradient_norm", "train_loss", "valid", "test",
]  # fmt: skip
NETS = ["gru", "lru"]
LAYERED = ["gru", "lstm", "ps_lru", "rg_lru", "lru", "ps_lru_authors", "rg_lru_authors"]
DEPTH = {"corpus": "char_ptb", "size": "10m", "epochs": 10, "layers": 10, "batches": 20}
QUICK_DEPTH = {"corpus": "pydoc", "size": "10m", "layers": 4, "batches": 2, "epochs": 4}


def main(
    quick: cli.Quick = False,
    output: cli.Output = None,
    seed: cli.Seeds = (0,),
    net: Annotated[list[str] | None, typer.Option(help=", ".join(LAYERED))] = None,
    corpus: Annotated[str | None, typer.Option(help="Default: char_ptb.")] = None,
    size: Annotated[str | None, typer.Option(help="Parameters: 250k, 1m, 10m or 24m.")] = None,
    characters: cli.Characters = None,
    epochs: Annotated[int | None, typer.Option(min=1)] = None,
    batch_size: cli.BatchSize = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Default: 10.")] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="On which to measure.")] = None,
    data_dir: cli.DataDir = None,
):
    """Gradient norms of GRU and LRU by layer and epoch (Fig. 7)."""
    from study import lattice

    scale = lattice.QUICK | QUICK_DEPTH if quick else lattice.FULL | DEPTH
    settings = cli.changed(
        quick, scale, corpus=corpus, size=size, characters=characters, epochs=epochs,
        batch_size=batch_size, layers=layers, batches=batches,
    )  # fmt: skip
    run(cli.folder(output, "gradient_norms", quick), settings, net or NETS, seed, data_dir)


def run(folder, settings, nets, seeds, data_dir=None):
    """The study: every net with every seed."""
    from study import lattice
    from study.table import Study

    for net in nets:
        lattice.check_name("net with layers", net, LAYERED)
        recipe(settings, net, 0, data_dir)  # rejects unknown names before training
    study = Study("gradient_norms", folder, settings, COLUMNS)
    for seed in seeds:
        for net in nets:
            cell = {"net": net, "seed": seed}
            study.run(cell, lambda work, cell=cell: measure(settings, work, data_dir, **cell))
    plot(study)
    return study


def recipe(settings, net, seed, data_dir=None):
    """Returns the zoo's recipe of a cell, which trains for all epochs without early stopping."""
    from study import lattice

    made = lattice.recipe(settings, settings["corpus"], net, settings["size"], 100, seed, data_dir)
    return made.replace(stop_patience=None)


def measure(settings, work, data_dir, net, seed):
    """Trains one net; returns a row per epoch and layer."""
    import keras
    from study import lattice

    from trellis_keras.training import GradientNorms
    from trellis_keras.training.history import read_history
    from trellis_keras.zoo.run import train

    keras.utils.clear_session()  # frees the previous cell
    made = recipe(settings, net, seed, data_dir)
    curve = lattice.Curve.of(made, f"{net}, seed {seed}")
    norms = GradientNorms(made.stream(made.load_data().train), steps=settings["batches"])
    model = train(made, work, verbose=0, callbacks=[curve, norms])
    losses = ("epoch", "train_loss", "valid", "test")
    history = read_history(work / "history.csv")
    layers = [name for name in history[0] if name.startswith("gradient_norm/")]
    return [
        {
            "parameters": model.count_params(),
            **{name: record[name] for name in losses},
            "layer": layer,
            "gradient_norm": float(row[name]),
        }
        for record, row in zip(curve.records, history, strict=True)
        for layer, name in enumerate(layers, start=1)
    ]


def plot(study):
    """Draws a heatmap per net: means over the seeds, larger norms darker, each on its own scale."""
    import statistics

    from study import figures, lattice

    rows = study.rows()
    nets = list(dict.fromkeys(row["net"] for row in rows))
    figure, axes = figures.panels(len(nets))
    for axis, net in zip(axes, nets, strict=True):
        here = [row for row in rows if row["net"] == net]
        layers, epochs = (sorted({row[name] for row in here}) for name in ("layer", "epoch"))
        of = {}
        for row in here:
            of.setdefault((row["layer"], row["epoch"]), []).append(row["gradient_norm"])
        norms = [[statistics.fmean(of[layer, epoch]) for epoch in epochs] for layer in layers]
        figures.heatmap(axis, norms, epochs, layers, "Norm of the gradient")
        axis.set(xlabel="Epoch", ylabel="Layer (1: the lowest)")
        axis.set_title(f"{lattice.NETS[net].label}, {here[0]['parameters']:,} parameters")
    figures.save(figure, study)


if __name__ == "__main__":
    cli.run(main)
