"""Event streams: state first, every change, the end; and what happens when bells are lost or clients are slow."""

import contextlib
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psycopg
import pytest

from pgqueue.api.access import new_key
from pgqueue.calling import Call
from pgqueue.settings import Settings
from tests.api.conftest import Live, MakeLive
from tests.conftest import Connect
from tests.meet import running_time, wait_until

LISTENERS = (
    "select pid from pg_stat_activity where application_name = 'pgqueue listener' and datname = current_database()"
)


class Hand:
    """A worker by hand, over SQL."""

    def __init__(self, session: psycopg.Connection[Any]) -> None:
        self.session = session
        self.worker = uuid.uuid4()

    def enqueue(self, job_type: str = "a", queue: str = "default", **options: Any) -> str:
        names = "".join(f", {name} => %({name})s" for name in options)
        row = self.session.execute(
            f"select job_id from pgqueue.enqueue(%(job_type)s, queue => %(queue)s{names})",
            {"job_type": job_type, "queue": queue, **options},
        ).fetchone()
        assert row
        return str(row[0])

    def claim(self, count: int = 1) -> list[str]:
        rows = self.session.execute("select job_id from pgqueue.claim(%s, null, %s)", [self.worker, count]).fetchall()
        return [str(row[0]) for row in rows]

    def complete(self, *job_ids: str, attempt: int = 1) -> None:
        self.session.execute(
            "select pgqueue.complete(%s, %s::uuid[], %s, null)", [self.worker, list(job_ids), [attempt] * len(job_ids)]
        )

    def fail(self, job_id: str, attempt: int = 1, retryable: bool = True) -> None:
        self.session.execute(
            "select pgqueue.fail(%s, %s, %s, '{\"message\": \"no\"}', %s, '0 s')",
            [self.worker, job_id, attempt, retryable],
        )


@pytest.fixture
def hand(connect: Connect) -> Hand:
    """A worker by hand."""
    return Hand(connect())


class Follower:
    """Reads a stream in a thread, with the moment at which each event came."""

    def __init__(self, live: Live, path: str, **headers: str) -> None:
        self.events: list[dict[str, Any]] = []
        self.ended = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(live, path, headers), daemon=True)
        self._thread.start()
        assert self._begun.wait(20)

    def _read(self, live: Live, path: str, headers: dict[str, str]) -> None:
        try:
            with live.events(path, **headers) as events:
                for event in events:
                    self.events.append({**event, "came": time.monotonic()})
                    self._begun.set()
        except httpx.TransportError:
            pass
        finally:
            self._begun.set()
            self.ended.set()

    def names(self) -> list[str]:
        return [event["event"] for event in self.events if event["event"] != "ping"]

    def until(self, predicate: Callable[[list[str]], Any], timeout: float = 10) -> None:
        wait_until(lambda: predicate(self.names()), timeout)


def test_a_job_is_followed_to_its_end(live: MakeLive, hand: Hand) -> None:
    api = live()
    job_id = hand.enqueue("echo", "q")
    stream = Follower(api, f"/jobs/{job_id}/events")
    stream.until(lambda names: names == ["job.queued"])
    wait_until(lambda: api.hub.followers == 1)
    hand.claim()
    stream.until(lambda names: "job.started" in names)
    hand.fail(job_id)
    hand.session.execute("select pgqueue.sweep()")
    hand.claim()
    hand.complete(job_id, attempt=2)
    assert stream.ended.wait(10)
    expected = ["job.queued", "job.started", "job.failed", "job.queued", "job.started", "job.completed"]
    assert stream.names() == expected
    first, last = stream.events[0]["data"], stream.events[-1]["data"]
    assert (first["snapshot"], first["to"], first["job_id"]) == (True, "pending", job_id)
    assert (last["event"], last["queue"], last["job_type"]) == ("job.completed", "q", "echo")
    assert (last["from"], last["to"], last["attempt"]) == ("processing", "completed", 2)
    assert last["at"].endswith("Z")
    wait_until(lambda: api.hub.followers == 0)


