"""Alerts: has the database measure and evaluate its rules, logs what begins and ends, and delivers webhooks.

The rules are rows of pgqueue.alert_rules. An alert that fires or ends becomes one job for each row of
pgqueue.alert_webhooks, so that its delivery is retried like any job; workers with maintenance have the task.
"""

import json
import math
import time
from typing import Any, Final

from pgqueue import __version__, calls
from pgqueue.connections import Link
from pgqueue.errors import DeadLetter
from pgqueue.log import logger
from pgqueue.tasks import Producer, Task, TaskOptions, Tasks

_log: Final = logger("pgqueue.alerts")
WEBHOOK: Final = "pgqueue.webhook"
#: Alerts of fewer live workers than can do without one of them.
FEW_WORKERS: Final = frozenset({"WorkerDown", "WorkerCountLow"})
ONE_MACHINE: Final = (
    "one worker is enough to try pgqueue; in production have two, so that one may fail: pgqueue worker MODULE:APP"
)
_MEASURE_EVERY: Final = 2.0
#: While nothing moves.
_MEASURE_CALMLY_EVERY: Final = 4.0
_EVALUATE_EVERY: Final = 10.0
_PATIENCE: Final = 10.0


class Alerts:
    """Calls the sweep's steps `measure`, every 2 s (4 s when `calm`), and `alerts`, every 10 s; one at a time works."""

    def __init__(self, *, one_machine: bool = False, first_after: float = 5.0) -> None:
        """Rules are first evaluated after so many seconds: whoever has just started does first what jobs wait for.

        `one_machine`: the database is embedded, so a second worker would fail with it.
        """
        self._one_machine = one_machine
        #: No sweep has moved anything for a while.
        self.calm = False
        self._measured_at = -math.inf
        self._evaluated_at = time.monotonic() - _EVALUATE_EVERY + first_after
        self._event = 0

    @property
    def measure_due(self) -> bool:
        """Whether it is time to measure."""
        every = _MEASURE_CALMLY_EVERY if self.calm else _MEASURE_EVERY
        return time.monotonic() - self._measured_at >= every

    def measured(self, left: int | None) -> None:
        """Note that it was measured; not 0: some is left to count."""
        self._measured_at = -math.inf if left else time.monotonic()

    async def step(self, link: Link) -> None:
        """Do what is due, over `link`. Raises a PgqueueError."""
        now = time.monotonic()
        if self.measure_due:
            self.measured(0)
            self.measured(sum(left for _, left in await link.call(calls.MEASURE)))
        if now - self._evaluated_at >= _EVALUATE_EVERY:
            self._evaluated_at = now
            if any(changes for _, changes in await link.call(calls.EVALUATE_ALERTS)):
                await self._tell(link)

    async def _tell(self, link: Link) -> None:
        """Log what this session's evaluations began and ended."""
        for event in await link.call(calls.ALERT_EVENTS, after=self._event):
            self._event = event["event_id"]
            told = {name: event[name] for name in ("alert", "severity", "queue", "summary", "since")}
            if event["state"] == "resolved":
                _log.info("alert is over", **told)
            elif self._one_machine and event["alert"] in FEW_WORKERS and not event["summary"].startswith("0 "):
                _log.warning("alert", **told, advice=ONE_MACHINE)
            elif event["severity"] == "page":
                _log.error("alert", **told)
            else:
                _log.warning("alert", **told)


def deliver(url: str, body: dict[str, Any]) -> dict[str, int]:
    """POST an alert as JSON. Raises DeadLetter where trying again cannot help, OSError where it can."""
    if not url.startswith(("http://", "https://")):
        raise DeadLetter(f"{url!r} is not http or https")
    # Takes a tenth of a worker's start to load, and few have a webhook.
    import urllib.request
    from urllib.error import HTTPError

    request = urllib.request.Request(  # noqa: S310 (the scheme was looked at)
        url,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "User-Agent": f"pgqueue/{__version__}"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:  # noqa: S310
            return {"status": answer.status}
    except HTTPError as exc:
        with exc:
            if exc.code in (408, 425, 429) or exc.code >= 500:
                raise ConnectionError(f"{url} answered {exc.code}") from None
            raise DeadLetter(f"{url} answered {exc.code}") from None


def with_webhooks(tasks: Tasks, producer: Producer) -> Tasks:
    """Return the tasks with that of webhooks among them; one of the user's of that name stays."""
    extended = Tasks()
    for task in tasks:
        extended.add(task)
    for schedule in tasks.schedules.values():
        extended.add_schedule(schedule)
    if WEBHOOK not in extended:
        extended.add(Task(WEBHOOK, deliver, TaskOptions(priority=0, timeout=2 * _PATIENCE), producer))
    return extended
