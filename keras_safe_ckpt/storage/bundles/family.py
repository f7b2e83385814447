"""Which checkpoints of a directory belong together, and which of them stay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Those that are called ``base`` and a number, such as ``ckpt-7``.

    ``bare``: one without a number belongs to them as well. One that had to make way for a
    checkpoint of the same name is called ``ckpt-7~2`` until that one is whole.
    """

    base: str
    bare: bool = False

    def includes(self, name: str) -> bool:
        return self._match(name) is not None

    def number(self, name: str) -> int:
        """-1 for one without a number, or of another family."""
        match = self._match(name)
        return -1 if match is None or match["number"] is None else int(match["number"])

    def _match(self, name: str) -> re.Match[str] | None:
        number = r"(?:-(?P<number>\d{1,18}))" + ("?" if self.bare else "")
        return re.fullmatch(re.escape(self.base) + number + r"(?:~\d+)?", name)


def aside_of(name: str, number: int) -> str:
    """The name under which a checkpoint waits until another one has taken its place."""
    return f"{name}~{number}"


def stands_aside_of(name: str, other: str) -> bool:
    """Whether ``name`` is such a name, of the checkpoint ``other``."""
    return re.fullmatch(re.escape(other) + r"~\d+", name) is not None


@dataclass(frozen=True)
class Keep:
    """The newest ``most`` (None: all), and beyond them one of each ``every_seconds``."""

    most: int | None = None
    every_seconds: float | None = None

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
