"""The output of several workers on one screen: whole lines, each with the name of its worker."""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import sys
from collections.abc import Mapping
from typing import IO

#: Bright enough on dark and on light screens.
_COLOURS = (36, 33, 35, 32, 34, 31)
_LONGEST_LINE = 65536
#: A progress bar ends its lines by a carriage return; one that comes last may be half of "\r\n".
_LINE_END = re.compile(r"\r\n|\n|\r(?!\Z)")


class Printer:
    """Prints lines of workers, and notes of the launcher, in colour where that is wanted."""

    def __init__(
        self, workers: int, *, colour: bool | None = None, notes: IO[str] | None = None
    ) -> None:
        self._width = len(str(max(0, workers - 1)))
        self._colour = wants_colour(sys.stdout, os.environ) if colour is None else colour
        self._notes = notes

    def note(self, text: str) -> None:
        """A message of the launcher itself."""
        target = sys.stderr if self._notes is None else self._notes
        self._print(f"{self._coloured('[launch]', 1)} {text}", target)

    async def pump(self, worker: int, source: asyncio.StreamReader, target: IO[str]) -> None:
        """Print what ``source`` delivers until it ends."""
        name = f"[worker {worker:>{self._width}}]"
        prefix = self._coloured(name, _COLOURS[worker % len(_COLOURS)])
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        rest = ""
        try:
            while data := await source.read(_LONGEST_LINE):
                *lines, rest = _LINE_END.split(rest + decoder.decode(data))
                while len(rest) > _LONGEST_LINE:
                    lines.append(rest[:_LONGEST_LINE])
                    rest = rest[_LONGEST_LINE:]
                self._print_all(prefix, lines, target)
        finally:
            rest = (rest + decoder.decode(b"", final=True)).rstrip("\r")
            if rest:
                self._print_all(prefix, [rest], target)

    def _print_all(self, prefix: str, lines: list[str], target: IO[str]) -> None:
        if lines:
            self._print("\n".join(f"{prefix} {line}" for line in lines), target)

    def _print(self, text: str, target: IO[str]) -> None:
        try:
            target.write(text + "\n")
            target.flush()
        except (OSError, ValueError):
            # Whoever read this is gone (`| head`), or the disk of the log is full. The workers go
            # on, so their output must go on being read.
            return

    def _coloured(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text


def wants_colour(stream: IO[str], environment: Mapping[str, str]) -> bool:
    """As the conventions have it: NO_COLOR, then FORCE_COLOR, then whether it is a screen."""
    if environment.get("NO_COLOR"):
        return False
    return bool(environment.get("FORCE_COLOR")) or stream.isatty()
