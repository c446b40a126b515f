"""Times of tables: how they are written, which step they rise by, and which times follow."""

import dataclasses
import re
import warnings
from typing import Any

import numpy as np
import pandas as pd

_DAY = pd.Timedelta(days=1)
_AMBIGUOUS = re.compile(r"\d{1,2}([./-])\d{1,2}\1\d{2,4}")  # a day and a month, in some order
_QUARTER = re.compile(r"\d{4}[- ]?[Qq][1-4]")
_SPAN = re.compile(r"\d{4}-\d\d-\d\d/\d{4}-\d\d-\d\d")
_OFFSET = re.compile(r"(Z|[+-]\d\d:?\d\d)$")
_EPOCH = pd.Timestamp(0)


def parse_times(values: pd.Series, dayfirst: bool | None = None) -> pd.Series:
    """Returns times as integers, datetimes, periods or durations.

    Strings are times in any format that pandas reads, quarters such as `2024Q1`, or weeks such as
    `2024-01-01/2024-01-07`. Times with an offset from UTC become times in UTC. Integers such as
    `20240131` or `202401` are dates where they are not evenly spaced.

    Args:
        values: The column of a table.
        dayfirst: Boolean, whether `01/02/2024` is the first of February. Defaults to `None`: the
            order in which the times are more evenly spaced.

    Raises:
        ValueError: If a value is not a time.
    """
    if values.isna().any():
        row = int(np.flatnonzero(values.isna())[0]) + 1
        raise ValueError(f"The column {values.name!r} has no time in row {row}.")
    kind = values.dtype
    if pd.api.types.is_bool_dtype(kind) or isinstance(kind, pd.CategoricalDtype):
        values = values.astype(object)
    if pd.api.types.is_numeric_dtype(values.dtype):
        return _numbers(values)
    if values.dtype.kind in "mM" or isinstance(kind, (pd.PeriodDtype, pd.DatetimeTZDtype)):
        return values
    first = values.iloc[0]
    if isinstance(first, pd.Period):
        return pd.Series(pd.PeriodIndex(values), index=values.index, name=values.name)
    if isinstance(first, str):
        return _strings(values.astype(str).str.strip(), dayfirst)
    return _try(values, {})


