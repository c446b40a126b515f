"""Draws docs/stream.gif: samples arrive, the state rolls on, the class appears.

python docs/draw_stream.py          # trains examples/edge/exercises.py first, about a minute
"""

import io
import json
import pathlib
import runpy

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from trellis_keras.export import native

HERE = pathlib.Path(__file__).parent
SHOWN, FRAMES = 60, 75
FIGURES = HERE.parent / "benchmarks" / "results" / "edge-tensorflow.json"
NET = "exercises, TCN of 32 filters"
SHADES = ["#f3f7fb", "#d6e5f3", "#aecde6", "#7db3d8", "#4a92c5", "#1f6fae"]


def stream(model, samples):
    """Returns for each sample the probabilities of the classes, and the rings of the state."""
    compiled, cache, found = native(model), model.initial_cache(1), []
    for x in samples:
        _, cache = model.step(x[None], cache)
        rings = [np.asarray(ring)[0] for block in cache for ring in block]
        found.append((compiled.step(x), rings))
    return found


def draw(samples, probabilities, rings, largest, names, truth, caption):
    """Returns a frame: the samples up to now, the state after them, and the classes."""
    figure = Figure(figsize=(9.6, 3.1), layout="constrained", dpi=100)
    signal, state, classes = figure.subplots(1, 3, width_ratios=[3.2, 2.4, 2.6])
    times = np.arange(1 - len(samples), 1)
    for c, name in enumerate(("ax", "ay", "az")):
        signal.plot(times, samples[:, c] - 3.0 * c, lw=1.3)
        signal.plot(0, samples[-1, c] - 3.0 * c, "o", color=f"C{c}", ms=5)
        signal.text(1 - SHOWN, 0.9 - 3.0 * c, name, color=f"C{c}", va="bottom")
    signal.set(xlim=(-SHOWN, 2), ylim=(-8.5, 2.6), yticks=[], xlabel="samples before now")
    signal.set_title("a sample arrives", fontsize=11)

    for n, ring in enumerate(rings):
        strength = np.abs(ring).mean(axis=1) / largest[n]
        places = np.arange(-len(ring), 0)
        shades = [SHADES[min(int(6 * s), 5)] for s in strength]
        state.bar(places, 0.8, 0.92, n - 0.4, color=shades, edgecolor="0.75", lw=0.4)
        taps = -len(ring) // 2 * np.arange(1, 3)  # a kernel of three taps: two of them in the past
        state.plot(taps, [n, n], ".", color="tab:orange", ms=4)
    state.set(xlim=(-17, 0), ylim=(-0.7, 7.7), yticks=range(8))
    state.set_xlabel("inputs kept; dots: what the next step reads")
    state.set_yticklabels([f"block {n // 2 + 1}" if n % 2 == 0 else "" for n in range(8)])
    state.set_title("the state rolls on", fontsize=11)

    best = int(np.argmax(probabilities))
    colors = ["tab:blue" if k == best else "0.75" for k in range(len(names))]
    classes.barh(range(len(names)), probabilities, color=colors)
    classes.set(xlim=(0, 1), yticks=range(len(names)), xlabel=f"truth: {truth}")
    classes.set_yticklabels(names)
    classes.set_title("the class appears", fontsize=11)
    for axes in (signal, state, classes):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, labelsize=9)
    figure.supxlabel(caption, fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return Image.open(buffer).convert("RGB")


def main():
    example = runpy.run_path(str(HERE.parent / "examples" / "edge" / "exercises.py"))
    table, model, names = example["table"], example["model"], example["names"]
    person = (table["person"] == 10) & (table["arm"] == "right")
    samples, truth = example["signals"][person], table["exercise"][person]
    # From one exercise to the next one, after enough of the past.
    change = np.flatnonzero(truth[1:] != truth[:-1])[2] + 1
    first = change - FRAMES // 3
    found = stream(model, samples[: first + FRAMES])
    largest = [max(np.abs(ring).mean(axis=1).max() for ring in rings)
               for rings in zip(*(rings for _, rings in found[first:]), strict=True)]  # fmt: skip
    net = json.loads(FIGURES.read_text())["nets"][NET]
    caption = (
        f"each step: {net['microseconds']['C']:.1f} microseconds in C, however much came before"
        f"   ·   weights {net['bytes']['weights'] / 1000:.0f} KB"
        f"   ·   state {net['bytes']['state'] / 1000:.1f} KB"
    )
    frames = [
        draw(samples[t + 1 - SHOWN : t + 1], *found[t], largest, names, truth[t], caption)
        for t in range(first, first + FRAMES)
    ]
    both = Image.new("RGB", (frames[0].width, 2 * frames[0].height))
    both.paste(frames[0], (0, 0))
    both.paste(frames[FRAMES // 2], (0, frames[0].height))
    palette = both.quantize(64)
    frames = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    path = HERE / "stream.gif"
    frames[0].save(
        path, save_all=True, append_images=frames[1:], duration=120, loop=0, optimize=True
    )
    print(f"{path}: {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main()
