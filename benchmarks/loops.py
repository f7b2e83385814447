"""What safe checkpoints of TensorFlow cost, as ratios within one run.

    python benchmarks/loops.py                     # 100M parameters with Adam: 1.2 GB
    python benchmarks/loops.py --parameters 5e6    # smaller and quicker
    python benchmarks/loops.py --markdown          # the table of the README

`SafeCheckpointManager.save` returns when the checkpoint is durable. TensorFlow's own returns
before: "plus fsync" adds what it leaves out, an fsync of its files and of the directory.
What is compared is measured in turn, in one process, each way first every other time; times and
ratios are the best of ``--rounds`` rounds, with the ratio of the medians beside them, and every
round is printed to standard error. All restores are of files that were read before. Ends with 1 if
a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage import build_model, seconds, state_views, warm_up_memory
from tables import shown, table_lines

CALLS = 20_000
SMALL_ROUNDS = 40


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_plus_fsync(manager: Any) -> None:
    """What TensorFlow does, and what it leaves out."""
    prefix = Path(manager.save())
    for path in sorted(prefix.parent.glob(f"{prefix.name}.*")):
        sync(path)
    sync(prefix.parent / "checkpoint")
    sync(prefix.parent)


class Comparison:
    """Two ways to do the same, measured in turn."""

    def __init__(self, what: str, ours: Callable[[], object], other: str,
                 theirs: Callable[[], object], goal: float | None,
                 prepare: Callable[[], object] = lambda: None) -> None:  # fmt: skip
        self.what, self.other, self.goal = what, other, goal
        self._prepare = prepare  # What our way needs, and is not measured.
        self._ways = (ours, theirs)
        self.times: tuple[list[float], list[float]] = ([], [])

    def measure_all(self, rounds: int, *, quiet: bool = False) -> None:
        self._measure(quiet=True)
        for times in self.times:
            times.clear()  # The first one traces functions and makes directories.
        for _ in range(rounds):
            self._measure(quiet=quiet)

    def _measure(self, *, quiet: bool) -> None:
        pairs = list(zip(self._ways, self.times, strict=True))
        # Whoever comes second finds the memory of the file that the first one has deleted.
        for way, times in pairs if len(self.times[0]) % 2 == 0 else reversed(pairs):
            if times is self.times[0]:
                self._prepare()
            times.append(seconds(way))
        if not quiet:
            ours, theirs = self.times
            print(f"{self.what}: {ours[-1]:.3f} s, {self.other}: {theirs[-1]:.3f} s",
                  file=sys.stderr)  # fmt: skip

    @property
    def ratio(self) -> float:
        return min(self.times[0]) / min(self.times[1])

    @property
    def of_medians(self) -> float:
        return statistics.median(self.times[0]) / statistics.median(self.times[1])

    @property
    def reached(self) -> bool:
        return self.goal is None or self.ratio <= self.goal

    def row(self) -> list[str]:
        goal = "" if self.goal is None else f"<= {self.goal} {'yes' if self.reached else 'NO'}"
        ours, theirs = (shown(min(times)) for times in self.times)
        return [self.what, f"{ours}, {self.other}: {theirs}", f"{self.ratio:.2f}",
                f"{self.of_medians:.2f}", goal]  # fmt: skip


def compare_managers(model: Any, folder: Path, size: str, goal: float) -> list[Comparison]:
    import tensorflow as tf

    from keras_safe_ckpt import SafeCheckpointManager

    checkpoint = tf.train.Checkpoint(model=model)
    ours = SafeCheckpointManager(checkpoint, folder / f"{size}-ours", max_to_keep=1)
    theirs = tf.train.CheckpointManager(checkpoint, str(folder / f"{size}-theirs"), max_to_keep=1)
    return [
        Comparison(
            f"{size}: save, durable", ours.save, "CheckpointManager.save plus fsync",
            lambda: save_plus_fsync(theirs), goal,
        ),
        Comparison(
            f"{size}: restore, verified", lambda: ours.restore(),
            "CheckpointManager.restore_or_initialize", theirs.restore_or_initialize, None,
        ),
    ]  # fmt: skip


def measure_guard() -> float:
    """Seconds that a guard adds to a step at which nothing is due."""
    from keras_safe_ckpt import PreemptionGuard

    def nothing() -> None:
        pass

    def bare() -> None:
        for _ in range(CALLS):
            nothing()

    guard = PreemptionGuard(save_fn=nothing, verbose=0)

    def guarded() -> None:
        for _ in range(CALLS):
            guard.run(nothing)

    best = min(seconds(guarded) for _ in range(5)) - min(seconds(bare) for _ in range(5))
    guard.close()
    return best / CALLS


def print_table(rows: list[list[str]], markdown: bool) -> None:
    head = ["what", "time", "ratio", "of medians", "goal"]
    print("\n".join(table_lines(head, rows, markdown=markdown)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parameters", type=float, default=100e6, help="of the model (1e8)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--directory", help="where to write (default: a temporary folder)")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        folder = Path(temporary)
        large = build_model(options.parameters)
        size = sum(view.nbytes for view in state_views(large))
        warm_up_memory(3 * size)
        comparisons = compare_managers(large, folder, f"{size / 1e9:.2g} GB", 1.3)
        small = compare_managers(build_model(8e3), folder, "100 kB", 1.3)
        for comparison in comparisons:
            comparison.measure_all(options.rounds)
        for comparison in small:
            comparison.measure_all(SMALL_ROUNDS, quiet=True)
        rows = [comparison.row() for comparison in (*comparisons, *small)]
        rows.append(["a step of `PreemptionGuard.run` at which nothing is due",
                     f"{1e6 * measure_guard():.1f} µs", "", "", ""])  # fmt: skip
        print_table(rows, options.markdown)
        return 0 if all(c.reached for c in (*comparisons, *small)) else 1


if __name__ == "__main__":
    sys.exit(main())
