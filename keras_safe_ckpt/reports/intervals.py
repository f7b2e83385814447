"""Intervals of time: joined, and measured."""

from __future__ import annotations

import math
from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments, in intervals that neither overlap nor touch."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def length_within(intervals: Iterable[Interval], begin: float, end: float) -> float:
    """How much of the time from ``begin`` to ``end`` they cover; they do not overlap."""
    return math.fsum(max(0.0, min(end, b) - max(begin, a)) for a, b in intervals)
