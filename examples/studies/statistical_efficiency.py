"""Data efficiency: test loss as a function of the fraction of training text.

    python examples/studies/statistical_efficiency.py --quick

Fig. 5 of the LRU paper (Ahuja & Morency 2018): the first 20 to 100 % of the training split of Penn
Treebank and text8, with unchanged validation and test splits. The test loss is measured at the
epoch of the lowest validation loss.
"""

from study import cli

CORPORA = ["char_ptb", "text8"]


def main(
    quick: cli.Quick = False,
    output: cli.Output = None,
    seed: cli.Seeds = (0,),
    net: cli.Nets = None,
    corpus: cli.Corpora = None,
    size: cli.Sizes = None,
    percent: cli.Percents = None,
    characters: cli.Characters = None,
    epochs: cli.WholeEpochs = None,
    batch_size: cli.BatchSize = None,
    layers: cli.Layers = None,
    data_dir: cli.DataDir = None,
):
    """Test loss against the share of the training part that is used (Fig. 5)."""
    from study import lattice

    settings = cli.changed(
        quick, lattice.QUICK if quick else lattice.FULL,
        characters=characters, epochs=epochs, batch_size=batch_size, layers=layers,
    )  # fmt: skip
    cells = lattice.product(
        corpus or (["pydoc"] if quick else CORPORA),
        net or (lattice.QUICK_NETS if quick else lattice.PUBLISHED),
        size or ["10m"],
        percent or ([50, 100] if quick else lattice.PERCENTS),
    )
    run(cli.folder(output, "statistical_efficiency", quick), settings, cells, seed, data_dir)


def run(folder, settings, cells, seeds, data_dir=None):
    """The study."""
    from study import lattice

    return lattice.sweep("statistical_efficiency", folder, settings, cells, seeds, report, data_dir)


def report(study):
    """Writes the table, and draws a panel per corpus and size: a line per net."""
    from study import figures, lattice, lattice_results

    lattice_results.write_table(study)
    rows = lattice_results.table(study)
    places = list(dict.fromkeys((row["corpus"], row["size"]) for row in rows))
    figure, axes = figures.panels(len(places), height=4.4, width=6.4)
    for axis, (corpus, size) in zip(axes, places, strict=True):
        here = [row for row in rows if (row["corpus"], row["size"]) == (corpus, size)]
        for net in lattice.NETS:
            points = sorted((r["train_percent"], r["test"]) for r in here if r["net"] == net)
            if points:
                label = lattice.NETS[net].label
                axis.plot(*zip(*points, strict=True), label=label, **figures.lattice_style(net))
        axis.set(xlabel="Share of the training part in %", ylabel=lattice_results.LOSS)
        axis.set_xticks(sorted({row["train_percent"] for row in here}))
        axis.set_title(lattice_results.heading(study, corpus, size))
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1))  # outside the axes
    figures.save(figure, study)


if __name__ == "__main__":
    cli.run(main)
