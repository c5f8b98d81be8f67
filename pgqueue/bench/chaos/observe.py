"""The observer: writes down every final state it sees, so that a change of one shows."""

import threading
from typing import Final

from pgqueue.bench.chaos import statements
from pgqueue.bench.chaos.ledger import Ledger
from pgqueue.bench.chaos.server import ChaosServer, ServerGone

_EVERY: Final = 3.0


class Observer:
    """Looks every few seconds at what has ended since its last look."""

    def __init__(self, server: ChaosServer, ledger: Ledger) -> None:
        """Begin to look."""
        self._server = server
        self._ledger = ledger
        self._over = threading.Event()
        self._seen: dict[str, str] = {}
        self._since = "-infinity"
        self._thread = threading.Thread(target=self._run, name="chaos-observer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(_EVERY):
            self.look()

    def look(self) -> None:
        """Write down what is new; whoever commits late is met again, since looks overlap by ten seconds."""
        try:
            with self._server.admin() as admin:
                rows = admin.execute(statements.ENDED_SINCE, {"since": self._since}).fetchall()
        except ServerGone:
            return
        for job_id, status, attempts, token, finished_at, _ in rows:
            if self._seen.get(job_id) != finished_at:
                self._seen[job_id] = finished_at
                self._ledger.write("final", job_id, status, attempts, token)
        if rows:
            self._since = rows[-1][5]

    def close(self) -> None:
        """Stop looking."""
        self._over.set()
        self._thread.join()
