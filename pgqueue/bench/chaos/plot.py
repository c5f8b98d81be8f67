"""A chaos run as an SVG page: attempts that ended over time, and how long nothing began, by kind of fault."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

_WIDTH: Final = 860
_LEFT: Final = 190
_COURSE: Final = 130
_ROW: Final = 20


def svg(told: Mapping[str, Any]) -> str:
    """Return the page of a document (`report.document`)."""
    kinds, course = told["kinds"], told["course"]
    height = 60 + _COURSE + 50 + _ROW * len(kinds) + 20
    title = (
        f"pgqueue bench chaos: seed {told['seed']}, {told['injections']} faults, {told['accepted']:,} jobs, "
        f"{sum(told['violations'].values())} broken promises"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(12, 26, title, size=15),
        *_course(course, 50),
        _text(12, 60 + _COURSE + 30, "nothing began for (s): median, whisker to the worst", weight="bold"),
    ]
    most = max((kind["work_gap"]["worst"] for kind in kinds), default=1.0) or 1.0
    scale = (_WIDTH - _LEFT - 80) / most
    for n, kind in enumerate(kinds):
        at = 60 + _COURSE + 42 + n * _ROW
        median, worst = kind["work_gap"]["median"], kind["work_gap"]["worst"]
        parts += [
            _text(_LEFT - 8, at + 12, f"{kind['kind']} ({kind['times']})", anchor="end"),
            f'<rect x="{_LEFT}" y="{at}" width="{median * scale:.1f}" height="{_ROW - 6}" fill="#2f6fab"/>',
            f'<line x1="{_LEFT + median * scale:.1f}" y1="{at + 7}" x2="{_LEFT + worst * scale:.1f}" y2="{at + 7}" '
            'stroke="black"/>',
            _text(_LEFT + worst * scale + 6, at + 12, f"{median:.1f} … {worst:.1f}"),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _course(course: Sequence[int], top: int) -> list[str]:
    most = max(course, default=1) or 1
    width = _WIDTH - _LEFT - 80
    step = width / max(len(course) - 1, 1)
    points = " ".join(
        f"{_LEFT + step * n:.1f},{top + _COURSE * (1 - ends / most):.1f}" for n, ends in enumerate(course)
    )
    return [
        _text(_LEFT - 8, top + 10, "attempts ended per second", anchor="end"),
        _text(_LEFT + width + 6, top + 10, f"{most / 10:,.0f}"),
        f'<polyline points="{points}" fill="none" stroke="#c2571a"/>',
        f'<line x1="{_LEFT}" y1="{top + _COURSE}" x2="{_LEFT + width}" y2="{top + _COURSE}" stroke="#999999"/>',
    ]


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">'
        f"{escape(words)}</text>"
    )
