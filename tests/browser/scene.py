"""A queue in which something of everything goes on, with hostile text wherever a user can put text."""

import json
import uuid
from typing import Any

import psycopg

HOSTILE = "<img src=x onerror=\"document.title='pwned'\">"
BIG = "1970670598291982290"
TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/srv/app/tasks.py", line 41, in send_email\n'
    "    smtp.send(message)\n"
    '  File "/usr/lib/python3.11/smtplib.py", line 255, in __init__\n'
    "    (code, msg) = self.connect(host, port)\n"
    "ConnectionRefusedError: [Errno 111] Connection refused\n"
)


class Scene:
    """Jobs in every status; `hostile` is a dead letter whose every field is hostile."""

    def __init__(self, session: psycopg.Connection[Any]) -> None:
        self.session = session
        self.worker = uuid.uuid4()
        session.execute(
            "select pgqueue.worker_started(%s, 'mail-worker-1', 'host-a', 4242, null, null, null, null, 8, '0.1.0')",
            [self.worker],
        )
        for number in range(30):
            payload = json.dumps({"to": f"user{number}@example.com", "password": "hunter2"})
            self.enqueue("send_email", payload, "mail", priority=number % 4)
        for number in range(12):
            self.enqueue("resize", json.dumps({"path": f"cat{number}.png"}), "images", delay="1 hour")
        for _ in range(8):
            self.enqueue("daily_report", '{"day": "2026-11-29"}')
        claimed = self.claim(14)
        for job_id in claimed[:4]:
            self.complete(job_id, '{"sent": true}')
        for job_id in claimed[4:7]:
            self.fail(job_id, "ConnectionRefusedError", "[Errno 111] Connection refused")
        for place, job_id in enumerate(claimed[7:11]):
            self.fail(job_id, "KeyError", f"user {place} has no address", retryable=False)
        self.running = claimed[11:]
        self.hostile = self.enqueue(
            HOSTILE,
            json.dumps({"id": int(BIG), "html": HOSTILE}),
            HOSTILE,
            idempotency_key=HOSTILE,
            ordering_key=HOSTILE,
            producer_id=HOSTILE,
        )
        self.claim(1, HOSTILE)
        self.fail(self.hostile, HOSTILE, HOSTILE, retryable=False, traceback=HOSTILE)
        session.execute("select pgqueue.pause('images')")
        for name, cron in (("nightly", "0 3 * * *"), (HOSTILE, "*/5 * * * *")):
            session.execute(
                "insert into pgqueue.schedules (name, cron, timezone, job_type) values (%s, %s, 'Europe/Berlin', %s)",
                [name, cron, name],
            )

    def enqueue(self, job_type: str, payload: str = "{}", queue: str = "default", **options: Any) -> str:
        names = "".join(f", {name} => %({name})s" for name in options)
        return self._one(
            f"select job_id from pgqueue.enqueue(%(type)s, payload => %(payload)s::jsonb, queue => %(queue)s{names})",
            {"type": job_type, "payload": payload, "queue": queue, **options},
        )

    def claim(self, count: int, queue: str | None = None) -> list[str]:
        queues = None if queue is None else [queue]
        rows = self.session.execute("select job_id from pgqueue.claim(%s, %s, %s)", [self.worker, queues, count])
        return [str(row[0]) for row in rows.fetchall()]

    def complete(self, job_id: str, result: str = "null") -> None:
        self.session.execute(
            "select pgqueue.complete(%s, %s::uuid[], %s, %s::jsonb[])", [self.worker, [job_id], [1], [result]]
        )

    def fail(self, job_id: str, kind: str, message: str, *, retryable: bool = True, traceback: str = TRACEBACK) -> None:
        error = json.dumps({"type": kind, "message": message, "traceback": traceback, "duration_ms": 132})
        self.session.execute(
            "select pgqueue.fail(%s, %s, 1, %s, %s, '10 min')", [self.worker, job_id, error, retryable]
        )

    def status(self, job_id: str) -> str:
        return self._one("select status from pgqueue.job(%s)", [job_id])

    def _one(self, sql: str, parameters: Any = None) -> str:
        row = self.session.execute(sql, parameters).fetchone()
        assert row
        return str(row[0])