def _numbers(values):
    whole = values.astype("int64")
    if not (whole == values).all():
        raise ValueError(
            f"Times must be dates or integers. Received: {values[whole != values].iloc[0]!r} in "
            f"the column {values.name!r}"
        )
    digits = 8 if (whole // 10**7 > 0).all() else 6
    if (
        len(np.unique(np.diff(np.unique(whole)))) > 1
        and whole.between(170_000 * 10 ** (digits - 6), 220_000 * 10 ** (digits - 6)).all()
    ):
        form = "%Y%m%d" if digits == 8 else "%Y%m"
        found = pd.to_datetime(whole.astype(str), format=form, errors="coerce")
        if not found.isna().any():
            return found
    return whole


def _strings(values, dayfirst):
    if values.map(lambda text: bool(_SPAN.fullmatch(text))).all():
        starts = values.str[:10]
        ends = pd.to_datetime(values.iloc[:1].str[11:])
        return pd.to_datetime(starts).dt.to_period(f"W-{ends.dt.strftime('%a').iloc[0].upper()}")
    if values.map(lambda text: bool(_QUARTER.fullmatch(text))).all():
        quarters = values.str.upper().str.replace(r"[- ]", "", regex=True)
        return pd.Series(pd.PeriodIndex(quarters, freq="Q"), index=values.index, name=values.name)
    if _OFFSET.search(values.iloc[0]) and ":" in values.iloc[0]:
        return _try(values, {"utc": True})
    match = _AMBIGUOUS.match(values.iloc[0])
    if not match:
        return _try(values, {})
    if dayfirst is not None:
        return _try(values, {"dayfirst": dayfirst})
    found = {}
    for order in (True, False) if match[1] == "." else (False, True):
        try:
            found[order] = _try(values, {"dayfirst": order})
        except ValueError as error:
            failed = error
    if not found:
        raise failed
    return min(found.values(), key=_unevenness)


def _try(values, options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about the order of day and month
        for more in ({}, {"format": "ISO8601"}):
            try:
                return pd.to_datetime(values, **options, **more)
            except (ValueError, TypeError):
                pass
        single = values.map(lambda value: pd.to_datetime(value, errors="coerce", **options))
    wrong = values[single.isna()] if single.isna().any() else values
    raise ValueError(
        f"The column {values.name!r} has times that are not written alike, or none. "
        f"Received: {wrong.iloc[0]!r}"
    )


def _unevenness(times):
    steps = np.diff(np.unique(times.to_numpy()))
    return float(steps.max() / np.median(steps)) if len(steps) else 0.0


@dataclasses.dataclass
class Calendar:
    """The times of a table.

    Attributes:
        freq: String, a frequency of pandas, or an integer for times that are numbers.
        kind: `"number"`, `"time"`, `"duration"` or `"period"`.
        zone: String, the time zone, or `None`. Steps of less than a day are counted in UTC.
        in_utc: Boolean, whether they are.
        period: String, the frequency of periods, or `None`.
    """

    freq: str | int
    kind: str
    zone: str | None = None
    in_utc: bool = False
    period: str | None = None

    @classmethod
    def of(cls, times: pd.Series, longest: pd.Series, freq: str | int | None) -> "Calendar":
        """Finds the calendar of a table.

        Args:
            times: Parsed times.
            longest: Those of the longest series, from which the frequency is inferred.
            freq: The frequency, or `None`.
        """
        if pd.api.types.is_integer_dtype(times.dtype):
            return cls(_number_step(longest) if freq is None else freq, "number")
        if isinstance(times.dtype, pd.PeriodDtype):
            period = times.dtype.name.removeprefix("period[").removesuffix("]")
            starts = pd.period_range("2001-01-01", periods=8, freq=period).to_timestamp()
            return cls(infer_frequency(starts), "period", period=period)
        kind = "duration" if times.dtype.kind == "m" else "time"
        zone = getattr(times.dt, "tz", None)
        utc = longest if zone is None else longest.dt.tz_convert("UTC")
        steps = np.diff(np.unique(utc.to_numpy()))
        in_utc = zone is not None and len(steps) > 0 and np.median(steps) < np.timedelta64(20, "h")
        found = cls("D" if freq is None else freq, kind, zone and str(zone), bool(in_utc))
        if freq is None:
            found.freq = infer_frequency(pd.DatetimeIndex(np.unique(found.plain(longest))))
        return found

    def plain(self, times: pd.Series) -> np.ndarray:
        """Returns parsed times as integers or `datetime64` without a zone."""
        if self.kind == "number":
            return times.to_numpy("int64")
        if self.kind == "period":
            return times.dt.to_timestamp().to_numpy()
        if self.kind == "duration":
            return (times + _EPOCH).to_numpy()
        zone = getattr(times.dt, "tz", None)
        if (zone is None) != (self.zone is None):
            raise ValueError(
                f"Times must {'have' if self.zone else 'not have'} a time zone, like those of the "
                f"first table. Received: {times.iloc[0]}"
            )
        if zone is None:
            return times.to_numpy()
        times = times.dt.tz_convert("UTC" if self.in_utc else self.zone)
        return times.dt.tz_localize(None).to_numpy()

    def written(self, plain: Any) -> pd.Index:
        """Returns plain times as the table has them."""
        if self.kind == "number":
            return pd.Index(plain)
        times = pd.DatetimeIndex(plain)
        if self.kind == "period":
            return times.to_period(self.period)
        if self.kind == "duration":
            return times - _EPOCH
        if self.zone is None:
            return times
        if self.in_utc:
            return times.tz_localize("UTC").tz_convert(self.zone)
        return times.tz_localize(self.zone, ambiguous=False, nonexistent="shift_forward")

    def grid(self, first: Any, last: Any) -> pd.Index:
        """Returns all plain times from the first to the last."""
        if self.kind == "number":
            return pd.RangeIndex(first, last + 1, self.freq)
        return pd.date_range(first, last, freq=self._offset)

    def size(self, first: Any, last: Any) -> int:
        """Returns about the number of plain times from the first to the last."""
        if self.kind == "number":
            return int(last - first) // int(self.freq) + 1
        steps = pd.date_range(first, periods=8, freq=self._offset)
        return int((pd.Timestamp(last) - pd.Timestamp(first)) / ((steps[-1] - steps[0]) / 7)) + 1

    def after(self, last: Any, steps: int) -> pd.Index:
        """Returns the next plain times."""
        if self.kind == "number":
            return pd.RangeIndex(last + self.freq, last + (steps + 1) * self.freq, self.freq)
        return pd.date_range(last, periods=steps + 1, freq=self._offset)[1:]

    def before(self, last: Any, steps: int) -> pd.Index:
        """Returns the last plain times up to this one."""
        if self.kind == "number":
            return pd.RangeIndex(last - (steps - 1) * self.freq, last + 1, self.freq)
        return pd.date_range(end=last, periods=steps, freq=self._offset)

    @property
    def _offset(self):
        return pd.tseries.frequencies.to_offset(self.freq)


def _number_step(times):
    steps = np.diff(np.unique(times.to_numpy()))
    return int(np.gcd.reduce(steps)) if len(steps) else 1


def infer_frequency(times: pd.DatetimeIndex) -> str:
    """Returns the frequency of sorted times, some of which may be missing.

    Raises:
        ValueError: If they have none.
    """
    if len(times) < 3:
        raise ValueError(
            f"Three times or more show a frequency. Received: {len(times)}. Pass `freq`, such as "
            "freq='D'."
        )
    found = pd.infer_freq(times)
    if found is not None:
        return found
    steps = np.diff(times.to_numpy())
    step = pd.Timedelta(pd.Series(steps).mode().iloc[0])
    if step >= 28 * _DAY:
        months = np.gcd.reduce(np.diff(times.year * 12 + times.month))
        for is_edge, name in ((times.is_month_start, "MS"), (times.is_month_end, "ME")):
            if is_edge.all() and months:
                return f"{months}{name}" if months > 1 else name
    elif step % (7 * _DAY) == pd.Timedelta(0) and (times.dayofweek == times.dayofweek[0]).all():
        day = f"W-{times[0].strftime('%a').upper()}"
        weeks = step // (7 * _DAY)
        return f"{weeks}{day}" if weeks > 1 else day
    elif step == _DAY and (times.dayofweek < 5).all():
        return "B"
    else:
        off = (steps % step.to_numpy()) != np.timedelta64(0)
        if not off.any():
            return pd.tseries.frequencies.to_offset(step).freqstr
        raise ValueError(
            f"Most times rise by {step}, but after {times[:-1][off][0]} comes "
            f"{times[1:][off][0]}. Times must rise by one step, or several where rows are missing."
        )
    raise ValueError(
        f"The times have no frequency: they rise by {step} most often, from {times[0]} on. "
        "Pass `freq`, such as freq='D'."
    )
