"""The command `trellis-series`."""

import importlib.util
import itertools
import pathlib
import sys
import warnings
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from utilsforecast.evaluation import evaluate
from utilsforecast.losses import mae

from keras_streams.files import atomic_write, check_output
from trellis_keras.terminal import printable
from trellis_series.ensemble import fill
from trellis_series.files import read_csv
from trellis_series.forecasts import Forecasts, check_levels
from trellis_series.panel import Columns, check_columns, read_future, read_panel, to_frame
from trellis_series.saving import check_folder
from trellis_series.times import parse_times, time_range

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # as in `trellis-keras`
)
_WINDOWS = 5  # of the backtest, unless a series is too short
_WORST = 5  # series named under the table
_ROUNDING = 1e-12  # of the values: the error of a forecast that is exact
_RIVALS = ("AutoETS", "AutoTheta")  # of statsforecast
_RIVAL_ROWS, _RIVAL_SERIES, _RIVAL_SEASON = 1_000, 20, 24  # at most; the season of AutoETS
_HISTORY = 5  # horizons in the picture, before the backtest
_STEP = "step"  # the column of times of a file without one
_KINDS = ("ours", "naive")
_OF_FITS = (  # options that concern fitting
    *("target", "time", "series", "past", "future", "static", "horizon"),
    *("season", "freq", "windows", "network", "rivals", "save"),
)


@app.callback()
def _about() -> None:
    """Forecasts time series, and compares the forecasts with the seasonal naive ones."""


@app.command()
def forecast(
    context: typer.Context,
    file: Annotated[pathlib.Path, typer.Argument(help="CSV file, or .csv.gz.")],
    output: Annotated[
        pathlib.Path,
        typer.Option(help="CSV file to write; a picture is written beside it, as .png."),
    ],
    target: Annotated[str | None, typer.Option(help="Column to forecast.")] = None,
    time: Annotated[
        str | None, typer.Option(help="Column of times. Without it, rows are equal steps.")
    ] = None,
    series: Annotated[
        str | None, typer.Option(help="Column of names, in a file with several series.")
    ] = None,
    past: Annotated[
        list[str] | None, typer.Option(help="Covariate known up to the present. May be repeated.")
    ] = None,
    future: Annotated[
        list[str] | None,
        typer.Option(
            help="Covariate also known in the future, in rows without a target at the file's end."
        ),
    ] = None,
    static: Annotated[
        list[str] | None, typer.Option(help="Covariate that is constant for a series.")
    ] = None,
    horizon: Annotated[int, typer.Option(min=1, help="Number of steps to forecast.")] = 24,
    level: Annotated[
        list[float] | None, typer.Option(help="Percentage of a band, 80 by default.")
    ] = None,
    season: Annotated[
        list[int] | None, typer.Option(help="Steps in a season. May be passed several times.")
    ] = None,
    freq: Annotated[str | None, typer.Option(help="Frequency of times, for example h.")] = None,
    windows: Annotated[
        int | None, typer.Option(min=1, help="Windows of the backtest, 5 unless series are short.")
    ] = None,
    network: Annotated[
        bool, typer.Option(help="Try a network where there is enough to learn from.")
    ] = True,
    rivals: Annotated[
        bool, typer.Option(help="Try AutoETS and AutoTheta, if statsforecast is installed.")
    ] = True,
    fallback: Annotated[
        bool, typer.Option(help="Write the naive forecast if the backtest favors it.")
    ] = True,
    sep: Annotated[str | None, typer.Option(help="Separator. Detected by default.")] = None,
    decimal: Annotated[str | None, typer.Option(help="Decimal sign. Detected by default.")] = None,
    dayfirst: Annotated[
        bool | None, typer.Option(help="Whether 01/02/2024 is the first of February.")
    ] = None,
    encoding: Annotated[str | None, typer.Option(help="Encoding. Detected by default.")] = None,
    save: Annotated[
        pathlib.Path | None, typer.Option(help="Folder to save the fitted forecasts to.")
    ] = None,
    model: Annotated[
        pathlib.Path | None, typer.Option(help="Folder of saved forecasts, instead of fitting.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace files that exist.")] = False,
) -> None:
    """Forecasts a table, after a backtest on its last windows."""
    output = check_output(output, [file], overwrite)
    if output.suffix.lower() in (".png", ".xlsx", ".xls", ".json", ".parquet"):
        raise ValueError(
            "The forecast is written as CSV, with a picture next to it: name a .csv file. "
            f"Received: {output}"
        )
    picture = check_output(output.with_suffix(".png"), [file, output], overwrite)
    options = {"sep": sep, "decimal": decimal, "encoding": encoding}
    options = {name: value for name, value in options.items() if value is not None}
    kept = None if model is None else Forecasts.load(model)
    names = series if kept is None else kept.columns.id
    if kept is not None and not all(isinstance(name, str) for name in kept.models):
        names = None  # fitted to a data frame with other names
    frame = read_csv(file, text_column=names, **options)
    backtest = None
    if kept is not None:
        forecasts = kept
        typed = context.get_parameter_source("output")  # which is required
        passed = [
            f"--no-{name}" if context.params[name] is False else f"--{name}"
            for name in _OF_FITS
            if context.get_parameter_source(name) is typed
        ]
        if passed:
            raise ValueError(
                f"{model} is already fitted. With --model, leave out {', '.join(passed)}."
            )
        known, ahead = _split(frame, forecasts.columns, file, dayfirst)
        found = forecasts.predict(known, ahead, level or None, naive=True)
    else:
        if target is None:
            raise ValueError("Name the column to forecast: --target.")
        if time is None and _STEP in frame:
            raise ValueError(
                f"{file} has a column {_STEP!r}, a name reserved for files without times. "
                f"Pass --time {_STEP} if it has the times, or rename it."
            )
        forecasts = Forecasts(
            horizon,
            int(freq) if freq and freq.isdecimal() else freq,
            level or (80,),
            past or (),
            future or (),
            static or (),
            season or None,
            "auto" if network else None,
            id_col=series or Columns.id,
            time_col=time or _STEP,
            target_col=target,
        )
        if save is not None:
            check_folder(save, overwrite)
        known, ahead = _split(frame, forecasts.columns, file, dayfirst)
        if ahead is not None:
            _check_ahead(forecasts, known, ahead)
        backtest, errors = _backtest(forecasts, known, windows, rivals)
        if backtest is not None:
            # Trained once, and left out where it did not help.
            forecasts.network = forecasts.backtest_network
            forecasts.beats_naive = bool(_relative(errors)["ours"] <= 1)
        found = forecasts.fit(known).predict(X_df=ahead, naive=True)
        typer.echo(f"\n{_verdict(errors, fallback)}")
        few = sum(model.has_few_origins for model in forecasts.models.values())
        if few:
            short = "is too short to calibrate its band, which is"
            if few > 1:
                short = "are too short to calibrate their bands, which are"
            typer.echo(f"{few:,} of {len(forecasts.models):,} series {short} wider.")
    kind, other = ("naive", "ours") if fallback and forecasts.beats_naive is False else _KINDS
    roles = forecasts.columns.roles.values()
    others = [name for name in found if name not in roles and name.split("-")[0] == other]
    written = found.drop(columns=others)
    if forecasts.columns.id not in frame:
        written = written.drop(columns=forecasts.columns.id)
    with atomic_write(output) as temporary:
        written.to_csv(temporary, index=False)
    with atomic_write(picture) as temporary:
        tried = 0 if backtest is None else backtest["cutoff"].nunique()
        figure = forecasts.plot(
            known,
            pd.concat([backtest, found]),
            models=[kind],
            level=list(check_levels(level or forecasts.levels)),
            max_insample_length=forecasts.horizon * (_HISTORY + tried),
        )
        figure.savefig(temporary, dpi=120, bbox_inches="tight")
    if save is not None:
        forecasts.save(save, overwrite)
    times = written[forecasts.columns.time]
    typer.echo(
        f"{output} has {len(written):,} rows, {times.min()} to {times.max()}; see {picture}."
    )


