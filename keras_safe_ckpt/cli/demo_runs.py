"""The two runs of the demonstration, and who interrupts the second one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_safe_ckpt.cli.demo_screen import ShownRun
from keras_safe_ckpt.cli.demo_worker import AMBUSH, BATCHES, EPOCHS, STRUCK
from keras_safe_ckpt.cluster.launch import launch
from keras_safe_ckpt.cluster.launch_plan import RESTART_CODES, Outcome, Plan

_TOTAL = EPOCHS * BATCHES


@dataclass
class Strike:
    """One interruption: whom, when at the earliest (in batches), and where it really was."""

    worker: int
    after: int
    epoch: int | None = None
    batch: int | None = None


@dataclass
class Ambush:
    """Interrupts workers, one life of theirs after the other."""

    number: signal.Signals
    strikes: list[Strike] = field(default_factory=list)
    #: Where the worker that is to be struck finds out that it was; see `demo_worker`.
    directory: Path | None = None

    @staticmethod
    def at_random(rng: random.Random, workers: int, number: signal.Signals, count: int) -> Ambush:
        """Each in a part of the run of its own, so that something is trained in between."""
        part = _TOTAL // count
        places = [n * part + rng.randrange(part // 6, part * 5 // 6) for n in range(count)]
        return Ambush(number, [Strike(rng.randrange(workers), place) for place in places])

    def watch(self, worker: int, pid: int, epoch: int, batch: int) -> Strike | None:
        """Told how far a worker is; returns what has just been done to it."""
        number = next((n for n, one in enumerate(self.strikes) if one.epoch is None), None)
        if number is None or worker != self.strikes[number].worker:
            return None
        strike = self.strikes[number]
        if epoch * BATCHES + batch < strike.after:
            return None
        strike.epoch, strike.batch = epoch, batch
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, self.number)
        if self.directory is not None:
            (self.directory / STRUCK.format(number)).touch()
        return strike

    def lie_in_wait(self, directory: Path) -> None:
        """Tell the workers where to wait for it: a batch takes less than we may be kept waiting."""
        self.directory = directory
        directory.mkdir(parents=True)
        plan = [{"worker": strike.worker, "after": strike.after} for strike in self.strikes]
        (directory / AMBUSH).write_text(json.dumps(plan))


def run(directory: Path, workers: int, shown: ShownRun, ambush: Ambush | None) -> Outcome:
    """Launch the workers, and again as long as they ask for it."""
    together = ["--together"] if workers > 1 else []
    codes: tuple[int, ...] = RESTART_CODES
    if ambush is not None:
        codes = (*codes, 128 + ambush.number)
        ambush.lie_in_wait(directory)
        shown.on_progress = _told(shown, ambush)
    plan = Plan(
        [sys.executable, "-m", "keras_safe_ckpt.cli.demo_worker", str(directory), *together],
        workers,
        max_restarts=0 if ambush is None else len(ambush.strikes),
        restart_codes=codes,
        first_pause_seconds=0.1,
    )
    return launch(plan, shown)


def _told(shown: ShownRun, ambush: Ambush) -> Any:
    def on_progress(facts: dict[str, Any]) -> None:
        strike = ambush.watch(facts["worker"], facts["pid"], facts["epoch"], facts["batch"])
        if strike is not None:
            shown.say(
                f"{ambush.number.name} to worker {strike.worker} in epoch {facts['epoch'] + 1}, "
                f"after batch {facts['batch']}"
            )

    return on_progress
