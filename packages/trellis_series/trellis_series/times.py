"""Times of tables: how they are written, their frequency, and those that follow."""

import contextlib
import re
import warnings
from typing import Any

import numpy as np
import pandas as pd
from pandas.tseries.frequencies import to_offset

from trellis_keras.layers.checks import is_integer

_DAY = pd.Timedelta(days=1)
_AMBIGUOUS = re.compile(r"\d{1,2}([./-])\d{1,2}\1\d{2,4}")  # a day and a month, in some order
_PERIOD = re.compile(r"\d{4}[- ]?[Qq][1-4]|\d{4}-\d\d-\d\d/\d{4}-\d\d-\d\d")  # quarter or week
_OFFSET = re.compile(r":.*(Z|[+-]\d\d:?\d\d)$")
_MOST_STEPS = 1_000_000  # between the first and the last time, or twenty times the rows


def parse_times(values: pd.Series, dayfirst: bool | None = None) -> pd.Series:
    """Returns times as integers, datetimes, periods or durations.

    Strings are times in any format that pandas reads, quarters such as `2024Q1`, or weeks such as
    `2024-01-01/2024-01-07`. Times with an offset from UTC become times in UTC. Integers such as
    `20240131` or `202401` are dates if all of them are.

    Args:
        values: The column of a table.
        dayfirst: Boolean, whether `01/02/2024` is the first of February. Defaults to `None`: the
            order in which the times are more evenly spaced, see `day_order`.
    """
    if values.isna().any():
        row = int(np.flatnonzero(values.isna())[0]) + 1
        raise ValueError(f"The column {values.name!r} has no time in row {row}.")
    if isinstance(values.dtype, pd.CategoricalDtype):
        values = values.astype(object)
    values = values.infer_objects()
    if values.empty or isinstance(values.dtype, pd.PeriodDtype):
        return values
    if pd.api.types.is_numeric_dtype(values.dtype):
        return _numbers(values)
    if not isinstance(values.iloc[0], str):
        return _dates(values)
    values = values.astype(str).str.strip()
    first = values.iloc[0]
    if _PERIOD.fullmatch(first):
        end = first.partition("/")[2]
        freq = f"W-{pd.Timestamp(end).strftime('%a').upper()}" if end else "Q"
        periods = pd.PeriodIndex(values.str.replace(" ", ""), freq=freq)
        return pd.Series(periods, index=values.index, name=values.name)
    options: dict[str, Any] = {"utc": True} if _OFFSET.search(first) else {}
    if _AMBIGUOUS.match(first):
        options["dayfirst"] = day_order(values) if dayfirst is None else dayfirst
    return _dates(values, **options)


def day_order(values: pd.Series) -> bool | None:
    """Returns whether days precede months in strings of times, `None` where it is clear.

    Raises:
        ValueError: If the times are about as evenly spaced in both orders, such as the first days
            of a January, which may also be the first days of months. Dots mean days first.
    """
    first = values.iloc[0]
    first = first.strip() if isinstance(first, str) else ""
    match = _AMBIGUOUS.match(first)
    if match is None:
        return None
    written, found = values.astype(str).str.strip(), {}
    for order in (True, False):
        with contextlib.suppress(ValueError):
            found[order] = _dates(written, dayfirst=order, utc=True)
    if len(found) < 2:
        return True in found
    days, months = _unevenness(found[True]), _unevenness(found[False])
    if max(days, months) > 2 * min(days, months):
        return days < months
    differs = (found[True] != found[False]).to_numpy()
    if differs.any() and match[1] != ".":
        raise ValueError(
            f"The times of the column {values.name!r} may have the day or the month first, such as "
            f"{written[differs].iloc[0]!r}. Write them as 2024-12-31, or say which it is: "
            "`pandas.to_datetime(..., dayfirst=True)`, or --dayfirst or --no-dayfirst."
        )
    return True


