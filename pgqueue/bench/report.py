"""Results as JSON data and as a table."""

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pgqueue import __version__
from pgqueue.bench import statements
from pgqueue.bench.figures import UNITS, Measure, Place, Results, met
from pgqueue.bench.site import Sizes
from pgqueue.connections import SyncConnection

Cell = str
_MISSED: Final = {True: "yes", False: "no", None: ""}


def about(connection: SyncConnection, sizes: Sizes, reps: int) -> dict[str, Any]:
    """Return what a reader must know of the run: versions, machine, the server's settings, sizes."""
    return {
        "pgqueue": __version__,
        "python": platform.python_version(),
        "machine": {"system": platform.platform(), "processors": os.cpu_count()},
        "server": dict(map(tuple, statements.rows(connection, statements.SERVER))),
        "repetitions": reps,
        "jobs": sizes.jobs,
        "seconds": sizes.seconds,
    }


def document(results: Results, measures: Sequence[Measure], head: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything as data: medians, each repetition's figures, and ratios."""
    return {**head, "measures": [_measure(results, measure) for measure in measures], "faults": results.faults}


def _measure(results: Results, measure: Measure) -> dict[str, Any]:
    return {
        "name": measure.name,
        "title": measure.title,
        "headline": measure.headline,
        "variants": [
            {
                "name": variant.name,
                "figures": {
                    figure: {"median": results.median(place), "runs": results.values(place)}
                    for figure in UNITS
                    if results.median(place := Place(measure.name, variant.name, figure)) is not None
                },
                "course": results.course(measure.name, variant.name),
            }
            for variant in measure.variants
        ],
        "ratios": [
            {
                "name": ratio.name,
                "median": (median := statistics.median(quotients)),
                "runs": quotients,
                "wanted": ratio.wanted,
                "met": met(ratio, median),
            }
            for ratio in measure.ratios
            if (quotients := results.quotients(ratio))
        ],
    }


def lines(told: Mapping[str, Any]) -> list[str]:
    """Return a document as text for people."""
    server, machine = told["server"], told["machine"]
    out = [
        f"PostgreSQL {server['server_version']}, {machine['processors']} processors, Python {told['python']}, "
        f"pgqueue {told['pgqueue']}; medians of {told['repetitions']}; per job where it says µs, B or commits",
    ]
    for measure in told["measures"]:
        out += ["", f"{measure['name']}: {measure['title']}"]
        out += _table([variant for variant in measure["variants"] if variant["figures"]])
        out += _ratios(measure["ratios"])
    out += ["", *(f"failed: {fault}" for fault in told["faults"])] if told["faults"] else []
    return out


def _table(variants: Sequence[Mapping[str, Any]]) -> list[str]:
    figures = [figure for figure in UNITS if any(figure in variant["figures"] for variant in variants)]
    rows = [["", *(UNITS[figure].label for figure in figures)]]
    for variant in variants:
        cells = [_shown(variant["figures"].get(figure), UNITS[figure].digits) for figure in figures]
        rows.append([variant["name"], *cells])
    return _aligned(rows)


def _shown(figure: Mapping[str, Any] | None, digits: int) -> Cell:
    return "-" if figure is None else f"{figure['median']:,.{digits}f}"


def _ratios(ratios: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            ratio["name"],
            f"{ratio['median']:.2f}",
            f"{min(ratio['runs']):.2f} to {max(ratio['runs']):.2f}",
            ratio["wanted"],
            _MISSED[ratio["met"]],
        ]
        for ratio in ratios
    ]
    return _aligned([["ratio", "median", "runs", "wanted", "met"], *rows]) if rows else []


def _aligned(rows: Sequence[Sequence[Cell]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]
