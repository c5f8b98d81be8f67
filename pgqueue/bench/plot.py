"""Results as one SVG page: a panel per measure with its headline figure, and the course of runs that have one."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from pgqueue.bench.figures import UNITS

_WIDTH: Final = 860
_LABELS: Final = 270
_BAR: Final = 18
_GAP: Final = 6
_COURSE: Final = 90
_COLOURS: Final = ("#2f6fab", "#c2571a", "#3a8a3f", "#7d4fa3", "#8a6d1d", "#a83250", "#4a5a68", "#1c8c8c")


def svg(told: Mapping[str, Any]) -> str:
    """Return the page of a document (`report.document`)."""
    parts: list[str] = []
    top = 46
    for measure in told["measures"]:
        panel, height = _panel(measure, top)
        parts += panel
        top += height
    server = told["server"]["server_version"]
    title = f"pgqueue bench: PostgreSQL {server}, medians of {told['repetitions']}; whiskers from least to most"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" '
            f'viewBox="0 0 {_WIDTH} {top}" font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{top}" fill="white"/>',
            _text(12, 26, title, size=15),
            *parts,
            "</svg>",
            "",
        ]
    )


def _panel(measure: Mapping[str, Any], top: int) -> tuple[list[str], int]:
    headline = measure["headline"]
    variants = [variant for variant in measure["variants"] if headline in variant["figures"]]
    if not variants:
        return [], 0
    unit = UNITS[headline]
    parts = [_text(12, top + 14, f"{measure['title']} ({unit.label})", weight="bold")]
    most = max(max(_runs(variant, headline)) for variant in variants) or 1.0
    scale = (_WIDTH - _LABELS - 90) / most
    at = top + 24
    for index, variant in enumerate(variants):
        figure = variant["figures"][headline]
        runs = _runs(variant, headline)
        end = _LABELS + figure["median"] * scale
        middle = at + _BAR / 2
        parts += [
            _text(_LABELS - 8, middle + 4, variant["name"], anchor="end"),
            f'<rect x="{_LABELS}" y="{at}" width="{end - _LABELS:.1f}" height="{_BAR}" fill="{_colour(index)}"/>',
            _line([(_LABELS + min(runs) * scale, middle), (_LABELS + max(runs) * scale, middle)], "black"),
            _text(max(end, _LABELS + max(runs) * scale) + 6, middle + 4, f"{figure['median']:,.{unit.digits}f}"),
        ]
        at += _BAR + _GAP
    courses = [(index, variant["course"]) for index, variant in enumerate(variants) if variant["course"]]
    if courses:
        parts += _courses(courses, at + 16)
        at += _COURSE + 22
    return parts, at - top + 14


def _courses(courses: Sequence[tuple[int, Sequence[float]]], top: int) -> list[str]:
    most = max(max(course) for _, course in courses) or 1.0
    width = _WIDTH - _LABELS - 90
    parts = [
        _text(_LABELS - 8, top + 10, "jobs/s from first to last job", anchor="end"),
        _text(_LABELS + width + 6, top + 10, f"{most:,.0f}"),
        _line([(_LABELS, top), (_LABELS, top + _COURSE), (_LABELS + width, top + _COURSE)], "#999999"),
    ]
    for index, course in courses:
        step = width / max(len(course) - 1, 1)
        points = [(_LABELS + step * n, top + _COURSE * (1 - rate / most)) for n, rate in enumerate(course)]
        parts.append(_line(points, _colour(index), 2))
    return parts


def _runs(variant: Mapping[str, Any], figure: str) -> list[float]:
    return [run for run in variant["figures"][figure]["runs"] if run is not None]


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _line(points: Sequence[tuple[float, float]], colour: str, width: int = 1) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">'
        f"{escape(words)}</text>"
    )
