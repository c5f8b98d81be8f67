"""The filters of a list of jobs, as they stand in its address."""

from dataclasses import dataclass, field
from typing import Any, get_args
from uuid import UUID

from pgqueue.api.dashboard.session import Form
from pgqueue.api.problems import Invalid
from pgqueue.api.values import Status

_STATUSES = frozenset(get_args(Status))


@dataclass
class Filters:
    """What a list shows."""

    statuses: list[str] = field(default_factory=list)
    queue: str = ""
    job_type: str = ""
    producer: str = ""
    search: str = ""
    cursor: UUID | None = None

    @classmethod
    def read(cls, form: Form) -> "Filters":
        """Read them from an address or a form; raises Invalid."""
        statuses = list(dict.fromkeys(form.all("status")))
        for status in statuses:
            if status not in _STATUSES:
                raise Invalid(f"there is no status {status[:40]!r}; there are {', '.join(sorted(_STATUSES))}")
        # Names as they are: blanks at an end make another queue.
        return cls(
            statuses,
            form.one("queue"),
            form.one("type"),
            form.one("producer"),
            form.one("q").strip(),
            read_id(form.one("cursor"), "cursor"),
        )

    def query(self, **changed: Any) -> dict[str, Any]:
        """Return them as parts of an address, without the cursor."""
        return {
            "status": self.statuses,
            "queue": self.queue,
            "type": self.job_type,
            "producer": self.producer,
            "q": self.search,
            **changed,
        }

    @property
    def narrow(self) -> bool:
        """Whether anything but statuses is asked for."""
        return bool(self.queue or self.job_type or self.producer or self.search)

    def parameters(self, statuses: list[str], upto: UUID | None) -> dict[str, object]:
        """Return them for calls_dashboard.MATCHING, for jobs of these statuses alone."""
        chosen = [one for one in statuses if not self.statuses or one in self.statuses]
        return {
            "statuses": chosen,
            "queue": self.queue or None,
            "job_type": self.job_type or None,
            "producer_id": self.producer or None,
            "search": self.search or None,
            "upto": upto,
        }


def read_id(text: str, name: str) -> UUID | None:
    """Read an id, None for nothing; raises Invalid."""
    try:
        return UUID(text) if text else None
    except ValueError:
        raise Invalid(f"{name} must be an id") from None
