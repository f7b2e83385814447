"""``prune``: delete older checkpoints, after having said which."""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_safe_ckpt.cli.screen import (
    add_common_options,
    coloured,
    console,
    new_command,
    print_json,
    print_table,
    printable,
    shown_metrics,
    shown_or_dash,
    shown_path,
    shown_size,
)

if TYPE_CHECKING:
    from keras_safe_ckpt.storage.manifest import Manifest
    from keras_safe_ckpt.storage.retention import Checkpoint
    from keras_safe_ckpt.training.keeping import Keeping

_EPILOG = """\
The three options add up, each series of checkpoints by itself, and the best stays in any case, if
the files say by what they were judged (or --monitor and --mode do). Only files that this library
wrote and that still have their name are deleted, and none before one that stays was verified.
Checkpoints of TensorFlow are counted by --max-to-keep, as far as their file `checkpoint` lists
them. What belongs to a run of several workers (the folders worker-N of PreemptionAwareCallback) is
pruned by that run alone. Where training uses RedisLocks, its lock is not seen from here: prune when
nobody saves.

example:
  keras-safe-ckpt prune run --max-to-keep 3 --keep-best 2
  keras-safe-ckpt prune run --keep-every 10 --yes          # one of every 10 epochs
  keras-safe-ckpt prune run --keep-every 12h --yes         # one of every 12 hours
"""
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = new_command(
        commands,
        "prune",
        help="delete older checkpoints (a dry run unless --yes)",
        description="Delete older checkpoints. Without --yes nothing is deleted, only shown.",
        epilog=_EPILOG,
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--max-to-keep", type=int, metavar="N", help="keep the newest N")
    parser.add_argument("--keep-best", type=int, metavar="K", help="keep the best K")
    parser.add_argument(
        "--keep-every",
        type=_period,
        metavar="N|TIME",
        help="keep one of every N epochs, or of every 30m, 12h or 7d",
    )
    parser.add_argument("--monitor", metavar="METRIC", help="what the best is judged by")
    parser.add_argument("--mode", choices=("min", "max"))
    parser.add_argument("--yes", action="store_true", help="really delete")
    add_common_options(parser)
    parser.set_defaults(run=run_prune)


def run_prune(options: argparse.Namespace) -> int:
    """Return 0, also if there is nothing to delete."""
    from keras_safe_ckpt.cli.directories import existing_directory
    from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
    from keras_safe_ckpt.storage.bundles.trimming import Trimming, plan_trimming, trim
    from keras_safe_ckpt.storage.catalog import Catalog
    from keras_safe_ckpt.storage.events import EventLog
    from keras_safe_ckpt.storage.pruning import Pruner
    from keras_safe_ckpt.storage.store import CheckpointStore
    from keras_safe_ckpt.storage.survey import size_of
    from keras_safe_ckpt.training.keeping import Keeping

    directory = existing_directory(options.directory)
    keeping = Keeping(options.max_to_keep, options.keep_best, options.keep_every)
    if not keeping.deletes:
        raise ValueError("expected --max-to-keep, --keep-best or --keep-every, or several of them")
    if (options.monitor is None) != (options.mode is None):
        raise ValueError("--monitor and --mode: expected both or none of them")
    policy = SeriesPolicy(keeping, options.monitor, options.mode)
    catalog = Catalog(directory, ".h5")
    planned = Pruner(catalog, EventLog(directory)).plan(policy)
    bundles = BundleDirectory(directory)
    surplus = Trimming()
    if options.max_to_keep is not None:
        surplus = plan_trimming(bundles, options.max_to_keep)
    _check_monitor(options.monitor, [c.manifest for c, _ in planned])
    rows = [
        *(Row(c.path.name, is_doomed, c.manifest, size_of(c.path)) for c, is_doomed in planned),
        *(Row(name, False) for name in surplus.staying),
        *(Row(name, True) for name in surplus.doomed),
    ]
    deleted: list[str] = []
    if options.yes and any(row.is_doomed for row in rows):
        # Decided anew under the lock: somebody may have saved meanwhile.
        store = CheckpointStore(directory, format="legacy_h5")
        deleted += [path.name for path in store.prune(policy)]
        if surplus.doomed:
            deleted += trim(bundles, options.max_to_keep)
    if options.json:
        print_json(
            {
                "doomed": [row.name for row in rows if row.is_doomed],
                "staying": [row.name for row in rows if not row.is_doomed],
                "unlisted": list(surplus.unlisted),
                "deleted": deleted if options.yes else None,
            }
        )
    else:
        _print(options, rows, surplus.unlisted, deleted)
    return 0


@dataclass(frozen=True)
class Row:
    """One checkpoint and its fate; one of TensorFlow has no manifest."""

    name: str
    is_doomed: bool
    manifest: Manifest | None = None
    size: int | None = None

    def cells(self) -> tuple[object, ...]:
        fate = coloured("delete", "red") if self.is_doomed else coloured("keep", "green")
        if self.manifest is None or self.size is None:
            return self.name, "-", "-", "-", "-", fate
        metrics = shown_or_dash(shown_metrics(self.manifest.metrics))
        epoch = shown_or_dash(self.manifest.epoch)
        return self.name, self.manifest.step, epoch, metrics, shown_size(self.size), fate


@dataclass(frozen=True)
class SeriesPolicy:
    """`Keeping` for any series: what it was judged by is taken from its newest file."""

    keeping: Keeping
    monitor: str | None
    mode: str | None

    def keep(self, checkpoints: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        from keras_safe_ckpt.training.backups import SERIES

        if not checkpoints:
            return []
        newest = checkpoints[-1]
        if newest.manifest.series == SERIES and newest.manifest.worker is not None:
            return checkpoints  # Parts of checkpoints that are somewhere else.
        if isinstance(self.keeping.keep_every, int):
            unknown = [c.path.name for c in checkpoints if c.manifest.epoch is None]
            if unknown:
                raise ValueError(
                    f"--keep-every: {unknown[-1]} does not say its epoch: expected a time, such as "
                    "12h"
                )
        kept = [newest]
        for monitor, mode in self._standards(checkpoints):
            policy = self.keeping.policy(monitor, mode)
            kept += checkpoints if policy is None else policy.keep(checkpoints)
        return kept

    def _standards(self, checkpoints: Sequence[Checkpoint]) -> list[tuple[str, str | None]]:
        """By what the best is judged: by what was asked for, and by what they were saved by."""
        judged = [
            (c.manifest.monitor, c.manifest.mode)
            for c in checkpoints
            if c.manifest.monitor and c.manifest.mode
        ]
        found: list[tuple[str, str | None]] = []
        if self.monitor is not None:
            found.append((self.monitor, self.mode))
        if judged and judged[-1][0] is not None and judged[-1] not in found:
            found.append((judged[-1][0], judged[-1][1]))
        if not found and self.keeping.keep_best is not None:
            raise ValueError(
                f"--keep-best: {checkpoints[-1].path.name} does not say by what it was judged: "
                "expected --monitor and --mode"
            )
        return found or [("", None)]


def _check_monitor(monitor: str | None, manifests: Sequence[Manifest]) -> None:
    known = sorted({name for manifest in manifests for name in manifest.metrics})
    if monitor is not None and monitor not in known:
        raise ValueError(
            f"--monitor: no checkpoint has {monitor!r}; they have: {', '.join(known) or 'nothing'}"
        )


def _print(
    options: argparse.Namespace,
    rows: Sequence[Row],
    unlisted: Sequence[str],
    deleted: Sequence[str],
) -> None:
    if rows:
        print_table(
            ("file", "step>", "epoch>", "metrics", "size>", ""),
            [row.cells() for row in rows],
        )
    if unlisted and options.max_to_keep is not None:
        names = printable(", ".join(unlisted))
        console().print(f"Not listed by TensorFlow, and left alone: {names}.")
    doomed = sum(row.is_doomed for row in rows)
    place = shown_path(options.directory)
    if options.yes:
        console().print(f"Deleted {len(deleted)} of {len(rows)} checkpoints in {place}.")
        if len(deleted) < doomed:
            console().print(
                "Fewer than planned: none that would stay was whole, or another process has saved "
                "or deleted meanwhile. `verify` tells what is damaged."
            )
    elif doomed:
        console().print(f"Would delete {doomed} of {len(rows)} checkpoints: --yes does it.")
    else:
        console().print(f"Nothing to delete in {place}.")


def _period(text: str) -> int | datetime.timedelta:
    match = re.fullmatch(r"(\d{1,9})([mhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"expected a number of epochs, or a time such as 30m, 12h or 7d, received {text!r}"
        )
    number, unit = int(match[1]), match[2]
    return datetime.timedelta(**{_UNITS[unit]: number}) if unit else number
