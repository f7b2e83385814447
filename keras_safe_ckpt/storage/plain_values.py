"""Any values, as those for which JSON has a word."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def plain_values(value: Any) -> Any:
    """What JSON has no word for (NaN, an infinite number, a path) becomes text."""
    if isinstance(value, Mapping):
        return {_plain_text(str(key)): plain_values(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    return _plain_text(str(value))


def _plain_text(text: str) -> str:
    """A name that is not UTF-8 cannot stand in JSON as it is."""
    return text.encode(errors="backslashreplace").decode()
