"""Draws docs/cone.png and docs/cone_chop.png: the positions that a TrellisLayer computes.

python docs/draw_cone.py
"""

import pathlib

import numpy as np
from matplotlib.figure import Figure

from trellis_keras.kernels.cone import Cone, tap_offsets

HERE = pathlib.Path(__file__).parent


def draw_cone(cone, path, title):
    """Draws the computed positions of a `Cone` and the values that each of them reads."""
    time, depth = cone.time, len(cone.offsets)
    figure = Figure(figsize=(1.2 + 0.3 * time, 1.4 + 0.5 * depth), layout="constrained")
    axes = figure.add_subplot()
    everything = np.stack(np.meshgrid(np.arange(time), np.arange(depth + 1)), axis=-1)
    axes.scatter(*everything.reshape(-1, 2).T, s=24, color="0.85", zorder=1, label="not computed")
    for level in range(1, depth + 1):
        for t in cone.positions[level]:
            for source in t - np.asarray(cone.offsets[level - 1]):
                if source >= cone.positions[level - 1][0]:
                    axes.plot([source, t], [level - 1, level], color="tab:blue", lw=0.6, zorder=2)
    nodes = [(t, i) for i in range(1, depth + 1) for t in cone.positions[i]]
    axes.scatter(*np.transpose(nodes), s=36, color="tab:blue", zorder=3, label="computed")
    inputs = cone.positions[0]
    axes.scatter(inputs, 0 * inputs, s=36, color="tab:green", zorder=3, label="input read")
    outputs = cone.positions[depth]
    axes.scatter(outputs, 0 * outputs + depth, s=36, color="tab:orange", zorder=4, label="output")
    axes.set_xlabel("position")
    axes.set_ylabel("level (0: input)")
    axes.set_yticks(range(depth + 1))
    axes.set_xlim(-1, time)
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    draw_cone(
        Cone(32, [tap_offsets(2, d) for d in (1, 1, 2, 4, 8)], output_length=1),
        HERE / "cone.png",
        "Only the last output is wanted: levels of dilation 1, 1, 2, 4, 8",
    )
    draw_cone(
        Cone(24, [tap_offsets(2, 1)] * 8, output_length=12),
        HERE / "cone_chop.png",
        "The last 12 of 24 outputs enter the loss: eight levels of dilation 1",
    )
