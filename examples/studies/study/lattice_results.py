"""Results from the rows of `study.lattice`: best epochs, the table, curves of test loss."""

import csv
import itertools
import math
import statistics

from scipy import stats

from keras_streams.files import atomic_write
from study import figures, lattice

LOSS = "Test loss in nats a character"
TABLE = [
    "corpus", "size", "train_percent", "place", "net", "seeds", "test", "test_sd", "best_epoch",
    "seconds_per_epoch", "parameters", "published_place", "published", "published_epoch",
]  # fmt: skip
_HEADINGS = (
    "place | net | seeds | test loss | ± | best epoch | s an epoch | parameters | place in the "
    "paper | its loss | its best epoch"
)


def best(study):
    """A dict per cell: its key, `parameters`, and `epoch` and `test` at the lowest validation loss.

    `seconds` is a list of those of the epochs that did not begin with compiling; `cut` tells
    whether the last epoch was the best.
    """
    cells = {}
    for row in study.rows():
        cells.setdefault(tuple(row[key] for key in study.keys), []).append(row)
    return [_best(study.keys, rows) for rows in cells.values()]


def _best(keys, rows):
    chosen = min(rows, key=lambda row: (math.isnan(row["valid"]), row["valid"]))
    names = [*keys, "parameters", "epoch", "test"]
    seconds = [row["seconds"] for row in rows if not row["compiles"]]
    cut = chosen["epoch"] == max(row["epoch"] for row in rows)
    return {**{name: chosen[name] for name in names}, "seconds": seconds, "cut": cut}


def table(study):
    """Rows of `TABLE`: means over the seeds, the lowest test loss of a corpus and size first."""
    groups = {}
    for cell in best(study):
        where = cell["corpus"], cell["size"], cell["train_percent"]
        groups.setdefault(where, {}).setdefault(cell["net"], []).append(cell)
    return [row for where, nets in groups.items() for row in _ordered(where, nets)]


def _ordered(where, nets):
    losses = [published(where, net)[1] for net in lattice.PUBLISHED]
    rows = []
    for net, cells in nets.items():
        epoch, loss = published(where, net)
        test = [cell["test"] for cell in cells]
        seconds = [s for cell in cells for s in cell["seconds"]]
        rows.append({
            **dict(zip(TABLE, where, strict=False)),
            "net": net,
            "seeds": len(cells),
            "test": statistics.fmean(test),
            "test_sd": statistics.stdev(test) if len(test) > 1 else "",
            "best_epoch": statistics.median(cell["epoch"] for cell in cells),
            "seconds_per_epoch": statistics.median(seconds) if seconds else "",
            "parameters": cells[0]["parameters"],
            "published_place": "" if loss is None else 1 + sum(other < loss for other in losses),
            "published": "" if loss is None else loss,
            "published_epoch": "" if epoch is None else epoch,
        })  # fmt: skip
    rows.sort(key=lambda row: (math.isnan(row["test"]), row["test"]))
    return [{**row, "place": place} for place, row in enumerate(rows, start=1)]


def differences(study):
    """How much higher the test loss of each net is than that of each better one.

    Returns:
        {(corpus, size, train_percent): {(net, better net): (mean, half, seeds)}}, the lowest losses
        first: mean over the seeds that both nets have, and half the width of its 95 % confidence
        interval, by Student's t of the differences seed by seed; `nan` for one seed.
    """
    groups = {}
    for cell in best(study):
        where = cell["corpus"], cell["size"], cell["train_percent"]
        groups.setdefault(where, {}).setdefault(cell["net"], {})[cell["seed"]] = cell["test"]
    return {where: _differences(nets) for where, nets in groups.items()}


def _differences(nets):
    ordered = sorted(nets, key=lambda net: statistics.fmean(nets[net].values()))
    found = {}
    for better, net in itertools.combinations(ordered, 2):
        seeds = nets[net].keys() & nets[better].keys()
        each = [nets[net][seed] - nets[better][seed] for seed in seeds]
        if each:
            half = math.nan
            if len(each) > 1:
                half = stats.t.ppf(0.975, len(each) - 1) * statistics.stdev(each) / len(each) ** 0.5
            found[net, better] = statistics.fmean(each), half, len(each)
    return found


def published(where, net):
    """As `lattice.published`; the paper has no result for a part of the training text."""
    corpus, size, percent = where
    return lattice.published(net, corpus, size) if percent == 100 else (None, None)


def write_table(study):
    """Writes the table as CSV and Markdown, and returns the Markdown."""
    rows = table(study)
    with atomic_write(study.folder / f"{study.name}_table.csv") as temporary:
        with open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, TABLE)
            writer.writeheader()
            writer.writerows(rows)
    text = markdown(study, rows)
    with atomic_write(study.path("md")) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return text


