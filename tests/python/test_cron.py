"""When cron expressions fire, against cronsim and a minute-by-minute look at zone time, and what is refused."""

import functools
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim

from pgqueue.cron import Cron, Field, parse
from pgqueue.cron_words import describe
from pgqueue.errors import InvalidJob
from pgqueue.scheduler import plan

MINUTE = timedelta(minutes=1)
# Changes of the clocks by an hour, half an hour and two hours, at midnight, to yesterday, by a whole day, and none.
ZONES = (
    "America/New_York", "Europe/Berlin", "Europe/Dublin", "Australia/Lord_Howe", "Antarctica/Troll", "America/Havana",
    "Asia/Beirut", "Africa/Cairo", "America/Santiago", "Africa/Casablanca", "Pacific/Chatham", "Pacific/Apia",
    "Asia/Kathmandu", "UTC",
)  # fmt: skip


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


def fires(expression: str, zone: str, after: str, count: int) -> list[str]:
    cron, moment, found = Cron(expression, zone), at(after), []
    for _ in range(count):
        moment = cron.next(moment)
        found.append(f"{moment:%Y-%m-%dT%H:%MZ}")
    return found


# The oracles ----------------------------------------------------------------------------------------------------------


@functools.cache
def changes(zone: str, years: range) -> list[datetime]:
    """The hours in which a zone's clocks change."""
    info, hour = ZoneInfo(zone), timedelta(hours=1)
    moment, found = datetime(years[0], 1, 1, tzinfo=UTC), []
    while moment.year in years:
        if moment.astimezone(info).utcoffset() != (moment + hour).astimezone(info).utcoffset():
            found.append(moment)
        moment += hour
    return found


