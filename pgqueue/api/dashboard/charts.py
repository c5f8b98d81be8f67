"""Charts as SVG, drawn here; how they look is the style sheet's affair."""

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

_WIDTH: Final = 600
_HEIGHT: Final = 120
_STRIP: Final = 1000


def sparkline(lines: Sequence[tuple[str, str, Sequence[float]]], said: str) -> Markup:
    """Draw lines (class, name, values) over the same time; the first has an area below it."""
    most = max((value for _, _, values in lines for value in values), default=0.0)
    drawn = Markup("")
    for index, (kind, name, values) in enumerate(lines):
        if len(values) < 2:
            continue
        step = _WIDTH / (len(values) - 1)
        points = " ".join(
            f"{place * step:.1f},{_HEIGHT - 2 - (value / most * (_HEIGHT - 8) if most else 0):.1f}"
            for place, value in enumerate(values)
        )
        if index == 0:
            area = f"0,{_HEIGHT} {points} {_WIDTH},{_HEIGHT}"
            drawn += Markup('<polygon class="area {}" points="{}"/>').format(kind, area)
        drawn += Markup('<polyline class="line {}" points="{}"><title>{}</title></polyline>').format(kind, points, name)
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<line class="base" x1="0" y1="{}" x2="{}" y2="{}"/>{}</svg>'
    ).format(_WIDTH, _HEIGHT, said, _HEIGHT - 1, _WIDTH, _HEIGHT - 1, drawn)


def bar(part: float, kind: str, said: str) -> Markup:
    """Draw how much of a whole something is."""
    width = max(0.0, min(part, 1.0)) * 100
    if 0 < width < 1:
        width = 1.0
    return Markup(
        '<svg class="bar {}" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<rect class="track" width="100" height="6"/><rect class="fill" width="{}" height="6"/></svg>'
    ).format(kind, said, f"{width:.1f}")


def stack(parts: Sequence[tuple[str, float, str]], said: str) -> Markup:
    """Draw parts of a whole (class, amount, title) side by side, each of which is wide enough to be seen."""
    whole = sum(amount for _, amount, _ in parts)
    drawn = Markup("")
    if whole > 0:
        widths = [max(amount / whole, 0.006 if amount > 0 else 0.0) for _, amount, _ in parts]
        scale = _STRIP / sum(widths)
        x = 0.0
        for (kind, _, title), width in zip(parts, widths, strict=True):
            drawn += Markup('<rect class="{}" x="{}" width="{}" height="10"><title>{}</title></rect>').format(
                kind, f"{x:.1f}", f"{width * scale:.1f}", title
            )
            x += width * scale
    return Markup(
        '<svg class="strip" viewBox="0 0 {} 10" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<rect class="track" width="{}" height="10"/>{}</svg>'
    ).format(_STRIP, said, _STRIP, drawn)