def markdown(study, rows):
    """The table as Markdown: one for each corpus, size and percentage."""
    parts, behind = [], differences(study)
    for where, group in itertools.groupby(rows, lambda row: [row[name] for name in TABLE[:3]]):
        corpus, size, percent = where
        group = list(group)
        share = "" if percent == 100 else f", {percent} % of the training part"
        parts += [f"## {heading(study, corpus, size)}{share}", ""]
        parts += [f"| {_HEADINGS} |", "|" + " --- |" * len(_HEADINGS.split(" | "))]
        parts += [_line(row) for row in group]
        parts += _behind(behind[tuple(where)])
        if any(row["published"] != "" for row in group):
            parts += ["", *_orders(corpus, size, group)]
        parts.append("")
    return "\n".join([*parts, *_notes(study)]) + "\n"


def _behind(found):
    """A table of `differences`."""
    if not found:
        return []
    lines = ["", "| nets | difference of the test losses | 95 % interval | seeds |"]
    lines.append("| --- | --- | --- | --- |")
    for pair, (mean, half, seeds) in found.items():
        interval = "-" if math.isnan(half) else f"{mean - half:+.4f} to {mean + half:+.4f}"
        names = " minus ".join(lattice.NETS[net].label for net in pair)
        lines.append(f"| {names} | {mean:+.4f} | {interval} | {seeds} |")
    return lines


def heading(study, corpus, size):
    """Returns the title of a panel or table."""
    units = study.settings["units"]  # if given, overrides the size
    words = f"{size.upper()} parameters" if units is None else f"{units} units"
    return f"{lattice.CORPORA[corpus]}, {words}"


def _line(row):
    cells = [
        row["place"], lattice.NETS[row["net"]].label, row["seeds"], _fixed(row["test"], 4),
        _fixed(row["test_sd"], 4), f"{row['best_epoch']:g}", _fixed(row["seconds_per_epoch"], 1),
        f"{row['parameters']:,}", row["published_place"] or "-", _fixed(row["published"], 3),
        row["published_epoch"] or "-",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def _fixed(value, digits):
    return "-" if value == "" else f"{value:.{digits}f}"


def _orders(corpus, size, rows):
    def words(losses):
        ordered = itertools.groupby(sorted(losses, key=losses.get), losses.get)
        return " < ".join(" = ".join(same) for _, same in ordered)

    label = {name: lattice.NETS[name].label for name in lattice.NETS}
    found = {label[row["net"]]: row["test"] for row in rows}
    theirs = {label[net]: lattice.published(net, corpus, size)[1] for net in lattice.PUBLISHED}
    theirs_at = size if size in lattice.PAPERS_SIZES else "10m"
    return [
        f"Lowest first, found: {words(found)}.",
        "",
        f"The paper (Table 1, {theirs_at.upper()}, whole corpus): {words(theirs)}.",
    ]


def _notes(study):
    settings = ", ".join(f"{name} {value}" for name, value in study.settings.items()
                         if value is not None and name != "quick")  # fmt: skip
    hardware = "; ".join(dict.fromkeys(str(row["hardware"]) for row in study.rows()))
    return [
        "Loss: cross-entropy of the test part in nats a character, at the epoch of the lowest "
        "validation loss; mean and standard deviation over the seeds. Best epoch: their median. "
        "Seconds: median over all epochs, validation included, but not those that compiled.",
        *(["", f"Settings: {settings}."] if settings else []),
        "",
        f"Hardware: {hardware}.",
        *(["", figures.QUICK + "."] if study.settings["quick"] else []),
    ]


def curves(study):
    """Writes the paper's Figs. 3 and 4: test loss against epochs, a line per net.

    A line is the mean over the seeds, the band around it reaches from the lowest to the highest.
    """
    rows = study.rows()
    if not rows:
        return
    places = list(dict.fromkeys((row["corpus"], row["size"]) for row in rows))
    figure, axes = figures.panels(2 * len(places), height=4.4)
    pairs = zip(axes[::2], axes[1::2], strict=True)
    for (corpus, size), pair in zip(places, pairs, strict=True):
        here = [row for row in rows if (row["corpus"], row["size"]) == (corpus, size)]
        for axis, (words, nets) in zip(pair, figures.LATTICE_PANELS.items(), strict=True):
            for net in nets:
                _curve(axis, [row for row in here if row["net"] == net], net)
            axis.set(xlabel="Epoch", ylabel=LOSS)
            axis.set_title(f"{heading(study, corpus, size)}: {words}")
            axis.xaxis.get_major_locator().set_params(integer=True)
            if axis.lines:
                axis.legend()
    seeds = len({row["seed"] for row in rows})
    if seeds > 1:
        words = f"Line: mean of up to {seeds} seeds. Band: from the lowest to the highest."
        figure.supxlabel(words, fontsize="small")
    figures.save(figure, study)


def _curve(axis, rows, net):
    of = {}
    for row in rows:
        of.setdefault(row["epoch"], []).append(row["test"])
    if not of:
        return
    epochs = [epoch for epoch in sorted(of) if len(of[epoch]) == len(of[1])]  # of all seeds
    style = figures.lattice_style(net)
    mean = [statistics.fmean(of[epoch]) for epoch in epochs]
    axis.plot(epochs, mean, label=lattice.NETS[net].label, **style)
    low, high = ([f(of[epoch]) for epoch in epochs] for f in (min, max))
    axis.fill_between(epochs, low, high, color=style["color"], alpha=0.2, linewidth=0)
