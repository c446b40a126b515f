"""Plots forecasts against measured values, and errors by step ahead."""

import os

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from trellis_keras.forecasting.backtest import FORECASTS, backtest_scores, quantile_levels
from trellis_keras.forecasting.calibration import (
    calibrate_on_known,
    predict_windows,
    recent_count,
    windows_ahead,
)
from trellis_keras.forecasting.forecaster import Forecaster
from trellis_keras.forecasting.report import middle_values, target_names
from trellis_keras.forecasting.series import Windows

_PANELS = 4  # targets
_SHOWN = 7  # consecutive forecasts
_COLORS = dict(
    zip(FORECASTS, ("tab:blue", "0.5", "tab:orange", "tab:green", "tab:red"), strict=True)
)
_ROOM = 2.5  # height of an error panel, relative to the model's error


def draw(model: Forecaster, test: Windows, path: str | os.PathLike) -> None:
    """Draws the last forecasts of the test part, one after the other, with their bands.

    Args:
        model: `Forecaster`.
        test: `Windows`.
        path: The PNG file to write.
    """
    series, horizon = test.series, test.horizon
    apart = windows_ahead(test)
    # The last series with windows.
    numbers = range(len(series.lengths) - 1, -1, -1)
    number = next(i for i in numbers if len(test.of_series(i)))
    own = test.of_series(number)
    shown = own[::-apart][:_SHOWN][::-1]
    known = own[: max(own.index(shown[0]) - apart + 1, 0)][-recent_count(test) :]
    bands, y = predict_windows(model, test, shown)
    known_bands, known_y = predict_windows(model, test, known)
    bands = calibrate_on_known(model, bands, known_bands, known_y, test)
    rows = test.starts(np.array(shown))[:, None] + test.window + np.arange(horizon)
    middle = middle_values(model, bands)
    names = target_names(series)[:_PANELS]
    figure = Figure(figsize=(9, 2.2 + 2 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    axis = rows if series.times is None else series.times[rows]
    first = max(int(rows[0, 0]) - 2 * horizon, series.rows(number).start)
    before = np.arange(first, int(rows[0, 0]) + 1)
    for i, (panel, name) in enumerate(zip(panels, names, strict=True)):
        past = before if series.times is None else series.times[before]
        panel.plot(past, series.values[before, i], color="0.2", lw=1)
        for k in range(len(rows)):
            label = {"label": "measured"} if not k else {}
            panel.plot(axis[k], y[k, :, i], color="0.2", lw=1, **label)
            label = {"label": "forecast"} if not k else {}
            panel.plot(axis[k], middle[k, :, i], color="tab:blue", lw=1.4, **label)
            if model.quantiles is not None and model.has_band:
                band = f"{model.quantiles[0]:.0%} to {model.quantiles[-1]:.0%}"
                label = {"label": band} if not k else {}
                low, high = bands[k, :, i, 0], bands[k, :, i, -1]
                panel.fill_between(axis[k], low, high, color="tab:blue", alpha=0.2, lw=0, **label)
            panel.axvline(axis[k, 0], color="0.85", lw=0.8, zorder=0)
        panel.set_ylabel(name, parse_math=False)
        panel.spines[["top", "right"]].set_visible(False)
    if len(series.names) > 1:
        title = {"loc": "left", "fontsize": "medium", "parse_math": False}
        panels[0].set_title(f"series {series.names[number]}", **title)
    panels[0].legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    panels[-1].set_xlabel("step" if series.times is None else "time")
    if series.times is not None and series.times.dtype.kind == "M":
        figure.autofmt_xdate()
    figure.savefig(path, dpi=120, format="png")


def draw_backtest(rows: pa.Table, path: str | os.PathLike) -> None:
    """Draws the errors of a backtest by step ahead, and the coverage of the band.

    Baselines that are far worse than the model are cut off at the top of the panel.

    Args:
        rows: Table returned by `forecasting.backtest`.
        path: The PNG file to write.
    """
    scores = backtest_scores(rows, ("target", "step")).to_pylist()
    names = list(dict.fromkeys(row["target"] for row in scores))[:_PANELS]
    has_band = any(row["coverage"] is not None for row in scores)
    figure = Figure(figsize=(9, 1 + 2.4 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1 + has_band, sharex=True, squeeze=False)
    for name, row in zip(names, panels, strict=True):
        for method in FORECASTS:
            own = [s for s in scores if s["target"] == name and s["method"] == method]
            steps = [s["step"] for s in own]
            mae = [np.nan if s["mae"] is None else s["mae"] for s in own]
            width = 2 if method == "forecast" else 1
            color = _COLORS[method]
            row[0].plot(steps, mae, label=method.replace("_", " "), color=color, lw=width)
            if method == "forecast" and has_band:
                inside = [np.nan if s["coverage"] is None else s["coverage"] for s in own]
                row[1].plot(steps, inside, color="tab:blue", lw=2)
        row[0].set_ylabel(name, parse_math=False)
        own = [s["mae"] for s in scores if (s["target"], s["method"]) == (name, "forecast")]
        highest = max((mae for mae in own if mae is not None), default=0)
        row[0].set_ylim(0, min(row[0].get_ylim()[1], _ROOM * highest) or None)
    panels[0, 0].set_title("mean absolute error", loc="left", fontsize="medium")
    panels[0, 0].legend(frameon=False, fontsize="small", ncols=2)
    if has_band:
        panels[0, 1].set_title("values within the band", loc="left", fontsize="medium")
        levels = quantile_levels(rows.column_names)
        share = levels[-1] - levels[0]
        for panel in panels[:, 1]:
            panel.axhline(share, color="0.6", lw=0.8, ls="--")
            panel.set_ylim(0, 1.02)
            panel.yaxis.set_major_formatter(PercentFormatter(1))
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[-1]:
        panel.set_xlabel("step ahead")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120, format="png")
