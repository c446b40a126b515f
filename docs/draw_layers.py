"""Draws docs/layer_*.png: what each layer computes.

python docs/draw_layers.py
"""

import pathlib

import keras
import matplotlib.patches
import numpy as np
from matplotlib.figure import Figure

from trellis_keras.layers import DropConnect, Dropout, EmbeddingDropout, VariationalDropout

HERE = pathlib.Path(__file__).parent
BLUE, GREEN, ORANGE, GRAY = "tab:blue", "tab:green", "tab:orange", "0.8"
TIME = 9


def panels(*widths, height=3.4):
    """A figure with panels side by side, without axes."""
    figure = Figure(figsize=(sum(widths), height), layout="constrained")
    grid = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    for axes in grid:
        axes.set_axis_off()
        axes.set_aspect("equal")
    return figure, grid


def save(figure, name):
    figure.savefig(HERE / f"layer_{name}.png", dpi=110)


def arrow(axes, start, end, color="0.35", **options):
    options = {"arrowstyle": "-|>", "color": color, "shrinkA": 0, "shrinkB": 0, "lw": 1.1} | options
    axes.annotate("", end, start, arrowprops=options)


def box(axes, x, y, text, width=2.2, height=0.62, color="#dbe7f4"):
    """A box around (x, y)."""
    left, bottom = x - width / 2, y - height / 2
    axes.add_patch(
        _patch("Rectangle", (left, bottom), width, height, facecolor=color, edgecolor="0.35")
    )
    axes.text(x, y, text, ha="center", va="center", fontsize=8.5)


def circle(axes, x, y, text="", color="white", radius=0.2):
    axes.add_patch(_patch("Circle", (x, y), radius, facecolor=color, edgecolor="0.35", zorder=3))
    axes.text(x, y, text, ha="center", va="center", fontsize=8.5, zorder=4)


def _patch(kind, *arguments, **options):
    return getattr(matplotlib.patches, kind)(*arguments, **{"lw": 1} | options)


def lattice(axes, dilations, injected):
    """A causal net: the last output, what it depends on, and the rest in gray."""
    depth, last = len(dilations), TIME - 1
    seen = {depth: {last}}
    for level in range(depth, 0, -1):
        taps = {t - d for t in seen[level] for d in (0, dilations[level - 1])}
        seen[level - 1] = {t for t in taps if t >= 0}
    for level in range(1, depth + 1):
        for t in range(TIME):
            for source in (t - dilations[level - 1], t):
                if source >= 0:
                    used = t in seen[level]
                    style = {"color": BLUE if used else GRAY, "lw": 1.4 if used else 0.6}
                    style["zorder"] = 2 if used else 1
                    axes.plot([source, t], [level - 1, level], **style)
    colors = {0: GREEN, depth: ORANGE}
    for level in range(depth + 1):
        for t in range(TIME):
            color = colors.get(level, BLUE) if t in seen[level] else GRAY
            axes.plot(t, level, "o", ms=8, color=color, zorder=3)
    if injected:
        for level in range(1, depth + 1):
            axes.annotate(
                "x",
                (last + 0.08, level - 0.08),
                (last + 0.75, level - 0.5),
                color=GREEN,
                fontsize=9,
                arrowprops={"arrowstyle": "-|>", "color": GREEN},
            )
    axes.text(-0.6, 0, "x", ha="right", va="center")
    axes.text(-0.6, depth, "output", ha="right", va="center")
    axes.text(last / 2, -0.75, "time", ha="center")
    axes.set_xlim(-2.6, TIME + 0.3)
    axes.set_ylim(-1, depth + 0.7)