def _split(frame, columns, file, dayfirst):
    """Returns the rows up to the last value of each series, and those after it with covariates."""
    if columns.time == _STEP and _STEP not in frame:
        has_series = columns.id in frame
        steps = frame.groupby(columns.id).cumcount() if has_series else np.arange(len(frame))
        frame = frame.assign(**{_STEP: steps + 1})
    own = [columns.id] if columns.id != Columns.id else []
    needed = [columns.time, columns.target, *own, *columns.covariates]
    check_columns(needed, frame.columns, str(file))
    if frame.empty:
        raise ValueError(f"{file} has no rows.")
    times = parse_times(frame[columns.time], dayfirst)
    frame = to_frame(frame.assign(**{columns.time: times}), columns)
    last = times.where(frame[columns.target].notna()).groupby(frame[columns.id]).transform("max")
    is_ahead = times > last
    return frame[~is_ahead], frame[is_ahead] if columns.future else None


def _check_ahead(forecasts, known, ahead):
    """Raises ValueError unless the last rows have the covariates of all steps to forecast."""
    panel, freq, encoding = read_panel(known, forecasts.columns, forecasts.freq)
    steps = {
        series.name: time_range(freq, series.times[-1], periods=forecasts.horizon + 1)[1:]
        for series in panel
    }
    read_future(ahead, forecasts.columns, encoding, steps)


