"""A bar for work that takes long, where somebody can see it."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

#: Work that is done before is not worth a bar.
_PATIENCE_SECONDS = 1.0


class Progress:
    """``with Progress("Merging", total_bytes) as progress: progress.advance(n)``.

    On a terminal, and when it takes longer than a second; nothing otherwise. ``in_bytes`` is
    whether it is bytes that are counted.
    """

    def __init__(self, title: str, total: int, *, in_bytes: bool = True) -> None:
        self._in_bytes = in_bytes
        self._title = title
        self._total = total
        self._done = 0
        self._began = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() - self._began > _PATIENCE_SECONDS and sys.stderr.isatty():
            self._show()

    def _show(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            *(
                (progress.DownloadColumn(), progress.TransferSpeedColumn())
                if self._in_bytes
                else (progress.MofNCompleteColumn(),)
            ),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self._title, total=self._total, completed=self._done)
        self._bar.start()