def test_a_final_failure_is_a_failure_and_then_a_dead_letter(live: MakeLive, hand: Hand) -> None:
    api = live()
    job_id = hand.enqueue()
    hand.claim()
    stream = Follower(api, f"/jobs/{job_id}/events")
    stream.until(lambda names: names == ["job.started"])
    hand.fail(job_id, retryable=False)
    assert stream.ended.wait(10)
    assert stream.names() == ["job.started", "job.failed", "job.dead_letter"]


def test_a_job_that_has_ended_is_one_event(live: MakeLive, hand: Hand) -> None:
    api = live()
    job_id = hand.enqueue()
    hand.session.execute("select pgqueue.cancel(%s)", [job_id])
    stream = Follower(api, f"/jobs/{job_id}/events", **{"Last-Event-ID": "elsewhere-7"})
    assert stream.ended.wait(5)
    assert stream.names() == ["job.cancelled"]


def test_a_quiet_stream_gives_signs_of_life(live: MakeLive, hand: Hand) -> None:
    api = live(ping=0.2)
    stream = Follower(api, f"/jobs/{hand.enqueue()}/events")
    wait_until(lambda: [event["event"] for event in stream.events].count("ping") >= 3)


def test_a_queue_is_followed_from_its_state_on(live: MakeLive, hand: Hand) -> None:
    api = live()
    hand.enqueue(queue="q")
    stream, everything = Follower(api, "/events?queue=q"), Follower(api, "/events")
    stream.until(lambda names: names == ["state"])
    everything.until(lambda names: names == ["state"])
    assert [(row["queue"], row["pending"]) for row in stream.events[0]["data"]["queues"] if row["pending"]] == [
        ("q", 1)
    ]
    elsewhere, here = hand.enqueue(queue="other"), hand.enqueue(queue="q")
    everything.until(lambda names: len(names) >= 3)
    stream.until(lambda names: len(names) >= 2)
    assert [event["data"]["job_id"] for event in stream.events[1:] if event["event"] != "ping"] == [here]
    told = {event["data"]["job_id"] for event in everything.events if event["event"] == "job.queued"}
    assert {elsewhere, here} <= told


def test_a_stream_goes_on_after_the_event_that_the_client_saw_last(live: MakeLive, hand: Hand) -> None:
    api = live()
    first = Follower(api, "/events")
    jobs = [hand.enqueue(f"t{n}") for n in range(3)]
    first.until(lambda names: names.count("job.queued") == 3)
    queued = [event for event in first.events if event["event"] == "job.queued"]
    again = Follower(api, "/events", **{"Last-Event-ID": queued[0]["id"]})
    again.until(lambda names: len(names) >= 2)
    assert [event["data"]["job_id"] for event in again.events][:2] == [event["data"]["job_id"] for event in queued[1:]]
    assert {event["data"]["job_id"] for event in queued} == set(jobs)
    # Also for who cannot send headers, and with an id that is not known any more.
    lost = Follower(api, "/events?last_event_id=000000000000-1")
    lost.until(lambda names: names[:2] == ["resync", "state"])


def seen_last(api: Live, hand: Hand) -> str:
    """Follows everything until a job arrives, and leaves; the id of that event."""
    with api.events("/events") as events:
        assert next(events)["event"] == "state"
        hand.enqueue()
        return next(str(event["id"]) for event in events if event["event"] == "job.queued")


@pytest.mark.parametrize("lost", ["watch", "listener"])
def test_a_client_that_was_away_while_nobody_heard_begins_anew(
    live: MakeLive, hand: Hand, connection: psycopg.Connection[Any], lost: str
) -> None:
    api = live()
    seen = seen_last(api, hand)
    if lost == "watch":
        watchers = "select count(*) from pgqueue.watchers"
        wait_until(lambda: connection.execute(watchers).fetchone() == (0,), 30)
    else:
        before = api.hub.listener
        connection.execute("select pg_terminate_backend(%s)", [before])
        wait_until(lambda: api.hub.listener not in (None, before), 30)
    hand.enqueue()
    again = Follower(api, "/events", **{"Last-Event-ID": seen})
    again.until(lambda names: names[:2] == ["resync", "state"])


