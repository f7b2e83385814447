"""Which checkpoints of a directory belong together, and which of them stay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

#: TensorFlow counts in 64 bits.
LARGEST_NUMBER = 2**63 - 1


@dataclass(frozen=True)
class Family:
    """Those that are called ``base`` and a number, such as ``ckpt-7``.

    ``bare``: one without a number belongs to them as well. ``others`` do by their whole names.
    """

    base: str
    bare: bool = False
    others: frozenset[str] = frozenset()

    def includes(self, name: str) -> bool:
        return name in self.others or (self.bare and name == self.base) or self.number(name) >= 0

    def number(self, name: str) -> int:
        """-1 for one without a number, or of another family."""
        match = re.fullmatch(re.escape(self.base) + r"-([0-9]{1,19})", name)
        number = -1 if match is None else int(match[1])
        return number if number <= LARGEST_NUMBER else -1


@dataclass(frozen=True)
class Keep:
    """The newest ``most`` (None: all), and beyond them one of each ``every_seconds``.

    ``for_ever``: this one is not to be deleted, whatever others want to keep.
    """

    most: int | None = None
    every_seconds: float | None = None
    for_ever: bool = False

    def divide(
        self, managed: Mapping[str, float], preserved: float
    ) -> tuple[list[str], list[str], float]:
        """Of ``managed`` (names and times, oldest first): what is to be deleted, and what is kept
        for ever from now on, with the time of the last one that is.
        """
        doomed: list[str] = []
        spared: list[str] = []
        surplus = 0 if self.most is None else max(0, len(managed) - self.most)
        for name in list(managed)[:surplus]:
            if self.every_seconds and managed[name] - self.every_seconds >= preserved:
                preserved = managed[name]
                spared.append(name)
            else:
                doomed.append(name)
        return doomed, spared, preserved
