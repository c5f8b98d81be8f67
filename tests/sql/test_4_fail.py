"""Attempts that fail: retries, dead letters, and the records of their errors."""

import json
from datetime import timedelta
from typing import Any

import pytest

from tests.sql.verbs import WORKER, Verbs


def test_four_attempts_by_default_after_1_2_4_seconds_then_a_dead_letter_with_all_errors(q: Verbs) -> None:
    now = q.freeze()
    job_id = q.insert()
    for attempt, wait in ((1, 1), (2, 2), (3, 4)):
        (job,) = q.claim()
        assert job.attempts == attempt
        assert q.fail(job, {"type": "E", "message": f"number {attempt}"}) == "failed"
        job = q.job(job_id)
        assert timedelta(seconds=wait) <= job.due_at - now <= timedelta(seconds=wait * 1.1)
        assert (job.status, job.error, job.lease_expires_at) == ("failed", f"E: number {attempt}", None)
        q.sweep()
        assert q.claim() == []
        now = q.advance(seconds=wait * 1.1)
        q.sweep()
    (job,) = q.claim()
    assert q.fail(job, {"type": "E", "message": "number 4"}) == "dead_letter"
    dead = q.job(job_id)
    assert (dead.status, dead.attempts, dead.error, dead.finished_at) == ("dead_letter", 4, "E: number 4", now)
    assert [(e["attempt"], e["message"]) for e in dead.errors] == [(n, f"number {n}") for n in (1, 2, 3, 4)]
    assert dead.due_at is None


def test_without_jitter_the_waits_are_exact_and_stop_at_the_cap(q: Verbs) -> None:
    now = q.freeze()
    q.insert(max_retries=8, retry_policy={"jitter": False})
    waits = []
    for _ in range(8):
        (job,) = q.claim()
        q.fail(job)
        waits.append((q.job(job.job_id).due_at - now).total_seconds())
        now = q.advance(minutes=1)
        q.sweep()
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]


def test_jitter_is_spread(q: Verbs) -> None:
    q.freeze()
    q.fill(60)
    for job in q.claim(60):
        q.fail(job)
    waits = q.value("select array_agg(extract(epoch from due_at - pgqueue.clock())::float) from pgqueue.jobs")
    assert all(1 <= wait <= 1.1 for wait in waits)
    assert min(waits) < 1.03 < 1.07 < max(waits)


@pytest.mark.parametrize("max_retries", [0, 1, 5])
def test_max_retries_counts_what_comes_after_the_first_attempt(q: Verbs, max_retries: int) -> None:
    q.freeze()
    job_id = q.insert(max_retries=max_retries)
    outcomes = []
    while jobs := q.claim():
        outcomes.append(q.fail(jobs[0], retry_in=timedelta(0)))
        q.sweep()
    assert outcomes == ["failed"] * max_retries + ["dead_letter"]
    assert q.job(job_id).attempts == max_retries + 1


def test_an_error_that_is_not_retryable_is_final_at_once(q: Verbs) -> None:
    job = q.start()
    assert q.fail(job, retryable=False) == "dead_letter"
    dead = q.job(job.job_id)
    assert (dead.attempts, dead.errors[0]["retryable"]) == (1, False)


def test_the_jobs_policy_goes_before_the_queues(q: Verbs) -> None:
    now = q.freeze()
    q.session.execute(
        """insert into pgqueue.queues (name, retry_policy) values ('q', '{"base_delay_ms": 7000, "jitter": false}')"""
    )
    for policy, wait in ((None, 7), ({"base_delay_ms": 500, "jitter": False}, 0.5)):
        job = q.start(queue="q", retry_policy=policy)
        q.fail(job)
        assert q.job(job.job_id).due_at - now == timedelta(seconds=wait)


@pytest.mark.parametrize(("retry_in", "waits"), [
    (timedelta(seconds=90), timedelta(seconds=90)), (timedelta(0), timedelta(0)), (timedelta(days=-5), timedelta(0)),
    (timedelta(days=900_000), None), (None, None),
])  # fmt: skip
def test_retry_in_overrides_the_policy(q: Verbs, retry_in: Any, waits: Any) -> None:
    now = q.freeze()
    job = q.start()
    assert q.fail(job, retry_in=retry_in) == "failed"
    due = q.job(job.job_id).due_at
    if waits is not None:
        assert due - now == waits
    elif retry_in is None:
        assert timedelta(seconds=1) <= due - now <= timedelta(seconds=1.1)
    else:
        # As long as a job may be failed; then it is a dead letter.
        assert due - now == timedelta(days=7)


def test_a_record_says_all_about_its_attempt(q: Verbs) -> None:
    q.freeze()
    job = q.start()
    now = q.advance(seconds=2.5)
    q.fail(job, {"type": "KeyError", "message": "'x'", "traceback": "Traceback\n  line", "duration_ms": 1234})
    (record,) = q.job(job.job_id).errors
    assert q.value("select %s::timestamptz", [record.pop("at")]) == now
    assert record == {
        "attempt": 1, "worker_id": str(WORKER), "type": "KeyError", "message": "'x'", "retryable": True,
        "traceback": "Traceback\n  line", "duration_ms": 1234,
    }  # fmt: skip


