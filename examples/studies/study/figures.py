"""Figures: one color and one marker per net in all studies, safe for the color-blind."""

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed

import matplotlib.pyplot as plt  # noqa: E402

from keras_streams.files import atomic_write  # noqa: E402

# Okabe and Ito's palette.
COLORS = {"tcn": "#0072B2", "lstm": "#D55E00", "gru": "#009E73", "rnn": "#CC79A7"}
MARKERS = {"tcn": "o", "lstm": "s", "gru": "^", "rnn": "D"}
# The LRU paper's nets.
LATTICE_COLORS = {
    "lstm": COLORS["lstm"], "gru": COLORS["gru"], "grid_lstm": "#CC79A7", "rhn": "#000000",
    "ps_lru": "#E69F00", "rg_lru": "#56B4E9", "lru": "#0072B2",
}  # fmt: skip
LATTICE_MARKERS = {
    "lstm": MARKERS["lstm"], "gru": MARKERS["gru"], "grid_lstm": "D", "rhn": "v",
    "ps_lru": "P", "rg_lru": "X", "lru": "o",
}  # fmt: skip
# Its Figs. 3 and 4.
LATTICE_PANELS = {
    "LRU and others": ("lstm", "gru", "rhn", "grid_lstm", "lru"),
    "GRU to LRU": ("gru", "ps_lru", "ps_lru_authors", "rg_lru", "rg_lru_authors", "lru"),
}
# For variants of one net, from dark to light.
SHADES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
QUICK = "--quick shows that the script works, not the result"


def panels(number, columns=2, height=3.8, width=5.2):
    """Returns a figure and the list of its panels."""
    columns = min(columns, number)
    lines = -(-number // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(width * columns, height * lines),
        squeeze=False,
        layout="constrained",
    )
    axes = list(axes.flat)
    for empty in axes[number:]:
        empty.set_visible(False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    return figure, axes[:number]


def save(figure, study):
    """Writes a study's PNG atomically."""
    path = study.path("png")
    if study.settings["quick"]:
        figure.suptitle(QUICK, fontsize="small", color="gray")
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=150)
    plt.close(figure)
    print(f"Figure: {path}" + (f" ({QUICK})" if study.settings["quick"] else ""))


def lattice_style(net):
    """Matplotlib options of a line; dashed and hollow where the paper's program decides."""
    name = net.removesuffix("_authors")
    style = {"color": LATTICE_COLORS[name], "marker": LATTICE_MARKERS[name], "markersize": 5}
    return style if name == net else {**style, "linestyle": "--", "markerfacecolor": "white"}


def heatmap(axis, values, columns, rows, label):
    """Draws a matrix, its first row at the bottom, larger values darker."""
    x, y = range(len(columns)), range(len(rows))
    mesh = axis.pcolormesh(x, y, values, cmap="cividis_r", vmin=0, shading="nearest")
    step = -(-len(columns) // 12)
    axis.set_xticks(x[::step], columns[::step])
    axis.set_yticks(y, rows)
    axis.grid(False)
    axis.figure.colorbar(mesh, ax=axis, label=label)


def spread(number, width):
    """Returns offsets around 0 that separate points with the same value."""
    return [width * ((i + 0.5) / number - 0.5) for i in range(number)]


def title(task_name):
    """A task's name in words: `copy_memory_500` as `Copy memory, T = 500`."""
    words = {
        "seq_mnist": "Sequential MNIST",
        "permuted_mnist": "Permuted MNIST",
        "jsb": "JSB Chorales",
        "nottingham": "Nottingham",
        "ptb": "PTB, words",
        "char_ptb": "PTB, characters",
    }
    if task_name in words:
        return words[task_name]
    name, T = task_name.rsplit("_", 1)
    return f"{'Adding problem' if name == 'adding' else 'Copy memory'}, T = {T}"


def curves(rows, panel, line, style):
    """A figure of learning curves: the validation's metric against steps.

    Args:
        rows: Rows of a table.
        panel: Column with a panel per value, such as "task".
        line: Column with a line per value.
        style: Dict from a line's value to its label and matplotlib options.
    """
    from study import tasks

    figure, axes = panels(len(dict.fromkeys(row[panel] for row in rows)))
    for axis, of in zip(axes, dict.fromkeys(row[panel] for row in rows), strict=True):
        here = [row for row in rows if row[panel] == of]
        for name in (name for name in style if any(row[line] == name for row in here)):
            label, options = style[name]
            for seed in dict.fromkeys(row["seed"] for row in here):
                points = [
                    (row["step"], row["valid"])
                    for row in here
                    if row[line] == name and row["seed"] == seed
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), label=label, **options)
                    label = None  # one legend entry per net
        task = tasks.get(here[0]["task"])
        axis.set(xlabel="Training step", ylabel=f"{task.metric_label} (validation)")
        axis.set_title(title(of))
        if task.log_scale:
            axis.set_yscale("log")
        axis.legend()
    return figure
