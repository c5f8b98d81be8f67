"""The settings of one process: read once from PGQUEUE_* variables, then never changed."""

import dataclasses
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from pgqueue.errors import ConfigError

Wake = Literal["notify", "poll"]
LogFormat = Literal["auto", "json", "console"]

_TRUE: Final = frozenset({"1", "on", "true", "yes"})
_FALSE: Final = frozenset({"0", "off", "false", "no"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting, in seconds where it is a time.

    dsn             libpq connection string or URL; None: the embedded PostgreSQL
    listen_dsn      a direct connection for LISTEN when dsn goes through a pooler
    wake            "notify", or "poll": no LISTEN and no notices
    prepare         prepared statements; off behind a pooler that cannot keep them
    pool_size       connections at most in each pool of a process (client, tasks' transactions)
    lease           lease asked for by a worker; None: the queue's own
    statement_limit how long one call to the database may take before its connection is given up
    root_path       what a proxy in front of the API takes away from the beginning of paths, such as "/queue"
    """

    dsn: str | None = None
    listen_dsn: str | None = None
    wake: Wake = "notify"
    prepare: bool = True
    pool_size: int = 10
    sweep_interval: float = 1.0
    poll_interval: float = 1.0
    grace: float = 30.0
    lease: float | None = None
    concurrency: int = 10
    connect_timeout: float = 10.0
    statement_limit: float = 30.0
    data_dir: Path | None = None
    log_level: str = "info"
    log_format: LogFormat = "auto"
    statsd: str | None = None
    root_path: str = ""

    def __post_init__(self) -> None:
        for name in _RULES:
            _check(name, name, getattr(self, name))

    @classmethod
    def load(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Settings from PGQUEUE_<NAME> variables; overrides that are not None win.

        Raises ConfigError naming the variable, its value and what it must be.
        """
        source = os.environ if env is None else env
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            variable = f"PGQUEUE_{field.name.upper()}"
            text = source.get(variable, "").strip()
            if text:
                values[field.name] = value = _parse(variable, text, field.type)
                if field.name in _RULES:
                    _check(field.name, variable, value, text)
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(overrides) - known)
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; known are: {', '.join(sorted(known))}")
        values.update({name: value for name, value in overrides.items() if value is not None})
        return cls(**values)


def _positive(seconds: float | None) -> bool:
    return seconds is None or (math.isfinite(seconds) and seconds > 0)


_SECONDS: Final = (_positive, "seconds greater than 0")
_PATH: Final = re.compile(r"(/(?!\.\.?(/|$))[A-Za-z0-9._~-]+)*")
_COUNT: Final = (lambda number: number >= 1, "1 or more")
#: What values must be, and what says so.
_RULES: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "sweep_interval": _SECONDS,
    "poll_interval": _SECONDS,
    "connect_timeout": _SECONDS,
    "statement_limit": _SECONDS,
    "lease": (
        lambda seconds: seconds is None or 0 < seconds <= 86_400,
        "seconds greater than 0, and at most 86400, which is a day",
    ),
    "grace": (lambda seconds: math.isfinite(seconds) and seconds >= 0, "seconds, 0 or more"),
    "pool_size": _COUNT,
    "concurrency": _COUNT,
    "wake": (lambda text: text in ("notify", "poll"), "'notify' or 'poll'"),
    "log_level": (
        lambda text: text.upper() in logging.getLevelNamesMapping(),
        "debug, info, warning, error or critical",
    ),
    "root_path": (
        lambda text: _PATH.fullmatch(text) is not None,
        "a path such as /queue, of letters, digits and . _ ~ -, without a slash at its end",
    ),
    "log_format": (lambda text: text in ("auto", "json", "console"), "'auto', 'json' or 'console'"),
}


def _check(name: str, told: str, value: object, text: str | None = None) -> None:
    """Raise ConfigError unless a value is what its setting must be; `told` and `text`: as the user wrote it."""
    right, rule = _RULES[name]
    if not right(value):
        raise ConfigError(f"{told} is {(value if text is None else text)!r}; it must be {rule}")


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


_PARSERS: Final[dict[object, tuple[Callable[[str], Any], str]]] = {
    bool: (_boolean, "on or off"),
    int: (int, "a whole number"),
    float: (float, "a number of seconds"),
    float | None: (float, "a number of seconds"),
    Path | None: (Path, "a path"),
}


def _parse(variable: str, text: str, kind: object) -> Any:
    parser, expected = _PARSERS.get(kind, (str, "text"))
    try:
        return parser(text)
    except ValueError:
        raise ConfigError(f"{variable} is {text!r}; it must be {expected}") from None