def draw_trellis():
    figure, (left, right) = panels(5.6, 4.6)
    lattice(left, [1, 1, 1, 1], injected=True)
    left.set_title("Four levels with the same weights; each reads x again", fontsize=9)
    for x, text in ((0, "x, t-d"), (1.5, "x, t"), (3.0, "h, t-d"), (4.5, "h, t")):
        box(right, x, 0, text, width=1.3, color="#d9efd9" if text[0] == "x" else "#dbe7f4")
        arrow(right, (x, 0.31), (2.25 + (x - 2.25) * 0.6, 0.85))
    box(right, 2.25, 1.2, "convolution, the same at all levels: a = (i, f, g, o)", width=6)
    arrow(right, (2.25, 1.51), (2.25, 2.0))
    box(right, 2.25, 2.35, "c = σ(f) c(t-d, level below) + σ(i) tanh(g)", width=6, color="#fbe6cf")
    arrow(right, (2.25, 2.66), (2.25, 3.15))
    box(right, 2.25, 3.5, "h = σ(o) tanh(c), to the level above", width=6, color="#fbe6cf")
    right.set_xlim(-0.9, 5.4)
    right.set_ylim(-0.5, 4)
    right.set_title("One node", fontsize=9)
    save(figure, "trellis")


def draw_tcn():
    figure, (left, right) = panels(5.6, 4.0)
    lattice(left, [1, 2, 4], injected=False)
    left.set_title("Dilations 1, 2, 4: a long memory with few levels", fontsize=9)
    names = ["dilated convolution", "ReLU, dropout"] * 2
    for i, name in enumerate(names):
        color = "#dbe7f4" if i % 2 == 0 else "#fbe6cf"
        box(right, 2, 0.9 + 0.9 * i, name, width=2.6, color=color)
        arrow(right, (2, 0.31 + 0.9 * i if i else 0.1), (2, 0.59 + 0.9 * i))
    circle(right, 2, 4.5, "+")
    arrow(right, (2, 3.91), (2, 4.3))
    arrow(right, (2, 4.7), (2, 5.25))
    right.text(2.15, 5.0, "ReLU", fontsize=8.5, va="center")
    right.plot([2, 4.3, 4.3, 2.2], [0.3, 0.3, 4.5, 4.5], color="0.35", lw=1.1, zorder=0)
    box(right, 4.3, 2.3, "1x1, where\nwidths differ", width=1.6, height=0.9, color="#eeeeee")
    right.text(2, -0.05, "x", ha="center", va="center")
    right.text(2, 5.45, "y", ha="center", va="center")
    right.set_xlim(0.4, 5.4)
    right.set_ylim(-0.3, 5.7)
    right.set_title("One residual block", fontsize=9)
    save(figure, "tcn")


def draw_lru():
    figure, (left, right) = panels(4.6, 5.2)
    for t in range(5):
        for layer in range(3):
            x, y = 1.2 * t, 1.2 * layer
            arrow(left, (x, y - (0.98 if layer else 0.75)), (x, y - 0.22), GREEN)
            arrow(left, (x - (0.98 if t else 0.75), y), (x - 0.22, y), BLUE)
            circle(left, x, y, radius=0.22, color="#f4f4f4")
        arrow(left, (1.2 * t, 2.62), (1.2 * t, 3.15), ORANGE)
        left.text(1.2 * t, -0.95, "x", ha="center", va="center", color=GREEN)
    left.text(-0.85, 2.4, "h2", ha="right", va="center", color=BLUE)
    left.text(0.12, 0.6, "h1", ha="left", va="center", color=GREEN)
    left.set_xlim(-1.4, 5.5)
    left.set_ylim(-1.2, 3.3)
    left.set_title("h1 goes up, h2 goes through time", fontsize=9)
    box(right, 2.5, 0, "z1, z2, r1, r2: gates of h1 and h2", width=5)
    box(right, 2.5, 1.1, "p1 = tanh(h1, r2 h2)      p2 = tanh(r1 h1, h2)", width=5)
    box(right, 1.1, 2.3, "h1' = z1 p2 + (1-z1) h1", width=2.7, color="#d9efd9")
    box(right, 3.95, 2.3, "h2' = z2 p1 + (1-z2) h2", width=2.7, color="#dbe7f4")
    for x in (1.1, 3.95):
        arrow(right, (x, 1.41), (x, 1.99))
        arrow(right, (x, 0.31), (x, 0.79))
        arrow(right, (x, -0.9), (x, -0.31))
        arrow(right, (x, 2.61), (x, 3.1))
    for x, name in ((1.1, "h1"), (3.95, "h2")):
        right.text(x, -1.05, name, ha="center", va="center")
        right.text(x, 3.25, name + "'", ha="center", va="center")
    right.set_xlim(-0.5, 5.6)
    right.set_ylim(-1.3, 3.5)
    right.set_title('One node of the variant "ug"', fontsize=9)
    save(figure, "lru")


