"""Numbers and places in words that people read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from datetime import datetime, timezone

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_SIZES = ("B", "kB", "MB", "GB", "TB", "PB", "EB", "ZB")


def duration(seconds: float) -> str:
    """``"3.2 ms"``, ``"41.5 s"``, ``"12 min 5 s"``, ``"3 h 20 min"``, ``"5 d 2 h"``."""
    if seconds < 0.9995:
        decimals = 0 if seconds >= 0.1 or seconds < 0.00005 else 1
        return f"{seconds * 1e3:.{decimals}f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    large, small = next(pair for pair in itertools.pairwise(_UNITS) if whole >= pair[0][0])
    many, rest = whole // large[0], whole % large[0] // small[0]
    return f"{many:,} {large[1]} {rest} {small[1]}" if rest else f"{many:,} {large[1]}"


def size(count: float) -> str:
    """``"1.2 GB"``, by thousands."""
    for unit in _SIZES:
        if count < 999.5 or unit == _SIZES[-1]:
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.3g} {unit}"


def moment(time: float) -> str:
    """Date and time of day, UTC."""
    return _at(time).strftime("%Y-%m-%d %H:%M:%S")


def clock(time: float) -> str:
    """Time of day, UTC."""
    return _at(time).strftime("%H:%M:%S")


def _at(time: float) -> datetime:
    return datetime.fromtimestamp(time, timezone.utc)


def place(at: Mapping[str, int]) -> str:
    """Where in its training a life was."""
    words = []
    if at.get("epoch") is not None:
        epoch, batch = at["epoch"], at.get("batch", 0)
        if batch:
            words.append(f"epoch {epoch + 1:,}, batch {batch:,}")
        else:
            words.append(f"end of epoch {epoch:,}" if epoch else "the beginning")
    if at.get("runs") is not None:
        words.append(f"{at['runs']:,} runs")
    if at.get("step") is not None:
        words.append(f"step {at['step']:,}")
    return " · ".join(words) or "not known"


def count(number: int, one: str, many: str | None = None) -> str:
    """``"1 save"``, ``"1,200 saves"``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