def test_a_job_that_commits_late_shows_up(live: MakeLive, hand: Hand, connect: Connect) -> None:
    api = live()
    stream = Follower(api, "/events")
    late = connect(autocommit=False)
    row = late.execute("insert into pgqueue.jobs (job_type) values ('late') returning job_id").fetchone()
    assert row
    early = hand.enqueue("early")
    stream.until(lambda names: "job.queued" in names)
    late.commit()

    def told() -> set[str]:
        return {event["data"]["job_id"] for event in stream.events if event["event"] == "job.queued"}

    wait_until(lambda: told() == {early, str(row[0])}, 5)


def test_jobs_whose_notice_was_left_out_are_read(live: MakeLive, hand: Hand) -> None:
    """Producers share few notices; what they leave out must come all the same."""
    api = live()
    stream = Follower(api, "/events?queue=q")
    stream.until(lambda names: names == ["state"])
    jobs = {hand.enqueue(queue="q") for _ in range(40)}

    def told() -> set[str]:
        return {event["data"]["job_id"] for event in stream.events if event["event"] == "job.queued"}

    wait_until(lambda: told() == jobs, 8)
    assert stream.names().count("job.queued") == 40


def test_losing_the_listener_loses_no_end(live: MakeLive, hand: Hand, connection: psycopg.Connection[Any]) -> None:
    api = live()
    jobs = [hand.enqueue() for _ in range(5)]
    hand.claim(5)
    streams = [Follower(api, f"/jobs/{job_id}/events") for job_id in jobs]
    wait_until(lambda: api.hub.hears)
    for n, job_id in enumerate(jobs):
        [(pid,)] = connection.execute(LISTENERS).fetchall()
        connection.execute("select pg_terminate_backend(%s)", [pid])
        killed = running_time()
        hand.complete(job_id)
        assert streams[n].ended.wait(5), streams[n].names()
        assert streams[n].names()[-1] == "job.completed"
        wait_until(lambda: api.hub.hears and connection.execute(LISTENERS).fetchall(), 5)
        assert running_time() - killed < 5


def test_a_deaf_listener_is_replaced(live: MakeLive, hand: Hand, connection: psycopg.Connection[Any]) -> None:
    """A connection that is gone without a word stays open for long; our own bell tells."""
    api = live()
    job_id = hand.enqueue()
    hand.claim()
    stream = Follower(api, f"/jobs/{job_id}/events")
    wide = Follower(api, "/events")
    wait_until(lambda: api.hub.hears)
    listener = api.hub._listener
    assert listener is not None
    listener._tell = lambda channel, payload: None
    hand.complete(job_id)
    assert stream.ended.wait(5), "the end was missed"
    wait_until(lambda: api.hub._listener is not listener and api.hub.hears, 8)
    wide.until(lambda names: "resync" in names, 5)
    assert len(connection.execute(LISTENERS).fetchall()) == 1


def test_without_notices_streams_live_by_looking(live: MakeLive, hand: Hand, database: str) -> None:
    api = live(settings=Settings(dsn=database, wake="poll", poll_interval=0.3))
    job_id = hand.enqueue()
    stream = Follower(api, f"/jobs/{job_id}/events")
    stream.until(lambda names: names == ["job.queued"])
    hand.claim()
    hand.complete(job_id)
    assert stream.ended.wait(5)
    assert stream.names()[-1] == "job.completed"
    rows = hand.session.execute("select count(*) from pgqueue.watchers").fetchone()
    assert rows == (0,)


def test_a_slow_client_begins_anew(live: MakeLive, hand: Hand) -> None:
    api = live(backlog=20)
    with api.http.stream("GET", "/events", timeout=20) as response:
        lines = response.iter_lines()
        events: Iterator[dict[str, Any]] = _parse(lines)
        assert next(events)["event"] == "state"
        # It reads nothing for a while; far more happens than would be kept for it.
        for _ in range(30):
            hand.session.execute(
                "insert into pgqueue.jobs (job_type, payload) select 'flood', '{}' from generate_series(1, 200)"
            )
            time.sleep(0.06)
        wide = next(iter(api.hub._wide))
        assert len(wide._events) <= 20
        seen = [next(events)["event"] for _ in range(3)]
        while "resync" not in seen:
            seen.append(next(events)["event"])
        after = seen.index("resync")
        while len(seen) < after + 2:
            seen.append(next(events)["event"])
        assert seen[after + 1] == "state"


