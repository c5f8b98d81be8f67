"""The kinds of values that options take: spans of time, instants, priorities, lists, JSON objects."""

import json
import re
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    # Generic since click 8.5 only.
    ParamType = click.ParamType

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_SPAN: Final = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhdw]))+")
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")


class Span(ParamType):
    """A span of time as seconds: `90`, `1.5`, `500ms`, `5m`, `1h30m`, `7d`."""

    name = "span"

    def __init__(self, most: float = float("inf"), called: str = "") -> None:
        """`most` seconds are allowed; `called` is what a message calls them."""
        self.most = most
        self.called = called

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        if isinstance(value, float):
            return value
        text = str(value).strip()
        if _SPAN.fullmatch(text):
            seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
        else:
            try:
                seconds = float(text)
            except ValueError:
                seconds = -1.0
        if not 0 <= seconds < float("inf"):
            self.fail(f"{value!r} is no span of time; write seconds or such as 500ms, 90s, 5m, 1h30m, 7d", param, ctx)
        if seconds > self.most:
            self.fail(f"{value!r} is too long: it must be at most {self.called}", param, ctx)
        return seconds


class Instant(ParamType):
    """A moment in ISO 8601 with its time zone, without which it would be another one on another machine."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Return the moment with its zone."""
        if isinstance(value, datetime):
            return value
        try:
            moment = datetime.fromisoformat(str(value).strip())
        except ValueError:
            self.fail(f"{value!r} is no moment in ISO 8601, such as 2030-01-31T09:00:00+01:00", param, ctx)
        if moment.tzinfo is None:
            zoned = f"{moment.isoformat()}Z"
            self.fail(f"{value!r} has no time zone; give it one, such as {zoned} for UTC", param, ctx)
        return moment


class Priority(ParamType):
    """A priority by number or name, as its number."""

    name = "priority"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return 0 to 3."""
        from pgqueue.errors import InvalidJob
        from pgqueue.job import priority_number

        text = str(value).strip()
        try:
            return priority_number(int(text) if text.isdecimal() else text)
        except InvalidJob as exc:
            self.fail(str(exc), param, ctx)


class Listed(ParamType):
    """Values separated by commas, each of one kind."""

    name = "list"

    def __init__(self, kind: ParamType, name: str) -> None:
        """`kind` converts each value; `name` is how help shows it."""
        self.kind = kind
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """Return the values in the order given; raises a usage error when there is none."""
        if isinstance(value, list):
            return value
        items = [item.strip() for item in str(value).split(",") if item.strip()]
        if not items:
            self.fail("needs at least one value", param, ctx)
        return [self.kind.convert(item, param, ctx) for item in items]


class Weights(ParamType):
    """Four shares, of critical, high, normal and low in a claim, or `strict` for strict order."""

    name = "8,4,2,1|strict"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int] | str:
        """Return the shares or "strict"."""
        if value == "strict":
            return "strict"
        weights = Listed(click.IntRange(0, 100), self.name).convert(value, param, ctx)
        if len(weights) != 4:
            self.fail("needs four numbers: critical, high, normal, low", param, ctx)
        return weights


class OrNone(ParamType):
    """A value of one kind, or `none`, which stays that word and unsets."""

    def __init__(self, kind: ParamType, name: str) -> None:
        """`kind` converts any other value; `name` is how help shows it."""
        self.kind = kind
        self.name = f"{name}|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value or "none"."""
        return value if value == "none" else self.kind.convert(value, param, ctx)


class JsonObject(ParamType):
    """A JSON object; `-` reads it from stdin."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """Return the object."""
        if isinstance(value, dict):
            return value
        text = sys.stdin.read() if value == "-" else str(value)
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as exc:
            self.fail(f"is no JSON: {exc}", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f'is no JSON object such as {{"to": "a@example.com"}} but {text.strip():.60}', param, ctx)
        return parsed


SPAN: Final = Span()
CENTURY: Final = Span(3_155_760_000.0, "100 years")
DAY: Final = Span(86_400.0, "1 day")
INSTANT: Final = Instant()
PRIORITY: Final = Priority()
NAMES: Final = Listed(click.STRING, "a,b")
PRIORITY_LIST: Final = Listed(PRIORITY, "critical,high")
WEIGHTS: Final = Weights()
JSON_OBJECT: Final = JsonObject()
