"""Actions on many jobs: first how many and which, then, on a word, the deed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from litestar import Response, post

from pgqueue import calls, calls_dashboard
from pgqueue.api.access import Identity
from pgqueue.api.core import Api
from pgqueue.api.dashboard.filters import Filters, read_id
from pgqueue.api.dashboard.reading import Reading
from pgqueue.api.dashboard.reads import reads_of
from pgqueue.api.dashboard.session import Form, enter_to_act, read_form
from pgqueue.api.dashboard.shell import back, done, html
from pgqueue.api.exchange import AnyRequest, api_of
from pgqueue.api.problems import Invalid
from pgqueue.calling import Call
from pgqueue.errors import JobNotFound, PgqueueError, WrongState

_MOST: Final = 10_000
_AT_ONCE: Final = 250
_SHOWN: Final = 10


@dataclass(frozen=True)
class _Verb:
    """What can be done to many. `statuses`: of jobs to which it can be done."""

    name: str
    past: str
    statuses: list[str]
    effect: str
    many: Call[Any] | None
    one: Call[Any]


_VERBS: Final = {
    verb.name: verb
    for verb in (
        _Verb(
            "cancel",
            "cancelled",
            ["pending", "submitted", "failed", "processing"],
            "Jobs that wait are cancelled at once; jobs that run are asked to stop.",
            None,
            calls.CANCEL,
        ),
        _Verb(
            "retry",
            "pending again",
            ["failed", "dead_letter"],
            "Failed jobs and dead letters become pending now; dead letters with fresh attempts.",
            calls_dashboard.RETRY_THESE,
            calls.RETRY,
        ),
        _Verb(
            "discard",
            "deleted",
            ["dead_letter"],
            "Dead letters are deleted for good. This cannot be undone.",
            calls_dashboard.DISCARD_THESE,
            calls.DISCARD,
        ),
    )
}


@post("/jobs/bulk")
async def bulk(request: AnyRequest) -> Response[Any]:
    """Show what would be done; with `confirmed` do it."""
    identity = await enter_to_act(request)
    form = await read_form(request)
    verb = _VERBS.get(form.one("verb"))
    if verb is None:
        raise Invalid("choose what to do: cancel, retry or discard")
    everything = form.one("target") == "all"
    filters = Filters.read(form)
    upto = read_id(form.one("upto"), "upto")
    api = api_of(request)
    home = back(request, form.one("back"))
    if not everything and not form.all("id"):
        return done(request, home, "Select at least one job, or choose all that match.", "bad")
    ids = await _ids(api, verb, form, filters, upto, everything)
    more = len(ids) > _MOST
    ids = ids[:_MOST]
    if not ids:
        why = "No job that matches" if everything else "No job that is selected"
        return done(request, home, f"{why} can be {_passive(verb)}.", "bad")
    if form.one("confirmed"):
        count = await _do(api, identity, verb, ids)
        reads_of(api).forget()
        left = f" There are more than {_MOST:,}; the rest needs another go." if more else ""
        return done(request, home, f"{count:,} {'job is' if count == 1 else 'jobs are'} {verb.past}.{left}")
    sample = await Reading(api).call(calls_dashboard.CHOSEN, job_ids=ids[:_SHOWN], statuses=verb.statuses)
    return html(
        request,
        "bulk.html",
        identity,
        under=home,
        verb=verb,
        everything=everything,
        filters=filters,
        ids=ids if not everything else [],
        count=len(ids),
        more=more,
        upto=upto or ids[0],
        sample=sample,
        home=home,
    )


def _passive(verb: _Verb) -> str:
    return {"cancel": "cancelled", "retry": "retried", "discard": "discarded"}[verb.name]


async def _ids(api: Api, verb: _Verb, form: Form, filters: Filters, upto: UUID | None, everything: bool) -> list[str]:
    """Return the jobs to which it can be done, one more than may be at once at most."""
    if everything:
        # Jobs that come after the list was shown are not meant.
        chosen = filters.parameters(verb.statuses, upto)
        if not chosen["statuses"]:
            return []
        found: list[str] = await Reading(api).call(calls_dashboard.MATCHING, **chosen, limit=_MOST + 1)
        return found
    selected = [str(read_id(text, "id")) for text in form.all("id")]
    rows = await Reading(api).call(calls_dashboard.CHOSEN, job_ids=selected, statuses=verb.statuses)
    return [row["job_id"] for row in rows]


async def _do(api: Api, identity: Identity, verb: _Verb, ids: list[str]) -> int:
    """Do it, in transactions of a few hundred; returns to how many it was done."""
    count = 0
    for part in _parts(ids):
        if verb.many is None:
            outcomes = await api.act(identity, calls.CANCEL_MANY, job_ids=part)
            count += sum(outcome in ("cancelled", "cancel_requested") for outcome in outcomes.values())
            continue
        try:
            count += await api.act(identity, verb.many, job_ids=part, statuses=verb.statuses)
        except (JobNotFound, WrongState):
            # One of them has gone on meanwhile.
            for job_id in part:
                count += await _do_one(api, identity, verb, job_id)
    return count


async def _do_one(api: Api, identity: Identity, verb: _Verb, job_id: str) -> int:
    try:
        await api.act(identity, verb.one, job_id=job_id)
    except PgqueueError as exc:
        if exc.http_status in (404, 409):
            return 0
        raise
    return 1


def _parts(ids: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), _AT_ONCE):
        yield ids[start : start + _AT_ONCE]


ROUTES: Final[list[Any]] = [bulk]
