"""The LRU family against LSTM, GRU, Grid-LSTM and RHN: test loss, and epochs to the best.

    python examples/studies/lattice_comparison.py --quick

Table 1 and Figs. 3 and 4 of the LRU paper (Ahuja & Morency 2018), at a size feasible on two cores:
a million parameters, four epochs on the first million characters of Penn Treebank. Everything else
follows the paper's recipe (batches of 250 x 50 characters, Adam 0.001 times 0.9 after each epoch).
`--paper` uses the paper's setting: 10M parameters, whole corpora, until the validation loss stops
falling. RG- and PS-LRU appear twice: with the paper's equations, and as in the authors' code.

The figure shows the test loss after every epoch; the table (also as Markdown) shows it at the epoch
of the lowest validation loss. Both are updated whenever a model has been trained.
"""

from typing import Annotated

import typer
from study import cli

SMALL = {"characters": 1_000_000, "epochs": 4, "batch_size": None, "layers": 2, "units": None}
SEEDS = (0, 1, 2)


def main(
    quick: cli.Quick = False,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's size: days.")] = False,
    output: cli.Output = None,
    seed: cli.UsualSeeds = None,
    net: cli.Nets = None,
    corpus: cli.Corpora = None,
    size: cli.Sizes = None,
    characters: cli.Characters = None,
    epochs: cli.WholeEpochs = None,
    batch_size: cli.BatchSize = None,
    layers: cli.Layers = None,
    dtype_policy: cli.Policy = None,
    data_dir: cli.DataDir = None,
):
    """Test loss of the LRU family and of other nets of one size (Table 1, Figs. 3 and 4)."""
    from study import lattice

    if quick and paper:
        raise ValueError("--quick and --paper are two things.")
    scale = lattice.QUICK if quick else lattice.FULL if paper else SMALL
    settings = cli.changed(
        quick, scale, characters=characters, epochs=epochs, batch_size=batch_size, layers=layers,
        dtype_policy=dtype_policy,
    )  # fmt: skip
    usual = lattice.PAPERS_CORPORA if paper else ["pydoc"] if quick else ["char_ptb"]
    nets = net or (lattice.QUICK_NETS if quick else list(lattice.NETS))
    sizes = size or ["10m" if paper else "1m"]
    cells = lattice.product(corpus or usual, nets, sizes)
    seeds = seed or ((0,) if quick or paper else SEEDS)
    name = "lattice_comparison" + ("-paper" if paper else "")
    print(run(cli.folder(output, name, quick), settings, cells, seeds, data_dir)[1])


def run(folder, settings, cells, seeds, data_dir=None):
    """The study; returns it and its table as Markdown."""
    from study import lattice, lattice_results

    study = lattice.sweep("lattice_comparison", folder, settings, cells, seeds, report, data_dir)
    return study, lattice_results.write_table(study)


def report(study):
    """Writes table and figure."""
    from study import lattice_results

    lattice_results.write_table(study)
    lattice_results.curves(study)


if __name__ == "__main__":
    cli.run(main)