def draw_rnn():
    figure, (stack, highway, grid) = panels(3.4, 3.4, 3.4)
    for t in range(4):
        for layer, name in enumerate(("GRU", "LSTM")):
            box(stack, 1.5 * t, 1.2 * layer, name, width=0.9)
            arrow(stack, (1.5 * t, 1.2 * layer - 0.85), (1.5 * t, 1.2 * layer - 0.31), GREEN)
            arrow(stack, (1.5 * t + 0.45, 1.2 * layer), (1.5 * t + 1.05, 1.2 * layer), BLUE)
        arrow(stack, (1.5 * t, 1.51), (1.5 * t, 2.05), ORANGE)
    stack.text(5.6, 1.75, "states,\ncarried and\nstreamed", fontsize=8, color=BLUE, ha="center")
    stack.set_xlim(-0.7, 6.3)
    stack.set_ylim(-1.2, 2.6)
    stack.set_title("StackedRNN: Keras' layers as one", fontsize=9)
    for i in range(3):
        box(highway, 0, 1.3 * i, "h t + s (1 - t)", width=2.4)
        arrow(highway, (0, 1.3 * i - 0.98), (0, 1.3 * i - 0.31), BLUE)
    arrow(highway, (0, 2.91), (0, 3.5), ORANGE)
    arrow(highway, (-2.1, 0), (-1.2, 0), GREEN)
    highway.text(-2.2, 0, "x", ha="right", va="center", color=GREEN)
    highway.text(0.15, -0.75, "state of the step before", fontsize=8, color=BLUE, va="center")
    highway.text(0.15, 3.3, "output and new state", fontsize=8, color=ORANGE, va="center")
    highway.set_xlim(-2.8, 3.4)
    highway.set_ylim(-1.2, 3.7)
    highway.set_title("RHNCell: highway layers in one step", fontsize=9)
    box(grid, 0, 0, "LSTM of depth", width=2.2, color="#d9efd9")
    box(grid, 0, 1.1, "LSTM of time", width=2.2)
    arrow(grid, (-2.2, 1.1), (-1.1, 1.1), BLUE)
    arrow(grid, (1.1, 1.1), (2.2, 1.1), BLUE)
    arrow(grid, (0, -1.1), (0, -0.31), GREEN)
    grid.plot([1.1, 1.5, 1.5, 0, 0], [0, 0, 1.8, 1.8, 2], color=GREEN, lw=1.1)
    arrow(grid, (0, 1.9), (0, 2.5), GREEN)
    grid.plot([-1.6, -1.6, -1.1], [1.1, 0, 0], color=BLUE, lw=1.1)
    grid.plot([0, -1.3, -1.3, -1.1], [-0.7, -0.7, 0.95, 0.95], color=GREEN, lw=1.1)
    grid.text(-2.3, 1.1, "h2, m2", ha="right", va="center", color=BLUE)
    grid.text(0.15, -0.95, "h1, m1", va="center", color=GREEN)
    grid.set_xlim(-3.9, 2.6)
    grid.set_ylim(-1.3, 2.8)
    grid.set_title("GridLSTMCell: both LSTMs read h1 and h2", fontsize=9)
    save(figure, "rnn")


