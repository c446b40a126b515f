"""The LRU family against LSTM, GRU, Grid-LSTM and RHN: test loss after every epoch.

    python examples/studies/lattice_comparison.py --quick

Table 1 and Figs. 3 and 4 of the LRU paper (Ahuja & Morency 2018), at a size feasible on two cores:
a million parameters, four epochs on the first million characters of Penn Treebank. Everything else
follows the paper's recipe (batches of 250 x 50 characters, Adam 0.001 times 0.9 after each epoch).
`--paper` uses the paper's setting: 10M parameters, whole corpora, until the validation loss stops
falling. RG- and PS-LRU appear twice: with the paper's equations, and as in the authors' code.

The table (Markdown) shows the test loss at the epoch of the lowest validation loss.
"""

import itertools
import math
import statistics
from typing import Annotated

import keras
import study
import typer
from scipy import stats

from keras_streams.files import atomic_write
from trellis_keras import zoo
from trellis_keras.zoo import results

# Column of the table, first part of the zoo's name, its options, color, marker.
NETS = {
    "gru": ("GRU", "gru", {}, "#009E73", "^"),
    "ps_lru": ("PS-LRU", "lru", {"variant": "ps"}, "#E69F00", "P"),
    "rg_lru": ("RG-LRU", "lru", {"variant": "rg"}, "#56B4E9", "X"),
    "lru": ("LRU", "lru", {}, "#0072B2", "o"),
    "lstm": ("LSTM", "lstm", {}, "#D55E00", "s"),
    "grid_lstm": ("Grid-LSTM", "grid_lstm", {}, "#CC79A7", "D"),
    "rhn": ("RHN", "rhn", {}, "#000000", "v"),
    "ps_lru_authors": (
        "PS-LRU (program)", "lru", {"variant": "ps", "convention": "authors"}, "#E69F00", "+",
    ),
    "rg_lru_authors": (
        "RG-LRU (program)", "lru", {"variant": "rg", "convention": "authors"}, "#56B4E9", "x",
    ),
}  # fmt: skip
CORPORA = {
    "char_ptb": "PTB",
    "war_and_peace": "War and Peace",
    "enwik8": "enwik8",
    "text8": "text8",
    "pydoc": "Python's help texts",
}
COLUMNS = [
    "corpus", "net", "size", "seed", "parameters", "epoch", "train_loss", "valid", "test",
]  # fmt: skip


def main(
    quick: study.Quick = False,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's size: days.")] = False,
    output: study.Output = None,
    seed: study.Seeds = (),
    net: Annotated[list[str] | None, typer.Option(help=", ".join(NETS))] = None,
    corpus: Annotated[list[str] | None, typer.Option(help=", ".join(CORPORA))] = None,
    size: Annotated[int | None, typer.Option(min=1, help="Number of parameters.")] = None,
    epochs: study.Epochs = None,
    dtype_policy: Annotated[str | None, typer.Option(help="Such as mixed_bfloat16.")] = None,
    data_dir: study.DataDir = None,
):
    """Test loss of the LRU family and of other nets of one size (Table 1, Figs. 3 and 4)."""
    characters, own_epochs, own_size = 1_000_000, 4, 1_000_000
    if quick:
        characters, own_epochs, own_size = 30_000, 3, 10_000
        corpus, net, seed = corpus or ["pydoc"], net or ["gru", "lru"], seed or (0,)
    elif paper:
        characters, own_epochs, own_size = None, None, 10_000_000
        corpus = corpus or list(CORPORA)[:4]
    for kind, names, known in (("net", net, NETS), ("corpus", corpus, CORPORA)):
        if unknown := set(names or ()) - set(known):
            raise ValueError(f"Unknown {kind}. Received: {unknown}. Known: {', '.join(known)}.")
    settings = {
        "quick": quick,
        "characters": characters,
        "epochs": epochs or own_epochs,
        "dtype_policy": dtype_policy,
    }
    cells = study.Study("lattice_comparison", output, settings, COLUMNS)
    for one, place, name in itertools.product(
        seed or (0, 1, 2), corpus or ["char_ptb"], net or NETS
    ):
        cells.measure(
            lambda work, **cell: train(settings, data_dir, work, **cell),
            corpus=place, net=name, size=size or own_size, seed=one,
        )  # fmt: skip
    write_table(cells)
    plot(cells)


def train(settings, data_dir, work, corpus, net, size, seed):
    """Trains one net and returns a row for each epoch."""
    keras.utils.clear_session()  # frees the previous net
    recipe = recipe_of(settings, corpus, net, size, seed, data_dir)
    losses = TestLoss(recipe)
    model = zoo.train(recipe, work, verbose=2, callbacks=[losses])
    return [{"parameters": model.count_params(), **row} for row in losses.rows]


def recipe_of(settings, corpus, net, size, seed, data_dir=None):
    """Returns the zoo's recipe with as many units as the size allows."""
    name = zoo_name(corpus, net)
    options = {"seed": seed, "data_dir": data_dir, **NETS[net][2]}
    if settings["epochs"]:
        options["epochs"] = settings["epochs"]
    recipe = zoo.recipe(name, **options).replace(dtype_policy=settings["dtype_policy"])
    if settings["characters"]:
        options = recipe.data_options if corpus == recipe.data else {}
        recipe = recipe.replace(
            data=corpus, data_options={**options, "first": settings["characters"]}
        )

    def count_params(units):
        return recipe.replace(hidden_units=units).build().count_params()

    return recipe.replace(hidden_units=study.fitted_width(count_params, size))