def matches(fields: tuple[Field, ...], wall: datetime) -> bool:
    minute, hour, day, month, weekday = fields
    if wall.minute not in minute.values or wall.hour not in hour.values or wall.month not in month.values:
        return False
    last = (date(wall.year, wall.month, wall.day) + timedelta(days=1)).month != wall.month
    by_day = wall.day in day.values or (day.last and last)
    of_week = wall.isoweekday() % 7
    by_week = (of_week, (wall.day + 6) // 7) in weekday.nth if weekday.nth else of_week in weekday.values
    return (by_day and by_week) if day.star or weekday.star else (by_day or by_week)


def minute_by_minute(expression: str, zone: str, after: datetime, days: int) -> datetime | None:
    """The documented rule, by looking at every minute of real time; None: nothing within so many days."""
    fields, info = parse(expression), ZoneInfo(zone)
    hourly = len(fields[1].values) == 24
    moment = after.replace(second=0, microsecond=0)
    shown = moment.astimezone(info).replace(tzinfo=None)
    for _ in range(days * 1440):
        moment += MINUTE
        local = moment.astimezone(info)
        wall = local.replace(tzinfo=None, fold=0)
        # Wall times that the clocks have just skipped are due at this moment.
        skipped = [] if hourly else [shown + MINUTE * n for n in range(1, (wall - shown) // MINUTE)]
        shown = wall
        if any(matches(fields, time) for time in skipped) or (matches(fields, wall) and (hourly or not local.fold)):
            return moment
    return None


def cronsim(expression: str, zone: str, after: datetime) -> datetime:
    """What cronsim says, which may answer with a time before `after` in the second pass of a repeated hour."""
    for moment in CronSim(expression, after.astimezone(ZoneInfo(zone))):
        if moment.astimezone(UTC) > after:
            return moment.astimezone(UTC)
    raise AssertionError


def agrees_with_cronsim(expression: str) -> bool:
    """Whether the documented rule is Debian's, which takes any `*` in the first two fields for "in real time"."""
    minute, hour = expression.split()[:2]
    return len(parse(expression)[1].values) == 24 or not (minute.startswith("*") or hour.startswith("*"))


def term(rng: random.Random, low: int, high: int, names: tuple[str, ...] = ()) -> str:
    first = rng.randint(low, high)
    match rng.randrange(6):
        case 0:
            return f"*/{rng.randint(1, high)}"
        case 1 if first < high:
            # cronsim takes 5-5/2 for 5/2.
            last = rng.randint(first + 1, high)
            return f"{first}-{last}" + (f"/{rng.randint(1, high)}" if rng.random() < 0.4 else "")
        case 2 if names:
            return rng.choice(names)
        case 3:
            return f"{first}/{rng.randint(1, high)}"
        case _:
            return str(first)


def field(rng: random.Random, star: float, low: int, high: int, names: tuple[str, ...] = ()) -> str:
    if rng.random() < star:
        return "*"
    return ",".join(term(rng, low, high, names) for _ in range(rng.choice((1, 1, 1, 2, 3))))


def expressions(rng: random.Random) -> Iterator[str]:
    """Expressions that mostly fire around the hours in which clocks change; those that never fire are left out."""
    while True:
        hour = "*" if rng.random() < 0.3 else field(rng, 0.0, 0, 23) if rng.random() < 0.4 else str(rng.randint(0, 4))
        expression = " ".join(
            (
                field(rng, 0.15, 0, 59),
                hour,
                "L" if rng.random() < 0.03 else field(rng, 0.6, 1, 31),
                field(rng, 0.7, 1, 12, ("jan", "MAR", "Apr", "oct", "nov")),
                field(rng, 0.7, 0, 7, ("sun", "Mon", "SAT")),
            )
        )
        # cronsim reads "0-23" as a restriction.
        if len(parse_or_nothing(expression)) == 5 and (hour == "*" or len(parse(expression)[1].values) < 24):
            yield expression


def parse_or_nothing(expression: str) -> tuple[Field, ...]:
    try:
        return parse(expression)
    except InvalidJob:
        return ()


@pytest.mark.parametrize("seed", range(4))
def test_random_expressions_at_the_edges_agree_with_the_oracles(seed: int) -> None:
    """2,000 in all: an expression, a zone, and a moment within a day and a half of a change of its clocks."""
    rng = random.Random(seed)
    edges = {zone: changes(zone, range(2011, 2013) if zone == "Pacific/Apia" else range(2026, 2028)) for zone in ZONES}
    by_cronsim = by_minutes = 0
    for expression, _ in zip(expressions(rng), range(500), strict=False):
        zone = rng.choice(ZONES)
        edge = rng.choice(edges[zone] or [datetime(2026, 3, 1, tzinfo=UTC)])
        spread = rng.choice((90, 36 * 60))
        after = edge + timedelta(minutes=rng.randint(-spread, spread), seconds=rng.choice((0, 0, 1, 59)))
        ours = Cron(expression, zone).next(after)
        told = (expression, zone, after.isoformat(), ours.isoformat())
        if agrees_with_cronsim(expression):
            assert ours == cronsim(expression, zone, after), told
            by_cronsim += 1
        else:
            days = 5
            slow = minute_by_minute(expression, zone, after, days)
            assert ours == slow if slow else ours > after + timedelta(days=days) - MINUTE, told
            by_minutes += 1
    assert min(by_cronsim, by_minutes) > 50


@pytest.mark.parametrize("seed", range(2))
def test_cronsim_and_the_look_at_every_minute_agree(seed: int) -> None:
    """So that the oracle of the documented rule is one."""
    rng = random.Random(1000 + seed)
    checked = 0
    for expression in expressions(rng):
        zone = rng.choice(ZONES[:-1])
        edge = rng.choice(changes(zone, range(2026, 2027)) or [datetime(2026, 3, 1, tzinfo=UTC)])
        after = edge + timedelta(minutes=rng.randint(-300, 300))
        slow = minute_by_minute(expression, zone, after, 2)
        if slow and agrees_with_cronsim(expression):
            assert slow == cronsim(expression, zone, after), (expression, zone, after.isoformat())
            checked += 1
        if checked == 60:
            return


# Known values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("expression", "zone", "after", "expected"), [
    ("30 2 * * *", "America/New_York", "2026-03-08T00:00Z", ["2026-03-08T07:00Z", "2026-03-09T06:30Z"]),
    ("30 1 * * *", "America/New_York", "2026-11-01T04:00Z", ["2026-11-01T05:30Z", "2026-11-02T06:30Z"]),
    ("30 1 * * *", "America/New_York", "2026-11-01T06:10Z", ["2026-11-02T06:30Z"]),
    ("0 * * * *", "America/New_York", "2026-11-01T04:30Z",
     ["2026-11-01T05:00Z", "2026-11-01T06:00Z", "2026-11-01T07:00Z"]),
    ("*/20 2 * * *", "America/New_York", "2026-03-08T00:00Z", ["2026-03-08T07:00Z", "2026-03-09T06:00Z"]),
    ("*/30 1 * * *", "America/New_York", "2026-11-01T00:00Z",
     ["2026-11-01T05:00Z", "2026-11-01T05:30Z", "2026-11-02T06:00Z"]),
    ("0 0 * * *", "America/Havana", "2026-03-07T12:00Z", ["2026-03-08T05:00Z", "2026-03-09T04:00Z"]),
    ("30 * 31 10 *", "Asia/Beirut", "2026-10-24T21:00Z", ["2026-10-30T22:30Z"]),
    ("0 9 * * *", "Pacific/Apia", "2011-12-29T20:00Z", ["2011-12-30T10:00Z", "2011-12-30T19:00Z"]),
    ("0 0 13 * 5", "UTC", "2026-11-29T00:00Z", ["2026-12-04T00:00Z", "2026-12-11T00:00Z", "2026-12-13T00:00Z"]),
    ("0 0 1 * 1", "UTC", "2026-11-29T00:00Z", ["2026-11-30T00:00Z", "2026-12-01T00:00Z", "2026-12-07T00:00Z"]),
    ("0 0 */2 * 1", "UTC", "2026-11-29T00:00Z", ["2026-12-07T00:00Z", "2026-12-21T00:00Z"]),
    ("0 9 29 2 *", "UTC", "2026-11-29T00:00Z", ["2028-02-29T09:00Z", "2032-02-29T09:00Z"]),
    ("0 0 29 2 *", "UTC", "2096-03-01T00:00Z", ["2104-02-29T00:00Z"]),
    ("0 0 29 2 */7", "UTC", "2026-11-29T00:00Z", ["2032-02-29T00:00Z", "2060-02-29T00:00Z"]),
    ("0 0 L * *", "UTC", "2026-11-29T00:00Z", ["2026-11-30T00:00Z", "2026-12-31T00:00Z", "2027-01-31T00:00Z"]),
    ("0 0 * * mon#2,fri#1", "UTC", "2026-11-29T00:00Z", ["2026-12-04T00:00Z", "2026-12-14T00:00Z"]),
    ("0 0 * * FRI-sun", "UTC", "2026-11-29T00:00Z", ["2026-12-04T00:00Z", "2026-12-05T00:00Z", "2026-12-06T00:00Z"]),
    ("0 8 1-31 * 1", "UTC", "2026-11-29T00:00Z", ["2026-11-29T08:00Z", "2026-11-30T08:00Z"]),
    ("@hourly", "Asia/Kathmandu", "2026-11-29T00:00Z", ["2026-11-29T00:15Z", "2026-11-29T01:15Z"]),
    ("@WEEKLY", "UTC", "2026-11-29T00:00Z", ["2026-12-06T00:00Z"]),
    (" 0\t0  1 1  * ", "UTC", "2026-11-29T00:00Z", ["2027-01-01T00:00Z"]),
])  # fmt: skip
def test_known_times(expression: str, zone: str, after: str, expected: list[str]) -> None:
    assert fires(expression, zone, after, len(expected)) == expected


def test_the_hosts_zone_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert fires("30 2 * * *", "America/New_York", "2026-03-08T00:00Z", 1) == ["2026-03-08T07:00Z"]
    finally:
        monkeypatch.undo()
        time.tzset()


REFUSED = {
    "* * * * * *": "6 fields", "*/5 * * * * 30": "6 fields", "0 0 1 1 * 0 1999": "7 fields",
    "* * * *": "4 fields", "": "0 fields", "R * * * *": "no minute", "H * * * *": "no minute",
    "? * * * *": "no minute", "*/90 * * * *": "step", "*/0 * * * *": "step", "5-1 * * * *": "before",
    "60 * * * *": "0 to 59", "0 24 * * *": "0 to 23", "0 0 0 1 0": "1 to 31", "0 0 32 * *": "1 to 31",
    "0 0 1 13 *": "1 to 12", "0 0 * * 8": "0 to 7", "-5 * * * *": "no minute", "1,,2 * * * *": "no minute",
    "0 0 15W * *": "no day", "0 0 * * 5L": "no weekday", "0 0 * * xyz": "no weekday",
    "0 0 * jan-xyz *": "no month", "\u0661 * * * *": "no minute", "0 0 30 2 *": "never",
    "0 0 31 4,6 *": "never", "0 0 31 2 */2": "never", "10 0 1-5 * 2#2": "as day only",
    "0 0 * * 1#2,3": "either all", "0 0 * * 1#6": "no weekday", "@reboot": "unknown", "@every 5m": "unknown",
    "@": "unknown", "1.5 * * * *": "no minute", "0\n0 * * *": "fields",
}  # fmt: skip


@pytest.mark.parametrize("expression", REFUSED)
def test_what_is_odd_or_never_fires_is_refused(expression: str) -> None:
    with pytest.raises(InvalidJob, match=REFUSED[expression]) as caught:
        Cron(expression)
    assert caught.value.column == "cron"


@pytest.mark.parametrize(
    "zone", ["Mars/Olympus", "", "localtime", "../UTC", "/etc/passwd", "Europe", "right/UTC", "a\0b"]
)
def test_unknown_zones_are_refused(zone: str) -> None:
    with pytest.raises(InvalidJob, match="timezone") as caught:
        Cron("* * * * *", zone)
    assert caught.value.column == "timezone"


def test_the_latest_fires_are_found_without_going_through_all() -> None:
    cron = Cron("* * * * *", "Europe/Berlin")
    until = at("2026-11-29T12:00:30Z")
    assert [f"{moment:%H:%M}" for moment in cron.latest(at("1990-01-01T00:00Z"), until, 3)] == [
        "11:58",
        "11:59",
        "12:00",
    ]
    assert cron.latest(until - MINUTE / 2, until, 3) == []
    yearly = Cron("@yearly")
    assert [moment.year for moment in yearly.latest(at("2001-01-01T00:00Z"), until, 100)] == list(range(2002, 2027))


@pytest.mark.parametrize("weekday", ["sun-sun", "0-0", "7-7", "0-0/2"])
def test_a_range_of_one_sunday_is_a_sunday(weekday: str) -> None:
    cron = Cron(f"0 0 * * {weekday}")
    sundays = [f"{moment:%m-%d}" for moment in cron.between(at("2026-11-29T12:00Z"), at("2026-12-14T00:00Z"))]
    assert sundays == ["12-06", "12-13"]


@pytest.mark.parametrize(
    ("expression", "zone", "after"),
    [
        ("0 9 * * *", "Asia/Tokyo", "9999-12-31T23:59:59Z"),
        ("0 9 * * *", "UTC", "9999-12-31T23:59:59-12:00"),
        ("0 9 * * *", "America/New_York", "0001-01-01T00:00:00Z"),
        ("* * * * *", "America/New_York", "0001-01-01T00:00:00Z"),
        ("* * * * *", "Asia/Tokyo", "9999-12-31T14:59:30Z"),
        ("59 23 31 12 *", "UTC", "9999-12-31T23:59:00Z"),
    ],
)
def test_the_calendar_has_ends(expression: str, zone: str, after: str) -> None:
    with pytest.raises(InvalidJob):
        Cron(expression, zone).next(datetime.fromisoformat(after))


def test_the_latest_fires_are_found_however_long_ago_the_first_was() -> None:
    yearly = Cron("@yearly")
    found = yearly.latest(at("0500-01-01T00:00Z"), at("2026-11-29T12:00:30Z"), 10_000)
    assert (found[0].year, found[-1].year, len(found)) == (501, 2026, 1526)


NOW = at("2026-11-29T12:00:03Z")


@pytest.mark.parametrize(("misfire", "due", "count", "first", "last"), [
    ("run_once", "12:00:00", 1, "12:00", "12:00"), ("skip", "12:00:00", 1, "12:00", "12:00"),
    ("run_all", "12:00:00", 1, "12:00", "12:00"),
    ("run_once", "02:00:00", 1, "12:00", "12:00"), ("run_all", "02:00:00", 100, "10:21", "12:00"),
    ("skip", "02:00:00", 1, "12:00", "12:00"),
])  # fmt: skip
def test_what_is_fired_after_a_pause(misfire: str, due: str, count: int, first: str, last: str) -> None:
    planned, following = plan(Cron("* * * * *"), at(f"2026-11-29T{due}Z"), NOW, misfire)
    assert (len(planned), f"{planned[0]:%H:%M}", f"{planned[-1]:%H:%M}") == (count, first, last)
    assert following == at("2026-11-29T12:01Z")


def test_a_time_missed_is_not_made_up_for_when_it_is_to_be_skipped() -> None:
    late = NOW + timedelta(seconds=20)
    assert plan(Cron("* * * * *"), at("2026-11-29T02:00Z"), late, "skip") == ([], at("2026-11-29T12:01Z"))
    assert plan(Cron("0 9 * * *"), at("2026-11-29T09:00Z"), late, "skip") == ([], at("2026-11-30T09:00Z"))
    assert plan(Cron("0 9 * * *"), at("2026-11-29T09:00Z"), late)[0] == [at("2026-11-29T09:00Z")]
    # A due time that was set by hand is one, whatever the expression says.
    assert plan(Cron("0 9 * * *"), at("2026-11-29T11:11Z"), late)[0] == [at("2026-11-29T11:11Z")]
    assert plan(Cron("0 9 * * *"), None, late) == ([], at("2026-11-30T09:00Z"))


@pytest.mark.parametrize(("expression", "words"), [
    ("* * * * *", "every minute"),
    ("*/5 * * * *", "every 5 minutes"),
    ("0 * * * *", "at minute 0 of every hour"),
    ("0 9 * * mon-fri", "at 09:00 on Monday to Friday"),
    ("0 9,17 * * *", "at 09:00 and 17:00"),
    ("0 0 13 * 5", "at 00:00 on day 13 of the month or Friday"),
    ("0 0 */10 * 5", "at 00:00 on day 1, day 11, day 21 and day 31 of the month if it is Friday"),
    ("0 9 29 2 *", "at 09:00 on day 29 of the month in February"),
    ("0 0 L * *", "at 00:00 on the last day of the month"),
    ("0 0 * * mon#2", "at 00:00 on the second Monday of the month"),
    ("0 8 1-31 * 1", "at 08:00"),
    ("*/10 9-17 * 1,2,3,7 sat,sun",
     "every 10 minutes of hours 9 to 17 on Saturday and Sunday in January to March and July"),
    ("0 */2 * * *", "every 2 hours at minute 0"),
])  # fmt: skip
def test_words(expression: str, words: str) -> None:
    assert describe(expression) == f"{words} (UTC)"
