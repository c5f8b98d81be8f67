"""Cron: what an expression of five fields means, when it fires in a zone, and what it says in words.

Fields, ranges and steps are read here, so that nothing odd gets through; croniter does the arithmetic of dates, on
wall time without a zone; which instants a wall time stands for is decided here. Clocks that change:

- An expression that fires in every hour goes on in real time: it fires in both passes of a repeated hour.
- Any other fires once for each wall time: in the first pass of a repeated hour, and for a time that a clock skips at
  the moment of the skip. So a daily job is neither lost nor doubled.

Both day fields restrict when one of them begins with `*`; otherwise one that matches is enough.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast
from zoneinfo import ZoneInfo

from pgqueue.errors import InvalidJob

ALIASES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_LONGEST: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_TERM: Final = re.compile(r"(?:(\*)|([0-9]{1,2}|[a-z]{3})(?:-([0-9]{1,2}|[a-z]{3}))?)(?:/([0-9]{1,2}))?")
_NTH: Final = re.compile(r"([0-7]|[a-z]{3})#([1-5])")
_SECOND: Final = timedelta(seconds=1)
# Further apart than two firings of any expression that fires at all: a 29th of February on a given weekday.
_YEARS: Final = 50


@dataclass(frozen=True, slots=True)
class Range:
    """What the values of a field are."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()


FIELDS: Final = (
    Range("minute", 0, 59),
    Range("hour", 0, 23),
    Range("day", 1, 31),
    Range("month", 1, 12, _MONTHS),
    Range("weekday", 0, 7, _WEEKDAYS),
)


@dataclass(frozen=True, slots=True)
class Field:
    """A field as it was read. `star`: it begins with `*`; `last`: the last day; `nth`: weekdays with their number."""

    values: frozenset[int]
    star: bool
    last: bool = False
    nth: tuple[tuple[int, int], ...] = ()


