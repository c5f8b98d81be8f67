"""Logs: structlog to stderr, lines for people on a terminal, JSON for machines."""

import logging
import sys
from contextlib import suppress
from typing import Any, TypeAlias, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from pgqueue.errors import ConfigError

Logger: TypeAlias = FilteringBoundLogger


def logger(name: str) -> Logger:
    """Return the logger of a part of pgqueue; what it writes before `configure` follows structlog's defaults."""
    return cast(Logger, structlog.get_logger(part=name))


def configure(level: str = "info", form: str = "auto", **bound: Any) -> None:
    """Send logs of `level` and above to stderr, as "json" or "console" ("auto": console on a terminal).

    `bound` is added to each line. A line that cannot be written is lost. Raises ConfigError for an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"log_level is {level!r}; it must be debug, info, warning, error or critical")

    class Lines(structlog.make_filtering_bound_logger(number)):  # type: ignore[misc] # A base that is made here.
        def _proxy_to_logger(self, method_name: str, event: str | None = None, *args: Any, **values: Any) -> Any:
            # A full disk, a reader that is gone, a file that a task has closed: what is at work here goes on.
            with suppress(Exception):
                return super()._proxy_to_logger(method_name, event, *args, **values)

    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if console:
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()))
    else:
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=processors,
        wrapper_class=Lines,
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    # The driver's own remarks, such as on a query that shutdown interrupts, say nothing that is not logged here.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    if bound:
        structlog.contextvars.bind_contextvars(**bound)
