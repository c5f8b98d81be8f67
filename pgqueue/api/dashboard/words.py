"""How values are written on pages: numbers, times, sizes, and JSON with every digit that it has."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from markupsafe import Markup, escape
from msgspec import Raw

from pgqueue.errors import InvalidJob
from pgqueue.job import PRIORITIES

_SHOWN_JSON: Final = 100_000
_INDENT: Final = "  "
_SIZES: Final = ("B", "kB", "MB", "GB", "TB")


class _Number(str):
    """A number as it is written, which no float could hold."""

    __slots__ = ()


def moment(value: datetime | str | None) -> datetime | None:
    """Return a time that a row or a struct has."""
    if isinstance(value, str):
        return None if value.endswith("infinity") else datetime.fromisoformat(value).astimezone(UTC)
    return value


def duration(seconds: float | None) -> str:
    """Write a span of time with its two greatest units."""
    if seconds is None:
        return "\u2013"
    if seconds < 0.001:
        return "0 ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, lesser, lesser_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // lesser
            return f"{whole // size} {unit} {rest} {lesser_unit}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def when(value: datetime | str | None) -> Markup:
    """Write a time relative to now, the exact one in its title."""
    at = moment(value)
    if at is None:
        return Markup('<span class="faint">\u2013</span>')
    away = (datetime.now(UTC) - at).total_seconds()
    said = "now" if abs(away) < 1 else f"{coarse(away)} ago" if away > 0 else f"in {coarse(-away)}"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        at.isoformat(), at.strftime("%Y-%m-%d %H:%M:%S UTC"), said
    )


def coarse(seconds: float) -> str:
    """Write a span of time with one unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def exact(value: datetime | str | None) -> Markup:
    """Write a time to the millisecond."""
    at = moment(value)
    if at is None:
        return Markup('<span class="faint">\u2013</span>')
    said = at.strftime("%Y-%m-%d %H:%M:%S.") + f"{at.microsecond // 1000:03d}"
    return Markup('<time datetime="{}">{} <span class="faint">UTC</span></time>').format(at.isoformat(), said)


def number(value: float | None) -> str:
    """Write a count with separators."""
    return "\u2013" if value is None else f"{value:,.0f}"


def rate(value: float) -> str:
    """Write a rate with as many digits as it is worth."""
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def percent(part: float) -> str:
    """Write a part of 1."""
    return f"{part * 100:.0f} %" if part >= 0.1 or part == 0 else f"{part * 100:.1f} %"


def size(value: float | None) -> str:
    """Write a number of bytes."""
    if value is None:
        return "\u2013"
    left = float(value)
    for unit in _SIZES:
        if left < 1000 or unit == _SIZES[-1]:
            return f"{left:.0f} {unit}" if left >= 10 or unit == "B" else f"{left:.1f} {unit}"
        left /= 1000
    raise AssertionError


def short_id(value: object) -> str:
    """Write an id so that it fits in a table: the time in it, and the end of what is random."""
    said = str(value)
    return f"{said[:8]}…{said[-6:]}" if len(said) > 18 else said


def priority(value: int) -> str:
    """Write a priority's name."""
    return PRIORITIES[value] if 0 <= value < len(PRIORITIES) else str(value)


def status(value: str) -> Markup:
    """Write a status as a badge."""
    return Markup('<span class="badge {}">{}</span>').format(value.replace("_", "-"), value.replace("_", " "))


def pretty(value: bytes | Raw) -> Markup:
    """Write JSON over several lines, every number digit by digit as the database has it."""
    raw = bytes(value)
    try:
        parsed = json.loads(raw, parse_float=_Number, parse_int=_Number)
        parts: list[Markup] = []
        length = 0
        for part in _parts(parsed, "\n"):
            parts.append(part)
            length += len(part)
            if length > _SHOWN_JSON:
                parts.append(
                    Markup('\n<span class="faint">… cut here; GET /jobs/… of the REST API has all of it</span>')
                )
                break
        return Markup("").join(parts)
    except (ValueError, RecursionError):
        return escape(raw[:_SHOWN_JSON].decode(errors="replace"))


def _parts(value: Any, line: str) -> Iterator[Markup]:
    if isinstance(value, _Number):
        yield Markup('<span class="j-number">{}</span>').format(str(value))
    elif isinstance(value, str):
        yield Markup('<span class="j-text">{}</span>').format(json.dumps(value, ensure_ascii=False))
    elif isinstance(value, dict) and value:
        yield Markup("{")
        for count, (key, item) in enumerate(value.items()):
            yield escape(("," if count else "") + line + _INDENT)
            yield Markup('<span class="j-key">{}</span>: ').format(json.dumps(key, ensure_ascii=False))
            yield from _parts(item, line + _INDENT)
        yield escape(line + "}")
    elif isinstance(value, list) and value:
        yield Markup("[")
        for count, item in enumerate(value):
            yield escape(("," if count else "") + line + _INDENT)
            yield from _parts(item, line + _INDENT)
        yield escape(line + "]")
    else:
        yield escape(json.dumps(value))


def whole_number(text: str, name: str, least: int, most: int = 2**31 - 1) -> int | None:
    """Read a number that somebody typed, None for nothing; raises InvalidJob."""
    text = text.strip().replace(",", "")
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 10 or not least <= int(text) <= most:
        raise InvalidJob(f"{name} must be a whole number from {least:,} to {most:,}")
    return int(text)