def _backtest(forecasts, frame, windows, rivals):
    """Prints a table of errors on the last windows.

    Returns:
        The forecasts of these windows, and the MAE of each series (rows) and forecast; or
        `None` for both if the series are too short.
    """
    columns, horizon = forecasts.columns, forecasts.horizon
    rows = int(frame.groupby(columns.id).size().median())
    count = windows or min(rows // 2 // horizon, _WINDOWS)
    if not count:
        return None, None
    found = forecasts.cross_validation(frame, count, naive=True)
    if rivals and importlib.util.find_spec("statsforecast"):
        found = _with_rivals(forecasts, frame, found)
    kinds = [name for name in found if name in (*_KINDS, *_RIVALS)]
    known = found.dropna(subset=[columns.target, *kinds])
    errors = evaluate(known, [mae], models=kinds, **columns.roles)
    errors = errors.groupby(columns.id, sort=False)[kinds].mean()
    size = known[columns.target].abs().groupby(known[columns.id], sort=False).mean()
    errors = errors.where(errors.gt(_ROUNDING * size, axis=0), 0.0)  # of a constant series
    means = errors.mean().map("{:.5g}".format)
    table = pd.DataFrame({"MAE": means, "MAE / naive": _relative(errors)})
    for kind, p in itertools.product(_KINDS, forecasts.levels):
        low, high = (known[f"{kind}-{end}-{p}"] for end in ("lo", "hi"))
        table.loc[kind, f"in {p} % band"] = known[columns.target].between(low, high).mean()
    table = table.rename(index={"naive": "seasonal naive"})
    typer.echo(f"Backtest of the last {count} windows of {horizon} steps, {len(errors):,} series\n")
    typer.echo(table.to_string(float_format="{:.2f}".format, na_rep="-", col_space=10))
    if len(errors) > 1:
        worst = (errors["ours"] / errors["naive"]).fillna(1.0).nlargest(_WORST)  # both may be 0
        named = ", ".join(
            f"{printable(str(name), lines=False)} {ratio:.2f}" for name, ratio in worst.items()
        )
        typer.echo(f"\nMAE / naive of the worst series: {named}")
    return found, errors


def _relative(errors):
    """Returns the errors divided by those of the naive forecast, where all series count alike."""
    # A series counts by the larger of the two errors that are compared.
    largest = errors[list(_KINDS)].max(axis=1)
    ratios = errors.div(largest.where(largest > 0), axis=0).fillna(1.0)  # both may be 0
    return ratios.mean() / ratios["naive"].mean()  # infinite where naive has no error


def _verdict(errors, fallback):
    """Returns which forecast the backtest favors, in a line."""
    if errors is None:
        return "There is no backtest: the series are too short for one."
    relative, mean = _relative(errors)["ours"], errors.mean()
    if relative == 1:
        return "The backtest favors neither forecast: the errors of both are equal."
    each = ", each relative to its series," if len(errors) > 1 else ""
    difference = abs(relative - 1)
    amount = f"{difference:.0%}" if difference >= 0.005 else "less than 1%"
    but = ", but the MAE, which large series dominate, is "
    if relative < 1:
        but = f"{but}higher" if mean["ours"] > mean["naive"] else ""
        return (
            f"The backtest favors this forecast: its errors{each} are {amount} below those of "
            f"the seasonal naive forecast{but}."
        )
    but = f"{but}lower" if mean["ours"] < mean["naive"] else ""
    written = ", which is written instead (--no-fallback writes ours)" if fallback else ""
    above = f"{amount} above its own" if np.isfinite(relative) else "not 0, as its own are"
    return (
        f"The backtest favors the seasonal naive forecast{written}: our errors{each} are "
        f"{above}{but}."
    )


@np.errstate(invalid="ignore")  # of constant series
def _with_rivals(forecasts, frame, found):
    """Returns a backtest with columns of the models of statsforecast, for up to twenty series."""
    from statsforecast import models

    columns = forecasts.columns
    panel, freq, _ = read_panel(frame, columns, forecasts.freq)
    if len(panel) > _RIVAL_SERIES:
        return found
    candidates = forecasts.candidate_seasons(panel, freq)
    for series in panel:
        season = next((s for s in candidates if 2 * s < len(series.y)), 1)
        y = fill(series.y, season)
        for cutoff, rows in found[found[columns.id] == series.name].groupby("cutoff"):
            history = y[: series.times.get_loc(cutoff) + 1][-_RIVAL_ROWS:]
            for name in _RIVALS:
                has_season = name != "AutoETS" or season <= _RIVAL_SEASON
                model = getattr(models, name)(season_length=season if has_season else 1)
                found.loc[rows.index, name] = model.forecast(y=history, h=len(rows))["mean"]
    return found


def main() -> None:
    """Runs the command line."""
    shown: set[str] = set()

    def show(message, *_, **__):
        note = printable(f"Note: {message}")
        if note not in shown:  # the backtest and the fit read the same table
            typer.echo(note, err=True)
        shown.add(note)

    warnings.showwarning = show
    try:
        app()
    except (ValueError, OSError) as error:
        text = str(error)
        if isinstance(error, FileNotFoundError) and error.filename is not None:
            text = f"There is no file {error.filename}."
        typer.echo(f"Error: {printable(text)}", err=True)
        sys.exit(2)