def _numbers(values):
    whole = values.astype("int64")
    is_wrong = (whole != values) | pd.api.types.is_bool_dtype(values)
    if is_wrong.any():
        raise ValueError(
            f"Times must be dates or integers. Received: {values[is_wrong].tolist()[0]!r} in the "
            f"column {values.name!r}"
        )
    for digits, form in ((8, "%Y%m%d"), (6, "%Y%m")):
        if whole.between(10 ** (digits - 1), 10**digits - 1).all():
            dates = pd.to_datetime(whole.astype(str), format=form, errors="coerce")
            dates = dates.dt.as_unit("ns")
            return dates if dates.dt.year.between(1700, 2200).all() else whole
    return whole


def _dates(values, **options):
    if values.dtype.kind == "m":
        return values.dt.as_unit("ns")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the order of day and month
        for form in (None, "ISO8601"):
            with contextlib.suppress(ValueError, TypeError):
                found = pd.to_datetime(values, format=form, **options).dt.as_unit("ns")
                return pd.Series(pd.DatetimeIndex(found), values.index, name=values.name)
        options |= {"format": "mixed", "errors": "coerce", "utc": True}
        years = pd.to_datetime(values, **options).dt.year
    wrong = values[~years.between(1678, 2261)]  # those of nanoseconds
    if len(wrong):
        raise ValueError(
            f"The column {values.name!r} must have times that exist, in the years 1678 to "
            f"2261, such as 2024-12-31 18:00. Received: {wrong.iloc[0]!r}"
        )
    form = values.astype(str).str.replace(r"\d", "0", regex=True)
    written = [values.iloc[0], *values[form != form.iloc[0]][:1]]
    raise ValueError(
        "Times must be written alike, such as 2024-12-31 18:00, all in UTC or all without an "
        f"offset. Received: {' and '.join(map(repr, written))} in the column {values.name!r}"
    )


def _unevenness(times):
    steps = np.diff(np.unique(times.to_numpy()))
    return float(steps.max() / np.median(steps)) if len(steps) else 0.0


def time_range(
    freq: str | int, start: Any = None, end: Any = None, periods: int | None = None
) -> pd.Index:
    """Returns evenly spaced times of any kind, as `pandas.date_range`."""
    known = end if start is None else start
    if isinstance(known, pd.Period):
        return pd.period_range(start, end, periods)
    if isinstance(known, pd.Timedelta):
        return pd.timedelta_range(start, end, periods, freq)
    if isinstance(known, pd.Timestamp):
        offset, zone = to_offset(freq), known.tz
        if zone is None or (isinstance(offset, pd.offsets.Tick) and pd.Timedelta(offset) < _DAY):
            return pd.date_range(start, end, periods, offset)
        known, end = _wall(pd.DatetimeIndex([known]))[0], end and end.tz_localize(None)
        start, end = (None, known) if start is None else (known, end)
        found = pd.date_range(start, end, periods, offset)  # some of which may not exist there
        return found.tz_localize(zone, ambiguous=False, nonexistent="shift_forward")
    step = int(freq)
    if periods is None:
        return pd.RangeIndex(start, end + 1, step)
    start = end - (periods - 1) * step if start is None else start
    return pd.RangeIndex(start, start + periods * step, step)


def _wall(times):
    """Returns the times that clocks show, and midnight for a day that began at 01:00.

    Some countries change their clocks at midnight. One such day alone counts as midnight, also if
    all others were at 01:00.
    """
    local, instant = times.tz_localize(None), pd.Timedelta("1ns")
    before = (times - instant).tz_localize(None) + instant
    is_later = (before < local) & (before == before.normalize())
    if len(times) > 1 and (local == local.normalize()).mean() < 0.5:
        return local  # 01:00 is the time of all days
    return local.where(~is_later, before)