def _parse(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    from tests.api.conftest import parse_events

    return (event for event in parse_events(lines) if event["event"] != "ping")


def test_streams_are_few_enough(live: MakeLive, hand: Hand) -> None:
    api = live(max_streams=2)
    job_id = hand.enqueue()
    streams = [Follower(api, "/events") for _ in range(2)]
    refused = api.http.get(f"/jobs/{job_id}/result?wait=5")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert refused.json()["type"].endswith("too-many-streams")
    assert api.http.get("/events").status_code == 503
    assert len(streams) == 2
    assert api.http.get(f"/jobs/{job_id}").status_code == 200


def test_a_burst_of_streams_gets_its_seats_and_not_one_more(
    live: MakeLive, hand: Hand, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = live(max_streams=20)
    core = api.app.state.pgqueue
    asked: list[str] = []
    real = core.call

    async def counted(call: Call[Any], **parameters: object) -> Any:
        asked.append(call.name)
        return await real(call, **parameters)

    monkeypatch.setattr(core, "call", counted)
    job_id = hand.enqueue()
    paths = ["/events", f"/jobs/{job_id}/events", "/dashboard/events"] * 15
    with contextlib.ExitStack() as open_streams:
        begun = threading.Barrier(len(paths))

        def ask(path: str) -> httpx.Response:
            http = open_streams.enter_context(httpx.Client(base_url=api.url, timeout=30))
            request = http.build_request("GET", path)
            begun.wait(30)
            return http.send(request, stream=True)

        with ThreadPoolExecutor(len(paths)) as pool:
            answers = list(pool.map(ask, paths))
        statuses = Counter(answer.status_code for answer in answers)
        assert statuses == {200: 20, 503: 25}
        for answer in answers:
            if answer.status_code == 503:
                assert answer.headers["retry-after"] == "5"
            else:
                assert next(answer.iter_raw())
    wait_until(lambda: api.hub.followers == 0, 30)
    # The seats are free again.
    with api.events("/events") as events:
        next(events)
    assert "Traceback" not in capfd.readouterr().err
    assert 1 <= asked.count("queue_counts") < 10


def test_nobody_watches_when_nobody_is_there(live: MakeLive, hand: Hand) -> None:
    api = live()
    with api.events(f"/jobs/{hand.enqueue()}/events") as events:
        next(events)
        wait_until(lambda: hand.session.execute("select count(*) from pgqueue.watchers").fetchone() == (1,))
    wait_until(lambda: hand.session.execute("select count(*) from pgqueue.watchers").fetchone() == (0,), 15)
    assert api.hub.followers == 0


def test_a_stream_ends_when_the_server_stops(live: MakeLive, hand: Hand) -> None:
    api = live()
    streams = [Follower(api, "/events"), Follower(api, f"/jobs/{hand.enqueue()}/events")]
    begun = running_time()
    api.server.should_exit = True
    assert all(stream.ended.wait(10) for stream in streams)
    assert running_time() - begun < 5


def test_a_stream_ends_with_its_key(live: MakeLive, hand: Hand, connection: psycopg.Connection[Any]) -> None:
    api = live()
    job_id = hand.enqueue()
    with api.events(f"/jobs/{job_id}/events") as open_to_all, api.events("/events") as wide:
        assert next(open_to_all)["event"] == "job.queued"
        assert next(wide)["event"] == "state"
        key, digest, shown = new_key()
        connection.execute("select pgqueue.create_key('k', %s, %s, '{read}', null, null)", [digest, shown])
        # From the first key on, nobody goes on without one.
        for stream in (open_to_all, wide):
            assert [event for event in stream if event["event"] != "ping"] == []
    with_key = {"Authorization": f"Bearer {key}"}
    other, digest, shown = new_key()
    connection.execute("select pgqueue.create_key('other', %s, %s, '{read}', null, null)", [digest, shown])
    with (
        api.events(f"/jobs/{job_id}/events", **with_key) as ends,
        api.events("/events", Authorization=f"Bearer {other}") as goes_on,
    ):
        assert next(ends)["event"] == "job.queued"
        assert next(goes_on)["event"] == "state"
        connection.execute("select pgqueue.revoke_key('k')")
        assert [event for event in ends if event["event"] != "ping"] == []
        later = hand.enqueue()
        assert any(event.get("data", {}).get("job_id") == later for event in goes_on)
