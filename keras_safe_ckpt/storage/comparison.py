"""How two checkpoints differ, array by array."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_safe_ckpt.storage.array_source import ArraySource

#: Compared so many elements at a time: beside the two arrays little memory is taken.
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Difference:
    """``largest`` and ``mean`` are of the absolute differences; None where there are no numbers.

    ``elements_different`` counts bits, so that two ways to write NaN differ by nothing. NaN at one
    place only is an infinite difference.
    """

    name: str
    what: str
    is_in_both: bool
    elements: int = 0
    elements_different: int = 0
    largest: float | None = None
    mean: float | None = None


def bytes_to_compare(one: ArraySource, other: ArraySource) -> int:
    """How much `compare` will read."""
    return sum(2 * one.arrays[name].nbytes for name in _to_be_read(one, other))


def compare(
    one: ArraySource, other: ArraySource, advance: Callable[[int], None]
) -> list[Difference]:
    """Those that differ, the largest difference first; each one read is verified."""
    found = [
        Difference(name, f"only in {which}", is_in_both=False)
        for which, first, second in (("A", one, other), ("B", other, one))
        for name in first.arrays
        if name not in second.arrays
    ]
    for name, facts in one.arrays.items():
        theirs = other.arrays.get(name)
        if theirs is not None and (facts.shape, facts.dtype) != (theirs.shape, theirs.dtype):
            what = f"{facts.dtype}{list(facts.shape)} in A, {theirs.dtype}{list(theirs.shape)} in B"
            found.append(Difference(name, what, is_in_both=True))
    for name in _to_be_read(one, other):
        difference = _values_of(name, one, other)
        advance(2 * one.arrays[name].nbytes)
        if difference is not None:
            found.append(difference)
    return sorted(found, key=lambda d: (d.largest is not None, -(d.largest or 0.0), d.name))


def _to_be_read(one: ArraySource, other: ArraySource) -> Iterator[str]:
    """Those of the same form whose digests do not say already that they are the same."""
    for name, facts in one.arrays.items():
        theirs = other.arrays.get(name)
        if theirs is None or (facts.shape, facts.dtype) != (theirs.shape, theirs.dtype):
            continue
        if one.kind != other.kind or facts.digest != theirs.digest:
            yield name


def _values_of(name: str, one: ArraySource, other: ArraySource) -> Difference | None:
    first, second = one.read(name), other.read(name)
    if first is None or second is None:
        return Difference(name, "other contents", is_in_both=True)
    first, second = (np.ascontiguousarray(array).reshape(-1) for array in (first, second))
    has_numbers = first.dtype.kind not in "SV" or _is_extension(first.dtype)
    count, largest, total = 0, 0.0, 0.0
    for start in range(0, first.size, _BLOCK):
        one_block, other_block = first[start : start + _BLOCK], second[start : start + _BLOCK]
        unequal = (_rows_of_bytes(one_block) != _rows_of_bytes(other_block)).any(axis=1)
        count += int(np.count_nonzero(unequal))
        if has_numbers:
            distance = _distances(one_block, other_block)
            largest = max(largest, float(distance.max(initial=0.0)))
            total += float(distance.sum())
    if not count:
        return None  # Of two kinds of checkpoints, whose digests cannot be compared.
    if not has_numbers:
        return Difference(name, "other contents", is_in_both=True)
    facts = one.arrays[name]
    return Difference(
        name,
        f"{facts.dtype}{list(facts.shape)}",
        is_in_both=True,
        elements=first.size,
        elements_different=count,
        largest=largest,
        mean=total / first.size,
    )


def _rows_of_bytes(array: np.ndarray[Any, Any]) -> Any:
    return array.view(np.uint8).reshape(array.size, -1)


def _is_extension(dtype: np.dtype[Any]) -> bool:
    """bfloat16 and its kin, which NumPy takes for raw bytes."""
    return not dtype.name.startswith(("bytes", "void"))


def _distances(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> Any:
    # Integers of 64 bits do not fit into a float64.
    kind: Any = {"c": np.complex128, "i": np.longdouble, "u": np.longdouble}.get(
        first.dtype.kind, np.float64
    )
    with np.errstate(all="ignore"):
        distance = np.abs(first.astype(kind) - second.astype(kind))
    # Infinite on both sides, or no number on both: they are the same if their bits are.
    equal = (first == second) | ((first != first) & (second != second))
    return np.where(equal, 0.0, np.where(np.isnan(distance), np.inf, distance))
