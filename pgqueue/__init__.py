"""A job queue that is PostgreSQL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pgqueue.app import App
    from pgqueue.errors import Cancel, DeadLetter, PgqueueError, RateLimited, Retry, Snooze
    from pgqueue.job import EnqueuedJob, Job, JobRow
    from pgqueue.settings import Settings
    from pgqueue.tasks import Task

__version__ = "0.1.0"

__all__ = [
    "App",
    "Cancel",
    "DeadLetter",
    "EnqueuedJob",
    "Job",
    "JobRow",
    "PgqueueError",
    "RateLimited",
    "Retry",
    "Settings",
    "Snooze",
    "Task",
]

_HOMES: Final = {
    "App": "app",
    "EnqueuedJob": "job",
    "Job": "job",
    "JobRow": "job",
    "Settings": "settings",
    "Task": "tasks",
}


def __getattr__(name: str) -> Any:
    # Names are imported when used, so that `pgqueue --help` need not load the database driver.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"pgqueue.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