@pytest.mark.parametrize(("error", "line", "message"), [
    ({"type": "E", "message": "two\nlines\t and  more"}, "E: two lines and more", "two\nlines\t and  more"),
    ({"message": "no type"}, "no type", "no type"), ({}, "no reason was given", "no reason was given"),
    ("a string", "a string", "a string"), (None, "no reason was given", "no reason was given"),
    (" \n", "no reason was given", " \n"), ([1, 2], "[1, 2]", "[1, 2]"),
    ({"type": 5, "message": {"a": 1}}, '5: {"a": 1}', '{"a": 1}'),
    ({"message": "m" * 5000}, "m" * 1000, "m" * 5000),
])  # fmt: skip
def test_error_is_one_line_of_at_most_1000_characters(q: Verbs, error: Any, line: str, message: str) -> None:
    q.freeze()
    job = q.start()
    q.advance(seconds=2)
    assert q.fail(job, error) == "failed"
    stored = q.job(job.job_id)
    assert (stored.error, stored.errors[0]["message"], stored.errors[0]["duration_ms"]) == (line, message, 2000)


def test_an_sql_null_error_is_an_error_all_the_same(q: Verbs) -> None:
    job = q.start()
    assert q.call_value("fail", WORKER, job.job_id, 1, None) == "failed"


HUGE = {
    "10 MB": "m" * 10_000_000,
    "four bytes": "\N{ROCKET}" * 250_000,
    "two bytes": "\N{CYRILLIC SMALL LETTER YA}" * 20_000,
    "quotes": '"' * 20_000,
    "newlines": "\n" * 30_000,
    "control characters": "\x01" * 30_000,
    "backslashes": "\\" * 100_000,
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_a_record_is_capped_whatever_it_is_made_of(q: Verbs, text: str) -> None:
    job = q.start()
    error = {"type": text, "message": text, "traceback": text, "duration_ms": text}
    assert q.fail(job, error) == "failed"
    stored = q.job(job.job_id)
    (record,) = stored.errors
    assert q.value("select octet_length((errors -> 0)::text) from pgqueue.jobs") <= 32 * 1024
    assert record["message"].endswith(" … (cut)")
    assert record["traceback"].endswith(" … (cut)")
    kept = record["message"].removesuffix(" … (cut)")
    assert text.startswith(kept)
    assert len(json.dumps(kept, ensure_ascii=False).encode()) > 7900
    assert len(stored.error) <= 1000
    assert "\N{REPLACEMENT CHARACTER}" not in stored.error + record["type"]


def test_only_the_newest_20_records_of_512_kib_are_kept(q: Verbs) -> None:
    job_id = q.insert(max_retries=299, retry_policy={"base_delay_ms": 0})
    message = "m" * 100_000
    for _ in range(40):
        q.fail(q.claim()[0], {"type": "E", "message": message, "traceback": message})
        q.sweep("due")
    job = q.job(job_id)
    attempts = [record["attempt"] for record in job.errors]
    assert job.attempts == 40
    assert attempts == list(range(41 - len(attempts), 41))
    assert 10 <= len(attempts) <= 20
    assert q.value("select octet_length(errors::text) from pgqueue.jobs") <= 512 * 1024
    for _ in range(25):
        q.fail(q.claim()[0])
        q.sweep("due")
    assert [record["attempt"] for record in q.job(job_id).errors] == list(range(46, 66))


def test_cut_keeps_whole_characters_and_marks_the_cut(q: Verbs, subtests: pytest.Subtests) -> None:
    for character in ("a", "\N{CYRILLIC SMALL LETTER YA}", "\N{ROCKET}", "\x01", '"'):
        for length in (0, 1, 16, 17, 98, 99, 100, 101, 1000):
            text = character * length
            with subtests.test(repr(character), length=length):
                got = q.value("select pgqueue.cut(%s, 100)", [text])
                size = q.value("select octet_length(to_json(%s::text)::text)", [got])
                assert size <= 100
                if got != text:
                    assert len(json.dumps(text, ensure_ascii=False).encode()) > 100
                    assert got.endswith(" … (cut)")
                    assert text.startswith(got.removesuffix(" … (cut)"))
                    assert size > 80


@pytest.mark.parametrize("error", [None, {}, "", {"message": ""}, {"message": None}, {"type": "", "message": ""}])
def test_an_error_without_words_says_so(q: Verbs, error: Any) -> None:
    for retryable, status in ((True, "failed"), (False, "dead_letter")):
        job = q.start()
        assert q.fail(job, error, retryable=retryable) == status
        stored = q.job(job.job_id)
        assert (stored.error, stored.errors[0]["message"]) == ("no reason was given", "no reason was given")
        assert "no reason was given" in q.why(job.job_id)
    job = q.start()
    assert q.call_value("fail", WORKER, job.job_id, 1, None, False) == "dead_letter"
    assert q.job(job.job_id).error == "no reason was given"


def test_an_error_with_a_type_alone_keeps_it(q: Verbs) -> None:
    job = q.start()
    q.fail(job, {"type": "KeyError"}, retryable=False)
    assert q.job(job.job_id).error == "KeyError: no reason was given"
