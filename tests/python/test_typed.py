"""Typed arguments: checked when a job is enqueued and when it runs, and made of JSON and back."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pytest

from pgqueue import App, Job
from pgqueue.errors import InvalidPayload
from pgqueue.testing import drain_sync, inline
from tests.python.running import CHECKOUT, make_app

if TYPE_CHECKING:
    from elsewhere import OnlyCheckersKnow  # type: ignore[import-not-found]


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Address(msgspec.Struct):
    city: str
    number: int = 1


@dataclasses.dataclass
class Order:
    items: list[str]
    to: Address
    at: datetime
    price: Decimal = Decimal(0)


class Odd:
    """A class that has no form in JSON."""


ORDER = Order(["a"], Address("Berlin", 7), datetime(2030, 1, 2, tzinfo=UTC), Decimal("1.10"))
STORED = {
    "items": ["a"],
    "to": {"city": "Berlin", "number": 7},
    "at": "2030-01-02T00:00:00Z",
    "price": "1.10",
}


@pytest.fixture
def app(database: str) -> Iterator[App]:
    with make_app(database) as app:
        yield app


def test_rich_arguments_travel_as_json(app: App) -> None:
    seen: list[Any] = []

    @app.task("ship")
    def ship(
        job: Job, order: Order, ident: uuid.UUID, sizes: set[Size], by_name: dict[str, Address] | None = None
    ) -> None:
        seen.append((order, ident, sizes, by_name))

    ident = uuid.uuid4()
    payload = ship.payload(ORDER, ident, {Size.SMALL}, by_name={"x": Address("Rome")})
    assert payload == {
        "order": STORED,
        "ident": str(ident),
        "sizes": ["small"],
        "by_name": {"x": {"city": "Rome", "number": 1}},
    }
    job = ship.enqueue_sync(ORDER, ident, {Size.SMALL}, by_name={"x": Address("Rome")})
    assert app.job_sync(job).payload == payload
    drain_sync(app)
    assert seen == [(ORDER, ident, {Size.SMALL}, {"x": Address("Rome")})]
    with inline(app) as jobs:
        asyncio.run(ship.enqueue(ORDER, ident, set()))
    assert seen[1] == (ORDER, ident, set(), None)
    assert jobs[0].payload["order"] == STORED


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"number": "x"}, "number: Expected `int`, got `str`"),
        ({"number": 11}, "number: Expected `int` <= 10"),
        ({"number": None}, "number: Expected `int`, got `null`"),
        ({"number": 1, "kind": "c"}, "kind: Invalid enum value 'c'"),
        ({"number": 1, "to": {"number": 1}}, "to: Object missing required field `city`"),
        ({"number": 1, "to": {"city": 5}}, "to: Expected `str`, got `int` - at `$.city`"),
        ({"number": 1, "maybe": "x"}, "maybe: Expected `int | null`, got `str`"),
    ],
)
def test_what_is_of_another_type_is_refused_at_both_ends(app: App, arguments: dict[str, Any], said: str) -> None:
    runs: list[Any] = []

    @app.task("t")
    def t(
        job: Job,
        number: Annotated[int, msgspec.Meta(le=10)],
        kind: Literal["a", "b"] = "a",
        to: Address | None = None,
        maybe: int = None,  # type: ignore[assignment]  # noqa: RUF013
    ) -> None:
        runs.append(number)

    with pytest.raises(InvalidPayload) as refused:
        t.payload(**arguments)
    assert said in str(refused.value)
    job = app.enqueue_sync("t", arguments)
    drain_sync(app)
    row = app.job_sync(job)
    # No other attempt would find another payload.
    assert (row.status, row.attempts, runs) == ("dead_letter", 1, [])
    assert said in (row.error or "")


def test_plain_json_stays_as_it_is(app: App) -> None:
    @app.task("t")
    def t(
        job: Job, number: float, many: list[int], deep: dict[str, Any], by_number: dict[int, str], big: int
    ) -> None: ...

    arguments = {"number": 1, "many": [1, 2], "deep": {"a": [None, {}]}, "by_number": {"1": "x"}, "big": 2**70}
    assert t.payload(**arguments) == arguments  # type: ignore[call-overload]
    bound = t.bind(arguments)
    assert (bound["number"], bound["by_number"], bound["big"]) == (1.0, {1: "x"}, 2**70)
    assert arguments["by_number"] == {"1": "x"}


def test_annotations_that_say_nothing_check_nothing(app: App) -> None:
    @app.task("t")
    def t(
        job: Job, odd: Odd, unknown: OnlyCheckersKnow, nothing: Any, many: list[Odd], mapped: Mapping[str, Any], bare
    ) -> None:  # type: ignore[no-untyped-def]
        ...

    arguments = dict.fromkeys(("odd", "unknown", "nothing", "many", "bare"), 5) | {"mapped": {}}
    assert t.bind(arguments) == t.payload(**arguments) == arguments


def test_models_of_pydantic(app: App) -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Model", at=(datetime, ...), number=(int, pydantic.Field(gt=0)))

    def t(job: Job, one, many=()) -> None: ...  # type: ignore[no-untyped-def]

    t.__annotations__ |= {"one": model, "many": list[model]}  # type: ignore[valid-type]
    task = app.task("t")(t)
    made = model(at=datetime(2030, 1, 2, tzinfo=UTC), number=5)
    payload = task.payload(made, many=[made])
    assert payload == {"one": {"at": "2030-01-02T00:00:00Z", "number": 5}, "many": [payload["one"]]}
    assert task.bind(payload) == {"one": made, "many": [made]}
    for call in (task.payload, lambda one: task.bind({"one": one})):
        with pytest.raises(InvalidPayload, match="greater than 0"):
            call(one={"at": "2030-01-02T00:00:00Z", "number": 0})


TYPED = """
from typing import Any, assert_type