class Cron:
    """An expression in a zone. Not for several threads at once."""

    def __init__(self, expression: str, timezone: str = "UTC") -> None:
        """Read both; raises InvalidJob, which says what is wrong, for what is impossible or never fires."""
        self.expression: Final = expression
        self.timezone: Final = timezone
        self.zone: Final = zone(timezone)
        self.fields: Final = parse(expression)
        _, hour, day, _, weekday = self.fields
        self._hourly: Final = len(hour.values) == 24
        # Loaded by those who have a schedule.
        from croniter import croniter

        self._walls: Final = croniter(
            " ".join(_plain(field, span) for field, span in zip(self.fields, FIELDS, strict=True)),
            datetime(2000, 1, 1),  # noqa: DTZ001 (walls have no zone)
            ret_type=datetime,
            day_or=not (day.star or weekday.star),
            max_years_between_matches=_YEARS,
        )

    def next(self, after: datetime) -> datetime:
        """Return the first firing after an instant, in UTC; raises InvalidJob when the calendar ends before."""
        try:
            moment = self._next(after)
            # In its zone too: the end of the calendar is not at the same time everywhere.
            moment.astimezone(self.zone)
        except (OverflowError, ValueError):
            raise InvalidJob(
                f"cron {self.expression!r} has no time after {after.isoformat()}: the calendar ends", column="cron"
            ) from None
        return moment

    def _next(self, after: datetime) -> datetime:
        if self._hourly:
            return self._next_in_real_time(after)
        for wall in self._after(_wall(after.astimezone(self.zone))):
            moment = self._place(wall)
            if moment > after:
                return moment
        raise AssertionError

    def between(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """Give the firings after one instant, up to and with another."""
        while (after := self.next(after)) <= until:
            yield after

    def latest(self, after: datetime, until: datetime, count: int) -> list[datetime]:
        """Return the last `count` firings of `between`, in order, without going through all of them."""
        reach = timedelta(minutes=count)
        while True:
            begin = until - reach if reach < until - after else after
            fires = list(self.between(begin, until))
            if len(fires) >= count or begin == after:
                return fires[-count:]
            reach *= 4

    # Walls ------------------------------------------------------------------------------------------------------------

    def _after(self, wall: datetime) -> Iterator[datetime]:
        """Give the wall times that match after one, in order."""
        from croniter import CroniterError

        self._walls.set_current(wall, force=True)
        while True:
            try:
                yield cast(datetime, self._walls.get_next(datetime))
            except (CroniterError, OverflowError, ValueError):
                raise InvalidJob(f"cron {self.expression!r} never fires", column="cron") from None

    def _offsets(self, wall: datetime) -> tuple[timedelta, timedelta]:
        """Return what zone time is ahead of UTC by at a wall time, before and after a change that is near it."""
        first, second = (wall.replace(tzinfo=self.zone, fold=fold).utcoffset() for fold in (0, 1))
        assert first is not None
        assert second is not None
        return first, second

    def _place(self, wall: datetime) -> datetime:
        """Return the first instant of a wall time, or that at which clocks skip it."""
        before, after = self._offsets(wall)
        if before < after:
            return self._change(_utc(wall, after), _utc(wall, before))
        return _utc(wall, before)

    def _change(self, low: datetime, high: datetime) -> datetime:
        """Return the instant in (low, high] at which the zone's offset changes."""
        offset = low.astimezone(self.zone).utcoffset()
        while high - low > _SECOND:
            middle = low + timedelta(seconds=(high - low) // _SECOND // 2)
            if middle.astimezone(self.zone).utcoffset() == offset:
                low = middle
            else:
                high = middle
        return high

    def _next_in_real_time(self, after: datetime) -> datetime:
        local = after.astimezone(self.zone)
        start = _wall(local)
        before, then = self._offsets(start)
        if before > then and not local.fold:
            # In the first pass: what is left of it comes first, then the second pass from its beginning.
            turn = self._change(after.astimezone(UTC), after.astimezone(UTC) + (before - then))
            wall = next(self._after(start))
            if _utc(wall, before) < turn:
                return _utc(wall, before)
            start, fold = _wall(turn.astimezone(self.zone)) - _SECOND, 1
        else:
            fold = local.fold
        for wall in self._after(start):
            before, then = self._offsets(wall)
            if before < then:
                continue
            second_pass = fold and wall - start < timedelta(hours=3)
            return _utc(wall, then if second_pass else before)
        raise AssertionError


# Reading --------------------------------------------------------------------------------------------------------------


def zone(name: str) -> ZoneInfo:
    """Return the zone of a name of the IANA database; raises InvalidJob for any other."""
    try:
        # What "localtime" is depends on the machine.
        if name.lower() not in ("localtime", "posixrules") and not name.startswith("right/"):
            return ZoneInfo(name)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise InvalidJob(f"timezone {name!r} is not known; it must be such as UTC or Europe/Berlin", column="timezone")


def parse(expression: str) -> tuple[Field, Field, Field, Field, Field]:
    """Return minute, hour, day, month and weekday; raises InvalidJob, which says what is wrong."""
    text = expression.strip(" \t").lower()
    if text.startswith("@"):
        if text not in ALIASES:
            raise _wrong(expression, f"{text} is unknown; known are {', '.join(ALIASES)}")
        text = ALIASES[text]
    parts = [part for part in re.split(r"[ \t]+", text) if part]
    if len(parts) != len(FIELDS):
        hint = "; seconds and years are not supported" if len(parts) in (6, 7) else ""
        raise _wrong(expression, f"it has {len(parts)} fields, not five: minute hour day month weekday{hint}")
    fields = [_field(expression, part, span) for part, span in zip(parts, FIELDS, strict=True)]
    minute, hour, day, month, weekday = fields
    if weekday.nth and parts[2] != "*":
        raise _wrong(expression, "a numbered weekday such as mon#1 goes with `*` as day only")
    if (day.star or weekday.star) and not day.last:
        longest = max(_LONGEST[number - 1] for number in month.values)
        if min(day.values) > longest:
            raise _wrong(expression, f"it never fires: no such month has a day {min(day.values)}")
    if not (day.star or weekday.star) and (_full(day, FIELDS[2]) or _full(weekday, FIELDS[4])):
        day, weekday = Field(frozenset(range(1, 32)), star=True), Field(frozenset(range(7)), star=True)
    return minute, hour, day, month, weekday


def _field(expression: str, part: str, span: Range) -> Field:
    values: set[int] = set()
    nth: list[tuple[int, int]] = []
    last = False
    terms = part.split(",")
    for term in terms:
        if term == "l" and span.name == "day":
            last = True
        elif (numbered := _NTH.fullmatch(term)) and span.name == "weekday":
            nth.append((_number(expression, numbered[1], span) % 7, int(numbered[2])))
        else:
            values.update(_term(expression, term, span))
    if nth and len(nth) < len(terms):
        raise _wrong(expression, "weekdays are either all numbered, such as mon#1, or none is")
    if span.name == "weekday":
        values = {value % 7 for value in values}
    return Field(frozenset(values), part.startswith("*"), last, tuple(nth))


def _term(expression: str, term: str, span: Range) -> range:
    match = _TERM.fullmatch(term)
    if match is None:
        raise _wrong(expression, f"{term!r} is no {span.name}")
    star, first, second, step = match.groups()
    low = span.low if star else _number(expression, first, span)
    high = span.high if star or (step and not second) else low
    if second:
        high = _number(expression, second, span)
        # The week may end on a Sunday.
        high = 7 if span.name == "weekday" and high == 0 < low else high
    if high < low:
        raise _wrong(expression, f"{term!r} ends before it begins")
    if step and not 1 <= int(step) <= span.high:
        raise _wrong(expression, f"the step of {term!r} must be 1 to {span.high}")
    return range(low, high + 1, int(step or 1))


def _number(expression: str, text: str, span: Range) -> int:
    if text in span.names:
        return span.names.index(text) + span.low
    if not text.isdecimal() or not span.low <= int(text) <= span.high:
        raise _wrong(expression, f"{text!r} is no {span.name}: it must be {span.low} to {span.high}")
    return int(text)


def _wrong(expression: str, reason: str) -> InvalidJob:
    return InvalidJob(f"cron {expression!r:.200} is not valid: {reason}", column="cron")


# Helpers --------------------------------------------------------------------------------------------------------------


def _full(field: Field, span: Range) -> bool:
    return len(field.values) == (7 if span.name == "weekday" else span.high - span.low + 1)


def _plain(field: Field, span: Range) -> str:
    """Return a field as a list of numbers, which all readers of cron take to mean the same."""
    if _full(field, span) or not (field.values or field.nth or field.last):
        return "*"
    parts: list[Any] = sorted(field.values)
    parts += ["L"] if field.last else []
    parts += [f"{weekday}#{number}" for weekday, number in field.nth]
    return ",".join(map(str, parts))


def _wall(local: datetime) -> datetime:
    return local.replace(tzinfo=None, fold=0)


def _utc(wall: datetime, offset: timedelta) -> datetime:
    return (wall - offset).replace(tzinfo=UTC)
