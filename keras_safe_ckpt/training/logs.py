"""What callbacks are given as ``logs``: numbers by name, and sometimes other things."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


def numbers_in(logs: Mapping[str, Any]) -> dict[str, float]:
    """Those of the logs that are numbers."""
    numbers = {}
    for name, value in logs.items():
        if len(getattr(value, "shape", ())) > 0:
            continue
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            continue
    return numbers


def monitored_value(
    logs: Mapping[str, Any], monitor: str, purpose: str = "save best model"
) -> float | None:
    """The value to judge by; None, with the warnings of Keras, if there is none."""
    current = logs.get(monitor)
    if current is None:
        warnings.warn(f"Can {purpose} only with {monitor} available.", stacklevel=2)
        return None
    if len(getattr(current, "shape", ())) > 0:
        warnings.warn(
            f"Can save best model only when `monitor` is a scalar value. Received: {current}. "
            "Falling back to `save_best_only=False`.",
            stacklevel=2,
        )
        return None
    return float(current)
