"""``verify``: every byte of checkpoints against their digests."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keras_safe_ckpt.cli.screen import (
    add_common_options,
    coloured,
    console,
    new_command,
    print_json,
    print_table,
    shown_path,
    shown_size,
)
from keras_safe_ckpt.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from keras_safe_ckpt.storage.survey import Surveyed

_EPILOG = """\
A PATH is a checkpoint (.keras, .weights.h5, .h5, or the prefix of one of TensorFlow), or a
directory with all checkpoints in it and below it. Ends with 1 if one is damaged, else with 2 if
one cannot be judged (no permission, no digests in it, of a newer version).

example:
  keras-safe-ckpt verify run/best.keras run/loop/ckpt-7
  keras-safe-ckpt verify /backup && echo "all of it is whole"
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser of the program."""
    parser = new_command(
        commands,
        "verify",
        help="compare every byte of checkpoints with their digests",
        description="Compare every byte of checkpoints with their digests. Nothing is changed.",
        epilog=_EPILOG,
    )
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH")
    add_common_options(parser)
    parser.set_defaults(run=run_verify)


def run_verify(options: argparse.Namespace) -> int:
    """Return 0 if all are whole, 1 if one is damaged, 2 if one cannot be judged."""
    from keras_safe_ckpt.cli.directories import checkpoints_below
    from keras_safe_ckpt.cli.looking import look_at_all
    from keras_safe_ckpt.storage.survey import (
        Condition,
        Surveyed,
        checkpoint_at,
        find_checkpoints,
    )

    closed: list[Surveyed] = []

    def note_closed(path: Path, error: OSError) -> None:
        reason = f"it cannot be looked into ({error.strerror})"
        closed.append(
            Surveyed(path, "directory", 0, 0.0, None, Condition.UNKNOWN, reason, verified=False)
        )

    paths: dict[Path, None] = {}  # Each once, in the order in which they were asked for.
    for path in options.paths:
        if not path.is_dir():
            paths[checkpoint_at(path)] = None
            continue
        found = find_checkpoints(path)
        found += [one for _, those in checkpoints_below(path, note_closed) for one in those]
        if not found and not closed:
            raise CheckpointNotFoundError(path, "the directory holds no checkpoint")
        paths.update(dict.fromkeys(found))
    looked_at = [*look_at_all(list(paths), verify=True), *closed]
    counts = {
        condition: sum(one.condition.value == condition for one in looked_at)
        for condition in ("whole", "damaged", "unknown")
    }
    if options.json:
        print_json({"checkpoints": [_facts(one) for one in looked_at], **counts})
    else:
        print_table(("file", "size>", "", "reason"), [_row(one) for one in looked_at])
        unknown = f", {counts['unknown']} cannot be judged" if counts["unknown"] else ""
        console().print(f"{counts['whole']} whole, {counts['damaged']} damaged{unknown}.")
    return 1 if counts["damaged"] else 2 if counts["unknown"] else 0


def _facts(one: Surveyed) -> dict[str, Any]:
    return {
        "path": str(one.path),
        "kind": one.kind,
        "bytes": one.size,
        "condition": one.condition.value,
        "reason": one.reason or None,
    }


def _row(one: Surveyed) -> tuple[object, ...]:
    style = {"whole": "green", "damaged": "bold red", "unknown": "yellow"}[one.condition.value]
    word = {"whole": "whole", "damaged": "DAMAGED", "unknown": "?"}[one.condition.value]
    return shown_path(one.path), shown_size(one.size), coloured(word, style), one.reason
