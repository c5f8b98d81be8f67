"""What is measured, as data: samples of variants, their medians, and ratios between them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pgqueue.bench.site import Site


class Unit(NamedTuple):
    """How a figure is shown."""

    label: str
    digits: int = 1


#: Every figure that a sample may have. Times of processors are per job, of server and client processes.
UNITS: Final[Mapping[str, Unit]] = {
    "jobs_per_s": Unit("jobs/s", 0),
    "p50_ms": Unit("p50 ms", 2),
    "p99_ms": Unit("p99 ms", 2),
    "done_p50_ms": Unit("stored p50 ms", 2),
    "done_p99_ms": Unit("stored p99 ms", 2),
    "first_per_s": Unit("first part/s", 0),
    "last_per_s": Unit("last part/s", 0),
    "of_linear": Unit("of linear", 3),
    "seconds": Unit("s", 2),
    "first_us": Unit("first part µs"),
    "last_us": Unit("last part µs"),
    "server_us": Unit("server µs"),
    "client_us": Unit("client µs"),
    "wal_bytes": Unit("WAL B", 0),
    "commits": Unit("commits", 4),
    "statements_per_s": Unit("statements/s", 2),
    "server_percent": Unit("server CPU %", 2),
    "client_percent": Unit("client CPU %", 2),
    "other_cores": Unit("other cores", 2),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a variant: figures by name (what cannot be measured here is absent), and a course if it has one."""

    figures: Mapping[str, float]
    course: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Variant:
    """One way in which something is measured."""

    name: str
    run: Callable[["Site"], Sample]


class Place(NamedTuple):
    """Where a figure stands."""

    measure: str
    variant: str
    figure: str = "jobs_per_s"


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure divided by another of the same repetition, and what is wanted of it."""

    name: str
    of: Place
    over: Place
    at_least: float | None = None
    at_most: float | None = None

    @property
    def wanted(self) -> str:
        """The bar in words, empty without one."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return f"<= {self.at_most:g}" if self.at_most is not None else ""


@dataclass(frozen=True, slots=True)
class Measure:
    """Something measured in several ways. `headline` is the figure that a plot shows."""

    name: str
    title: str
    variants: Sequence[Variant]
    ratios: Sequence[Ratio] = ()
    headline: str = "jobs_per_s"


@dataclass(slots=True)
class Results:
    """The samples of a run: by measure and variant, one per repetition, None where it failed."""

    samples: dict[tuple[str, str], list[Sample | None]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    interrupted: bool = False

    def add(self, measure: str, variant: str, sample: Sample | None) -> None:
        """Take the next repetition of a variant."""
        self.samples.setdefault((measure, variant), []).append(sample)

    def values(self, place: Place) -> list[float | None]:
        """Return a figure of each repetition, None where it is absent."""
        samples = self.samples.get((place.measure, place.variant), [])
        return [None if sample is None else sample.figures.get(place.figure) for sample in samples]

    def median(self, place: Place) -> float | None:
        """Return the median of a figure over the repetitions that have it."""
        return _median(self.values(place))

    def quotients(self, ratio: Ratio) -> list[float]:
        """Return a ratio in each repetition that has both figures."""
        pairs = zip(self.values(ratio.of), self.values(ratio.over), strict=False)
        return [of / over for of, over in pairs if of is not None and over]

    def course(self, measure: str, variant: str) -> list[float]:
        """Return the course of the repetitions, median by median."""
        courses = [sample.course for sample in self.samples.get((measure, variant), []) if sample and sample.course]
        return [statistics.median(step) for step in zip(*courses, strict=False)]


def met(ratio: Ratio, value: float) -> bool | None:
    """Say whether a ratio is as wanted, None without a bar."""
    if ratio.at_least is not None:
        return value >= ratio.at_least
    return None if ratio.at_most is None else value <= ratio.at_most


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value below which `part` (0 to 1) of the values lie, 0 without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0