def zoo_name(corpus, net):
    """Returns the zoo's name of a net on a corpus in this paper's setting."""
    name = f"{NETS[net][1]}_{'char_ptb' if corpus == 'pydoc' else corpus}"
    return f"{name}_lru_paper" if f"{name}_lru_paper" in zoo.list_models() else name


class TestLoss(keras.callbacks.Callback):
    """Evaluates the test split after every epoch, also of those before an interruption."""

    def __init__(self, recipe):
        super().__init__()
        self.stream = recipe.batches(recipe.load_data().test)
        self.rows = []

    def get_state(self):
        return {"rows": self.rows}

    def set_state(self, state):
        self.rows = state["rows"]

    def on_epoch_end(self, epoch, logs=None):
        test = self.model.evaluate(self.stream, verbose=0, return_dict=True)["loss"]
        row = {"train_loss": logs["loss"], "valid": logs["val_loss"], "test": test}
        row = {"epoch": epoch + 1, **{key: float(value) for key, value in row.items()}}
        self.rows = [*self.rows, row]


def best(rows):
    """Returns {(corpus, size): {net: {seed: row of the lowest validation loss}}}."""
    found = {}
    for row in rows:
        seeds = found.setdefault((row["corpus"], row["size"]), {}).setdefault(row["net"], {})
        if row["seed"] not in seeds or row["valid"] < seeds[row["seed"]]["valid"]:
            seeds[row["seed"]] = row
    return found


def write_table(cells):
    """Writes and prints the table of test losses and that of their differences, in Markdown."""
    lines = []
    for (corpus, size), nets in best(cells.rows()).items():
        test = {net: [row["test"] for row in seeds.values()] for net, seeds in nets.items()}
        ordered = sorted(nets, key=lambda net: statistics.fmean(test[net]))
        lines += [
            f"## {CORPORA[corpus]}, {size:,} parameters",
            "",
            "| net | seeds | test loss | ± | best epoch | parameters | published, 10M |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for net in ordered:
            rows = list(nets[net].values())
            deviation = f"{statistics.stdev(test[net]):.4f}" if len(rows) > 1 else "-"
            epoch = statistics.median(row["epoch"] for row in rows)
            lines.append(
                f"| {NETS[net][0]} | {len(rows)} | {statistics.fmean(test[net]):.4f} | {deviation} "
                f"| {epoch:g} | {rows[0]['parameters']:,} | {published(corpus, net)} |"
            )
        lines += ["", "| nets | difference | 95 % interval | seeds |", "| --- | --- | --- | --- |"]
        for low, high in itertools.combinations(ordered, 2):
            mean, half, seeds = difference(nets[low], nets[high])
            interval = "-" if math.isnan(half) else f"{mean - half:+.4f} to {mean + half:+.4f}"
            names = f"{NETS[high][0]} minus {NETS[low][0]}"
            lines.append(f"| {names} | {mean:+.4f} | {interval} | {seeds} |")
        lines.append("")
    lines += [
        "Loss: cross-entropy of the test part in nats a character, at the epoch of the lowest "
        "validation loss; mean and standard deviation over the seeds. Best epoch: their median. "
        "Intervals: Student's t of the differences seed by seed.",
        "",
        "Settings: " + ", ".join(f"{key} {value}" for key, value in cells.settings.items()) + ".",
    ]
    with atomic_write(cells.path("md")) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def difference(low, high):
    """Returns mean, half the 95 % interval (NaN for one seed) and number of the common seeds."""
    each = [high[seed]["test"] - low[seed]["test"] for seed in high.keys() & low.keys()]
    half = math.nan
    if len(each) > 1:
        half = stats.t.ppf(0.975, len(each) - 1) * statistics.stdev(each) / len(each) ** 0.5
    return statistics.fmean(each) if each else math.nan, half, len(each)


def published(corpus, net):
    """Returns the paper's test loss of the net with ten million parameters, or a dash."""
    variant = NETS[net][2].get("variant", "ug")
    for row in results.published():
        if (
            row.model == zoo_name(corpus, net)
            and row.options.get("variant", "ug") == variant
            and row.parameters == "10M"
            and corpus != "pydoc"
        ):
            return f"{row.value:.3f}"
    return "-"


def plot(cells):
    """Draws test loss against epochs; the band reaches from the lowest to the highest seed."""
    rows = cells.rows()
    places = list(dict.fromkeys((row["corpus"], row["size"]) for row in rows))
    figure, axes = study.panels(len(places))
    for place, axis in zip(places, axes, strict=False):
        for net, (label, _, _, color, marker) in NETS.items():
            losses = {}
            for row in rows:
                if (row["corpus"], row["size"], row["net"]) == (*place, net):
                    losses.setdefault(row["epoch"], []).append(row["test"])
            if losses:
                means = [statistics.fmean(values) for values in losses.values()]
                axis.plot(list(losses), means, color=color, marker=marker, label=label)
                axis.fill_between(
                    list(losses), list(map(min, losses.values())), list(map(max, losses.values())),
                    color=color, alpha=0.2, linewidth=0,
                )  # fmt: skip
        axis.set(xlabel="Epoch", ylabel="Test loss in nats a character")
        axis.set_title(f"{CORPORA[place[0]]}, {place[1]:,} parameters")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend()
    cells.save(figure)


if __name__ == "__main__":
    study.run(main)