def check_freq(freq: Any) -> None:
    """Raises ValueError unless `freq` is a pandas frequency or a positive integer."""
    if is_integer(freq, 1):
        return
    if isinstance(freq, str):
        for read in (to_offset, lambda text: pd.Period("2024-01-01", text).freq):
            with contextlib.suppress(ValueError):
                if read(freq).n > 0:
                    return
    raise ValueError(
        "`freq` must be a pandas frequency, such as 'h', '15min' or 'ME', or a positive integer. "
        f"Received: freq={freq!r}"
    )


def time_grid(freq: str | int, times: pd.Index, rows: int) -> pd.Index:
    """Returns all times from the first to the last of a table's sorted times."""
    first, last = times[0], times[-1]
    if isinstance(first, pd.Period):
        size = last.ordinal - first.ordinal
    else:
        probe = time_range(freq, first, periods=9)
        size = int((last - first) / (probe[-1] - probe[0]) * 8)
    check_steps(size, rows, f"there are {size:,} steps of {freq!r} from {first} to {last}")
    grid = time_range(freq, first, last)
    wrong = times[grid.get_indexer(times) < 0]
    if len(wrong):
        place = f"In steps of {freq!r} from {first}, {wrong[0]} is between two steps"
        if wrong[0] == first:
            place = f"{first} is not a time of the frequency {freq!r}"
        raise ValueError(f"{place}. Pass another `freq` (--freq), or aggregate the table.")
    return grid


def check_steps(count: int, rows: int, what: str) -> None:
    """Raises ValueError if there are far more steps than rows of a table."""
    if count > max(_MOST_STEPS, 20 * rows):
        raise ValueError(f"The table has {rows:,} rows, but {what}. Is a time wrong, or `freq`?")


def infer_freq(times: pd.Index) -> str | int:
    """Returns the frequency of sorted times, some of which may be missing."""
    if isinstance(times, pd.PeriodIndex):
        return times.freq.freqstr
    if not isinstance(times, pd.DatetimeIndex):
        step = int(np.gcd.reduce(np.diff(times.to_numpy("int64")))) if len(times) > 1 else 1
        is_duration = isinstance(times, pd.TimedeltaIndex)
        return to_offset(pd.Timedelta(step)).freqstr if is_duration else step
    if len(times) < 3:
        raise ValueError(
            "At least three points in time are needed to infer the frequency. Received: "
            f"{len(times)}. Pass `freq`, such as freq='D'."
        )
    # Clocks change, but days are days, and hours are hours.
    is_daily = np.median(np.diff(times.as_unit("ns").asi8)) >= 20 * 3_600e9
    if times.tz is not None:
        times = _wall(times) if is_daily else times.tz_convert(None)
    found = pd.infer_freq(times)
    found = getattr(found, "freqstr", found)  # pandas 4 returns an offset
    if found is not None and (found != "bh" or times.hour.min() == 9):  # when "bh" begins
        return found
    months = np.diff(times.year * 12 + times.month)
    for is_edge, name in ((times.is_month_start, "MS"), (times.is_month_end, "ME")):
        if is_edge.all() and months.all():
            return f"{np.gcd.reduce(months)}{name}"
    steps = pd.Series(times).diff()[1:]
    step = steps.mode().iloc[0]
    off = (steps % step).to_numpy() != np.timedelta64(0)
    if off.any():
        raise ValueError(
            f"Most times are spaced by {step}, but after {times[:-1][off][0]} comes "
            f"{times[1:][off][0]}. Times must be one step apart, or several where rows are "
            "missing. Write months as 2024-01, or pass `freq`."
        )
    days, rest = divmod(step, _DAY)
    if days % 7 == 0 and not rest and (times.day_of_week == times.day_of_week[0]).all():
        return f"{days // 7}W-{times[0].strftime('%a').upper()}"
    if step == _DAY and (times.day_of_week < 5).all():
        return "B"
    return to_offset(step).freqstr if rest else f"{days}D"
