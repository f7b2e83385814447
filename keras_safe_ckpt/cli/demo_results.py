"""What the demonstration has shown: where it was interrupted, where it went on, and the proof."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_safe_ckpt.cli.demo_runs import Ambush
from keras_safe_ckpt.cli.screen import coloured, console, print_json, print_table, shown_seconds
from keras_safe_ckpt.storage.events import EventLog
from keras_safe_ckpt.storage.formats import format_of


@dataclass(frozen=True)
class Interruption:
    """Places are (finished epochs, finished batches of the next one); None if unknown."""

    worker: int
    struck: tuple[int, int]
    stopped: tuple[int, int] | None
    resumed: tuple[int, int] | None
    repeated: int | None


def interruptions_of(state: Path, ambush: Ambush, pids: list[int]) -> list[Interruption]:
    """What the log of the run says of each strike; ``pids`` are those of one worker's lives."""
    by_life: dict[tuple[str, int], dict[str, Any]] = {
        (event["event"], event["pid"]): event for event in EventLog(state).read()
    }
    found = []
    for number, strike in enumerate(ambush.strikes):
        if strike.epoch is None or strike.batch is None:
            continue
        before, after = (pids[n] if n < len(pids) else 0 for n in (number, number + 1))
        resume = by_life.get(("resume", after))
        found.append(
            Interruption(
                strike.worker,
                (strike.epoch, strike.batch),
                _place_of(by_life.get(("preempted", before))),
                _place_of(resume),
                None if resume is None else resume["repeated"],
            )
        )
    return found


def _place_of(event: dict[str, Any] | None) -> tuple[int, int] | None:
    return None if event is None else (event["epoch"], event["batch"])


def print_results(
    folder: Path,
    interruptions: list[Interruption],
    *,
    workers: int,
    seconds: float,
    as_json: bool,
) -> bool:
    """Print all of it; return whether the two runs ended the same."""
    same, arrays = _compare(folder, workers)
    blocked = [
        event["blocked_seconds"]
        for event in EventLog(folder / "interrupted" / "state").read()
        if event["event"] == "save"
    ]
    if as_json:
        print_json(
            {
                "interruptions": [vars(one) for one in interruptions],
                "weights_equal": same,
                "arrays": arrays,
                "saves": len(blocked),
                "blocked_seconds": {
                    "median": statistics.median(blocked),
                    "largest": max(blocked),
                },
                "seconds": seconds,
            }
        )
        return same
    print_table(
        ("interruption>", "worker>", "interrupted in", "resumed in", "batches repeated>"),
        [
            (
                number,
                one.worker,
                _place(one.stopped or one.struck),
                _place(one.resumed),
                "?" if one.repeated is None else one.repeated,
            )
            for number, one in enumerate(interruptions, 1)
        ],
    )
    verdict = coloured("yes", "bold green") if same else coloured("NO", "bold red")
    middle, most = statistics.median(blocked), max(blocked)
    print_table(
        ("", ""),
        [
            ("weights equal to the undisturbed run, bit by bit", verdict),
            ("arrays compared (weights, optimizer, of each worker)", arrays),
            (
                "training blocked per save",
                f"{shown_seconds(middle)} (largest {shown_seconds(most)})",
            ),
            ("saves", len(blocked)),
            ("all of this took", f"{seconds:.0f} s"),
        ],
    )
    console().file.flush()
    return same


def _compare(folder: Path, workers: int) -> tuple[bool, int]:
    """By the digests in the files, each of which is verified first."""
    same, count = True, 0
    for worker in range(workers):
        digests = []
        for name in ("undisturbed", "interrupted"):
            path = folder / name / f"worker-{worker}" / "final.weights.h5"
            with format_of(path).open(path) as checkpoint:
                checkpoint.verify()
                arrays = checkpoint.manifest.arrays
            digests.append({array: record.digest for array, record in arrays.items()})
        same = same and digests[0] == digests[1]
        count += len(digests[0])
    return same, count


def _place(place: tuple[int, int] | None) -> str:
    return "?" if place is None else f"epoch {place[0] + 1}, after batch {place[1]}"
