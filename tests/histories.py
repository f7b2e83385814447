"""Logs of events made by hand, for what a report makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from keras_safe_ckpt.reports.history import read_history
from keras_safe_ckpt.reports.summary import Report, report_on

#: A moment from which the times of hand-made events count.
ZERO = 1_700_000_000.0


class Process:
    """One process that records events, at seconds of the test's choice."""

    def __init__(self, pid: int = 1, *, host: str = "node", started: float | None = None) -> None:
        self._who: dict[str, Any] = {"host": host, "pid": pid}
        if started is not None:
            self._who["started"] = ZERO + started

    def at(self, second: float, event: str, **facts: Any) -> dict[str, Any]:
        return {"event": event, "time": ZERO + second, **self._who, **facts}

    def save(self, second: float, file: str, **facts: Any) -> dict[str, Any]:
        """Captured in one second, then written for two, and durable now."""
        facts = {"bytes": 1000, "blocked_seconds": 1.0, "seconds": 2.0, **facts}
        return self.at(second, "save", file=file, **facts)


def write_log(folder: Path, entries: Iterable[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "events.jsonl", "a") as file:
        for entry in entries:
            file.write(json.dumps(entry) + "\n")
    return folder


def reported(folder: Path) -> Report:
    return report_on(read_history(folder))


def busy_run(folder: Path) -> Path:
    """Two workers, a notice, a kill, an error, a damaged file, and names that nobody chooses."""
    for worker in (0, 1):
        first, second, third = (
            Process(10 * (life + 1) + worker, host=f"node-{worker}", started=start)
            for life, start in enumerate((-5.0, 2040.0, 3990.0))
        )
        who = {"worker": worker, "leads": worker == 0, "callback": "PreemptionAwareCallback"}
        hostile = "<script>alert(1)</script>\"'&.weights.h5"
        entries = [
            first.at(0, "begin", epoch=0, batch=0, **who),
            *(first.at(t, "backup", step=t, seconds=0.01) for t in range(200, 1900, 200)),
            first.at(1990, "notice", source="gcp", reason="</title><img src=x onerror=alert(2)>"),
            first.at(1991, "agreement", seconds=1.0, epoch=1, batch=990),
            first.at(2000, "preempted", epoch=1, batch=990, outcome="saved", ending="exit code 143",
                     reason="gcp", seconds=8.0),
            second.at(2060, "resume", file="run-1990.weights.h5", step=1990, epoch=1, batch=990,
                      dropped=990, repeated=0, seconds=15.0),
            second.at(2060.5, "begin", epoch=1, batch=990, **who),
            *(second.at(t, "backup", step=t, seconds=0.01) for t in range(2200, 3700, 200)),
            third.at(4010, "begin", epoch=3, batch=200, **who),
            third.at(4030, "resume", file="run-3200.weights.h5", step=3200, epoch=3, batch=200,
                     dropped=200, repeated=560, seconds=25.0),
            *(third.at(t, "backup", step=t, seconds=0.01) for t in range(4200, 6000, 200)),
            third.at(6000, "finished", epochs=5, **who),
        ]  # fmt: skip
        if worker == 0:
            for life, begin, end in ((first, 200, 1900), (second, 2200, 3700), (third, 4200, 6000)):
                for step in range(begin, end, 200):
                    facts = {"step": step, "epoch": step // 1000, "batch": step % 1000 or None}
                    size = {"bytes": 1_200_000_000 + step, "seconds": 3.0 + step % 7}
                    file = hostile if step == 600 else f"run-{step}.weights.h5"
                    entries.append(
                        life.save(step + 5, file, blocked_seconds=0.004, **facts, **size)
                    )
            entries += [
                first.save(1998, "run-1990.weights.h5", step=1990, epoch=1, batch=990),
                second.at(2500, "error", error="the disk is full (ENOSPC)", kind="OSError"),
                second.at(2900, "wait", seconds=6.0),
                third.at(4001, "pass_over", file="run-3600.weights.h5", reason="digest differs"),
            ]
        write_log(folder, sorted(entries, key=lambda entry: entry["time"]))
    return folder