def draw_heads():
    figure, (dense, mixture, adaptive) = panels(2.6, 4.0, 4.0, height=3)
    box(dense, 0, 0, "h W + b", width=1.8)
    box(dense, 0, 1.1, "softmax", width=1.8, color="#fbe6cf")
    for y in (-0.8, 0.31, 1.41):
        arrow(dense, (0, y), (0, y + 0.48))
    dense.text(0, -0.95, "h", ha="center", va="center")
    dense.set_title("DenseHead", fontsize=9)
    for k in range(3):
        x = 2 * k - 2
        box(mixture, x, 0, f"tanh(h W{k + 1})", width=1.6)
        box(mixture, x, 1.0, "softmax", width=1.6, color="#fbe6cf")
        arrow(mixture, (0.3 * x, -0.9), (x, -0.31))
        arrow(mixture, (x, 0.31), (x, 0.69))
        arrow(mixture, (x, 1.31), (0.12 * x, 2.0))
    circle(mixture, 0, 2.2, "Σ")
    box(mixture, 2.7, 2.2, "prior of h", width=1.5, color="#eeeeee")
    arrow(mixture, (1.95, 2.2), (0.2, 2.2))
    mixture.text(0, -1.05, "h", ha="center", va="center")
    mixture.set_title("MixtureOfSoftmaxes: weighted by a prior", fontsize=9)
    sizes, colors = (2.2, 0.4, 0.4), ("#dbe7f4", "#fbe6cf", "#d9efd9")
    left = -2.2
    texts = ("frequent words", "", "")
    for size, color, text in zip(sizes, colors, texts, strict=True):
        box(adaptive, left + size / 2, 0.2, text, width=size, color=color)
        left += size
    box(adaptive, -1.2, 1.7, "rarer words", width=2.6, color=colors[1])
    box(adaptive, 2.0, 1.7, "the rarest words", width=3.4, color=colors[2])
    arrow(adaptive, (0.2, 0.51), (-0.9, 1.39))
    arrow(adaptive, (0.6, 0.51), (1.9, 1.39))
    adaptive.text(-0.7, -0.45, "one softmax, with a token for each tail", ha="center", fontsize=8)
    adaptive.text(0.6, 2.25, "computed where a target is in it", ha="center", fontsize=8)
    adaptive.set_title("AdaptiveSoftmax: a head and tails", fontsize=9)
    for axes, side in ((dense, 1.6), (mixture, 3.6), (adaptive, 3.8)):
        axes.set_xlim(-side, side)
        axes.set_ylim(-1.3, 2.7)
    save(figure, "heads")


def draw_dropout():
    """Masks that the layers draw, at rate 0.4."""
    keras.utils.set_random_seed(2)
    tokens = np.array([[2, 0, 3, 1, 2, 4, 0, 2, 1, 3]])
    ones = np.ones((1, 10, 6), "float32")
    kernel = DropConnect(0.4, 1)(np.ones((2, 6, 8), "float32"), training=True)
    kernel = np.concatenate([kernel[0], kernel[1]], axis=0)
    masks = {
        "Dropout\neach value": Dropout(0.4, seed=1)(ones, training=True),
        "VariationalDropout\nthe same channels at all steps": VariationalDropout(0.4, 3)(
            ones, training=True
        ),
        "EmbeddingDropout\nall occurrences of a word": EmbeddingDropout(0.4, 5, 1)(
            ones, tokens, training=True
        ),
        "DropConnect\nweights of the past tap": kernel,
    }
    figure = Figure(figsize=(11, 2.7), layout="constrained")
    for axes, (title, mask) in zip(figure.subplots(1, 4), masks.items(), strict=True):
        mask = np.asarray(mask)
        is_kernel = mask.ndim == 2
        image = mask if is_kernel else mask[0].T
        axes.imshow(image > 0, cmap="Blues", vmin=0, vmax=1.5, aspect="auto")
        axes.set_xticks(np.arange(image.shape[1]) - 0.5, [], minor=True)
        axes.set_yticks(np.arange(image.shape[0]) - 0.5, [], minor=True)
        axes.grid(which="minor", color="white", lw=1)
        axes.tick_params(which="both", length=0)
        axes.set_yticks([])
        axes.set_xticks([])
        axes.set_title(title, fontsize=9)
        if is_kernel:
            axes.set_ylabel("now           past", fontsize=8.5)
            axes.set_xlabel("output channel", fontsize=8.5)
        else:
            axes.set_ylabel("channel", fontsize=8.5)
            axes.set_xlabel("time", fontsize=8.5)
            if "Embedding" in title:
                axes.set_xticks(range(10), ["abcde"[token] for token in tokens[0]])
                axes.set_xlabel("word", fontsize=8.5)
    save(figure, "dropout")


if __name__ == "__main__":
    for draw in (draw_trellis, draw_tcn, draw_lru, draw_rnn, draw_heads, draw_dropout):
        draw()
