"""Drawings in SVG that fit any width: places are in per cent, text and marks are in pixels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from keras_safe_ckpt.reports.words import duration

#: Where there are more points than this, the largest of each of so many columns is drawn.
MOST_COLUMNS = 160
_HEIGHT = 128
_TOP, _BOTTOM = 14, 116
#: On a scale of powers of ten, less than that (a microsecond) is drawn at the bottom.
_SMALLEST = 1e-6
#: Far less than a clock can tell; at the end of what a float can, powers of ten are 0.
_NOTHING = 1e-12


@dataclass(frozen=True)
class Scale:
    """From a moment to a place on the page, in per cent."""

    first: float
    last: float

    def at(self, time: float) -> float:
        span = self.last - self.first
        if span <= 0:
            return 50.0
        return min(100.0, max(0.0, 100.0 * (time - self.first) / span))

    def column(self, time: float, columns: int) -> int:
        return min(columns - 1, int(self.at(time) * columns / 100))


class Point(NamedTuple):
    """A value at a moment; ``title`` is called only for those that are drawn."""

    time: float
    value: float
    title: Callable[[], str]


def bar(scale: Scale, begin: float, end: float, y: int, height: int, kind: str, title: str) -> str:
    """A rectangle from one moment to another, with at least a hair's breadth by its border."""
    left, right = scale.at(begin), scale.at(end)
    return (
        f'<rect class="{kind}" x="{left:.3f}%" width="{max(0.0, right - left):.3f}%" y="{y}" '
        f'height="{height}"><title>{escape(title)}</title></rect>'
    )


def mark(scale: Scale, time: float, y: int, kind: str, title: str) -> str:
    """A symbol at a moment; its form is that of its kind, so that colour is not all there is."""
    return (
        f'<svg class="mark" x="{scale.at(time):.3f}%" y="{y}"><use href="#{kind}" class="{kind}"/>'
        f"<title>{escape(title)}</title></svg>"
    )


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.3f}%" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def time_axis(scale: Scale) -> str:
    """Ticks at round times since the beginning."""
    span = scale.last - scale.first
    parts = ['<svg class="axis" width="100%" height="22" aria-hidden="true">']
    for seconds in ticks(span):
        at = scale.at(scale.first + seconds)
        anchor = "start" if at < 4 else "end" if at > 94 else "middle"
        parts.append(f'<line x1="{at:.3f}%" x2="{at:.3f}%" y1="0" y2="5"/>')
        parts.append(text(at, 18, _short(duration(seconds)), anchor))
    return "".join([*parts, "</svg>"])


def ticks(span: float, most: int = 6) -> list[float]:
    """From 0 to ``span``, in steps that people count in."""
    if not span > 0:
        return [0.0]
    steps: list[float] = [
        1,
        2,
        5,
        10,
        15,
        30,
        60,
        120,
        300,
        600,
        900,
        1800,
        3600,
        7200,
        10800,
        21600,
        43200,
    ]
    steps += [86400 * days for days in (1, 2, 5, 10, 30, 90, 365)]
    step = next((one for one in steps if span / one <= most), round_up(span / most))
    if span < 5:
        step = round_up(span / most)
    return [number * step for number in range(int(span / step + 1e-9) + 1)]


def _short(words: str) -> str:
    """For round numbers: ``"5.0 s"`` is ``"5 s"``, and nothing is 0."""
    return "0" if words in ("0 ms", "0 B") else words.replace(".0 ", " ")


def round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten; to 1 if there is nothing to show."""
    if value < _NOTHING:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(f * power for f in (1, 2, 5, 10) if f * power >= value * (1 - 1e-9))


def thinned(points: Sequence[Point], scale: Scale, columns: int = MOST_COLUMNS) -> list[Point]:
    """At most one point for each column: the largest, which says for how many it stands."""
    if len(points) <= columns:
        return list(points)
    groups: dict[int, list[Point]] = {}
    for point in points:
        groups.setdefault(scale.column(point.time, columns), []).append(point)
    kept = []
    for group in groups.values():
        largest = max(group, key=lambda point: point.value)
        more = f"\nthe largest of {len(group):,}" if len(group) > 1 else ""
        words = largest.title() + more
        kept.append(largest._replace(title=functools.partial(str, words)))
    return kept


def chart(
    title: str, kind: str, points: Sequence[Point], scale: Scale, words: Callable[[float], str]
) -> str:
    """Stems with heads; by powers of ten if the values differ by more than a factor of fifty."""
    shown = thinned(points, scale)
    values = [point.value for point in points]
    most = max(values)
    positive = [value for value in values if value >= _SMALLEST]
    logarithmic = bool(positive) and most / min(positive) > 50
    if logarithmic:
        low = 10.0 ** math.floor(math.log10(min(positive)))
        high = 10.0 ** math.ceil(math.log10(most) - 1e-9)
        exponents = range(round(math.log10(low)), round(math.log10(high)) + 1)
        grid = [10.0**exponent for exponent in exponents][:: max(1, len(exponents) // 4)]
    else:
        low, high = 0.0, round_up(most)
        grid = [0.0, high / 2, high]

    def y(value: float) -> float:
        if logarithmic:
            value, bottom, top = max(value, low), math.log10(low), math.log10(high)
            part = (math.log10(value) - bottom) / (top - bottom)
        else:
            part = value / high
        return _BOTTOM - part * (_BOTTOM - _TOP)

    labels = "".join(
        f'<text x="58" y="{y(g) + 4:.1f}">{escape(_short(words(g)))}</text>' for g in grid
    )
    lines = "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{y(g):.1f}" y2="{y(g):.1f}"/>' for g in grid
    )
    stems = "".join(_stem(scale.at(p.time), y(p.value), kind, p.title()) for p in shown)
    notes = [", powers of ten" if logarithmic else ""]
    notes.append(", the largest of each moment" if len(shown) < len(points) else "")
    return (
        f'<figure class="chart"><figcaption>{escape(title)}<small>{"".join(notes)}</small>'
        f'</figcaption><div class="plot"><svg class="labels" width="64" height="{_HEIGHT}" '
        f'aria-hidden="true">{labels}</svg><div><svg width="100%" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{lines}{stems}</svg>'
        f"{time_axis(scale)}</div></div></figure>"
    )


def _stem(x: float, y: float, kind: str, title: str) -> str:
    return (
        f'<g class="stem {kind}"><line x1="{x:.3f}%" x2="{x:.3f}%" y1="{_BOTTOM}" y2="{y:.1f}"/>'
        f'<circle cx="{x:.3f}%" cy="{y:.1f}" r="3.5"/><title>{escape(title)}</title></g>'
    )
