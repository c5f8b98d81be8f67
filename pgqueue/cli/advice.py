"""What to do about each alert."""

from typing import Final

_MORE_WORKERS: Final = "start more workers: pgqueue worker MODULE:APP, or pgqueue autoscale MODULE:APP"
_DEAD_LETTERS: Final = "pgqueue dlq list says why; then pgqueue dlq retry or discard"
_ONE_IS_FEW: Final = (
    "start another, so that one may fail: pgqueue worker MODULE:APP; where one is enough: update pgqueue.alert_rules "
    "set enabled = false where alert in ('WorkerDown', 'WorkerCountLow')"
)
_FAILURES: Final = "pgqueue jobs list --status failed,dead_letter shows the errors; look at what the tasks need"
_ADVICE: Final = {
    "JobsProcessedLow": _MORE_WORKERS,
    "JobsFailedHigh": _FAILURES,
    "HighFailureRate": _FAILURES,
    "DeadLettersHigh": _DEAD_LETTERS,
    "DLQBreach": _DEAD_LETTERS,
    "QueueDepthHigh": _MORE_WORKERS,
    "QueueBacklog": _MORE_WORKERS,
    "QueueFull": f"{_MORE_WORKERS}; or raise the limit: pgqueue queues set QUEUE --hard-limit N",
    "QueueAgeHigh": f"pgqueue jobs show JOB_ID says why a job waits; {_MORE_WORKERS}",
    "StuckJobs": f"pgqueue jobs show JOB_ID says why a job waits; {_MORE_WORKERS}",
    "ProcessingTimeHigh": "see what the tasks wait for; timeout= bounds an attempt",
    "WorkerUtilizationHigh": _MORE_WORKERS,
    "WorkerCountLow": _ONE_IS_FEW,
    "WorkerDown": _ONE_IS_FEW,
    "NoWorkers": "start a worker that serves the queue: pgqueue worker MODULE:APP",
    "NoWorkersForType": "start a worker whose app has the tasks; pgqueue jobs cancel, if the type is a mistake",
    "SweeperStale": "start a worker, or pgqueue scheduler",
    "SweepStepFails": "select * from pgqueue.sweep_steps tells more",
    "RetentionBehind": "select * from pgqueue.retention says why; workers and pgqueue scheduler drop partitions",
    "JobsOverdue": "start a worker, or pgqueue scheduler; select * from pgqueue.stuck_jobs shows the jobs",
    "BelowCursor": "the audit has mended it; if it comes back, it is a bug worth a report",
    "LongTransaction": "end it: select pg_terminate_backend(PID)",
}


def advice_on(alert: str) -> str:
    """Return what to do about an alert by its name."""
    return _ADVICE.get(alert, "its rule is a row of pgqueue.alert_rules")
