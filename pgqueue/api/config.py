"""How an API is set up, beyond the settings of the process."""

import re
from dataclasses import dataclass, field
from typing import Final

DEFAULT_SECRETS: Final = (
    r"(?i)passw(or)?d|secret|token|api[_-]?key|authorization|credential|private[_-]?key|cookie|card[_-]?number|cvv"
    r"|(^|_)ssn(_|$)"
)
MIB: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """All that can be chosen.

    path            where the routes are, "" for the root
    trusted         the app around this API decides who may do what: no keys are asked for, every request may do all
    hosts           names besides this machine's own under which an API without keys may be reached
    maintenance     sweep, so that an API without workers keeps its queue in order
    secrets         keys of payloads whose values are not shown in lists, as a regular expression
    max_body        bytes of a request's body at most; a batch of jobs may have 64 MiB
    max_payload     bytes of one job's payload at most
    max_streams     open event streams and waiting requests of this process at most
    ping            seconds between signs of life on a quiet stream
    backlog         events that wait for one slow client at most; beyond it begins anew with the present state
    answer_limit    seconds that the database gets for one call
    """

    path: str = ""
    trusted: bool = False
    hosts: frozenset[str] = frozenset()
    maintenance: bool = True
    secrets: re.Pattern[str] = field(default_factory=lambda: re.compile(DEFAULT_SECRETS))
    max_body: int = 4 * MIB
    max_payload: int = 2 * MIB
    max_streams: int = 2000
    ping: float = 15.0
    backlog: int = 1000
    answer_limit: float = 10.0
