"""Draws docs/theorem1.png: the kernels of a 2-layer LSTM's TrellisNet, and its lattice of windows.

python docs/draw_theorem1.py
"""

import pathlib

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from trellis_keras.layers import MixedGroupKernel

HERE = pathlib.Path(__file__).parent
CHANNELS, UNITS = 2, 3  # of x, and of each LSTM layer
BLOCKS = ("i", "f", "c", "o")
TIME, TRUNCATION = 8, 4
DEPTH = TRUNCATION + 1
BEGIN = 4  # of the window that is colored
WIDTH, HEIGHT = 0.3, 0.34  # of a square
# Okabe and Ito's palette, safe for the color-blind.
KERNELS = {
    "U¹: past h¹ to h¹": "#0072B2",
    "U²: past h² to h²": "#56B4E9",
    "K¹: x to h¹": "#D55E00",
    "K²: h¹ to h²": "#E69F00",
}
U1, U2, K1, K2 = KERNELS.values()


def weights(recurrent):
    """Where a kernel has weights: booleans (tap, in, out)."""
    kernel = MixedGroupKernel(
        2, len(BLOCKS) * 2 * UNITS, groups=[UNITS] * 2, recurrent=recurrent, initializer="ones"
    )
    kernel.build((None, None, 2 * UNITS if recurrent else CHANNELS))
    return np.asarray(kernel()) != 0


def draw_kernels(panels):
    """The past tap and the current one, x's kernel above h's."""
    taps = np.concatenate([weights(recurrent=False), weights(recurrent=True)], axis=1)
    palette = ListedColormap(["0.93", *KERNELS.values()])
    edges = np.cumsum([0, CHANNELS, UNITS, UNITS])
    columns = taps.shape[2]
    layer = np.arange(columns) // UNITS % 2  # that an output channel belongs to, from 0
    for tap, (axes, title) in enumerate(
        zip(panels, ("Past tap, step t - 1", "Current tap, step t"), strict=True)
    ):
        numbers = np.where(taps[tap], 1 + 2 * tap + layer, 0)
        axes.pcolormesh(numbers, cmap=palette, vmin=0, vmax=4, edgecolor="white", lw=0.5)
        axes.hlines(edges, 0, columns, color="black", lw=0.8)
        axes.vlines(range(0, columns + 1, 2 * UNITS), 0, edges[-1], color="black", lw=0.8)
        axes.vlines(range(UNITS, columns, 2 * UNITS), 0, edges[-1], color="black", lw=0.3)
        axes.set(aspect="equal", ylim=(edges[-1], 0), title=title)
        axes.set_yticks((edges[:-1] + edges[1:]) / 2, ["x", "h¹", "h²"])
        middles = UNITS * (np.arange(2 * len(BLOCKS)) + 0.5)
        axes.set_xticks(middles, ["h¹", "h²"] * len(BLOCKS), minor=True)
        axes.set_xticks(middles[::2] + UNITS / 2, [f"\ngate {block}" for block in BLOCKS])
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)


def draw_lattice(axes):
    """Every state with the step at which its RNN began; one window is colored."""
    for t in range(1, TIME + 1):
        for level in range(1, DEPTH + 1):
            for layer in (1, 2):
                draw_state(axes, t, level, layer)
    axes.annotate(
        f"h² of the LSTM over steps {BEGIN} to {BEGIN + TRUNCATION - 1}",
        center(BEGIN + TRUNCATION - 1, DEPTH, 2),
        (TIME - 3.2, DEPTH + 0.7),
        arrowprops={"arrowstyle": "-", "shrinkB": 9},
    )
    axes.set(xlim=(0.4, TIME + 0.6), ylim=(0.3, DEPTH + 1), xlabel="step t", ylabel="level")
    axes.set_yticks(range(1, DEPTH + 1))
    axes.set_xticks(range(1, TIME + 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"M = {TRUNCATION}: {DEPTH} levels. Squares: h¹, h², and the step they began at")


def center(t, level, layer):
    return t + (layer - 1.5) * WIDTH, level


def draw_state(axes, t, level, layer):
    """The square of a layer's state, with arrows from what it is made of if it is colored."""
    (x, y), began, asleep = center(t, level, layer), t - level + layer, level < layer
    inside = began == BEGIN and t < BEGIN + TRUNCATION and not asleep
    color = (U1, U2)[layer - 1] if inside else "white"
    style = {"facecolor": color, "edgecolor": "0.6", "hatch": "////" if asleep else None}
    axes.add_patch(Rectangle((x - WIDTH / 2, y - HEIGHT / 2), WIDTH, HEIGHT, zorder=2, **style))
    if not asleep:
        ink = ("white", "black")[layer - 1] if inside else "0.55"
        style = {"ha": "center", "va": "center", "fontsize": 8, "color": ink}
        axes.text(x, y, max(began, 1), **style)
    if not inside:
        return
    if layer == 1:
        draw_arrow(axes, (x, y - 0.52), (x, y), K1, shrink=0)
        axes.text(x - 0.05, y - 0.42, f"x{t}", ha="right", va="center", fontsize=8, color=K1)
    else:
        draw_arrow(axes, center(t, level - 1, 1), (x, y), K2)
    if t > BEGIN:
        draw_arrow(axes, center(t - 1, level - 1, layer), (x, y), (U1, U2)[layer - 1])


def draw_arrow(axes, begin, end, color, shrink=9):
    style = {"arrowstyle": "-|>", "color": color, "shrinkA": shrink, "shrinkB": 9, "lw": 1.4}
    axes.annotate("", end, begin, arrowprops=style)


if __name__ == "__main__":
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.1))
    draw_kernels(left.subplots(2, 1))
    draw_lattice(right.subplots())
    handles = [Patch(color=color, label=label) for label, color in KERNELS.items()]
    handles.append(Patch(facecolor="0.93", label="no weight"))
    handles.append(Patch(facecolor="white", edgecolor="0.6", hatch="////", label="held at zero"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(HERE / "theorem1.png", dpi=120)
