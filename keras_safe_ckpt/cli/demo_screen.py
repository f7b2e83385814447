"""What the demonstration shows while it runs: a bar for each run, and what happens to it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from keras_safe_ckpt.cli.demo_worker import BATCHES, EPOCHS, MARK
from keras_safe_ckpt.cli.screen import printable

_TOTAL = EPOCHS * BATCHES
#: What the lines of `PreemptionAwareCallback` begin with.
_STORY = "[preemption]"


class DemoScreen:
    """On standard error with ``quiet``, where standard output is for a program."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console

        file = sys.stderr if quiet else sys.stdout
        self._console = Console(file=file, markup=False, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(text)

    @contextmanager
    def running(self, name: str) -> Iterator[ShownRun]:
        """One run, from its start to its end."""
        from rich import progress

        if not self._console.is_terminal:
            yield ShownRun(name, self._console.print, self._lines(name))
            return
        with progress.Progress(
            progress.TextColumn("{task.description:<12}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("batches {task.fields[loss]}"),
            progress.TimeElapsedColumn(),
            console=self._console,
        ) as bars:
            task = bars.add_task(name, total=_TOTAL, loss="")
            yield ShownRun(
                name,
                bars.console.print,
                lambda done, loss: bars.update(task, completed=done, loss=loss),
            )

    def _lines(self, name: str) -> Callable[[int, str], None]:
        said = {""}

        def show(done: int, loss: str) -> None:
            # The loss is news at the end of each epoch.
            if loss not in said:
                said.add(loss)
                self._console.print(f"{name}: {done} of {_TOTAL} batches, {loss}")

        return show


class ShownRun:
    """What `launch` prints with: progress is shown, the rest kept for when it is needed."""

    def __init__(
        self, name: str, say: Callable[[str], None], show: Callable[[int, str], None]
    ) -> None:
        self._name = name
        self._say = say
        self._show = show
        self._loss = ""
        self._lines: deque[str] = deque(maxlen=20)
        #: The processes that the first worker was, one after another.
        self.pids: list[int] = []
        #: Called with what a worker tells of itself after each batch.
        self.on_progress: Callable[[dict[str, Any]], None] | None = None

    def say(self, text: str) -> None:
        self._say(f"  {printable(text)}")

    def note(self, text: str) -> None:
        """A message of the launcher; of those only the restarts are part of the story."""
        if "start again" in text:
            self.say(text)

    def last_lines(self) -> list[str]:
        return list(self._lines)

    async def pump(self, worker: int, source: asyncio.StreamReader, target: IO[str]) -> None:
        """Read what a worker prints until it ends."""
        while line := await self._next_line(source):
            text = line.decode(errors="replace").rstrip()
            if text.startswith(MARK):
                self._take(json.loads(text.removeprefix(MARK)))
            elif text.startswith(_STORY):
                # All workers tell the same.
                if worker == 0 and "in the background" not in text:
                    self.say(text.removeprefix(_STORY).strip())
            elif text:
                self._lines.append(f"[worker {worker}] {text}")

    async def _next_line(self, source: asyncio.StreamReader) -> bytes:
        try:
            return await source.readline()
        except ValueError:  # Longer than asyncio keeps.
            return b"...\n"

    def _take(self, facts: dict[str, Any]) -> None:
        if "logs" in facts:
            logs = facts["logs"]
            self._loss = f"loss {logs.get('loss', float('nan')):.3f}"
        if facts["worker"] == 0:
            if facts["pid"] not in self.pids:
                self.pids.append(facts["pid"])
            self._show(facts["epoch"] * BATCHES + facts["batch"], self._loss)
        if self.on_progress is not None and "logs" not in facts:
            self.on_progress(facts)
