"""`pgqueue doctor`: looks for what makes a queue slow or silent, and says what to do about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import rich_click as click

from pgqueue.cli.advice import advice_on
from pgqueue.cli.codes import FAILURE
from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.output import duration, parse_instant, print_json, printable

if TYPE_CHECKING:
    from pgqueue.connections import SyncConnection
    from pgqueue.settings import Settings

Facts = dict[str, Any]
OK: Final = "ok"
WARNING: Final = "warning"
PROBLEM: Final = "problem"
_MARKS: Final = {OK: ("ok", "green"), WARNING: ("warning", "yellow"), PROBLEM: ("PROBLEM", "red")}
_LONG: Final = 300.0
_BELL_PATIENCE: Final = 3.0
_MANY_DEAD: Final = 20_000
_SKEW: Final = 2.0


class Finding(NamedTuple):
    """What a check found: `level` is ok, warning or problem; advice is what to do about it."""

    check: str
    level: str
    found: str
    advice: str | None = None


@click.command()
@door_options
@pass_door
@click.pass_context
def doctor(ctx: click.Context, door: Door, /) -> None:
    """Check schema, settings, open transactions, dead rows, partitions, pooler, notices, clocks, sweeps and workers.

    Ends with 1 when there is a problem; warnings alone are no failure.
    """
    findings = examine(door)
    if door.as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            mark, colour = _MARKS[finding.level]
            click.echo(click.style(f"{mark:<8}", fg=colour) + f" {finding.check:<12} {printable(finding.found)}")
            if finding.advice:
                click.echo(f"{'':<8} {'':<12} → {printable(finding.advice)}")
    if any(finding.level == PROBLEM for finding in findings):
        ctx.exit(FAILURE)


def examine(door: Door) -> list[Finding]:
    """Return what all checks found. Raises a PgqueueError when the database cannot be asked at all."""
    from pgqueue import calling, calls_watch
    from pgqueue.connections import connect
    from pgqueue.errors import AccessDenied

    findings: list[Finding] = []
    with door.client() as client:
        dsn, settings = client.dsn, client.settings
        with connect(dsn, settings, "pgqueue doctor") as connection:
            facts: Facts = {"claimed_pid": connection.info.backend_pid}
            for part in calls_watch.DOCTOR:
                begun = time.time()
                try:
                    facts |= calling.run(connection, part)
                except AccessDenied as exc:
                    findings.append(Finding(part.name, WARNING, f"not checked: {exc}"))
                    continue
                facts.setdefault("host_now", (begun + time.time()) / 2)
                findings += [finding for check in _CHECKS[part.name] for finding in check(facts)]
            findings.append(_bell(connection, dsn, settings))
    return findings


def _schema(facts: Facts) -> Iterator[Finding]:
    from pgqueue.schema import head

    if facts["schema"] == head():
        yield Finding("schema", OK, f"at {facts['schema']}, on PostgreSQL {facts['server']}")
    else:
        yield Finding("schema", PROBLEM, f"at {facts['schema']}; this package needs {head()}", "pgqueue migrate")
    if facts["read_only"]:
        yield Finding("schema", PROBLEM, "the server takes no writes", "connect to the primary server")


def _settings(facts: Facts) -> Iterator[Finding]:
    settings = facts["settings"]
    wrong = {name: settings[name] for name in ("fsync", "full_page_writes") if settings[name] != "on"}
    if wrong:
        yield Finding(
            "settings",
            PROBLEM,
            f"{', '.join(f'{name} is {value}' for name, value in wrong.items())}: a crash can lose or break jobs",
            "; ".join(f"alter system set {name} = on" for name in wrong) + "; select pg_reload_conf()",
        )
    if settings["autovacuum"] != "on" or settings["track_counts"] != "on":
        yield Finding(
            "settings",
            PROBLEM,
            "autovacuum is off: dead rows pile up",
            "alter system set autovacuum = on; alter system set track_counts = on; select pg_reload_conf()",
        )
    if settings["synchronous_commit"] == "off":
        yield Finding(
            "settings",
            WARNING,
            "synchronous_commit is off: a crash loses the last jobs",
            "alter system set synchronous_commit = on; select pg_reload_conf()",
        )
    used, most = facts["connections"], int(settings["max_connections"])
    if used > 0.8 * most:
        yield Finding(
            "connections",
            WARNING,
            f"{used} of {most} are in use",
            "a worker needs five and those of its tasks; raise max_connections or use a pooler",
        )
    else:
        yield Finding("connections", OK, f"{used} of {most} are in use")
    if facts["xid_age"] > 1_000_000_000:
        yield Finding(
            "settings",
            PROBLEM,
            f"the oldest transaction id is {facts['xid_age']:,} behind: the server stops at 2,000,000,000",
            "vacuum freeze the database, and end what holds its horizon",
        )


def _horizon(facts: Facts) -> Iterator[Finding]:
    """Name who keeps dead rows from being removed, and how to end it."""
    now = parse_instant(facts["now"])
    held = False
    for row in facts["horizon"]:
        since = parse_instant(row["since"])
        age = (now - since).total_seconds() if now and since else None
        if row["kind"] == "session" and (age is None or age < _LONG):
            continue
        if row["kind"] == "replication slot" and row["xmin_age"] < 1_000_000 and row["pid"] is not None:
            continue
        held = True
        lasting = f" for {duration(age)}" if age is not None else ""
        match row["kind"]:
            case "session":
                found = f"pid {row['pid']} has a transaction open{lasting} ({row['what']}): {row['query']}"
                advice = f"select pg_terminate_backend({row['pid']}); or set idle_in_transaction_session_timeout"
            case "prepared transaction":
                found = f"the prepared transaction {row['what']!r} waits{lasting}"
                advice = f"rollback prepared '{row['what']}' or commit it"
            case _:
                found = f"the replication slot {row['what']!r} keeps rows of {row['xmin_age']:,} transactions ago"
                advice = f"select pg_drop_replication_slot('{row['what']}') if nobody needs it"
        yield Finding("horizon", PROBLEM, f"{found}: dead rows pile up", advice)
    if not held:
        yield Finding("horizon", OK, "nobody keeps dead rows from being removed")


def _dead_rows(facts: Facts) -> Iterator[Finding]:
    bloated = [table for table in facts["tables"] if table["dead"] > max(_MANY_DEAD, table["live"] // 2)]
    for table in bloated:
        yield Finding(
            "dead rows",
            WARNING,
            f"{table['name']} has {table['dead']:,} dead rows, {table['live']:,} live, {table['bytes'] >> 20:,} MiB",
            f"vacuum (analyze) pgqueue.{table['name']}; it removes nothing that the horizon keeps",
        )
    if not bloated:
        yield Finding("dead rows", OK, f"{sum(table['dead'] for table in facts['tables']):,} in all tables")


def _partitions(facts: Facts) -> Iterator[Finding]:
    wanted = [f"jobs_{status}_{day}" for status in ("completed", "cancelled") for day in _days(facts)]
    wanted.append(f"jobs_dead_letter_{facts['this_week']}")
    missing = [name for name in wanted if name not in facts["partitions"]]
    advice = "select * from pgqueue.maintain_partitions(); workers and pgqueue scheduler do it every hour"
    if missing:
        yield Finding("partitions", PROBLEM, f"missing: {', '.join(missing)}", advice)
    if facts["strays"] and not missing:
        yield Finding("partitions", WARNING, f"{', '.join(facts['strays'])} hold jobs that no partition took", advice)
    if not missing and not facts["strays"]:
        yield Finding("partitions", OK, f"{len(facts['partitions'])}, made ahead of time")


def _days(facts: Facts) -> tuple[str, str]:
    return facts["today"], facts["tomorrow"]


def _pooler(facts: Facts) -> Iterator[Finding]:
    if facts["claimed_pid"] == facts["pid"]:
        yield Finding("pooler", OK, "none: this is a direct connection")
        return
    yield Finding(
        "pooler",
        WARNING,
        "the connection goes through a pooler",
        "set PGQUEUE_LISTEN_DSN to a direct connection, and PGQUEUE_PREPARE=off for PgBouncer before 1.22",
    )


def _clock(facts: Facts) -> Iterator[Finding]:
    server = datetime.fromisoformat(facts["now"]).astimezone(UTC).timestamp()
    skew = facts["host_now"] - server
    if abs(skew) > _SKEW:
        yield Finding(
            "clock",
            WARNING,
            f"this machine is {duration(skew)} {'ahead of' if skew > 0 else 'behind'} the database",
            "run NTP on both; jobs go by the database's clock alone, logs and people do not",
        )
    else:
        yield Finding("clock", OK, f"{duration(skew)} apart from the database")


def _roles(facts: Facts) -> Iterator[Finding]:
    from pgqueue.schema import roles_advice

    if facts["roles"]:
        yield Finding("roles", WARNING, f"missing: {', '.join(facts['roles'])}", roles_advice(facts["roles"]))


def _sweep(facts: Facts) -> Iterator[Finding]:
    steps = facts["steps"]
    for step in steps:
        if step["failures"]:
            yield Finding(
                "sweep",
                PROBLEM,
                f"step {step['step']} failed {step['failures']} times: {step['last_error']}",
                "select * from pgqueue.sweep_steps tells more",
            )
    age = min((step["age"] for step in steps if step["step"] not in ("measure", "alerts")), default=None)
    if age is None or age > 30:
        yield Finding(
            "sweep",
            PROBLEM,
            "no sweep has run yet" if age is None else f"no sweep has run for {duration(age)}",
            "start a worker, or pgqueue scheduler: delayed jobs, retries and lost leases wait for it",
        )
    elif not any(step["failures"] for step in steps):
        yield Finding("sweep", OK, f"ran {duration(age)} ago")


def _workers(facts: Facts) -> Iterator[Finding]:
    for worker in facts["lost"]:
        seen = parse_instant(worker["last_heartbeat"])
        ago = duration((datetime.fromisoformat(facts["now"]) - seen).total_seconds()) if seen else "long"
        yield Finding(
            "workers",
            WARNING,
            f"{worker['name']} ({worker['hostname']}, pid {worker['pid']}) has been silent for {ago}",
            "its jobs went back to the queue; look at its log, and start another",
        )
    if not facts["lost"]:
        yield Finding("workers", OK, "none is lost")


def _alerts(facts: Facts) -> Iterator[Finding]:
    from pgqueue.alerts import FEW_WORKERS

    told = {"SweeperStale", "SweepStepFails", "LongTransaction"}
    for alert in facts["alerts"]:
        if alert["alert"] in told:
            continue
        level = PROBLEM if alert["severity"] == "page" else WARNING
        if alert["alert"] in FEW_WORKERS and alert["value"] > 0:
            # Jobs are run: what is missing is only another that would go on without this one.
            level = WARNING
        yield Finding("alert", level, f"{alert['alert']}: {alert['summary']}", advice_on(alert["alert"]))


def _notices(facts: Facts) -> Iterator[Finding]:
    if facts["notify_usage"] > 0.5:
        yield Finding(
            "notices",
            PROBLEM,
            f"PostgreSQL's queue of notices is {facts['notify_usage']:.0%} full: at 100% every NOTIFY fails",
            "end the session that listens inside of a long transaction (see horizon)",
        )


def _bell(connection: SyncConnection, dsn: str, settings: Settings) -> Finding:
    """Ring a bell as an enqueue does, and wait for it as a worker does."""
    import secrets

    from pgqueue import calling, calls
    from pgqueue.connections import connect

    if settings.wake == "poll":
        return Finding("notify", OK, "not used: PGQUEUE_WAKE is poll")
    channel = f"pgqueue_doctor_{secrets.token_hex(6)}"
    with connect(settings.listen_dsn or dsn, settings, "pgqueue doctor") as listener:
        listener.execute(calls.listen(channel).encode())
        begun = time.perf_counter()
        calling.run(connection, calls.RING, channel=channel, payload="")
        for _ in listener.notifies(timeout=_BELL_PATIENCE, stop_after=1):
            return Finding("notify", OK, f"a bell is heard after {(time.perf_counter() - begun) * 1000:.1f} ms")
    return Finding(
        "notify",
        PROBLEM,
        f"a bell was not heard within {_BELL_PATIENCE:g} s: workers would only poll",
        "set PGQUEUE_LISTEN_DSN to a direct connection, or PGQUEUE_WAKE=poll",
    )


#: By the part of the facts that they go by.
_CHECKS: Final[dict[str, tuple[Callable[[Facts], Iterator[Finding]], ...]]] = {
    "server": (_schema, _settings, _dead_rows, _pooler, _notices, _clock),
    "horizon": (_horizon,),
    "partitions": (_partitions,),
    "roles": (_roles,),
    "sweep": (_sweep,),
    "workers": (_workers,),
    "alert": (_alerts,),
}
