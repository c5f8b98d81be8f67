"""Runs measures: all variants once, then all again, so that what else the machine does meets all of them alike."""

from collections.abc import Callable, Sequence

from pgqueue.bench.figures import Measure, Results, Sample, Variant
from pgqueue.bench.site import Site
from pgqueue.errors import PgqueueError

Told = Callable[[str], None]


def run(site: Site, measures: Sequence[Measure], reps: int, told: Told) -> Results:
    """Take every measure `reps` times. What fails is noted in the results and does not end the run; Ctrl-C does."""
    results = Results()
    try:
        for rep in range(reps):
            for measure in measures:
                for variant in _turned(measure.variants, rep):
                    told(f"{rep + 1}/{reps} {measure.name}: {variant.name}")
                    results.add(measure.name, variant.name, _tried(site, measure, variant, results))
    except KeyboardInterrupt:
        results.interrupted = True
        results.faults.append("interrupted: what was measured until then")
    return results


def _turned(variants: Sequence[Variant], by: int) -> list[Variant]:
    """Return the variants beginning with another one each time, so that none always comes first."""
    start = by % len(variants)
    return [*variants[start:], *variants[:start]]


def _tried(site: Site, measure: Measure, variant: Variant, results: Results) -> Sample | None:
    try:
        return variant.run(site)
    except PgqueueError as exc:
        results.faults.append(f"{measure.name}, {variant.name}: {exc}")
        return None
