"""Cron expressions in English, for people who look at schedules."""

from collections.abc import Iterable, Sequence
from typing import Final

from pgqueue.cron import Field, parse

_MONTHS: Final = (
    "", "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_WEEKDAYS: Final = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ORDINALS: Final = ("", "first", "second", "third", "fourth", "fifth")
#: Times of day that are listed one by one, at most.
_TIMES: Final = 6


def describe(expression: str, timezone: str = "UTC") -> str:
    """Return what an expression says: `at 09:00 on Monday to Friday (Europe/Berlin)`; raises InvalidJob."""
    minute, hour, day, month, weekday = parse(expression)
    days = _days(day, weekday)
    months = "" if len(month.values) == 12 else f" in {_listed(_runs(month.values, _MONTHS))}"
    return f"{_times(minute, hour)}{days}{months} ({timezone})"


def _times(minute: Field, hour: Field) -> str:
    minutes, hours = sorted(minute.values), sorted(hour.values)
    if len(minutes) * len(hours) <= _TIMES:
        return "at " + _listed([f"{h:02}:{m:02}" for h in hours for m in minutes])
    each = _each(minutes, 60, "minute")
    if len(hours) == 24:
        return each or f"at {_named(minutes, 'minute')} of every hour"
    step = _each(hours, 24, "hour")
    if step and len(minutes) == 1:
        return f"{step} at minute {minutes[0]}"
    every = each or f"at {_named(minutes, 'minute')}"
    return f"{every} of {step or _named(hours, 'hour')}"


def _days(day: Field, weekday: Field) -> str:
    by_day = by_weekday = ""
    if day.last or len(day.values) < 31:
        parts = [f"day {run}" for run in _runs(day.values)] + ["the last day"] * day.last
        by_day = f"{_listed(parts)} of the month"
    if weekday.nth:
        parts = [f"the {_ORDINALS[number]} {_WEEKDAYS[which]}" for which, number in weekday.nth]
        by_weekday = f"{_listed(parts)} of the month"
    elif len(weekday.values) < 7:
        # Monday first, so that a weekend is one run.
        by_weekday = _listed(_runs({value or 7 for value in weekday.values}, _WEEKDAYS))
    if by_day and by_weekday:
        return f" on {by_day} if it is {by_weekday}" if day.star or weekday.star else f" on {by_day} or {by_weekday}"
    return f" on {by_day or by_weekday}" if by_day or by_weekday else ""


def _each(values: Sequence[int], size: int, unit: str) -> str:
    """Return `every 5 minutes` for values that divide the whole evenly, else nothing."""
    if len(values) == size:
        return f"every {unit}"
    step = size // len(values)
    return f"every {step} {unit}s" if len(values) > 1 and list(values) == list(range(0, size, step)) else ""


def _named(values: Iterable[int], unit: str) -> str:
    runs = _runs(values)
    return f"{unit}{'s' if len(runs) > 1 or ' to ' in runs[0] else ''} {_listed(runs)}"


def _runs(values: Iterable[int], names: Sequence[str] = ()) -> list[str]:
    """Return values as text, three and more in a row as `a to b`."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and runs[-1][-1] == value - 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    said: list[str] = []
    for run in runs:
        words = [names[value] if names else str(value) for value in run]
        said += [f"{words[0]} to {words[-1]}"] if len(words) > 2 else words
    return said


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
