"""The number of epochs until a model's validation loss is lowest.

    python examples/studies/epochs_to_converge.py --quick

Fig. 6 of the LRU paper (Ahuja & Morency 2018): a box per model over corpora and sizes; `--percent`
adds parts of the training text, which the paper's box plot also includes. A box covers the middle
half of the cells, its line is their median; every cell is a point. A hollow point marks a cell
whose best epoch was the last of `--epochs`, so it might have needed more.
"""

from study import cli

# In the paper's words, "on average".
PAPER = {"lstm": "about 30", "gru": "about 22", "grid_lstm": "about 22", "rhn": "about 22",
         "ps_lru": "about 12", "rg_lru": "about 12", "lru": "about 12"}  # fmt: skip


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
    """Epochs to the lowest validation loss as a box plot (Fig. 6)."""
    from study import lattice

    settings = cli.changed(
        quick, lattice.QUICK if quick else lattice.FULL,
        characters=characters, epochs=epochs, batch_size=batch_size, layers=layers,
    )  # fmt: skip
    cells = lattice.product(
        corpus or (["pydoc"] if quick else lattice.PAPERS_CORPORA),
        net or (lattice.QUICK_NETS if quick else lattice.PUBLISHED),
        size or (["10m"] if quick else lattice.PAPERS_SIZES),
        percent or ([50, 100] if quick else [100]),
    )
    study = run(cli.folder(output, "epochs_to_converge", quick), settings, cells, seed, data_dir)
    print(summary(study))


def run(folder, settings, cells, seeds, data_dir=None):
    """The study."""
    from study import lattice

    return lattice.sweep("epochs_to_converge", folder, settings, cells, seeds, plot, data_dir)


def summary(study):
    """Mean and standard deviation of the epochs by net, as lines of text."""
    import statistics

    from study import lattice

    lines = ["Epochs to the lowest validation loss (in brackets: the paper, Fig. 6):"]
    for net, cells in by_net(study).items():
        epochs = [cell["epoch"] for cell in cells]
        spread = f" ± {statistics.stdev(epochs):.1f}" if len(epochs) > 1 else ""
        words = f"{lattice.NETS[net].label}: {statistics.fmean(epochs):.1f}{spread}, "
        paper = f" ({PAPER[net]})" if net in PAPER else ""
        lines.append(f"{words}{len(epochs)} cells{paper}")
    return "\n".join(lines)


def by_net(study):
    """Dict from net to its cells, in the order of `lattice.NETS`."""
    from study import lattice, lattice_results

    cells = lattice_results.best(study)
    found = {net: [cell for cell in cells if cell["net"] == net] for net in lattice.NETS}
    return {net: cells for net, cells in found.items() if cells}


def plot(study):
    """Draws a box per net."""
    from study import figures, lattice

    nets = by_net(study)
    figure, (axis,) = figures.panels(1, width=1.6 + 1.1 * max(len(nets), 4))
    places = range(1, len(nets) + 1)
    boxes = axis.boxplot(
        [[cell["epoch"] for cell in cells] for cells in nets.values()],
        positions=places, widths=0.55, patch_artist=True, showfliers=False,
        medianprops={"color": "black"},
    )  # fmt: skip
    for place, (net, cells), box in zip(places, nets.items(), boxes["boxes"], strict=True):
        style = figures.lattice_style(net)
        box.set(facecolor=style["color"], alpha=0.35)
        for cell, shift in zip(cells, figures.spread(len(cells), 0.4), strict=True):
            face = "white" if cell["cut"] else style["color"]
            axis.plot(place + shift, cell["epoch"], style["marker"], markersize=5,
                      markerfacecolor=face, markeredgecolor="black")  # fmt: skip
    labels = [lattice.NETS[net].label.replace(" (", "\n(") for net in nets]
    if any(cell["cut"] for cells in nets.values() for cell in cells):
        style = {"markerfacecolor": "white", "markeredgecolor": "black", "linestyle": ""}
        axis.plot([], [], "o", label="Last epoch: may still improve", **style)
        axis.legend()
    axis.set_xticks(places, labels)
    axis.set(ylabel="Epochs to the lowest validation loss", ylim=(0, None))
    axis.yaxis.get_major_locator().set_params(integer=True)
    figures.save(figure, study)


if __name__ == "__main__":
    cli.run(main)