from pgqueue import App, EnqueuedJob, Job

app = App()


@app.schedule("@daily", payload={"path": "cat.png"})
@app.task("resize", queue="images")
def resize(job: Job, path: str, width: int = 800) -> dict[str, Any]:
    return {}


@app.task("crop")
async def crop(job: Job, path: str, width: int = 800) -> dict[str, Any]:
    return {}


@app.task("any")
def to_any(job: Job, path: str, width: int = 800) -> Any: ...


@app.task
def bare(job: Job, path: str, width: int = 800) -> dict:  # type: ignore[type-arg]
    return {}


@app.task("exact", process=True)
async def exact(job: Job, path: str, width: int = 800) -> str:
    return path


@app.task
def without(path: str, width: int = 800) -> dict[str, Any]:
    return {}


@app.task("alone")
def alone(job: Job) -> Any: ...


async def use(job: Job) -> None:
    assert_type(resize(job, "cat.png"), dict[str, Any])
    assert_type(await crop(job, "cat.png"), dict[str, Any])
    assert_type(await exact(job, "cat.png"), str)
    assert_type(without("cat.png"), dict[str, Any])
    assert_type(await resize.enqueue("cat.png"), EnqueuedJob)
    assert_type(await resize.having(delay=1).enqueue("cat.png"), EnqueuedJob)
    assert_type(resize.payload("cat.png"), dict[str, Any])
TASKS
    alone.job()
    alone.job("cat.png")  # refused
"""
EACH = """
    {0}.enqueue_sync("cat.png", width=5)
    {0}.enqueue_sync(path="cat.png")
    {0}.enqueue_sync("cat.png", width="x")  # refused
    {0}.enqueue_sync()  # refused
    {0}.job(5)  # refused
    {0}.payload("cat.png", height=5)  # refused
    {0}.having(delay=1).enqueue_sync("cat.png", width="x")  # refused
    {0}.having(delay=1).job(5)  # refused
"""


def test_checkers_know_the_arguments_whatever_is_returned(tmp_path: Path) -> None:
    names = ("resize", "crop", "to_any", "bare", "exact", "without")
    program = tmp_path / "program.py"
    program.write_text(TYPED.replace("TASKS", "".join(EACH.format(name) for name in names)))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", program], cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=110
    )
    errors = {int(line) for line in re.findall(r"program\.py:(\d+): error", checked.stdout)}
    lines = program.read_text().splitlines()
    assert errors == {number for number, line in enumerate(lines, 1) if "# refused" in line}, checked.stdout
