"""Norms by layer and epoch as a picture."""

import numpy as np

_SIZE = (5.0, 3.2)  # inches
_DOTS = 120  # per inch
_MOST_LABELS = 16


def draw_heatmap(norms, rows, title):
    """Draws a square for each row and epoch, on a logarithmic scale.

    Args:
        norms: Array (rows, epochs), the first row at the bottom. What is not a positive number, or
            was not measured (NaN), stays white.
        rows: The names of the rows.
        title: Of the picture.

    Returns:
        The picture, 8-bit colours (height, width, 3).

    Example:

    >>> draw_heatmap(np.array([[1.0, 2.0], [0.5, np.nan]]), ["1", "2"], "norm").dtype
    dtype('uint8')
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    norms = np.asarray(norms, "float64")
    shown = np.ma.masked_where(~(np.isfinite(norms) & (norms > 0)), norms)
    figure = Figure(figsize=_SIZE, dpi=_DOTS, layout="constrained")
    axes = figure.add_subplot()
    epochs = norms.shape[1]
    image = axes.imshow(
        shown,
        norm=LogNorm(*_limits(shown)),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
        extent=(0.5, epochs + 0.5, -0.5, len(rows) - 0.5),
    )
    labelled = range(0, len(rows), -(-len(rows) // _MOST_LABELS))
    axes.set_yticks(labelled, [rows[i] for i in labelled])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="epoch", title=title)
    figure.colorbar(image)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def _limits(shown):
    """The smallest and the largest number, a tenth apart at least: a scale needs two ends."""
    if shown.count() == 0:
        return 0.9, 1.0
    return shown.min(), max(shown.max(), 1.1 * shown.min())
